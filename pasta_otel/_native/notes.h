/* What the Sanitizer tells of while the driver holds its lock: noted without Python, read by Python when it likes. */
#ifndef PASTA_NOTES_H
#define PASTA_NOTES_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint64_t freed, address, size;
} pasta_memory_event;

enum {
  PASTA_STREAM_SYNCHRONIZED = 1, /* value: the stream's handle */
  PASTA_CONTEXT_SYNCHRONIZED = 2,
  PASTA_CONTEXT_GONE = 3,
  PASTA_CONTEXT_REFUSED = 4, /* value: SanitizerResult */
  PASTA_MODULE_REFUSED = 5,  /* the same */
  PASTA_MODULE_LEFT = 6,     /* no GPU kernel in it can be a chosen one */
  PASTA_INSTRUCTION_UNKNOWN = 7, /* value: Sanitizer_InstructionId */
  PASTA_STREAM_GONE = 8 /* value: the stream's handle */
};

typedef struct {
  uint64_t kind, context, value;
  uint64_t entered; /* of a synchronisation: how many launches had begun in all streams when it was asked for */
  const char *call; /* what was refused; a constant, or NULL */
} pasta_note;

/* Handle a callback of the resource and of the synchronisation domain. */
void pasta_resource(uint32_t id, const void *data);
void pasta_synchronized(uint32_t id, const void *data);
void pasta_note_refusal(int kind, void *context, int value, const char *call);

/* Return what was noted since the last call, for the caller to free. */
pasta_memory_event *pasta_take_memory(size_t *count);
pasta_note *pasta_take_notes(size_t *count);
int pasta_noted(void); /* whether there are notes to take */
uint64_t pasta_lost_notes(void);

#endif
