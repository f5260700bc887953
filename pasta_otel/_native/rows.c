#include "rows.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_NAMES 256u
#define MAX_NAMES (1u << 20)

static uint64_t mix_pointer(const void *pointer) {
  uint64_t x = (uint64_t)(uintptr_t)pointer;
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  return x;
}

static uint64_t hash_text(const char *text, size_t length) {
  uint64_t h = 1469598103934665603ULL; /* FNV-1a */
  for (size_t i = 0; i < length; i++) h = (h ^ (unsigned char)text[i]) * 1099511628211ULL;
  return h ^ (h >> 29);
}

static int names_init(pasta_names *names) {
  names->capacity = FIRST_NAMES;
  names->slots = FIRST_NAMES * 4;
  names->by_pointer = calloc(names->slots, sizeof *names->by_pointer);
  names->by_text = calloc(names->slots, sizeof *names->by_text);
  names->text = calloc(names->capacity, sizeof *names->text);
  if (!names->by_pointer || !names->by_text || !names->text) return -1;
  names->text[0] = strdup("");
  names->count = 1;
  return names->text[0] ? 0 : -1;
}

static void names_destroy(pasta_names *names) {
  for (uint32_t i = 0; names->text && i < names->count; i++) free(names->text[i]);
  free(names->text);
  free(names->by_text);
  free(names->by_pointer);
  memset(names, 0, sizeof *names);
}

static void place_text(pasta_names *names, uint32_t id) {
  uint32_t mask = names->slots - 1;
  uint32_t at = (uint32_t)hash_text(names->text[id], strlen(names->text[id])) & mask;
  while (names->by_text[at]) at = (at + 1) & mask;
  names->by_text[at] = id;
}

/* Doubles the tables. The pointer table starts empty again: it is only a cache. */
static int names_grow(pasta_names *names) {
  if (names->capacity >= MAX_NAMES) return -1;
  uint32_t capacity = names->capacity * 2, slots = names->slots * 2;
  char **text = realloc(names->text, capacity * sizeof *text);
  if (!text) return -1;
  names->text = text;
  pasta_name_slot *by_pointer = calloc(slots, sizeof *by_pointer);
  uint32_t *by_text = calloc(slots, sizeof *by_text);
  if (!by_pointer || !by_text) {
    free(by_pointer);
    free(by_text);
    return -1;
  }
  free(names->by_pointer);
  free(names->by_text);
  names->by_pointer = by_pointer;
  names->by_text = by_text;
  names->capacity = capacity;
  names->slots = slots;
  for (uint32_t id = 1; id < names->count; id++) place_text(names, id);
  return 0;
}

static uint32_t intern_text(pasta_names *names, const char *text, size_t length) {
  uint32_t mask = names->slots - 1;
  uint32_t at = (uint32_t)hash_text(text, length) & mask;
  for (; names->by_text[at]; at = (at + 1) & mask) {
    const char *known = names->text[names->by_text[at]];
    if (strncmp(known, text, length) == 0 && known[length] == 0) return names->by_text[at];
  }
  if (names->count == names->capacity && names_grow(names) != 0) {
    names->overflow++;
    return 0;
  }
  char *copy = strndup(text, length);
  if (!copy) {
    names->overflow++;
    return 0;
  }
  uint32_t id = names->count++;
  names->text[id] = copy;
  place_text(names, id);
  return id;
}

uint32_t pasta_intern(pasta_names *names, const void *pointer, const char *text, size_t length) {
  (void)pointer;
  length = strnlen(text, length);
  return length ? intern_text(names, text, length) : 0;
}

/* CUPTI keeps one string per function, so the pointer is a cache key; a module unload may give the same address to
   another name, hence the comparison. */
uint32_t pasta_intern_live(pasta_names *names, const char *pointer) {
  if (!pointer || !*pointer) return 0;
  uint32_t mask = names->slots - 1, at = (uint32_t)mix_pointer(pointer) & mask;
  for (int probe = 0; probe < 8 && names->by_pointer[at].pointer; probe++, at = (at + 1) & mask) {
    pasta_name_slot *slot = &names->by_pointer[at];
    if (slot->pointer == pointer) {
      if (strcmp(names->text[slot->id], pointer) != 0) slot->id = intern_text(names, pointer, strlen(pointer));
      return slot->id;
    }
  }
  uint32_t id = intern_text(names, pointer, strlen(pointer));
  if (id) {
    at = (uint32_t)mix_pointer(pointer) & (names->slots - 1);
    for (int probe = 0; probe < 7 && names->by_pointer[at].pointer; probe++) at = (at + 1) & (names->slots - 1);
    names->by_pointer[at] = (pasta_name_slot){pointer, id};
  }
  return id;
}

int pasta_ring_init(pasta_ring *ring, uint32_t block_rows, uint32_t max_blocks) {
  memset(ring, 0, sizeof *ring);
  ring->block_rows = block_rows;
  ring->max_blocks = max_blocks;
  if (pthread_mutex_init(&ring->lock, NULL) != 0) return -1;
  return names_init(&ring->names);
}

static void free_blocks(pasta_block *block) {
  while (block) {
    pasta_block *next = block->next;
    free(block);
    block = next;
  }
}

void pasta_ring_destroy(pasta_ring *ring) {
  free_blocks(ring->free_list);
  free_blocks(ring->ready_head);
  free_blocks(ring->current);
  names_destroy(&ring->names);
  pthread_mutex_destroy(&ring->lock);
}

static pasta_block *fresh_block(pasta_ring *ring) {
  pasta_block *block = ring->free_list;
  if (block) {
    ring->free_list = block->next;
  } else if (ring->allocated < ring->max_blocks) {
    block = malloc(sizeof *block + (size_t)ring->block_rows * sizeof(pasta_row));
    if (block) ring->allocated++;
  }
  if (block) {
    block->next = NULL;
    block->used = 0;
  }
  return block;
}

static void queue_current(pasta_ring *ring) {
  pasta_block *block = ring->current;
  if (ring->ready_tail)
    ring->ready_tail->next = block;
  else
    ring->ready_head = block;
  ring->ready_tail = block;
  ring->current = NULL;
}

pasta_row *pasta_ring_slot(pasta_ring *ring) {
  if (ring->current && ring->current->used == ring->block_rows) queue_current(ring);
  if (!ring->current && !(ring->current = fresh_block(ring))) {
    ring->counts.ring_full++;
    return NULL;
  }
  return &ring->current->rows[ring->current->used++];
}

pasta_block *pasta_ring_take(pasta_ring *ring) {
  pthread_mutex_lock(&ring->lock);
  if (ring->current && ring->current->used) queue_current(ring);
  pasta_block *list = ring->ready_head;
  ring->ready_head = ring->ready_tail = NULL;
  pthread_mutex_unlock(&ring->lock);
  return list;
}

void pasta_ring_give_back(pasta_ring *ring, pasta_block *block) {
  pthread_mutex_lock(&ring->lock);
  block->next = ring->free_list;
  ring->free_list = block;
  pthread_mutex_unlock(&ring->lock);
}

void pasta_ring_next_attachment(pasta_ring *ring) {
  pthread_mutex_lock(&ring->lock);
  ring->attachment++;
  pthread_mutex_unlock(&ring->lock);
}
