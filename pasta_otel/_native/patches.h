/* Device functions go into a module's machine code while it is being loaded, in the driver's callback, without Python.
 * Later is too late: GPU kernels that were loaded or captured before gave wrong addresses or counted nothing (H200).
 */
#ifndef PASTA_PATCHES_H
#define PASTA_PATCHES_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
  int instruction; /* Sanitizer_InstructionId */
  int optional;    /* whether the library or the GPU may not know it */
  char *function;
} pasta_patch;

typedef struct {
  int (*add)(const char *file, void *context);                               /* sanitizerAddPatchesFromFile */
  int (*instructions)(int instruction, void *module, const char *function);  /* sanitizerPatchInstructions */
  int (*module)(void *module);                                               /* sanitizerPatchModule */
  char *file;
  pasta_patch *patches;
  size_t count;
  char **texts; /* a module is patched if a GPU kernel's name in it has one of these; none = all modules */
  size_t text_count;
} pasta_patching;

typedef struct { /* Sanitizer_ResourceModuleData */
  void *context, *module;
  size_t size;
  const char *cubin;
} pasta_module;

/* Take over how to patch; what it holds is ours then. */
void pasta_patch_with(pasta_patching *patching);
/* Patch a module, under the driver's lock; what comes of it is noted. */
void pasta_patch_module(const pasta_module *module);
void pasta_patch_context_gone(void *context);

#endif
