/* The receiver of the Sanitizer's callbacks. It has Python decide before a launch, and does under the driver's lock
 * what was decided: the driver holds that lock in its callbacks about launches, GPU kernels of a graph, modules and
 * streams, and cudaMalloc waits for it, with the lock of PyTorch's allocator held; a thread that has Python's
 * interpreter lock may wait for the allocator's. So Python is entered at the beginning and the end of the driver's
 * calls only, where no lock is held (found out on an H200, driver 580: there an allocation by another thread comes
 * through).
 */
#ifndef PASTA_CALLS_H
#define PASTA_CALLS_H

#include <stddef.h>
#include <stdint.h>

typedef void (*pasta_callback)(void *user, int domain, uint32_t id, const void *data);

enum { /* what Python is called with as id; the domain is the driver API's */
  PASTA_LAUNCH_ENTER = 1,
  PASTA_LAUNCH_LEAVE = 2,
  PASTA_GRAPH_ENTER = 3,
  PASTA_GRAPH_LEAVE = 4,
  PASTA_STREAM_GOES = 5, /* entering a destruction; of the data context and stream alone are valid */
  PASTA_CONTEXT_GOES = 6 /* the same, without data: which one stands in the parameters */
};

enum { PASTA_NOT_BEGUN = -1, PASTA_NO_MEMORY = -2, PASTA_SHARED = -3 };

typedef struct {    /* the data of these: one launch */
  void *context;
  void *stream;     /* the Sanitizer's handle of it */
  void *function;   /* a CUfunction or a CUkernel, or a graph's CUgraphExec */
  const char *name; /* may be NULL */
  uint32_t grid[3], block[3];
  int32_t code;     /* at the end: what came of the slot: SanitizerResult, or one of the above */
} pasta_call;

typedef struct {    /* all nodes of one GPU kernel in a launch of a graph */
  void *function;
  char *name;
  uint32_t grid[3], block[3]; /* the first one's */
  int32_t code;     /* what came of the slot: SanitizerResult, PASTA_NO_MEMORY or PASTA_SHARED */
  uint32_t count;
  uint64_t slot;    /* 0 = none */
  int listed;       /* among the functions that launches of graphs have */
  int32_t place;    /* which of those reserved, also where it could not be made ready; -1 = none */
} pasta_node;

enum { PASTA_MOST_SLABS = 1 << 16 };

typedef struct { /* a place in a row of slots (a slab), which is allocated and cleared when its first launch begins */
  uint32_t slab, turn; /* turn: of using the slab; it is cleared once for each */
  size_t slab_bytes;   /* 0 = there is none: the offset is an address */
  size_t offset;
  const void *header;  /* written to the place in the stream's order; must live until the stream has passed */
  size_t header_size;
} pasta_slot;

typedef struct {
  pasta_callback python;
  int (*allocate)(void *context, void **address, size_t size);               /* sanitizerAlloc */
  int (*clear)(void *address, int value, size_t size, void *stream);         /* sanitizerMemset */
  int (*write)(void *address, const void *from, size_t size, void *stream);  /* sanitizerMemcpyHostToDeviceAsync */
  int (*set_launch)(void *launch, void *function, void *stream, void *data); /* sanitizerSetLaunchCallbackData */
  int (*set_function)(void *function, void *data);                           /* sanitizerSetCallbackData */
  int (*stream_handle)(void *context, void *stream, void **handle);          /* sanitizerGetStreamHandle */
  const char *driver; /* file of the CUDA driver; must live on */
} pasta_receiver;

void pasta_receive_for(const pasta_receiver *receiver);
void pasta_receive(void *user, int domain, uint32_t id, const void *data);
void pasta_listen(int on);

/* In the thread of a call that is being entered: give the launch a slot, or a graph slots for one GPU kernel each. */
int pasta_give(const pasta_slot *slot);
int pasta_reserve(const pasta_slot *slots, size_t count);
/* In the thread of a graph's launch that is being left. */
const pasta_node *pasta_nodes(size_t *count);
/* Return where a slab lies; 0 = no launch of this turn has begun. */
uint64_t pasta_slab(uint32_t slab, uint32_t turn);
/* Return how many launches had begun, in all streams, when this thread entered its call of the driver (or now). */
uint64_t pasta_entered(void);
/* Tell whether no launch has begun in a stream since that many had begun in all. */
int pasta_idle(const void *stream, uint64_t entered);
/* Have this thread meet other threads' captures in another way (CUstreamCaptureMode); returns the former, -1 = unknown. */
int pasta_exchange_mode(int mode);
/* Launches that began in a call that we do not know: nobody was asked. */
uint64_t pasta_unknown_launches(void);

#endif
