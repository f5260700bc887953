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
enum { MOST_IDS = 4096 };
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

typedef enum { UNKNOWN, OTHER, KERNEL, CONFIGURED, GRAPH, DESTROY, CAPTURED } kind;

typedef struct {
  kind kind;
  int in_python, begun;
  pasta_call data;
  int given;
  pasta_slot slot, *reserved;
  size_t reserved_count, reserved_used;
  pasta_node *nodes;
  size_t count, room;
} call;

typedef struct {
  void *function;
  uint64_t slot;
  int open; /* launches of graphs that have not yet put it into their stream */
} given;

static pasta_receiver to;
static atomic_int listening;
static atomic_uchar kinds[MOST_IDS];
static atomic_size_t given_used;
static atomic_ullong unknown;
static __thread call current;
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
      {"cuStreamDestroy", DESTROY},
      {"cuStreamDestroy_v2", DESTROY},
      {"cuCtxDestroy", DESTROY},
      {"cuCtxDestroy_v2", DESTROY},
      {"cuCtxDetach", DESTROY},
      {"cuGreenCtxDestroy", DESTROY},
      {"cuDevicePrimaryCtxRelease", DESTROY},
      {"cuDevicePrimaryCtxRelease_v2", DESTROY},
      {"cuDevicePrimaryCtxReset", DESTROY},
      {"cuDevicePrimaryCtxReset_v2", DESTROY},
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

static void ask_python(call *of, uint32_t id) {
  if (!atomic_load(&listening)) return; /* Python may be about to end */
  of->in_python = 1;
  to.python(NULL, DRIVER_API, id, &of->data);
  of->in_python = 0;
}

static void read_shape(pasta_call *data, void *function, const uint32_t *grid, const uint32_t *block) {
  data->function = function;
  memcpy(data->grid, grid, sizeof data->grid);
  memcpy(data->block, block, sizeof data->block);
}

/* Read the parameters of a launching call, and return its stream. */
static void *read_params(kind kind, const void *params, pasta_call *data) {
  if (kind == GRAPH) {
    const graph_params *of = params;
    return data->function = of->graph, of->stream;
  }
  if (kind == CONFIGURED) {
    const configured_params *of = params;
    return read_shape(data, of->function, of->config->grid, of->config->block), of->config->stream;
  }
  const kernel_params *of = params;
  return read_shape(data, of->function, of->grid, of->block), of->stream;
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
  void *stream = read_params(kind, api->params, &of->data);
  if (!stream && ends_with(api->function, strlen(api->function), "_ptsz")) stream = PER_THREAD;
  of->kind = CAPTURED;
  find_driver();
  if (captures(stream)) return;
  if (to.stream_handle(api->context, stream, &of->data.stream)) return;
  of->kind = kind;
  int mode = RELAXED; /* what follows may allocate, while another thread captures */
  int exchanged = driver.exchange_mode && !driver.exchange_mode(&mode);
  if (kind != GRAPH) find_name(&of->data, kind, api);
  ask_python(of, kind == GRAPH ? PASTA_GRAPH_ENTER : PASTA_LAUNCH_ENTER);
  if (exchanged) driver.exchange_mode(&mode);
}

/* Return the place of a function in the table, or how many there are; under the lock. */
static size_t find_given(const void *function) {
  size_t at = 0, used = atomic_load(&given_used);
  while (at < used && table[at].function != function) at++;
  return at;
}

static void close_given(const call *of) {
  pthread_mutex_lock(&lock);
  for (size_t at = 0; at < of->count; at++) {
    size_t in = find_given(of->nodes[at].function);
    if (of->nodes[at].slot && in < atomic_load(&given_used) && table[in].open) table[in].open--;
  }
  pthread_mutex_unlock(&lock);
}

static void leave_launch(call *of) {
  if (of->kind == GRAPH) {
    close_given(of);
    ask_python(of, PASTA_GRAPH_LEAVE);
    free(of->nodes), free(of->reserved);
    of->nodes = NULL, of->reserved = NULL;
    of->count = of->room = of->reserved_count = of->reserved_used = 0;
  } else if (of->kind != CAPTURED && of->given) {
    if (!of->begun) of->data.code = PASTA_NOT_BEGUN;
    ask_python(of, PASTA_LAUNCH_LEAVE);
  }
  of->kind = UNKNOWN;
}

static void driver_call(uint32_t id, const api_data *api) {
  kind kind = kind_of(id, api->function);
  call *of = &current;
  if (kind == OTHER || kind == UNKNOWN) return;
  if (kind == DESTROY) {
    if (api->site == ENTER && atomic_load(&listening)) to.python(NULL, DRIVER_API, PASTA_DESTROY_ENTER, NULL);
  } else if (of->in_python) {
    return; /* a launch by what Python does for another one: left alone */
  } else if (api->site == ENTER) {
    if (of->kind == UNKNOWN && atomic_load(&listening)) enter_launch(of, kind, api);
  } else if (of->kind != UNKNOWN) {
    leave_launch(of);
  }
}

void pasta_forget(void *function, uint64_t slot) {
  if (!atomic_load(&given_used)) return;
  pthread_mutex_lock(&lock);
  size_t at = find_given(function), used = atomic_load(&given_used);
  int found = at < used && !table[at].open && (!slot || table[at].slot == slot);
  if (found) {
    table[at] = table[used - 1];
    atomic_store(&given_used, used - 1);
  }
  pthread_mutex_unlock(&lock);
  if (found) to.set_function(function, NULL);
}

/* Under the driver's lock: whatever slot it has. */
static void forget(void *function) { pasta_forget(function, 0); }

static int remember(void *function, uint64_t slot) {
  int done = 1;
  pthread_mutex_lock(&lock);
  size_t at = find_given(function), used = atomic_load(&given_used);
  if (at == used && used == table_room) {
    given *larger = realloc(table, (table_room ? 2 * table_room : 64) * sizeof *larger);
    if (larger) table = larger, table_room = table_room ? 2 * table_room : 64;
    done = larger != NULL;
  }
  if (done) {
    table[at] = (given){function, slot, at < used ? table[at].open + 1 : 1};
    if (at == used) atomic_store(&given_used, used + 1);
  }
  pthread_mutex_unlock(&lock);
  return done;
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

uint64_t pasta_slab(uint32_t slab) { return slab < PASTA_MOST_SLABS ? slabs[slab].address : 0; }

static void launch_begins(const launch_data *launch) {
  call *of = &current;
  int known = (of->kind == KERNEL || of->kind == CONFIGURED) && !of->in_python && !of->begun;
  if (!known && atomic_load(&listening)) atomic_fetch_add(&unknown, 1);
  if (known) of->begun = 1;
  int32_t code = PASTA_NOT_BEGUN;
  uint64_t slot = known && of->given ? prepare(&of->slot, launch->context, launch->handle, &code) : 0;
  if (slot) code = to.set_launch(launch->launch, launch->function, launch->handle, (void *)(uintptr_t)slot);
  if (code) forget(launch->function);
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
  *node = (pasta_node){.function = launch->function, .name = launch->name, .place = -1};
  memcpy(node->grid, launch->grid, sizeof node->grid);
  memcpy(node->block, launch->block, sizeof node->block);
  return node;
}

static void give_node(call *of, pasta_node *node) {
  size_t place = of->reserved_used;
  uint64_t slot = 0;
  if (place < of->reserved_count) slot = prepare(&of->reserved[place], of->data.context, of->data.stream, &node->code);
  if (!slot || !remember(node->function, slot)) {
    forget(node->function);
    return;
  }
  of->reserved_used++;
  node->slot = slot, node->place = (int32_t)place;
  node->code = to.set_function(node->function, (void *)(uintptr_t)slot);
}

static void node_begins(const node_data *data) {
  call *of = &current;
  if (data->type != KERNEL_NODE) return;
  if (of->kind != GRAPH || of->in_python) { /* an upload, or a call that we do not know */
    forget(data->launch.function);
    return;
  }
  pasta_node *node = node_of(of, &data->launch);
  if (node && !node->count++) give_node(of, node);
}

void pasta_receive(void *user, int domain, uint32_t id, const void *data) {
  (void)user;
  if (domain == DRIVER_API)
    driver_call(id, data);
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
