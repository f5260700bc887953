/* The Python side of the capture extension: a Ring of rows, Blocks that numpy views, and the running process's CUPTI. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "decode.h"
#include "live.h"

typedef struct {
  PyObject_HEAD
  pasta_ring ring;
  int ready;
} RingObject;

typedef struct {
  PyObject_HEAD
  RingObject *owner;
  pasta_block *block;
} BlockObject;

typedef struct {
  PyTypeObject *ring_type, *block_type;
} module_state;

static struct PyModuleDef module_definition;

/* ---- Block: read-only bytes of whole rows, given back to the ring when the last view of them has gone ---- */

static int block_getbuffer(PyObject *self, Py_buffer *view, int flags) {
  BlockObject *block = (BlockObject *)self;
  return PyBuffer_FillInfo(view, self, block->block->rows, (Py_ssize_t)(block->block->used * sizeof(pasta_row)), 1, flags);
}

static void block_dealloc(PyObject *self) {
  BlockObject *block = (BlockObject *)self;
  PyTypeObject *type = Py_TYPE(self);
  if (block->block) pasta_ring_give_back(&block->owner->ring, block->block);
  Py_XDECREF((PyObject *)block->owner);
  PyObject_Free(self);
  Py_DECREF((PyObject *)type);
}

static Py_ssize_t block_length(PyObject *self) { return (Py_ssize_t)((BlockObject *)self)->block->used; }

static PyType_Slot block_slots[] = {
    {Py_tp_doc, "Rows of one block, as a read-only buffer of 64-byte rows; numpy views it without copying."},
    {Py_tp_dealloc, block_dealloc},
    {Py_bf_getbuffer, block_getbuffer},
    {Py_sq_length, block_length},
    {0, NULL},
};

static PyType_Spec block_spec = {
    .name = "pasta_otel._native._cupti.Block",
    .basicsize = sizeof(BlockObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = block_slots,
};

/* ---- Ring ---- */

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"block_rows", "max_blocks", NULL};
  unsigned int block_rows = 8192, max_blocks = 128;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|II", names, &block_rows, &max_blocks)) return NULL;
  if (block_rows == 0 || max_blocks == 0 || block_rows > (1u << 24)) {
    PyErr_SetString(PyExc_ValueError, "block_rows and max_blocks must be positive, block_rows at most 2**24");
    return NULL;
  }
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  RingObject *self = (RingObject *)allocate(type, 0);
  if (!self) return NULL;
  if (pasta_ring_init(&self->ring, block_rows, max_blocks) != 0) {
    Py_DECREF((PyObject *)self);
    return PyErr_NoMemory();
  }
  self->ready = 1;
  return (PyObject *)self;
}

static void ring_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  if (((RingObject *)self)->ready) pasta_ring_destroy(&((RingObject *)self)->ring);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF((PyObject *)type);
}

static void give_back_list(pasta_ring *ring, pasta_block *list) {
  while (list) {
    pasta_block *next = list->next;
    pasta_ring_give_back(ring, list);
    list = next;
  }
}

static PyObject *ring_take(PyObject *self, PyObject *unused) {
  (void)unused;
  RingObject *ring = (RingObject *)self;
  module_state *state = PyType_GetModuleState(Py_TYPE(self));
  PyObject *result = PyList_New(0);
  if (!result || !state) return NULL;
  pasta_block *list;
  Py_BEGIN_ALLOW_THREADS
  list = pasta_ring_take(&ring->ring);
  Py_END_ALLOW_THREADS
  while (list) {
    pasta_block *next = list->next;
    BlockObject *block = PyObject_New(BlockObject, state->block_type);
    if (!block) break;
    Py_INCREF(self);
    block->owner = ring;
    block->block = list;
    list = next;
    int failed = PyList_Append(result, (PyObject *)block);
    Py_DECREF((PyObject *)block);
    if (failed) break;
  }
  if (list) {
    give_back_list(&ring->ring, list);
    Py_DECREF(result);
    return NULL;
  }
  return result;
}

static int by_pointer(const void *a, const void *b) {
  uint64_t x = ((const pasta_recorded_name *)a)->pointer, y = ((const pasta_recorded_name *)b)->pointer;
  return x < y ? -1 : x > y;
}

static int intern_entry(pasta_ring *ring, PyObject *key, PyObject *value, pasta_recorded_name *entry) {
  char *text;
  Py_ssize_t length;
  entry->pointer = PyLong_AsUnsignedLongLong(key);
  if (PyErr_Occurred() || PyBytes_AsStringAndSize(value, &text, &length) < 0) return -1;
  pthread_mutex_lock(&ring->lock);
  entry->id = pasta_intern(&ring->names, NULL, text, strnlen(text, (size_t)length));
  pthread_mutex_unlock(&ring->lock);
  return 0;
}

static int intern_recorded(pasta_ring *ring, PyObject *names, pasta_recorded_names *out) {
  Py_ssize_t position = 0, count = PyDict_Size(names);
  PyObject *key, *value;
  pasta_recorded_name *entries = calloc((size_t)count + 1, sizeof *entries);
  out->entries = entries;
  out->count = 0;
  if (!entries) {
    PyErr_NoMemory();
    return -1;
  }
  while (PyDict_Next(names, &position, &key, &value))
    if (intern_entry(ring, key, value, &entries[out->count++]) != 0) return -1;
  qsort(entries, out->count, sizeof *entries, by_pointer);
  return 0;
}

static PyObject *ring_decode(PyObject *self, PyObject *args) {
  RingObject *ring = (RingObject *)self;
  Py_buffer data;
  unsigned int version;
  PyObject *names;
  pasta_recorded_names recorded = {0};
  if (!PyArg_ParseTuple(args, "y*IO!", &data, &version, &PyDict_Type, &names)) return NULL;
  const pasta_layout *layout = pasta_layout_for(version);
  PyObject *result = NULL;
  if (!layout) {
    PyErr_Format(PyExc_ValueError, "CUPTI API version %u has a record layout that is not known; known are %s", version,
                 pasta_layouts_known());
  } else if (intern_recorded(&ring->ring, names, &recorded) == 0) {
    Py_BEGIN_ALLOW_THREADS
    pasta_decode(&ring->ring, layout, data.buf, (size_t)data.len, &recorded);
    Py_END_ALLOW_THREADS
    result = Py_None;
    Py_INCREF(result);
  }
  free((void *)recorded.entries);
  PyBuffer_Release(&data);
  return result;
}

static PyObject *ring_names(PyObject *self, PyObject *arg) {
  pasta_ring *ring = &((RingObject *)self)->ring;
  unsigned long first = PyLong_AsUnsignedLong(arg);
  if (PyErr_Occurred()) return NULL;
  PyObject *result = PyList_New(0);
  if (!result) return NULL;
  for (uint32_t id = (uint32_t)first;; id++) {
    pthread_mutex_lock(&ring->lock);
    const char *text = id < ring->names.count ? ring->names.text[id] : NULL; /* texts are never freed or moved */
    pthread_mutex_unlock(&ring->lock);
    if (!text) return result;
    PyObject *name = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    int failed = !name || PyList_Append(result, name);
    Py_XDECREF(name);
    if (failed) break;
  }
  Py_DECREF(result);
  return NULL;
}

static PyObject *ring_name_pointers(PyObject *self, PyObject *unused) {
  (void)unused;
  pasta_ring *ring = &((RingObject *)self)->ring;
  PyObject *result = PyDict_New();
  pthread_mutex_lock(&ring->lock);
  for (uint32_t i = 0; result && i < ring->names.slots; i++) {
    pasta_name_slot slot = ring->names.by_pointer[i];
    if (!slot.pointer) continue;
    PyObject *key = PyLong_FromVoidPtr((void *)slot.pointer), *value = PyBytes_FromString(ring->names.text[slot.id]);
    if (!key || !value || PyDict_SetItem(result, key, value) != 0) Py_CLEAR(result);
    Py_XDECREF(key);
    Py_XDECREF(value);
  }
  pthread_mutex_unlock(&ring->lock);
  return result;
}

static PyObject *ring_counts(PyObject *self, PyObject *unused) {
  (void)unused;
  pasta_ring *ring = &((RingObject *)self)->ring;
  pthread_mutex_lock(&ring->lock);
  pasta_counts c = ring->counts;
  unsigned long names = ring->names.count - 1, lost = ring->names.overflow;
  unsigned long blocks = ring->allocated;
  pthread_mutex_unlock(&ring->lock);
  return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:k,s:k,s:k}", "records", c.records, "ring_full", c.ring_full,
                       "undecodable_bytes", c.undecodable, "incomplete", c.incomplete, "buffers", c.buffers, "decode_ns",
                       c.decode_ns, "graphs", c.graphs, "names", names, "names_lost", lost, "blocks", blocks);
}

static PyMethodDef ring_methods[] = {
    {"take", ring_take, METH_NOARGS, "Return the blocks filled so far, oldest first."},
    {"decode", ring_decode, METH_VARARGS, "decode(data, api_version, names): decode recorded bytes; names: {pointer: bytes}."},
    {"names", ring_names, METH_O, "names(first): the interned names from id `first` on."},
    {"name_pointers", ring_name_pointers, METH_NOARGS, "Return {pointer: name} of live names, for recordings."},
    {"counts", ring_counts, METH_NOARGS, "Return what was decoded, dropped and refused so far."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_doc, "Ring(block_rows=8192, max_blocks=128): fixed-size rows of GPU activity."},
    {Py_tp_new, ring_new},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, ring_methods},
    {0, NULL},
};

static PyType_Spec ring_spec = {
    .name = "pasta_otel._native._cupti.Ring",
    .basicsize = sizeof(RingObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = ring_slots,
};

/* ---- the running process's CUPTI ---- */

static PyObject *checked(int code) {
  if (code == 0) Py_RETURN_NONE;
  PyErr_Format(PyExc_OSError, "CUPTI error %d: %s", code, pasta_live_error(code));
  return NULL;
}

static int loaded(void) {
  if (pasta_live_version()) return 1;
  PyErr_SetString(PyExc_RuntimeError, "no CUPTI library is loaded");
  return 0;
}

static PyObject *native_load(PyObject *module, PyObject *args) {
  (void)module;
  const char *path;
  char message[1024] = "";
  int failed;
  if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  failed = pasta_live_load(path, message, sizeof message);
  Py_END_ALLOW_THREADS
  if (!failed) return PyLong_FromUnsignedLong(pasta_live_version());
  PyErr_SetString(PyExc_OSError, message);
  return NULL;
}

static PyObject *native_attach(PyObject *module, PyObject *args) {
  module_state *state = PyModule_GetState(module);
  PyObject *ring;
  unsigned long long bytes;
  unsigned int buffers;
  char message[256] = "";
  if (!PyArg_ParseTuple(args, "O!KI", state->ring_type, &ring, &bytes, &buffers)) return NULL;
  if (pasta_live_attach(&((RingObject *)ring)->ring, (size_t)bytes, buffers, message, sizeof message) != 0) {
    PyErr_SetString(PyExc_RuntimeError, message);
    return NULL;
  }
  Py_INCREF(ring); /* CUPTI's threads may write to it as long as the process lives */
  Py_RETURN_NONE;
}

static PyObject *native_register(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  int code;
  if (!loaded()) return NULL;
  Py_BEGIN_ALLOW_THREADS
  code = pasta_live_register();
  Py_END_ALLOW_THREADS
  return checked(code);
}

static PyObject *native_enable(PyObject *module, PyObject *args) {
  (void)module;
  unsigned int kind;
  int on, code;
  if (!PyArg_ParseTuple(args, "Ip", &kind, &on) || !loaded()) return NULL;
  Py_BEGIN_ALLOW_THREADS
  code = pasta_live_enable(kind, on);
  Py_END_ALLOW_THREADS
  return checked(code);
}

/* All in one: each time that the interpreter is given away, a busy program may keep it for five milliseconds. */
static PyObject *native_enable_calls(PyObject *module, PyObject *args) {
  (void)module;
  int driver, on, code = 0;
  uint32_t ids[64];
  PyObject *given;
  if (!PyArg_ParseTuple(args, "pO!p", &driver, &PyTuple_Type, &given, &on) || !loaded()) return NULL;
  Py_ssize_t count = PyTuple_Size(given);
  if (count > (Py_ssize_t)(sizeof ids / sizeof *ids)) {
    PyErr_SetString(PyExc_ValueError, "too many callback ids");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < count; i++) ids[i] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(given, i));
  if (PyErr_Occurred()) return NULL;
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; i < count && code == 0; i++) code = pasta_live_enable_call(driver, ids[i], on);
  Py_END_ALLOW_THREADS
  return checked(code);
}

static PyObject *native_flush(PyObject *module, PyObject *args) {
  (void)module;
  unsigned int flag;
  int code;
  if (!PyArg_ParseTuple(args, "I", &flag) || !loaded()) return NULL;
  Py_BEGIN_ALLOW_THREADS
  code = pasta_live_flush(flag);
  Py_END_ALLOW_THREADS
  return checked(code);
}

/* Entering and leaving are on the request's path: no GIL release, and CUPTI's refusals are counted, not raised. */
static PyObject *native_enter(PyObject *module, PyObject *arg) {
  (void)module;
  unsigned long long id = PyLong_AsUnsignedLongLong(arg);
  if (PyErr_Occurred()) return NULL;
  pasta_live_enter(id);
  Py_RETURN_NONE;
}

static PyObject *native_leave(PyObject *module, PyObject *arg) {
  (void)module;
  unsigned long long id = PyLong_AsUnsignedLongLong(arg);
  if (PyErr_Occurred()) return NULL;
  pasta_live_leave(id);
  Py_RETURN_NONE;
}

static PyObject *native_replace(PyObject *module, PyObject *arg) {
  (void)module;
  unsigned long long id = PyLong_AsUnsignedLongLong(arg);
  if (PyErr_Occurred()) return NULL;
  pasta_live_replace(id);
  Py_RETURN_NONE;
}

static PyObject *native_depth(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyLong_FromUnsignedLong(pasta_live_depth());
}

static PyObject *native_window(PyObject *module, PyObject *arg) {
  (void)module;
  int open = PyObject_IsTrue(arg);
  if (open < 0 || !loaded()) return NULL;
  pasta_live_window(open);
  Py_RETURN_NONE;
}

static PyObject *native_edges(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  uint32_t most = 4096;
  pasta_edge *edges = malloc(most * sizeof *edges);
  PyObject *result = PyList_New(0);
  uint32_t count = edges ? pasta_live_edges(edges, most) : 0;
  for (uint32_t i = 0; result && i < count; i++) {
    PyObject *edge = Py_BuildValue("(IKK)", edges[i].thread, edges[i].id, edges[i].until);
    if (!edge || PyList_Append(result, edge) != 0) Py_CLEAR(result);
    Py_XDECREF(edge);
  }
  free(edges);
  return result;
}

static PyObject *native_mute_calls(PyObject *module, PyObject *arg) {
  (void)module;
  int code, driver = PyObject_IsTrue(arg);
  if (driver < 0 || !loaded()) return NULL;
  Py_BEGIN_ALLOW_THREADS
  code = pasta_live_mute_calls(driver);
  Py_END_ALLOW_THREADS
  return checked(code);
}

static PyObject *native_timestamp(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  uint64_t now = 0;
  if (!loaded()) return NULL;
  int code = pasta_live_timestamp(&now);
  return code == 0 ? PyLong_FromUnsignedLongLong(now) : checked(code);
}

static PyObject *native_detach(PyObject *module, PyObject *arg) {
  (void)module;
  unsigned long timeout = PyLong_AsUnsignedLong(arg);
  int code;
  if (PyErr_Occurred() || !loaded()) return NULL;
  Py_BEGIN_ALLOW_THREADS
  code = pasta_live_detach((unsigned)timeout);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(code);
}

static PyObject *native_probe(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  char who[128] = "";
  int code;
  if (!loaded()) return NULL;
  Py_BEGIN_ALLOW_THREADS
  code = pasta_live_probe(who, sizeof who);
  Py_END_ALLOW_THREADS
  return Py_BuildValue("(iss)", code, who, code ? pasta_live_error(code) : "");
}

static PyObject *native_forget(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  pasta_live_forget_buffers();
  Py_RETURN_NONE;
}

static PyObject *native_counts(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  pasta_live_counts c = pasta_live_stats();
  return Py_BuildValue("{s:K,s:K,s:K,s:K,s:I,s:I,s:K,s:K,s:K}", "dropped", c.dropped, "buffers_refused", c.buffers_refused,
                       "buffers_lost", c.buffers_lost, "foreign_buffers", c.foreign_buffers, "buffers_out", c.buffers_out,
                       "buffers_allocated", c.buffers_allocated, "detached", c.detached, "push_errors", c.push_errors,
                       "walk_mismatches", c.walk_mismatches);
}

static PyObject *native_record(PyObject *module, PyObject *arg) {
  (void)module;
  unsigned long limit = PyLong_AsUnsignedLong(arg);
  if (PyErr_Occurred()) return NULL;
  pasta_live_record(limit);
  Py_RETURN_NONE;
}

static PyObject *native_recorded(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  size_t length;
  const uint8_t *bytes = pasta_live_recorded(&length);
  return PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)length);
}

static PyObject *native_struct_size(PyObject *module, PyObject *arg) {
  (void)module;
  size_t size = 0;
  unsigned long kind = PyLong_AsUnsignedLong(arg);
  if (PyErr_Occurred() || !loaded()) return NULL;
  if (pasta_live_struct_size((uint32_t)kind, &size) != 0) Py_RETURN_NONE;
  return PyLong_FromSize_t(size);
}

static PyObject *native_graph_node_id(PyObject *module, PyObject *arg) {
  (void)module;
  uint64_t id = 0;
  void *node = PyLong_AsVoidPtr(arg);
  if (PyErr_Occurred() || !loaded()) return NULL;
  int code = pasta_live_graph_node_id(node, &id);
  return code == 0 ? PyLong_FromUnsignedLongLong(id) : checked(code);
}

static PyObject *native_call_name(PyObject *module, PyObject *args) {
  (void)module;
  int driver;
  unsigned int id;
  const char *name = NULL;
  if (!PyArg_ParseTuple(args, "pI", &driver, &id) || !loaded()) return NULL;
  if (pasta_live_call_name(driver, id, &name) != 0 || !name) Py_RETURN_NONE;
  return PyUnicode_FromString(name);
}

static PyObject *native_layout(PyObject *module, PyObject *arg) {
  (void)module;
  unsigned long version = PyLong_AsUnsignedLong(arg);
  if (PyErr_Occurred()) return NULL;
  const pasta_layout *layout = pasta_layout_for((uint32_t)version);
  if (!layout) Py_RETURN_NONE;
  PyObject *sizes = PyDict_New();
  for (unsigned kind = 0; sizes && kind < PASTA_KIND_LIMIT; kind++) {
    if (!layout->size[kind]) continue;
    PyObject *key = PyLong_FromUnsignedLong(kind), *value = PyLong_FromUnsignedLong(layout->size[kind]);
    if (!key || !value || PyDict_SetItem(sizes, key, value) != 0) Py_CLEAR(sizes);
    Py_XDECREF(key);
    Py_XDECREF(value);
  }
  return sizes;
}

static PyMethodDef module_methods[] = {
    {"load", native_load, METH_VARARGS, "load(path) -> CUPTI API version; OSError says why not."},
    {"attach", native_attach, METH_VARARGS, "attach(ring, buffer_bytes, max_buffers): decode into this ring."},
    {"register", native_register, METH_NOARGS, "Register our buffer callbacks with CUPTI."},
    {"enable", native_enable, METH_VARARGS, "enable(kind, on)."},
    {"enable_calls", native_enable_calls, METH_VARARGS, "enable_calls(driver, callback_ids, on): these API calls only."},
    {"flush", native_flush, METH_VARARGS, "flush(flag): 0 completed records, 1 forced."},
    {"enter", native_enter, METH_O, "enter(id): what this thread launches from here on belongs to id."},
    {"leave", native_leave, METH_O, "leave(id): end that region, and those inside it that ended unseen."},
    {"replace", native_replace, METH_O, "replace(id): leave every region of this thread, then enter one."},
    {"depth", native_depth, METH_NOARGS, "depth() -> regions this thread is in."},
    {"window", native_window, METH_O, "window(open): give regions to CUPTI from now on, or no longer."},
    {"edges", native_edges, METH_NOARGS, "edges() -> [(thread, id, until)]: what threads were in as the window began."},
    {"mute_calls", native_mute_calls, METH_O, "mute_calls(driver): enable that API's kind with every call off."},
    {"timestamp", native_timestamp, METH_NOARGS, "CUPTI's clock, ns."},
    {"detach", native_detach, METH_O, "detach(timeout_ms) -> 0 done, 1 no CUDA call came, else CUPTI's error."},
    {"probe", native_probe, METH_NOARGS, "probe() -> (code, who, text): 0 when nobody else subscribes."},
    {"forget_buffers", native_forget, METH_NOARGS, "Count buffers that another client holds as lost."},
    {"counts", native_counts, METH_NOARGS, "Return buffer and drop counts."},
    {"record", native_record, METH_O, "record(limit): keep raw copies of buffers, at most limit bytes; 0 stops."},
    {"recorded", native_recorded, METH_NOARGS, "Return the raw copies: (u64 length, bytes)*."},
    {"struct_size", native_struct_size, METH_O, "struct_size(kind): as CUPTI tells it, or None."},
    {"graph_node_id", native_graph_node_id, METH_O, "graph_node_id(CUgraphNode) -> CUPTI's node id."},
    {"call_name", native_call_name, METH_VARARGS, "call_name(driver, callback_id) -> name or None."},
    {"layout", native_layout, METH_O, "layout(api_version) -> {kind: record bytes}, or None when unknown."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  state->block_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &block_spec, NULL);
  state->ring_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ring_spec, NULL);
  if (!state->block_type || !state->ring_type) return -1;
  if (PyModule_AddType(module, state->block_type) || PyModule_AddType(module, state->ring_type)) return -1;
  return PyModule_AddIntConstant(module, "ROW_BYTES", sizeof(pasta_row));
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  module_state *state = PyModule_GetState(module);
  Py_VISIT(state->ring_type);
  Py_VISIT(state->block_type);
  return 0;
}

static int module_clear(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  Py_CLEAR(state->ring_type);
  Py_CLEAR(state->block_type);
  return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_cupti",
    .m_doc = "CUPTI activity capture: decoding in C on CUPTI's threads, rows for numpy.",
    .m_size = sizeof(module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__cupti(void) { return PyModuleDef_Init(&module_definition); }
