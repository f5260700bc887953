/* The running process's CUPTI: loaded by path, never linked. Callbacks run on CUPTI's threads and touch no Python. */
#ifndef PASTA_LIVE_H
#define PASTA_LIVE_H

#include "decode.h"

typedef struct {
  uint64_t dropped;          /* records CUPTI says it dropped */
  uint64_t buffers_refused;  /* CUPTI asked for a buffer and the pool was at its limit */
  uint64_t buffers_lost;     /* handed to CUPTI and never returned, because another client replaced our callbacks */
  uint64_t foreign_buffers;  /* returned to us, but not ours */
  uint32_t buffers_out;      /* with CUPTI now */
  uint32_t buffers_allocated;
  uint64_t detached;         /* times CUPTI was detached */
  uint64_t push_errors;      /* CUPTI refused an external id */
  uint64_t walk_mismatches;  /* our record sizes disagreed with CUPTI's own walker */
} pasta_live_counts;

/* Until when a thread was in a region that CUPTI did not know of, in the last window. */
typedef struct {
  uint64_t id;
  uint64_t until; /* ns, wall clock; UINT64_MAX = to the window's end */
  uint32_t thread;
} pasta_edge;

/* 0, or an error text in message. */
int pasta_live_load(const char *path, char *message, size_t size);
uint32_t pasta_live_version(void);
int pasta_live_attach(pasta_ring *ring, size_t buffer_bytes, uint32_t max_buffers, char *message, size_t size);
/* Forget buffers that a foreign client took over. */
void pasta_live_forget_buffers(void);
int pasta_live_register(void);
int pasta_live_enable(uint32_t kind, int on);
int pasta_live_enable_call(int driver, uint32_t callback_id, int on);
int pasta_live_flush(uint32_t flag);
/* Regions of the calling thread, innermost last. They are kept here, and given to CUPTI only while a window is open:
   a push outside a window would attach CUPTI to the process again. */
void pasta_live_enter(uint64_t id);
void pasta_live_leave(uint64_t id);
/* Leave everything this thread is in, then enter. For threads whose regions end elsewhere (autograd). */
void pasta_live_replace(uint64_t id);
uint32_t pasta_live_depth(void);
void pasta_live_window(int open);
uint32_t pasta_live_edges(pasta_edge *out, uint32_t most);
/* Detach CUPTI from the process, as a tool must: from inside the end of a CUDA call that the program makes. 0 = done,
   1 = no CUDA call came within the time and CUPTI is still attached, else CUPTI's error (39: another subscriber). */
int pasta_live_detach(unsigned timeout_ms);
/* Record no API call but those that are enabled singly afterwards; before CUDA 12.6 one enables them all. */
int pasta_live_mute_calls(int driver);
int pasta_live_timestamp(uint64_t *now);
/* Try to subscribe and leave at once: 0 = nobody else, 39 = taken; `who` gets the other's name where CUPTI tells it. */
int pasta_live_probe(char *who, size_t size);
int pasta_live_struct_size(uint32_t kind, size_t *size);
int pasta_live_graph_node_id(void *node, uint64_t *id);
int pasta_live_call_name(int driver, uint32_t callback_id, const char **name);
const char *pasta_live_error(int code);
pasta_live_counts pasta_live_stats(void);
/* Raw copies of returned buffers, for fixtures: at most `limit` bytes are kept. */
void pasta_live_record(size_t limit);
const uint8_t *pasta_live_recorded(size_t *length);

#endif
