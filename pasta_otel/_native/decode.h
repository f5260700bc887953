/* From CUPTI's activity buffers to rows. No Python and no CUDA here: the same code runs on live and on recorded bytes. */
#ifndef PASTA_DECODE_H
#define PASTA_DECODE_H

#include "rows.h"

enum { /* CUpti_ActivityKind */
  PASTA_MEMCPY = 1,
  PASTA_MEMSET = 2,
  PASTA_KERNEL = 3,
  PASTA_DRIVER = 4,
  PASTA_RUNTIME = 5,
  PASTA_CONCURRENT_KERNEL = 10,
  PASTA_OVERHEAD = 17,
  PASTA_MEMCPY2 = 22,
  PASTA_SYNCHRONIZATION = 38,
  PASTA_EXTERNAL_CORRELATION = 39,
  PASTA_GRAPH_TRACE = 51,
  PASTA_KIND_LIMIT = 64
};

typedef struct {
  uint32_t first, last; /* CUPTI API versions, inclusive */
  const char *label;
  uint16_t size[PASTA_KIND_LIMIT]; /* bytes of a record by kind; 0 = a kind we cannot step over */
} pasta_layout;

/* The layout of a CUPTI API version (cuptiGetVersion), or NULL when it is unknown. */
const pasta_layout *pasta_layout_for(uint32_t api_version);
const char *pasta_layouts_known(void);

/* Names of a recorded buffer, sorted by pointer value. */
typedef struct {
  uint64_t pointer;
  uint32_t id;
} pasta_recorded_name;

typedef struct {
  const pasta_recorded_name *entries;
  size_t count;
} pasta_recorded_names;

/* Decode one buffer into the ring (takes its lock). names == NULL: name pointers are live and are followed. */
void pasta_decode(pasta_ring *ring, const pasta_layout *layout, const uint8_t *buffer, size_t length,
                  const pasta_recorded_names *names);

#endif
