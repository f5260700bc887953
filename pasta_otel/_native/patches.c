#include "patches.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "notes.h"

enum { MOST_CUBIN = 1 << 30, MOST_CONTEXTS = 64, PASTA_OUT_OF_MEMORY = 7 /* SANITIZER_ERROR_OUT_OF_MEMORY */ };

static pasta_patching how;
static pthread_mutex_t patching = PTHREAD_MUTEX_INITIALIZER; /* taken under the driver's lock, never around it */
static struct {
  void *context;
  int refused;
} contexts[MOST_CONTEXTS];

static void release(pasta_patching *old) {
  for (size_t at = 0; at < old->count; at++) free(old->patches[at].function);
  for (size_t at = 0; at < old->text_count; at++) free(old->texts[at]);
  free(old->patches), free(old->texts), free(old->file);
}

void pasta_patch_with(pasta_patching *new) {
  pthread_mutex_lock(&patching);
  release(&how);
  how = *new;
  memset(contexts, 0, sizeof contexts);
  pthread_mutex_unlock(&patching);
}

/* Tell whether the names after ".text." in the machine code's table of section names have a text that we look for. */
static int may_be_chosen(const pasta_module *of) {
  static const char prefix[] = "\0.text.";
  const size_t of_prefix = sizeof prefix - 1;
  if (!how.text_count || !of->cubin || of->size < 4 || of->size >= MOST_CUBIN) return 1;
  if (memcmp(of->cubin, "\177ELF", 4)) return 1;
  const char *at = of->cubin, *end = at + of->size;
  while ((at = memmem(at, (size_t)(end - at), prefix, of_prefix))) {
    const char *name = at + of_prefix, *stop = memchr(name, 0, (size_t)(end - name));
    if (!stop) break;
    for (size_t text = 0; text < how.text_count; text++)
      if (memmem(name, (size_t)(stop - name), how.texts[text], strlen(how.texts[text]))) return 1;
    at = stop; /* the next one may begin with this zero */
  }
  return 0;
}

/* Load the device functions into a context that has not got them; returns whether it can be patched. */
static int prepare(void *context) {
  size_t at = 0;
  while (at < MOST_CONTEXTS && contexts[at].context && contexts[at].context != context) at++;
  if (at == MOST_CONTEXTS) return pasta_note_refusal(PASTA_CONTEXT_REFUSED, context, PASTA_OUT_OF_MEMORY, "too many contexts"), 0;
  if (!contexts[at].context) {
    int code = how.add(how.file, context);
    contexts[at].context = context, contexts[at].refused = code != 0;
    if (code) pasta_note_refusal(PASTA_CONTEXT_REFUSED, context, code, "sanitizerAddPatchesFromFile");
  }
  return !contexts[at].refused;
}

static void patch(const pasta_module *of) {
  for (size_t at = 0; at < how.count; at++) {
    const pasta_patch *one = &how.patches[at];
    int code = how.instructions(one->instruction, of->module, one->function);
    if (code && one->optional) {
      pasta_note_refusal(PASTA_INSTRUCTION_UNKNOWN, of->context, one->instruction, NULL);
    } else if (code) {
      pasta_note_refusal(PASTA_MODULE_REFUSED, of->context, code, "sanitizerPatchInstructions");
      return;
    }
  }
  int code = how.module(of->module);
  if (code) pasta_note_refusal(PASTA_MODULE_REFUSED, of->context, code, "sanitizerPatchModule");
}

void pasta_patch_module(const pasta_module *module) {
  pthread_mutex_lock(&patching);
  if (how.add && prepare(module->context)) {
    if (may_be_chosen(module))
      patch(module);
    else
      pasta_note_refusal(PASTA_MODULE_LEFT, module->context, 0, NULL);
  }
  pthread_mutex_unlock(&patching);
}

void pasta_patch_context_gone(void *context) {
  pthread_mutex_lock(&patching);
  for (size_t at = 0; at < MOST_CONTEXTS; at++)
    if (contexts[at].context == context) {
      size_t last = at;
      while (last + 1 < MOST_CONTEXTS && contexts[last + 1].context) last++;
      contexts[at] = contexts[last];
      contexts[last].context = NULL;
      break;
    }
  pthread_mutex_unlock(&patching);
}
