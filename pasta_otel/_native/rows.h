/* Fixed-size rows, the ring of blocks that hold them, and the interned names. No Python here. */
#ifndef PASTA_ROWS_H
#define PASTA_ROWS_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* One activity, one cache line. pasta_otel/gpu/cupti/rows.py describes the same layout to numpy. */
typedef struct {
  uint64_t start;       /* ns, CUPTI's clock */
  uint64_t end;         /* ns, CUPTI's clock */
  uint64_t value;       /* bytes (memcpy, memset) or external id (external correlation) */
  uint64_t node;        /* graph node id, 0 outside graphs */
  uint32_t correlation; /* joins launch call, external id and device work */
  uint32_t name;        /* interned name id (GPU kernels), 0 = none */
  uint32_t device;
  uint32_t context;
  uint32_t stream;
  uint32_t graph;
  uint32_t thread; /* CUPTI's thread id of an API call */
  uint8_t kind;    /* CUpti_ActivityKind */
  uint8_t attachment; /* of CUPTI's to the process, modulo 256: correlation ids count anew in each */
  uint16_t detail; /* callback id, copy kind, synchronisation type, overhead kind or external kind */
} pasta_row;

typedef struct pasta_block {
  struct pasta_block *next;
  uint32_t used;
  pasta_row rows[];
} pasta_block;

typedef struct {
  const void *pointer; /* as CUPTI gave it */
  uint32_t id;
} pasta_name_slot;

typedef struct {
  pasta_name_slot *by_pointer;
  uint32_t *by_text; /* open addressing: name id or 0 */
  char **text;       /* text[id], id 0 is "" */
  uint32_t count, capacity, slots;
  uint64_t overflow; /* names that found no place */
} pasta_names;

typedef struct {
  uint64_t records;     /* decoded into rows */
  uint64_t ring_full;   /* decoded, but no block was free */
  uint64_t undecodable; /* bytes left in a buffer after a record of unknown kind or a torn one */
  uint64_t incomplete;  /* records without timestamps */
  uint64_t buffers;     /* buffers decoded */
  uint64_t decode_ns;   /* CPU-clock time spent in decoding */
  uint64_t graphs;      /* records that speak of a CUDA graph: nodes, launches, instantiations, captures */
} pasta_counts;

typedef struct {
  pthread_mutex_t lock;
  uint32_t block_rows, max_blocks, allocated;
  pasta_block *free_list, *current, *ready_head, *ready_tail;
  pasta_names names;
  pasta_counts counts;
  uint8_t attachment; /* of the rows that are decoded now */
} pasta_ring;

int pasta_ring_init(pasta_ring *ring, uint32_t block_rows, uint32_t max_blocks);
void pasta_ring_destroy(pasta_ring *ring);
/* With the lock held: a place for one row, or NULL when the ring is full (counted). */
pasta_row *pasta_ring_slot(pasta_ring *ring);
/* Take every block that holds rows, the partly filled one too; the caller owns the list. */
pasta_block *pasta_ring_take(pasta_ring *ring);
/* What is decoded from now on was recorded in the next attachment. */
void pasta_ring_next_attachment(pasta_ring *ring);
void pasta_ring_give_back(pasta_ring *ring, pasta_block *block);

/* With the ring's lock held: the id of a name, 0 when it finds no place. */
uint32_t pasta_intern(pasta_names *names, const void *pointer, const char *text, size_t length);
uint32_t pasta_intern_live(pasta_names *names, const char *pointer);

#endif
