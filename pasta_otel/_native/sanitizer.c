/* The native part of memory analysis for Python: what calls.h, patches.h and notes.h do. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "notes.h"
#include "patches.h"

static char driver_file[4096];

static PyObject *python;            /* is called with (id, address of the data) */
static unsigned long long main_thread;
static __thread int depth;       /* of calls into the analysis, one inside the other */
static __thread PyObject *later; /* an exception for the program, from within one of its calls into the driver */

static int raise_it(void *exception) {
  PyErr_SetObject((PyObject *)Py_TYPE((PyObject *)exception), exception);
  Py_DECREF((PyObject *)exception);
  return -1;
}

/* Keep the exception that is set: a driver cannot pass it on. */
static void keep(void) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value) {
    Py_XDECREF(later);
    later = value;
  }
  Py_XDECREF(type), Py_XDECREF(trace);
}

/* Raise what is kept once the program runs Python again. */
static void deliver(void) {
  if (!later) return;
  if (PyThread_get_thread_ident() == main_thread) {
    if (Py_AddPendingCall(raise_it, later)) return; /* the queue is full: the next call tries again */
  } else {
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), (PyObject *)Py_TYPE(later));
    Py_DECREF(later);
  }
  later = NULL;
}

static void call_python(void *user, int domain, uint32_t id, const void *data) {
  (void)user, (void)domain;
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *type, *value, *trace; /* a destructor may call us while an exception is under way */
  PyErr_Fetch(&type, &value, &trace);
  int must_end = id == PASTA_LAUNCH_LEAVE || id == PASTA_GRAPH_LEAVE;
  for (int tries = 0; tries < 4 && Py_MakePendingCalls(); tries++) keep(); /* handlers of signals: now, not in our Python */
  for (int tries = 0; tries < 4; tries++) {
    depth++;
    PyObject *done = PyObject_CallFunction(python, "IK", id, (unsigned long long)(uintptr_t)data);
    depth--;
    Py_XDECREF(done);
    if (done) break;
    keep(); /* a handler's again, at the first line: what is called raises nothing itself */
    if (!must_end) break;
  }
  PyErr_Restore(type, value, trace);
  deliver();
  PyGILState_Release(state);
}

static PyObject *inside(PyObject *self, PyObject *work) {
  (void)self;
  depth++;
  PyObject *done = PyObject_CallNoArgs(work);
  depth--;
  return done;
}

static PyObject *how_deep(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  return PyLong_FromLong(depth);
}

static PyObject *raise_later(PyObject *self, PyObject *exception) {
  (void)self;
  if (!PyExceptionInstance_Check(exception)) return PyErr_SetString(PyExc_TypeError, "not an exception"), NULL;
  Py_XDECREF(later);
  Py_INCREF(exception);
  later = exception;
  Py_RETURN_NONE;
}

static PyObject *receiver(PyObject *self, PyObject *arguments) {
  unsigned long long allocate, clear, write, set_launch, set_function, stream_handle;
  PyObject *callable;
  const char *driver;
  pasta_receiver to = {0};
  (void)self;
  if (!PyArg_ParseTuple(arguments, "OKKKKKKKs", &callable, &main_thread, &allocate, &clear, &write, &set_launch,
                        &set_function, &stream_handle, &driver))
    return NULL;
  if (strlen(driver) >= sizeof driver_file)
    return PyErr_SetString(PyExc_ValueError, "the driver's path is too long"), NULL;
  strcpy(driver_file, driver);
  Py_INCREF(callable); /* for ever: a callback may be under way whenever we are told to stop */
  python = callable;
  to.driver = driver_file;
  to.python = call_python;
  to.allocate = (int (*)(void *, void **, size_t))(uintptr_t)allocate;
  to.clear = (int (*)(void *, int, size_t, void *))(uintptr_t)clear;
  to.write = (int (*)(void *, const void *, size_t, void *))(uintptr_t)write;
  to.set_launch = (int (*)(void *, void *, void *, void *))(uintptr_t)set_launch;
  to.set_function = (int (*)(void *, void *))(uintptr_t)set_function;
  to.stream_handle = (int (*)(void *, void *, void **))(uintptr_t)stream_handle;
  pasta_receive_for(&to);
  return PyLong_FromVoidPtr((void *)pasta_receive);
}

/* Read (instruction, optional, function). */
static int read_patch(PyObject *item, pasta_patch *one) {
  const char *function;
  if (!PyArg_ParseTuple(item, "ips", &one->instruction, &one->optional, &function)) return -1;
  one->function = strdup(function);
  return one->function ? 0 : (PyErr_NoMemory(), -1);
}

static int read_text(PyObject *item, char **one) {
  PyObject *bytes = PyUnicode_AsUTF8String(item);
  const char *text = bytes ? PyBytes_AsString(bytes) : NULL;
  *one = text ? strdup(text) : NULL;
  Py_XDECREF(bytes);
  return *one ? 0 : -1;
}

static PyObject *patch_with(PyObject *self, PyObject *arguments) {
  unsigned long long add, instructions, module;
  const char *file;
  PyObject *patches, *texts;
  pasta_patching how = {0};
  (void)self;
  if (!PyArg_ParseTuple(arguments, "KKKsOO", &add, &instructions, &module, &file, &patches, &texts)) return NULL;
  Py_ssize_t patch_count = PySequence_Size(patches), text_count = PySequence_Size(texts);
  if (patch_count < 0 || text_count < 0) return NULL;
  how.add = (int (*)(const char *, void *))(uintptr_t)add;
  how.instructions = (int (*)(int, void *, const char *))(uintptr_t)instructions;
  how.module = (int (*)(void *))(uintptr_t)module;
  how.file = strdup(file);
  how.patches = calloc((size_t)patch_count + 1, sizeof *how.patches);
  how.texts = calloc((size_t)text_count + 1, sizeof *how.texts);
  int bad = !how.file || !how.patches || !how.texts;
  for (Py_ssize_t at = 0; !bad && at < patch_count; at++) {
    PyObject *item = PySequence_GetItem(patches, at);
    bad = !item || read_patch(item, &how.patches[how.count++]);
    Py_XDECREF(item);
  }
  for (Py_ssize_t at = 0; !bad && at < text_count; at++) {
    PyObject *item = PySequence_GetItem(texts, at);
    bad = !item || read_text(item, &how.texts[how.text_count++]);
    Py_XDECREF(item);
  }
  if (bad) return PyErr_Occurred() ? NULL : PyErr_NoMemory(); /* what was read is lost: this happens once, or never */
  pasta_patch_with(&how);
  Py_RETURN_NONE;
}

static PyObject *stop(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  pasta_listen(0);
  Py_RETURN_NONE;
}

static PyObject *outside(int code) {
  if (!code) Py_RETURN_NONE;
  return PyErr_SetString(PyExc_RuntimeError, "not in a call that is being entered"), NULL;
}

/* Read (slab, turn, slab_bytes, offset, header). */
static int read_slot(PyObject *item, pasta_slot *slot) {
  Py_ssize_t slab_bytes, header_size;
  unsigned long long offset;
  const char *header;
  if (!PyTuple_Check(item)) return PyErr_SetString(PyExc_TypeError, "a slot is a tuple"), -1;
  if (!PyArg_ParseTuple(item, "IInKy#", &slot->slab, &slot->turn, &slab_bytes, &offset, &header, &header_size)) return -1;
  slot->slab_bytes = (size_t)slab_bytes, slot->offset = offset;
  slot->header = header, slot->header_size = (size_t)header_size;
  return 0;
}

static PyObject *give(PyObject *self, PyObject *arguments) {
  (void)self;
  pasta_slot slot;
  return read_slot(arguments, &slot) ? NULL : outside(pasta_give(&slot));
}

static PyObject *reserve(PyObject *self, PyObject *list) {
  (void)self;
  Py_ssize_t count = PySequence_Size(list);
  if (count < 0) return NULL;
  pasta_slot *slots = calloc((size_t)count + 1, sizeof *slots);
  if (!slots) return PyErr_NoMemory();
  int bad = 0;
  for (Py_ssize_t at = 0; !bad && at < count; at++) {
    PyObject *item = PySequence_GetItem(list, at);
    bad = !item || read_slot(item, &slots[at]);
    Py_XDECREF(item); /* the list has it, and the header is the caller's to keep */
  }
  PyObject *done = bad ? NULL : outside(pasta_reserve(slots, (size_t)count));
  free(slots);
  return done;
}

static PyObject *shape(const uint32_t *of) { return Py_BuildValue("(III)", of[0], of[1], of[2]); }

static PyObject *name_of(const char *name) {
  if (!name) name = "?";
  return PyUnicode_DecodeUTF8(name, (Py_ssize_t)strlen(name), "replace");
}

static PyObject *nodes(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  size_t count;
  const pasta_node *of = pasta_nodes(&count);
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t at = 0; list && at < count; at++) {
    const pasta_node *node = &of[at];
    PyObject *item = Py_BuildValue("(KNNNIiKi)", (unsigned long long)(uintptr_t)node->function, name_of(node->name),
                                   shape(node->grid), shape(node->block), node->count, node->code, node->slot,
                                   node->place);
    if (!item || PyList_SetItem(list, (Py_ssize_t)at, item)) Py_CLEAR(list);
  }
  return list;
}

static PyObject *slab(PyObject *self, PyObject *arguments) {
  unsigned int number, turn;
  (void)self;
  return PyArg_ParseTuple(arguments, "II", &number, &turn) ? PyLong_FromUnsignedLongLong(pasta_slab(number, turn)) : NULL;
}

static PyObject *idle(PyObject *self, PyObject *arguments) {
  unsigned long long stream, entered;
  (void)self;
  if (!PyArg_ParseTuple(arguments, "KK", &stream, &entered)) return NULL;
  return PyBool_FromLong(pasta_idle((const void *)(uintptr_t)stream, entered));
}

static PyObject *exchange_mode(PyObject *self, PyObject *mode) {
  (void)self;
  long of = PyLong_AsLong(mode);
  return PyErr_Occurred() ? NULL : PyLong_FromLong(of < 0 ? of : pasta_exchange_mode((int)of));
}

static PyObject *memory(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  size_t count;
  pasta_memory_event *taken = pasta_take_memory(&count);
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t at = 0; list && at < count; at++) {
    const pasta_memory_event *one = &taken[at];
    PyObject *item = Py_BuildValue("(KKK)", one->freed, one->address, one->size);
    if (!item || PyList_SetItem(list, (Py_ssize_t)at, item)) Py_CLEAR(list);
  }
  free(taken);
  return list;
}

static PyObject *notes(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  size_t count;
  pasta_note *taken = pasta_take_notes(&count);
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t at = 0; list && at < count; at++) {
    const pasta_note *one = &taken[at];
    PyObject *item = Py_BuildValue("(KKKKz)", one->kind, one->context, one->value, one->entered, one->call);
    if (!item || PyList_SetItem(list, (Py_ssize_t)at, item)) Py_CLEAR(list);
  }
  free(taken);
  return list;
}

static PyObject *noted(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  return PyBool_FromLong(pasta_noted());
}

static PyObject *lost(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  return PyLong_FromUnsignedLongLong(pasta_lost_notes());
}

static PyObject *unknown(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  return PyLong_FromUnsignedLongLong(pasta_unknown_launches());
}

static PyMethodDef methods[] = {
    {"receiver", receiver, METH_VARARGS, "Return the address of what to subscribe; it calls back about launches."},
    {"patch_with", patch_with, METH_VARARGS, "Patch modules, as they are loaded, with these device functions."},
    {"stop", stop, METH_NOARGS, "Do not call back any more."},
    {"give", give, METH_VARARGS, "Give the launch that is being entered a slot: slab, turn, slab_bytes, offset, header."},
    {"slab", slab, METH_VARARGS, "Return where a slab lies; 0 = no launch of this turn has begun: number, turn."},
    {"idle", idle, METH_VARARGS, "Tell whether no launch has begun in a stream since so many had in all: stream, count."},
    {"exchange_mode", exchange_mode, METH_O, "Set this thread's CUstreamCaptureMode; returns the former, -1 = unknown."},
    {"reserve", reserve, METH_O, "Give the graph that is being entered slots, each for one GPU kernel."},
    {"nodes", nodes, METH_NOARGS, "Return the GPU kernels of the graph that is being left."},
    {"inside", inside, METH_O, "Call something as a part of the analysis, which depth() counts."},
    {"depth", how_deep, METH_NOARGS, "Return how many calls into the analysis this thread is in, one inside the other."},
    {"raise_later", raise_later, METH_O, "Raise this in the program, once its call into the driver is over."},
    {"memory", memory, METH_NOARGS, "Return what was allocated and freed since the last call: (freed, address, size)."},
    {"notes", notes, METH_NOARGS, "Return what happened since the last call: (kind, context, value, entered, call)."},
    {"noted", noted, METH_NOARGS, "Tell whether there are notes."},
    {"lost", lost, METH_NOARGS, "Return how many events there was no room for."},
    {"unknown", unknown, METH_NOARGS, "Return how many launches began in calls that are not known."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_sanitizer",
    .m_doc = "The receiver of the Sanitizer API's callbacks: no Python under the driver's lock.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__sanitizer(void) { return PyModuleDef_Init(&definition); }
