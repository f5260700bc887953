#include "notes.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "patches.h"

enum { /* Sanitizer_CallbackIdResource */
  CONTEXT_DESTROY_STARTING = 4,
  STREAM_DESTROY_STARTING = 7,
  MODULE_LOADED = 9,
  DEVICE_MEMORY_ALLOC = 11,
  DEVICE_MEMORY_FREE = 12
};
enum { STREAM = 1, CONTEXT = 2 }; /* Sanitizer_CallackIdSync */
enum { MOST = 1 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* never held while anything else is waited for */
typedef struct {
  void *items;
  size_t used, room;
} list;
static list events, notes; /* of pasta_memory_event and pasta_note */
static uint64_t lost;
static atomic_int noted;

/* Return the place of one more element, or NULL and one more lost; under the lock. */
static void *one_more(list *of, size_t size) {
  if (of->used == of->room) {
    size_t more = of->room ? 2 * of->room : 256;
    void *larger = more <= MOST ? realloc(of->items, more * size) : NULL;
    if (!larger) return lost++, NULL;
    of->items = larger, of->room = more;
  }
  return (char *)of->items + size * of->used++;
}

/* Return all elements, and begin an empty list. */
static void *take(list *of, size_t *count) {
  pthread_mutex_lock(&lock);
  void *items = of->items;
  *count = of->used;
  *of = (list){0};
  pthread_mutex_unlock(&lock);
  return items;
}

static void note_memory(int freed, const void *data) {
  uint64_t place[2]; /* Sanitizer_ResourceMemoryData: address, size */
  memcpy(place, data, sizeof place);
  pthread_mutex_lock(&lock);
  pasta_memory_event *one = one_more(&events, sizeof *one);
  if (one) *one = (pasta_memory_event){freed, place[0], place[1]};
  pthread_mutex_unlock(&lock);
}

static void note(pasta_note new) {
  pthread_mutex_lock(&lock);
  pasta_note *last = notes.used ? (pasta_note *)notes.items + notes.used - 1 : NULL;
  int synchronized = new.kind == PASTA_STREAM_SYNCHRONIZED || new.kind == PASTA_CONTEXT_SYNCHRONIZED;
  int again = synchronized && last && last->kind == new.kind && last->context == new.context;
  again = again && last->value == new.value;
  pasta_note *one = again ? last : one_more(&notes, sizeof *one);
  if (one) *one = new;
  atomic_store(&noted, notes.used > 0);
  pthread_mutex_unlock(&lock);
}

void pasta_note_refusal(int kind, void *context, int value, const char *call) {
  note((pasta_note){(uint64_t)kind, (uintptr_t)context, (uint64_t)(int64_t)value, 0, call});
}

void pasta_resource(uint32_t id, const void *data) {
  if (id == DEVICE_MEMORY_ALLOC || id == DEVICE_MEMORY_FREE) {
    note_memory(id == DEVICE_MEMORY_FREE, data);
  } else if (id == MODULE_LOADED) {
    pasta_patch_module(data);
  } else if (id == STREAM_DESTROY_STARTING) {
    /* Sanitizer_ResourceStreamData: context, stream, handle; since 13.5 context, green context or NULL, stream, handle.
     * Of a green context's stream the CUstream is noted, which is nobody's handle.
     */
    void *const *of = data;
    note((pasta_note){PASTA_STREAM_GONE, (uintptr_t)of[0], (uintptr_t)(of[1] ? of[2] : of[3]), 0, NULL});
  } else if (id == CONTEXT_DESTROY_STARTING) {
    void *context = *(void *const *)data;
    pasta_patch_context_gone(context);
    note((pasta_note){PASTA_CONTEXT_GONE, (uintptr_t)context, 0, 0, NULL});
  }
}

void pasta_synchronized(uint32_t id, const void *data) {
  void *const *of = data; /* Sanitizer_SynchronizeData: context, stream, handle */
  if (id == STREAM)
    note((pasta_note){PASTA_STREAM_SYNCHRONIZED, (uintptr_t)of[0], (uintptr_t)of[2], pasta_entered(), NULL});
  else if (id == CONTEXT)
    note((pasta_note){PASTA_CONTEXT_SYNCHRONIZED, (uintptr_t)of[0], 0, pasta_entered(), NULL});
}

pasta_memory_event *pasta_take_memory(size_t *count) { return take(&events, count); }

pasta_note *pasta_take_notes(size_t *count) {
  atomic_store(&noted, 0); /* before: what comes meanwhile is noted again */
  return take(&notes, count);
}

int pasta_noted(void) { return atomic_load(&noted); }

uint64_t pasta_lost_notes(void) {
  pthread_mutex_lock(&lock);
  uint64_t now = lost;
  pthread_mutex_unlock(&lock);
  return now;
}
