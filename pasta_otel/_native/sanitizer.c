/* The first receiver of the Sanitizer's callbacks: it takes what must not wait for Python, and hands on the rest.
 *
 * An allocator that holds its lock while it calls the driver (PyTorch's does, for cudaMalloc and cudaFree) would wait for
 * Python's interpreter lock in a callback written in Python, while a thread that has that lock waits for the allocator's.
 * So allocations are put into a list here, which Python takes when it likes; resource events that nobody reads end here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*callback)(void *, int, uint32_t, const void *);

enum { RESOURCE = 3, MEMORY_ALLOC = 11, MEMORY_FREE = 12, MOST_EVENTS = 1 << 20 };

typedef struct {
  uint64_t freed, address, size;
} event;

static callback next_receiver;
static uint64_t wanted_resources; /* one bit for each callback id of the resource domain */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* never held while anything else is waited for */
static event *events;
static size_t used, room;
static uint64_t lost;

static void note(uint32_t id, const void *data) {
  event one = {id == MEMORY_FREE, 0, 0};
  memcpy(&one.address, data, sizeof one.address); /* Sanitizer_ResourceMemoryData: address, size */
  memcpy(&one.size, (const char *)data + sizeof one.address, sizeof one.size);
  pthread_mutex_lock(&lock);
  if (used == room && room < MOST_EVENTS) {
    size_t more = room ? 2 * room : 256;
    event *larger = realloc(events, more * sizeof *larger);
    if (larger) events = larger, room = more;
  }
  if (used < room)
    events[used++] = one;
  else
    lost++;
  pthread_mutex_unlock(&lock);
}

static void receive(void *user, int domain, uint32_t id, const void *data) {
  if (domain == RESOURCE) {
    if (id == MEMORY_ALLOC || id == MEMORY_FREE) {
      note(id, data);
      return;
    }
    if (id >= 64 || !(wanted_resources >> id & 1)) return;
  }
  next_receiver(user, domain, id, data);
}

static PyObject *before(PyObject *self, PyObject *arguments) {
  unsigned long long address, mask;
  (void)self;
  if (!PyArg_ParseTuple(arguments, "KK", &address, &mask)) return NULL;
  next_receiver = (callback)(uintptr_t)address;
  wanted_resources = mask;
  return PyLong_FromVoidPtr((void *)receive);
}

static PyObject *take(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  pthread_mutex_lock(&lock);
  event *taken = events;
  size_t count = used;
  events = NULL, used = room = 0;
  pthread_mutex_unlock(&lock);
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t at = 0; list && at < count; at++) {
    event *one = &taken[at];
    PyObject *item = Py_BuildValue("(KKK)", one->freed, one->address, one->size);
    if (!item || PyList_SetItem(list, (Py_ssize_t)at, item)) Py_CLEAR(list);
  }
  free(taken);
  return list;
}

static PyObject *count_lost(PyObject *self, PyObject *nothing) {
  (void)self, (void)nothing;
  pthread_mutex_lock(&lock);
  uint64_t now = lost;
  pthread_mutex_unlock(&lock);
  return PyLong_FromUnsignedLongLong(now);
}

static PyMethodDef methods[] = {
    {"before", before, METH_VARARGS, "Return the address of a receiver that hands on to another, given by its address."},
    {"take", take, METH_NOARGS, "Return what was allocated and freed since the last call: (freed, address, size)."},
    {"lost", count_lost, METH_NOARGS, "Return how many allocations there was no room for."},
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
    .m_doc = "Device memory as the Sanitizer API tells of it, without Python's interpreter lock.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__sanitizer(void) { return PyModuleDef_Init(&definition); }
