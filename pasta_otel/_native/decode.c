#include "decode.h"

#include <string.h>
#include <time.h>

/* Sizes were read with sizeof from the headers of the PyPI packages nvidia-cuda-cupti(-cu12) 12.1 to 13.5. Records only
   ever grew at their end: the offsets below hold for all of these versions. Version 19, 25 and 27 were never published
   in a package; 27 lies between two equal layouts and is taken, 19 and 25 are refused. */
#define SIZES(kernel, memcpy_, memset_, sync_, overhead_, graph_)                                                     \
  {                                                                                                                   \
    [PASTA_MEMCPY] = memcpy_, [PASTA_MEMSET] = memset_, [PASTA_KERNEL] = kernel, [PASTA_DRIVER] = 40,                 \
    [PASTA_RUNTIME] = 40, [PASTA_CONCURRENT_KERNEL] = kernel, [PASTA_OVERHEAD] = overhead_, [PASTA_MEMCPY2] = 96,     \
    [PASTA_SYNCHRONIZATION] = sync_, [PASTA_EXTERNAL_CORRELATION] = 24, [PASTA_GRAPH_TRACE] = graph_                  \
  }

static const pasta_layout LAYOUTS[] = {
    {18, 18, "12.1", SIZES(208, 88, 88, 40, 40, 48)},
    {20, 20, "12.2", SIZES(208, 88, 88, 40, 40, 48)},
    {21, 21, "12.3", SIZES(208, 88, 88, 40, 48, 56)},
    {22, 24, "12.4-12.6", SIZES(208, 88, 88, 40, 56, 56)},
    {26, 28, "12.8-12.9", SIZES(208, 96, 88, 56, 56, 56)},
    {130000, 130099, "13.0", SIZES(216, 96, 88, 56, 56, 56)},
    {130100, 130299, "13.1-13.2", SIZES(224, 96, 88, 56, 56, 56)},
    {130300, 130399, "13.3", SIZES(232, 96, 88, 56, 56, 56)},
    {130400, 130599, "13.4-13.5", SIZES(248, 112, 104, 56, 56, 56)},
};

const pasta_layout *pasta_layout_for(uint32_t api_version) {
  for (size_t i = 0; i < sizeof LAYOUTS / sizeof *LAYOUTS; i++)
    if (api_version >= LAYOUTS[i].first && api_version <= LAYOUTS[i].last) return &LAYOUTS[i];
  return NULL;
}

const char *pasta_layouts_known(void) { return "CUDA 12.1-12.6, 12.8, 12.9 and 13.0-13.5"; }

static inline uint64_t u64(const uint8_t *at) {
  uint64_t v;
  memcpy(&v, at, sizeof v);
  return v;
}

static inline uint32_t u32(const uint8_t *at) {
  uint32_t v;
  memcpy(&v, at, sizeof v);
  return v;
}

static uint32_t recorded_name(const pasta_recorded_names *names, uint64_t pointer) {
  size_t low = 0, high = names->count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (names->entries[middle].pointer < pointer)
      low = middle + 1;
    else
      high = middle;
  }
  return low < names->count && names->entries[low].pointer == pointer ? names->entries[low].id : 0;
}

typedef struct {
  pasta_ring *ring;
  const pasta_recorded_names *names;
} decoder;

static void decode_kernel(decoder *d, const uint8_t *r, pasta_row *row) {
  row->start = u64(r + 16);
  row->end = u64(r + 24);
  row->device = u32(r + 40);
  row->context = u32(r + 44);
  row->stream = u32(r + 48);
  row->correlation = u32(r + 92);
  row->node = u64(r + 144);
  row->graph = u32(r + 156);
  d->ring->counts.graphs += row->graph != 0;
  uint64_t pointer = u64(r + 104);
  row->name = d->names ? recorded_name(d->names, pointer)
                       : pasta_intern_live(&d->ring->names, (const char *)(uintptr_t)pointer);
}

/* Offsets of memcpy and memset agree but for the detail byte. */
static void decode_copy(const uint8_t *r, pasta_row *row, int is_memset) {
  row->value = u64(r + 8);
  row->start = u64(r + 16);
  row->end = u64(r + 24);
  row->device = u32(r + 32);
  row->context = u32(r + 36);
  row->stream = u32(r + 40);
  row->correlation = u32(r + 44);
  row->node = u64(r + 64);
  row->graph = u32(r + 72);
  row->detail = is_memset ? 0 : r[4];
}

static void decode_peer_copy(const uint8_t *r, pasta_row *row) {
  row->value = u64(r + 8);
  row->start = u64(r + 16);
  row->end = u64(r + 24);
  row->device = u32(r + 32);
  row->context = u32(r + 36);
  row->stream = u32(r + 40);
  row->correlation = u32(r + 60);
  row->node = u64(r + 72);
  row->graph = u32(r + 80);
  row->detail = r[4];
}

/* Launch, instantiation, upload and capture of graphs (cupti_runtime_cbid.h, cupti_driver_cbid.h). */
static int speaks_of_graph(uint32_t kind, uint32_t callback_id) {
  static const uint16_t runtime[] = {310, 311, 312, 315, 316, 348, 349, 418, 436, 437, 443, 452, 453}, driver[] = {495, 496, 513, 514, 515, 539, 540, 578, 580, 581, 643, 656, 657, 720, 721};
  const uint16_t *ids = kind == PASTA_RUNTIME ? runtime : driver;
  size_t count = kind == PASTA_RUNTIME ? sizeof runtime / sizeof *runtime : sizeof driver / sizeof *driver;
  for (size_t i = 0; i < count; i++)
    if (ids[i] == callback_id) return 1;
  return 0;
}

static void decode_call(decoder *d, uint32_t kind, const uint8_t *r, pasta_row *row) {
  d->ring->counts.graphs += speaks_of_graph(kind, u32(r + 4));
  row->detail = (uint16_t)u32(r + 4);
  row->start = u64(r + 8);
  row->end = u64(r + 16);
  row->thread = u32(r + 28);
  row->correlation = u32(r + 32);
  row->value = u32(r + 36);
}

static void decode_sync(const uint8_t *r, pasta_row *row) {
  row->detail = (uint16_t)u32(r + 4);
  row->start = u64(r + 8);
  row->end = u64(r + 16);
  row->correlation = u32(r + 24);
  row->context = u32(r + 28);
  row->stream = u32(r + 32);
}

static void decode_overhead(const uint8_t *r, pasta_row *row, uint16_t size) {
  row->detail = (uint16_t)u32(r + 4);
  row->start = u64(r + 24);
  row->end = u64(r + 32);
  if (size >= 48) row->correlation = u32(r + 40);
}

static void decode_graph(const uint8_t *r, pasta_row *row) {
  row->correlation = u32(r + 4);
  row->start = u64(r + 8);
  row->end = u64(r + 16);
  row->device = u32(r + 24);
  row->graph = u32(r + 28);
  row->context = u32(r + 32);
  row->stream = u32(r + 36);
}

static void decode_record(decoder *d, const uint8_t *r, uint32_t kind, uint16_t size, pasta_row *row) {
  row->kind = (uint8_t)kind;
  row->attachment = d->ring->attachment;
  switch (kind) {
    case PASTA_KERNEL:
    case PASTA_CONCURRENT_KERNEL:
      decode_kernel(d, r, row);
      break;
    case PASTA_MEMCPY:
    case PASTA_MEMSET:
      decode_copy(r, row, kind == PASTA_MEMSET);
      break;
    case PASTA_MEMCPY2:
      decode_peer_copy(r, row);
      break;
    case PASTA_RUNTIME:
    case PASTA_DRIVER:
      decode_call(d, kind, r, row);
      break;
    case PASTA_SYNCHRONIZATION:
      decode_sync(r, row);
      break;
    case PASTA_OVERHEAD:
      decode_overhead(r, row, size);
      break;
    case PASTA_GRAPH_TRACE:
      decode_graph(r, row);
      break;
    default: /* external correlation */
      row->detail = (uint16_t)u32(r + 4);
      row->value = u64(r + 8);
      row->correlation = u32(r + 16);
      return;
  }
  if (!row->start || row->end < row->start) d->ring->counts.incomplete++;
}

static uint64_t thread_cpu_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void pasta_decode(pasta_ring *ring, const pasta_layout *layout, const uint8_t *buffer, size_t length,
                  const pasta_recorded_names *names) {
  decoder d = {ring, names};
  uint64_t began = thread_cpu_ns();
  size_t at = 0;
  pthread_mutex_lock(&ring->lock);
  while (length - at >= 4) {
    uint32_t kind = u32(buffer + at);
    uint16_t size = kind < PASTA_KIND_LIMIT ? layout->size[kind] : 0;
    if (!size || size > length - at) break;
    pasta_row *row = pasta_ring_slot(ring);
    if (row) {
      memset(row, 0, sizeof *row);
      decode_record(&d, buffer + at, kind, size, row);
      ring->counts.records++;
    }
    at += size;
  }
  ring->counts.undecodable += length - at;
  ring->counts.buffers++;
  ring->counts.decode_ns += thread_cpu_ns() - began;
  pthread_mutex_unlock(&ring->lock);
}
