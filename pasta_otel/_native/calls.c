#include "calls.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "notes.h"

enum { DRIVER_API = 1, RESOURCE = 3, SYNCHRONIZE = 4, LAUNCH = 5, GRAPHS = 10 }; /* Sanitizer_CallbackDomain */
enum { LAUNCH_BEGIN = 1, NODE_LAUNCH_BEGIN = 4, KERNEL_NODE = 0, ENTER = 0 };
enum { NOT_CAPTURING = 0, RELAXED = 2 }; /* CUstreamCaptureStatus, CUstreamCaptureMode */
enum { MOST_IDS = 4096, STREAM_PLACES = 4096 };
#define PER_THREAD ((void *)2) /* CU_STREAM_PER_THREAD */

typedef struct { /* Sanitizer_CallbackData; its name of a GPU kernel is not valid for every launching call */
  int site;
  const char *function;
  const void *params, *result;
  const char *symbol;
  void *context;
} api_data;

typedef struct { /* Sanitizer_LaunchData */
  void *context, *stream, *handle, *module, *function;
  const char *name;
  uint32_t grid[3], block[3], cluster[3];
  uint64_t grid_id;
  void *launch;
} launch_data;

typedef struct { /* Sanitizer_GraphNodeLaunchData */
  void *graph;
  uint32_t launch_id;
  void *node;
  int type;
  launch_data launch;
} node_data;

typedef struct { /* parameters of cuLaunchKernel and cuLaunchCooperativeKernel */
  void *function;
  uint32_t grid[3], block[3], shared;
  void *stream;
} kernel_params;

typedef struct { /* CUlaunchConfig */
  uint32_t grid[3], block[3], shared;
  void *stream;
} launch_config;

typedef struct { /* of cuLaunchKernelEx */
  const launch_config *config;
  void *function;
} configured_params;

typedef struct { /* of cuGraphLaunch */
  void *graph, *stream;
} graph_params;

typedef struct { /* of cuStreamDestroy */
  void *stream;
} stream_params;

typedef enum { UNKNOWN, OTHER, KERNEL, CONFIGURED, GRAPH, STREAM_GOES, CONTEXT_GOES, CAPTURED } kind;

typedef struct {
  kind kind;
  int in_python, begun;
  int mode, exchanged; /* the thread's way to meet captures of streams, while it is ours */
  pasta_call data;
  int given;
  pasta_slot slot, *reserved;
  size_t reserved_count, reserved_used;
  int no_memory;
  pasta_node *nodes;
  size_t count, room;
} call;

typedef struct {
  void *function;
  unsigned open; /* launches of graphs with it that may not yet have put it into their stream */
  int has_slot, spoilt; /* spoilt: several of these, or another launch meanwhile: none can be told from the other */
} given;

static pasta_receiver to;
static atomic_int listening;
static atomic_uchar kinds[MOST_IDS];
static atomic_size_t given_used; /* read without the lock only to see that there are none */
static atomic_ullong unknown;
static __thread call current;
static __thread uint64_t entered;
static __thread int in_call;
static atomic_ullong begun; /* launches, in all streams */
static atomic_ullong last_begun[STREAM_PLACES]; /* of a stream; those that share a place are busy together */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* never held while anything else is waited for */
static given *table;
static size_t table_room;
static struct {
  uint64_t address;
  uint32_t turn;
} slabs[PASTA_MOST_SLABS]; /* each changed under its context's lock of the driver alone */

static struct {
  atomic_int known;
  int (*kernel_name)(const char **, void *);
  int (*function_name)(const char **, void *);
  int (*is_capturing)(void *, int *);
  int (*exchange_mode)(int *);
} driver;

void pasta_receive_for(const pasta_receiver *receiver) {
  to = *receiver;
  memset(slabs, 0, sizeof slabs); /* an earlier receiver's */
  atomic_store(&given_used, 0);
  atomic_store(&driver.known, 0);
  atomic_store(&listening, 1);
}

void pasta_listen(int on) { atomic_store(&listening, on); }

uint64_t pasta_unknown_launches(void) { return atomic_load(&unknown); }

/* Only once the driver has called us: before, nothing of ours may load it. */
static void find_driver(void) {
  if (atomic_load(&driver.known)) return;
  void *library = dlopen(to.driver, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return;
  *(void **)&driver.kernel_name = dlsym(library, "cuKernelGetName");
  *(void **)&driver.function_name = dlsym(library, "cuFuncGetName");
  *(void **)&driver.is_capturing = dlsym(library, "cuStreamIsCapturing");
  *(void **)&driver.exchange_mode = dlsym(library, "cuThreadExchangeStreamCaptureMode");
  atomic_store(&driver.known, 1);
}

static int ends_with(const char *text, size_t length, const char *end) {
  size_t of_end = strlen(end);
  return length > of_end && !memcmp(text + length - of_end, end, of_end);
}

static kind kind_of_name(const char *name) {
  static const struct {
    const char *name;
    kind kind;
  } known[] = {
      {"cuLaunchKernel", KERNEL},
      {"cuLaunchCooperativeKernel", KERNEL},
      {"cuLaunchKernelEx", CONFIGURED},
      {"cuGraphLaunch", GRAPH},
      {"cuStreamDestroy", STREAM_GOES},
      {"cuStreamDestroy_v2", STREAM_GOES},
      {"cuCtxDestroy", CONTEXT_GOES},
      {"cuCtxDestroy_v2", CONTEXT_GOES},
      {"cuCtxDetach", CONTEXT_GOES},
      {"cuGreenCtxDestroy", CONTEXT_GOES},
      {"cuDevicePrimaryCtxRelease", CONTEXT_GOES},
      {"cuDevicePrimaryCtxRelease_v2", CONTEXT_GOES},
      {"cuDevicePrimaryCtxReset", CONTEXT_GOES},
      {"cuDevicePrimaryCtxReset_v2", CONTEXT_GOES},
  };
  size_t length = strlen(name);
  if (ends_with(name, length, "_ptsz")) length -= 5;
  for (size_t at = 0; at < sizeof known / sizeof *known; at++)
    if (strlen(known[at].name) == length && !memcmp(known[at].name, name, length)) return known[at].kind;
  return OTHER;
}

static kind kind_of(uint32_t id, const char *name) {
  kind found = id < MOST_IDS ? (kind)atomic_load_explicit(&kinds[id], memory_order_relaxed) : UNKNOWN;
  if (found != UNKNOWN || !name) return found;
  found = kind_of_name(name);
  if (id < MOST_IDS) atomic_store_explicit(&kinds[id], (unsigned char)found, memory_order_relaxed);
  return found;
}

static void call_python(uint32_t id, pasta_call *data) {
  if (atomic_load(&listening)) to.python(NULL, DRIVER_API, id, data); /* else Python may be about to end */
}

static void ask_python(call *of, uint32_t id) {
  of->in_python = 1;
  call_python(id, &of->data);
  of->in_python = 0;
}

/* Between these two the thread may allocate and wait, also while another one captures a stream. */
static int relax(int *mode) {
  *mode = RELAXED;
  return driver.exchange_mode && !driver.exchange_mode(mode);
}

static void restore(int exchanged, int *mode) {
  if (exchanged) driver.exchange_mode(mode);
}

static void read_shape(pasta_call *data, void *function, const uint32_t *grid, const uint32_t *block) {
  data->function = function;
  memcpy(data->grid, grid, sizeof data->grid);
  memcpy(data->block, block, sizeof data->block);
}

/* Read the parameters of a launching call; returns -1 where there are none: the driver will refuse them. */
static int read_params(kind kind, const void *params, pasta_call *data, void **stream) {
  if (kind == GRAPH) {
    const graph_params *of = params;
    data->function = of->graph, *stream = of->stream;
  } else if (kind == CONFIGURED) {
    const configured_params *of = params;
    if (!of->config) return -1;
    read_shape(data, of->function, of->config->grid, of->config->block);
    *stream = of->config->stream;
  } else {
    const kernel_params *of = params;
    read_shape(data, of->function, of->grid, of->block);
    *stream = of->stream;
  }
  return 0;
}

/* The name that the Sanitizer tells at this point is valid for cuLaunchKernel and cuLaunchCooperativeKernel, not for
 * cuLaunchKernelEx; the driver tells all of them since CUDA 12.3.
 */
static void find_name(pasta_call *data, kind kind, const api_data *api) {
  if (driver.kernel_name && !driver.kernel_name(&data->name, data->function)) return;
  if (driver.function_name && !driver.function_name(&data->name, data->function)) return;
  data->name = kind == KERNEL ? api->symbol : NULL;
}

static int captures(void *stream) {
  int status = NOT_CAPTURING;
  return driver.is_capturing && (driver.is_capturing(stream, &status) || status != NOT_CAPTURING);
}

static void enter_launch(call *of, kind kind, const api_data *api) {
  memset(&of->data, 0, sizeof of->data);
  of->given = of->begun = 0;
  of->data.context = api->context;
  of->kind = CAPTURED; /* or refused by the driver: left alone */
  of->exchanged = 0;
  void *stream = NULL;
  if (read_params(kind, api->params, &of->data, &stream)) return;
  if (!stream && ends_with(api->function, strlen(api->function), "_ptsz")) stream = PER_THREAD;
  find_driver();
  if (captures(stream)) return;
  if (to.stream_handle(api->context, stream, &of->data.stream)) return;
  of->kind = kind;
  of->exchanged = relax(&of->mode);
  if (kind != GRAPH) find_name(&of->data, kind, api);
  ask_python(of, kind == GRAPH ? PASTA_GRAPH_ENTER : PASTA_LAUNCH_ENTER);
}

/* Return the place of a function in the table, or how many there are; under the lock. */
static size_t find_given(const void *function) {
  size_t at = 0, used = atomic_load(&given_used);
  while (at < used && table[at].function != function) at++;
  return at;
}

/* Under the lock. */
static void remove_given(size_t at) {
  size_t last = atomic_load(&given_used) - 1;
  table[at] = table[last];
  atomic_store(&given_used, last);
}

/* A graph's launch is over: others may have its functions. */
static void close_given(call *of) {
  pthread_mutex_lock(&lock);
  for (size_t at = 0; at < of->count; at++) {
    size_t in = find_given(of->nodes[at].function);
    if (!of->nodes[at].listed || in == atomic_load(&given_used)) continue;
    if (table[in].spoilt && of->nodes[at].slot) of->nodes[at].code = PASTA_SHARED;
    if (!--table[in].open && (table[in].spoilt || !table[in].has_slot)) remove_given(in);
  }
  pthread_mutex_unlock(&lock);
}

static void leave_graph(call *of) {
  close_given(of);
  ask_python(of, PASTA_GRAPH_LEAVE);
  for (size_t at = 0; at < of->count; at++) free(of->nodes[at].name);
  free(of->nodes), free(of->reserved);
  of->nodes = NULL, of->reserved = NULL;
  of->count = of->room = of->reserved_count = of->reserved_used = 0;
  of->no_memory = 0;
}

static void leave_launch(call *of) {
  if (of->kind == GRAPH) {
    leave_graph(of);
  } else if (of->kind != CAPTURED && of->given) {
    if (!of->begun) of->data.code = PASTA_NOT_BEGUN;
    ask_python(of, PASTA_LAUNCH_LEAVE);
  }
  restore(of->exchanged, &of->mode);
  of->exchanged = 0;
  of->kind = UNKNOWN;
}

static void destruction(kind kind, const api_data *api) {
  int mode, exchanged = relax(&mode);
  pasta_call data = {.context = api->context};
  const stream_params *of = api->params;
  if (kind == STREAM_GOES && of->stream && !to.stream_handle(api->context, of->stream, &data.stream))
    call_python(PASTA_STREAM_GOES, &data);
  else
    call_python(PASTA_CONTEXT_GOES, NULL);
  restore(exchanged, &mode);
}

static void driver_call(uint32_t id, const api_data *api) {
  kind kind = kind_of(id, api->function);
  call *of = &current;
  in_call = api->site == ENTER;
  if (in_call) entered = atomic_load(&begun);
  if (kind == OTHER || kind == UNKNOWN) return;
  if (kind == STREAM_GOES || kind == CONTEXT_GOES) {
    if (api->site == ENTER && atomic_load(&listening)) destruction(kind, api);
  } else if (of->in_python) {
    return; /* a launch by what Python does for another one: left alone */
  } else if (api->site == ENTER) {
    if (of->kind == UNKNOWN && atomic_load(&listening)) enter_launch(of, kind, api);
  } else if (of->kind != UNKNOWN) {
    leave_launch(of);
  }
}

uint64_t pasta_entered(void) { return in_call ? entered : atomic_load(&begun); }

static atomic_ullong *place_of(const void *stream) {
  return &last_begun[((uintptr_t)stream >> 4) * 0x9E3779B97F4A7C15u >> 40 & (STREAM_PLACES - 1)];
}

int pasta_idle(const void *stream, uint64_t since) { return atomic_load(place_of(stream)) <= since; }

static void begins(const void *stream) {
  unsigned long long now = atomic_fetch_add(&begun, 1) + 1, last = atomic_load(place_of(stream));
  while (last < now && !atomic_compare_exchange_weak(place_of(stream), &last, now)) continue;
}

int pasta_exchange_mode(int mode) { return driver.exchange_mode && !driver.exchange_mode(&mode) ? mode : -1; }

/* Under the driver's lock: take a slot from a function that a launch of a graph gave it to; this launch has none, and
 * would count there. Where the graph may not yet have used it, both lose it.
 */
static void forget(void *function) {
  if (!atomic_load(&given_used)) return;
  pthread_mutex_lock(&lock);
  size_t at = find_given(function);
  int found = at < atomic_load(&given_used);
  if (found && table[at].open)
    table[at].spoilt = 1;
  else if (found)
    remove_given(at);
  pthread_mutex_unlock(&lock);
  if (found) to.set_function(function, NULL);
}

/* Note that a graph with this function begins; tells whether it is alone with it, or -1 if there is no memory. */
static int open_given(void *function, int *had_slot) {
  int alone = -1;
  pthread_mutex_lock(&lock);
  size_t at = find_given(function), used = atomic_load(&given_used);
  if (at == used && used == table_room) {
    given *larger = realloc(table, (table_room ? 2 * table_room : 64) * sizeof *larger);
    if (larger) table = larger, table_room = table_room ? 2 * table_room : 64;
  }
  if (at < table_room) {
    if (at == used) table[at] = (given){.function = function}, atomic_store(&given_used, used + 1);
    alone = !table[at].open++;
    *had_slot = table[at].has_slot;
    if (!alone) table[at].spoilt = 1;
    table[at].has_slot = 0;
  }
  pthread_mutex_unlock(&lock);
  return alone;
}

static void has_slot(const void *function) {
  pthread_mutex_lock(&lock);
  size_t at = find_given(function);
  if (at < atomic_load(&given_used)) table[at].has_slot = 1;
  pthread_mutex_unlock(&lock);
}

/* Return the address of a slot, ready in the stream's order, or 0 and why. All of it under the driver's lock: GPU kernels
 * of cuBLAS ran into illegal addresses where slabs were allocated and cleared at the entry of calls (Sanitizer 13.0 on an
 * H200; not 13.5).
 */
static uint64_t prepare(const pasta_slot *slot, void *context, void *stream, int32_t *code) {
  uint64_t address = slot->offset;
  *code = 0;
  if (slot->slab_bytes) {
    if (slot->slab >= PASTA_MOST_SLABS) return *code = PASTA_NO_MEMORY, 0;
    void *base = (void *)(uintptr_t)slabs[slot->slab].address;
    if (!base && to.allocate(context, &base, slot->slab_bytes)) return *code = PASTA_NO_MEMORY, 0;
    slabs[slot->slab].address = (uintptr_t)base;
    if (slabs[slot->slab].turn != slot->turn && (*code = to.clear(base, 0, slot->slab_bytes, stream))) return 0;
    slabs[slot->slab].turn = slot->turn;
    address += (uintptr_t)base;
  }
  if (slot->header_size && (*code = to.write((void *)(uintptr_t)address, slot->header, slot->header_size, stream))) return 0;
  return address;
}

uint64_t pasta_slab(uint32_t slab, uint32_t turn) {
  return slab < PASTA_MOST_SLABS && slabs[slab].turn == turn ? slabs[slab].address : 0;
}

static void launch_begins(const launch_data *launch) {
  call *of = &current;
  int known = (of->kind == KERNEL || of->kind == CONFIGURED) && !of->in_python && !of->begun;
  begins(launch->handle);
  if (!known) atomic_fetch_add(&unknown, 1);
  if (known) of->begun = 1;
  int32_t code = PASTA_NOT_BEGUN;
  uint64_t slot = known && of->given ? prepare(&of->slot, launch->context, launch->handle, &code) : 0;
  if (slot) code = to.set_launch(launch->launch, launch->function, launch->handle, (void *)(uintptr_t)slot);
  if (code && (of->kind != GRAPH || of->in_python)) forget(launch->function);
  if (known) of->data.code = code;
}

static pasta_node *node_of(call *of, const launch_data *launch) {
  for (size_t at = 0; at < of->count; at++)
    if (of->nodes[at].function == launch->function) return &of->nodes[at];
  if (of->count == of->room) {
    size_t more = of->room ? 2 * of->room : 64;
    pasta_node *larger = realloc(of->nodes, more * sizeof *larger);
    if (!larger) return NULL;
    of->nodes = larger, of->room = more;
  }
  pasta_node *node = &of->nodes[of->count++];
  *node = (pasta_node){.function = launch->function, .place = -1};
  node->name = launch->name ? strdup(launch->name) : NULL; /* the graph may be gone when Python asks */
  memcpy(node->grid, launch->grid, sizeof node->grid);
  memcpy(node->block, launch->block, sizeof node->block);
  return node;
}

/* Return the next reserved slot that can be made ready, or 0 and why. */
static uint64_t next_ready(call *of, pasta_node *node) {
  while (of->reserved_used < of->reserved_count) {
    const pasta_slot *slot = &of->reserved[of->reserved_used];
    node->place = (int32_t)of->reserved_used;
    uint64_t address = prepare(slot, of->data.context, of->data.stream, &node->code);
    if (address || node->code != PASTA_NO_MEMORY) return address;
    of->no_memory = 1;
    uint32_t slab = slot->slab;
    while (of->reserved_used < of->reserved_count && of->reserved[of->reserved_used].slab == slab) of->reserved_used++;
  }
  if (of->no_memory) node->code = PASTA_NO_MEMORY;
  return 0;
}

static void give_node(call *of, pasta_node *node) {
  int had_slot = 0, alone = open_given(node->function, &had_slot);
  node->listed = alone >= 0;
  uint64_t slot = alone > 0 ? next_ready(of, node) : 0;
  if (slot) {
    has_slot(node->function);
    of->reserved_used++;
    node->slot = slot;
    node->code = to.set_function(node->function, (void *)(uintptr_t)slot);
    return;
  }
  if (!alone) node->code = PASTA_SHARED;
  if (!node->code) node->place = -1;
  if (!alone || had_slot) to.set_function(node->function, NULL);
}

static void node_begins(const node_data *data) {
  call *of = &current;
  if (data->type != KERNEL_NODE) return;
  if (of->kind != GRAPH || of->in_python) { /* an upload, or a call that we do not know */
    forget(data->launch.function);
    return;
  }
  begins(of->data.stream);
  pasta_node *node = node_of(of, &data->launch);
  if (node && !node->count++) give_node(of, node);
}

void pasta_receive(void *user, int domain, uint32_t id, const void *data) {
  (void)user;
  if (domain == DRIVER_API)
    driver_call(id, data);
  else if (!atomic_load(&listening)) /* in a forked child too, where other threads' locks stay taken */
    return;
  else if (domain == RESOURCE)
    pasta_resource(id, data);
  else if (domain == SYNCHRONIZE)
    pasta_synchronized(id, data);
  else if (domain == LAUNCH && id == LAUNCH_BEGIN)
    launch_begins(data);
  else if (domain == GRAPHS && id == NODE_LAUNCH_BEGIN)
    node_begins(data);
}

int pasta_give(const pasta_slot *slot) {
  call *of = &current;
  if (!of->in_python || (of->kind != KERNEL && of->kind != CONFIGURED)) return -1;
  of->slot = *slot, of->given = 1;
  return 0;
}

int pasta_reserve(const pasta_slot *slots, size_t count) {
  call *of = &current;
  if (!of->in_python || of->kind != GRAPH || of->reserved) return -1;
  of->reserved = malloc((count ? count : 1) * sizeof *slots);
  if (!of->reserved) return -1;
  memcpy(of->reserved, slots, count * sizeof *slots);
  of->reserved_count = count;
  return 0;
}

const pasta_node *pasta_nodes(size_t *count) {
  *count = current.count;
  return current.nodes;
}
