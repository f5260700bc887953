#include "live.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_BUFFERS 1024u
#define CUPTI_OK 0
#define CUPTI_INVALID_PARAMETER 1
#define CUPTI_NO_FUNCTION 1000 /* ours: this CUPTI has no such function */
#define EXTERNAL_KIND 5u       /* CUSTOM2; Kineto uses CUSTOM0 and CUSTOM1 */
#define DRIVER_DOMAIN 1u
#define RUNTIME_DOMAIN 2u
#define API_EXIT 1
#define MAX_DEPTH 128u
#define MAX_EDGES 4096u
/* Callback ids up to the newest header read (13.5). An id beyond a library's own range is refused without harm. */
#define RUNTIME_CALLS 567u
#define DRIVER_CALLS 877u

typedef int (*fn_any)(void);
typedef void (*buffer_requested)(uint8_t **, size_t *, size_t *);
typedef void (*buffer_completed)(void *, uint32_t, uint8_t *, size_t, size_t);

typedef struct { /* CUpti_SubscriberParams: 13.0 and 13.1 end after old_size */
  size_t struct_size;
  const char *name;
  char *old_name;
  size_t old_size;
  uint8_t allow_multiple, padding[7];
} subscriber_params;

static struct {
  void *library;
  char path[512];
  uint32_t version;
  const pasta_layout *layout;
  pasta_ring *ring;
  int (*get_version)(uint32_t *);
  int (*register_callbacks)(buffer_requested, buffer_completed);
  int (*enable)(uint32_t), (*disable)(uint32_t);
  int (*enable_runtime)(uint32_t, uint8_t), (*enable_driver)(uint32_t, uint8_t);
  int (*flush_all)(uint32_t);
  int (*push)(uint32_t, uint64_t), (*pop)(uint32_t, uint64_t *);
  int (*timestamp)(uint64_t *);
  int (*dropped)(void *, uint32_t, size_t *);
  int (*next_record)(uint8_t *, size_t, uint8_t **);
  int (*subscribe)(void **, void *, void *);
  int (*subscribe_v2)(void **, void *, void *, subscriber_params *);
  int (*unsubscribe)(void *);
  int (*enable_callback)(uint32_t, void *, uint32_t, uint32_t);
  int (*struct_size)(uint32_t, uint32_t, size_t *);
  int (*graph_node_id)(void *, uint64_t *);
  int (*callback_name)(uint32_t, uint32_t, const char **);
  int (*result_string)(int, const char **);
  int (*register_timestamp)(uint64_t (*)(void));
  int (*finalize)(void);
} cupti;

static struct {
  pthread_mutex_t lock;
  size_t bytes;
  uint32_t limit, allocated, idle_count;
  uint8_t *all[MAX_BUFFERS], *idle[MAX_BUFFERS];
  pasta_live_counts counts;
  uint8_t *record;
  size_t record_limit, record_used;
  int walked;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static fn_any symbol(const char *name) {
  fn_any function;
  void *address = dlsym(cupti.library, name);
  memcpy(&function, &address, sizeof function);
  return function;
}

#define BIND(field, name) (cupti.field = (__typeof__(cupti.field))symbol(name))

static int bind_all(char *message, size_t size) {
  BIND(get_version, "cuptiGetVersion");
  BIND(register_callbacks, "cuptiActivityRegisterCallbacks");
  BIND(enable, "cuptiActivityEnable");
  BIND(disable, "cuptiActivityDisable");
  BIND(flush_all, "cuptiActivityFlushAll");
  BIND(push, "cuptiActivityPushExternalCorrelationId");
  BIND(pop, "cuptiActivityPopExternalCorrelationId");
  BIND(timestamp, "cuptiGetTimestamp");
  BIND(dropped, "cuptiActivityGetNumDroppedRecords");
  BIND(next_record, "cuptiActivityGetNextRecord");
  BIND(subscribe, "cuptiSubscribe");
  BIND(unsubscribe, "cuptiUnsubscribe");
  BIND(enable_callback, "cuptiEnableCallback");
  BIND(enable_runtime, "cuptiActivityEnableRuntimeApi"); /* from 12.6 */
  BIND(enable_driver, "cuptiActivityEnableDriverApi");
  BIND(subscribe_v2, "cuptiSubscribe_v2");        /* from 13.0 */
  BIND(struct_size, "cuptiActivityGetStructSize"); /* from 13.2 */
  BIND(graph_node_id, "cuptiGetGraphNodeId");
  BIND(callback_name, "cuptiGetCallbackName");
  BIND(result_string, "cuptiGetResultString");
  BIND(register_timestamp, "cuptiActivityRegisterTimestampCallback");
  BIND(finalize, "cuptiFinalize");
  if (cupti.get_version && cupti.register_callbacks && cupti.enable && cupti.disable && cupti.flush_all && cupti.push &&
      cupti.pop && cupti.timestamp && cupti.dropped && cupti.next_record && cupti.subscribe && cupti.unsubscribe)
    return 0;
  snprintf(message, size, "%s lacks functions of the CUPTI activity API", cupti.path);
  return -1;
}

int pasta_live_load(const char *path, char *message, size_t size) {
  if (cupti.library && cupti.layout) {
    if (strcmp(path, cupti.path) == 0) return 0;
    snprintf(message, size, "another CUPTI is loaded already: %s", cupti.path);
    return -1;
  }
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    snprintf(message, size, "%s", dlerror());
    return -1;
  }
  cupti.library = library;
  snprintf(cupti.path, sizeof cupti.path, "%s", path);
  if (bind_all(message, size) != 0) return -1;
  int code = cupti.get_version(&cupti.version);
  cupti.layout = code == CUPTI_OK ? pasta_layout_for(cupti.version) : NULL;
  if (cupti.layout) return 0;
  if (code != CUPTI_OK)
    snprintf(message, size, "cuptiGetVersion failed: %s", pasta_live_error(code));
  else
    snprintf(message, size, "%s has CUPTI API version %u, whose record layout is not known; known are %s", path,
             cupti.version, pasta_layouts_known());
  return -1;
}

uint32_t pasta_live_version(void) { return cupti.version; }

static int owned(const uint8_t *buffer) {
  for (uint32_t i = 0; i < pool.allocated; i++)
    if (pool.all[i] == buffer) return 1;
  return 0;
}

static void on_requested(uint8_t **buffer, size_t *size, size_t *max_records) {
  *max_records = 0;
  *buffer = NULL;
  *size = 0;
  pthread_mutex_lock(&pool.lock);
  if (pool.idle_count) {
    *buffer = pool.idle[--pool.idle_count];
  } else if (pool.allocated < pool.limit) {
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, pool.bytes) == 0) {
      pool.all[pool.allocated++] = memory;
      *buffer = memory;
    }
  }
  if (*buffer) {
    *size = pool.bytes;
    pool.counts.buffers_out++;
  } else {
    pool.counts.buffers_refused++;
  }
  pthread_mutex_unlock(&pool.lock);
}

/* Once for each attach: CUPTI's own walker must step exactly as our size table does. */
static int walk_agrees(uint8_t *buffer, size_t valid) {
  uint8_t *record = NULL;
  size_t at = 0;
  for (int i = 0; i < 4096 && cupti.next_record(buffer, valid, &record) == CUPTI_OK; i++) {
    uint32_t kind;
    memcpy(&kind, record, sizeof kind);
    if (record != buffer + at) return 0;
    uint16_t size = kind < PASTA_KIND_LIMIT ? cupti.layout->size[kind] : 0;
    if (!size) return 1; /* the decoder stops here too, and counts it */
    at += size;
  }
  return 1;
}

static void keep_copy(const uint8_t *buffer, size_t valid) {
  uint64_t length = valid;
  if (!pool.record || pool.record_used + sizeof length + valid > pool.record_limit) return;
  memcpy(pool.record + pool.record_used, &length, sizeof length);
  memcpy(pool.record + pool.record_used + sizeof length, buffer, valid);
  pool.record_used += sizeof length + valid;
}

static void on_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)size;
  size_t dropped = 0;
  pthread_mutex_lock(&pool.lock);
  int ours = buffer && owned(buffer), check = ours && valid && !pool.walked, agrees = 1;
  if (check) {
    pool.walked = 1;
    agrees = walk_agrees(buffer, valid);
    if (!agrees) pool.counts.walk_mismatches++;
  }
  if (ours && valid) keep_copy(buffer, valid);
  if (!ours) pool.counts.foreign_buffers++;
  int trusted = pool.counts.walk_mismatches == 0;
  pthread_mutex_unlock(&pool.lock);
  if (ours && valid && trusted && cupti.ring) pasta_decode(cupti.ring, cupti.layout, buffer, valid, NULL);
  if (cupti.dropped(context, stream, &dropped) != CUPTI_OK) dropped = 0;
  pthread_mutex_lock(&pool.lock);
  pool.counts.dropped += dropped;
  if (ours) {
    pool.idle[pool.idle_count++] = buffer;
    if (pool.counts.buffers_out) pool.counts.buffers_out--;
  }
  pthread_mutex_unlock(&pool.lock);
}

int pasta_live_attach(pasta_ring *ring, size_t buffer_bytes, uint32_t max_buffers, char *message, size_t size) {
  if (!cupti.layout) {
    snprintf(message, size, "load a CUPTI library first");
    return -1;
  }
  pthread_mutex_lock(&pool.lock);
  if (pool.allocated && pool.bytes != buffer_bytes) {
    pthread_mutex_unlock(&pool.lock);
    snprintf(message, size, "the buffer size cannot change while the process runs");
    return -1;
  }
  pool.bytes = buffer_bytes;
  pool.limit = max_buffers < MAX_BUFFERS ? max_buffers : MAX_BUFFERS;
  pool.walked = 0;
  cupti.ring = ring;
  pthread_mutex_unlock(&pool.lock);
  return 0;
}

void pasta_live_forget_buffers(void) {
  pthread_mutex_lock(&pool.lock);
  /* What is out is with the client that replaced our callbacks: it may still be written, so it is never reused. */
  pool.counts.buffers_lost += pool.counts.buffers_out;
  pool.counts.buffers_out = 0;
  memcpy(pool.all, pool.idle, pool.idle_count * sizeof *pool.all);
  pool.allocated = pool.idle_count;
  pthread_mutex_unlock(&pool.lock);
}

/* CUPTI's own clock on Linux. It is registered because Kineto leaves its clock behind: time stamp counter ticks, which
   would make every duration of ours wrong by the counter's rate. Kineto registers its own again when it starts. */
static uint64_t wall_clock(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Begins an attachment. What an earlier one recorded has come by now: its end hands over all that it held. */
int pasta_live_register(void) {
  if (cupti.ring) pasta_ring_next_attachment(cupti.ring);
  int code = cupti.register_timestamp ? cupti.register_timestamp(wall_clock) : CUPTI_OK;
  return code == CUPTI_OK ? cupti.register_callbacks(on_requested, on_completed) : code;
}

int pasta_live_enable(uint32_t kind, int on) { return on ? cupti.enable(kind) : cupti.disable(kind); }

/* Before 12.6 CUPTI records all calls of an API or none: there one call stands for all. */
int pasta_live_enable_call(int driver, uint32_t callback_id, int on) {
  int (*enable)(uint32_t, uint8_t) = driver ? cupti.enable_driver : cupti.enable_runtime;
  if (!enable) return pasta_live_enable(driver ? PASTA_DRIVER : PASTA_RUNTIME, on);
  int code = enable(callback_id, (uint8_t)on);
  return code == CUPTI_INVALID_PARAMETER ? CUPTI_OK : code; /* a call of a later CUDA than this library's */
}

int pasta_live_mute_calls(int driver) {
  int (*enable)(uint32_t, uint8_t) = driver ? cupti.enable_driver : cupti.enable_runtime;
  if (!enable) return CUPTI_OK;
  int code = cupti.enable(driver ? PASTA_DRIVER : PASTA_RUNTIME);
  for (uint32_t id = 1; id < (driver ? DRIVER_CALLS : RUNTIME_CALLS) && code == CUPTI_OK; id++) enable(id, 0);
  return code;
}

int pasta_live_flush(uint32_t flag) { return cupti.flush_all(flag); }
int pasta_live_timestamp(uint64_t *now) { return cupti.timestamp(now); }

/* ---- regions ---- */

static atomic_uint window_number;  /* odd while a window is open */
static atomic_uint attach_number;  /* raised by each detach: CUPTI's own stacks are empty then */

typedef struct region_state {
  struct region_state *next;
  uint64_t ids[MAX_DEPTH];
  uint32_t depth;  /* may exceed MAX_DEPTH: deeper regions are only counted */
  atomic_uint pushed; /* how many of them CUPTI has, as of `window` and `attached` */
  unsigned attached;
  atomic_uint window;        /* the last window in which this thread's regions were given to CUPTI */
  _Atomic uint64_t innermost; /* 0 = in none */
  uint32_t thread;           /* as CUPTI numbers threads by default: the low half of pthread_self() */
  int listed;
} region_state;

static __thread region_state regions;
static region_state *all_regions; /* of the living threads that ever entered one; under pool.lock */
static pthread_key_t thread_end;
static pthread_once_t thread_end_once = PTHREAD_ONCE_INIT;

/* What a thread was in when the window opened, until it first entered or left something in it: CUPTI did not know, or has
   the ids of an earlier window. */
static pasta_edge edges[MAX_EDGES];
static uint32_t edge_count;

/* With pool.lock held. A thread in no region matters as well, if CUPTI still has ids of an earlier window for it. */
static void add_edge(region_state *state, uint64_t until) {
  uint64_t id = atomic_load(&state->innermost);
  if ((id || atomic_load(&state->pushed)) && edge_count < MAX_EDGES)
    edges[edge_count++] = (pasta_edge){id, until, state->thread};
}

/* A thread ends. Its number may be given to another, so that what it was in holds until now and no longer. */
static void unlist(void *ended) {
  region_state *state = ended;
  pthread_mutex_lock(&pool.lock);
  unsigned window = atomic_load(&window_number);
  if ((window & 1u) && atomic_load(&state->window) != window)
    add_edge(state, wall_clock());
  for (region_state **at = &all_regions; *at; at = &(*at)->next)
    if (*at == state) {
      *at = (*at)->next;
      break;
    }
  pthread_mutex_unlock(&pool.lock);
}

static void make_key(void) { pthread_key_create(&thread_end, unlist); }

static void list_thread(void) {
  regions.listed = 1;
  regions.thread = (uint32_t)(uintptr_t)pthread_self();
  pthread_once(&thread_end_once, make_key);
  pthread_setspecific(thread_end, &regions);
  pthread_mutex_lock(&pool.lock);
  regions.next = all_regions;
  all_regions = &regions;
  pthread_mutex_unlock(&pool.lock);
}

static uint64_t innermost(void) {
  uint32_t kept = regions.depth < MAX_DEPTH ? regions.depth : MAX_DEPTH;
  return kept ? regions.ids[kept - 1] : 0;
}

static void pop_pushed(uint32_t down_to) {
  for (unsigned pushed = regions.pushed; pushed > down_to; regions.pushed = --pushed) cupti.pop(EXTERNAL_KIND, NULL);
}

/* The first enter or leave of this thread in a window: say what it was in until now, and begin on CUPTI's stack anew. */
static void meet_window(unsigned window) {
  uint64_t now = wall_clock();
  pthread_mutex_lock(&pool.lock);
  add_edge(&regions, now);
  pthread_mutex_unlock(&pool.lock);
  unsigned attached = atomic_load_explicit(&attach_number, memory_order_acquire);
  if (regions.attached != attached) {
    regions.attached = attached; /* CUPTI was detached since: its stack is empty */
    regions.pushed = 0;
  } else {
    pop_pushed(0);
  }
  atomic_store(&regions.window, window);
}

/* Bring CUPTI's stack of this thread up to ours. */
static void push_missing(void) {
  uint32_t most = regions.depth < MAX_DEPTH ? regions.depth : MAX_DEPTH;
  while (regions.pushed < most) {
    if (cupti.push(EXTERNAL_KIND, regions.ids[regions.pushed]) != CUPTI_OK) {
      pthread_mutex_lock(&pool.lock);
      pool.counts.push_errors++;
      pthread_mutex_unlock(&pool.lock);
      return;
    }
    regions.pushed++;
  }
}

/* The number of the open window, met by this thread; 0 = none is open. */
static unsigned met_window(void) {
  unsigned window = atomic_load_explicit(&window_number, memory_order_acquire);
  if (!(window & 1u)) return 0;
  if (atomic_load_explicit(&regions.window, memory_order_relaxed) != window) meet_window(window);
  return window;
}

void pasta_live_enter(uint64_t id) {
  if (!regions.listed) list_thread();
  unsigned window = met_window();
  if (regions.depth < MAX_DEPTH) regions.ids[regions.depth] = id;
  regions.depth++;
  atomic_store_explicit(&regions.innermost, innermost(), memory_order_relaxed);
  if (window) push_missing();
}

void pasta_live_leave(uint64_t id) {
  uint32_t kept = regions.depth < MAX_DEPTH ? regions.depth : MAX_DEPTH, depth = regions.depth;
  if (!depth) return;
  if (depth > MAX_DEPTH) {
    depth--; /* deeper than we keep ids: taken to be the innermost */
  } else {
    while (kept && regions.ids[kept - 1] != id) kept--; /* regions above it ended unseen */
    if (!kept) return;                                  /* it was never entered here */
    depth = kept - 1;
  }
  unsigned window = met_window();
  regions.depth = depth;
  atomic_store_explicit(&regions.innermost, innermost(), memory_order_relaxed);
  if (!window) return;
  pop_pushed(depth < regions.pushed ? depth : regions.pushed);
  push_missing();
}

void pasta_live_replace(uint64_t id) {
  if (!regions.listed) list_thread();
  if (met_window()) pop_pushed(0);
  regions.depth = 0;
  pasta_live_enter(id);
}

uint32_t pasta_live_depth(void) { return regions.depth; }

void pasta_live_window(int open) {
  unsigned now = atomic_load(&window_number);
  if ((int)(now & 1u) == (open != 0)) return;
  pthread_mutex_lock(&pool.lock);
  if (open) {
    edge_count = 0;
  } else { /* threads that have not met this window were in the same region all the time */
    for (region_state *state = all_regions; state; state = state->next)
      if (atomic_load(&state->window) != now) add_edge(state, UINT64_MAX);
  }
  pthread_mutex_unlock(&pool.lock);
  atomic_store_explicit(&window_number, now + 1, memory_order_release);
}

uint32_t pasta_live_edges(pasta_edge *out, uint32_t most) {
  pthread_mutex_lock(&pool.lock);
  uint32_t count = edge_count < most ? edge_count : most;
  memcpy(out, edges, count * sizeof *out);
  pthread_mutex_unlock(&pool.lock);
  return count;
}

/* ---- detaching ---- */

enum { DETACH_IDLE, DETACH_WANTED, DETACH_RUNNING, DETACH_DONE };
static atomic_int detach_state;

/* CUpti_CallbackData begins with the call site. */
static void on_call(void *user, uint32_t domain, uint32_t id, const void *data) {
  (void)user, (void)domain, (void)id;
  int site, wanted = DETACH_WANTED;
  memcpy(&site, data, sizeof site);
  if (site != API_EXIT || !atomic_compare_exchange_strong(&detach_state, &wanted, DETACH_RUNNING)) return;
  cupti.finalize();
  atomic_store(&detach_state, DETACH_DONE);
}

static int watch_calls(void *handle) {
  /* What a busy PyTorch process calls all the time: cudaGetDevice, launches, copies, graph launches. */
  static const uint32_t runtime[] = {17, 211, 430, 311, 41, 317, 138}, driver[] = {307, 652, 514, 277, 279, 281};
  int code = CUPTI_OK;
  for (size_t i = 0; i < sizeof runtime / sizeof *runtime && code == CUPTI_OK; i++)
    code = cupti.enable_callback(1, handle, RUNTIME_DOMAIN, runtime[i]);
  for (size_t i = 0; i < sizeof driver / sizeof *driver && code == CUPTI_OK; i++)
    code = cupti.enable_callback(1, handle, DRIVER_DOMAIN, driver[i]);
  return code;
}

static void nap(void) {
  struct timespec time = {0, 50000};
  nanosleep(&time, NULL);
}

int pasta_live_detach(unsigned timeout_ms) {
  void *handle = NULL, *callback;
  void (*function)(void *, uint32_t, uint32_t, const void *) = on_call;
  if (!cupti.finalize || !cupti.enable_callback) return CUPTI_NO_FUNCTION;
  memcpy(&callback, &function, sizeof callback);
  int code = cupti.subscribe(&handle, callback, NULL);
  if (code != CUPTI_OK) return code;
  atomic_store(&detach_state, DETACH_WANTED);
  code = watch_calls(handle);
  for (unsigned naps = 0; code == CUPTI_OK && naps < timeout_ms * 20 && atomic_load(&detach_state) != DETACH_DONE; naps++)
    nap();
  int wanted = DETACH_WANTED;
  if (atomic_compare_exchange_strong(&detach_state, &wanted, DETACH_IDLE)) { /* nobody called: take it back */
    cupti.unsubscribe(handle);
    return code != CUPTI_OK ? code : 1;
  }
  while (atomic_load(&detach_state) != DETACH_DONE) nap();
  atomic_store(&detach_state, DETACH_IDLE);
  atomic_fetch_add_explicit(&attach_number, 1, memory_order_release);
  pthread_mutex_lock(&pool.lock);
  pool.counts.detached++;
  pthread_mutex_unlock(&pool.lock);
  return CUPTI_OK;
}

static void ignore_callback(void *user, uint32_t domain, uint32_t id, const void *data) {
  (void)user, (void)domain, (void)id, (void)data;
}

int pasta_live_probe(char *who, size_t size) {
  void *handle = NULL, *callback;
  void (*function)(void *, uint32_t, uint32_t, const void *) = ignore_callback;
  memcpy(&callback, &function, sizeof callback);
  who[0] = 0;
  int code;
  if (cupti.subscribe_v2) {
    size_t bytes = cupti.version < 130200 ? offsetof(subscriber_params, allow_multiple) : sizeof(subscriber_params);
    subscriber_params params = {bytes, "pasta-otel", who, size, 0, {0}};
    code = cupti.subscribe_v2(&handle, callback, NULL, &params);
  } else {
    code = cupti.subscribe(&handle, callback, NULL);
  }
  if (code == CUPTI_OK) cupti.unsubscribe(handle);
  return code;
}

int pasta_live_struct_size(uint32_t kind, size_t *size) {
  return cupti.struct_size ? cupti.struct_size(kind, 0, size) : CUPTI_NO_FUNCTION;
}

int pasta_live_graph_node_id(void *node, uint64_t *id) {
  return cupti.graph_node_id ? cupti.graph_node_id(node, id) : CUPTI_NO_FUNCTION;
}

int pasta_live_call_name(int driver, uint32_t callback_id, const char **name) {
  return cupti.callback_name ? cupti.callback_name(driver ? 1 : 2, callback_id, name) : CUPTI_NO_FUNCTION;
}

const char *pasta_live_error(int code) {
  const char *text = NULL;
  if (code == CUPTI_NO_FUNCTION) return "this CUPTI has no such function";
  if (cupti.result_string && cupti.result_string(code, &text) == CUPTI_OK && text) return text;
  return "unknown CUPTI error";
}

pasta_live_counts pasta_live_stats(void) {
  pthread_mutex_lock(&pool.lock);
  pasta_live_counts counts = pool.counts;
  counts.buffers_allocated = pool.allocated;
  pthread_mutex_unlock(&pool.lock);
  return counts;
}

void pasta_live_record(size_t limit) {
  pthread_mutex_lock(&pool.lock);
  free(pool.record);
  pool.record = limit ? malloc(limit) : NULL;
  pool.record_limit = pool.record ? limit : 0;
  pool.record_used = 0;
  pthread_mutex_unlock(&pool.lock);
}

const uint8_t *pasta_live_recorded(size_t *length) {
  *length = pool.record_used;
  return pool.record;
}
