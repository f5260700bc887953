// The part of SIGTERM that must not wait for the interpreter: a C call may hold the GIL for as long as it likes, and no
// Python handler and no Python thread runs meanwhile. This handler stands before Python's own, arms a kernel timer that
// sends SIGTERM again, wakes the thread that waits in wait(), and passes the signal on. At the second SIGTERM whose time
// is over the default action is put back and taken: no lock, no allocation, no thread needed.
//
// It calls async-signal-safe functions only (signal-safety(7)): getpid, timer_settime, timer_gettime, sem_post,
// sigaction, kill.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <math.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST_SECONDS = 86400 };

static struct sigaction before;    // Python's handler
static struct itimerspec limit;    // between the first SIGTERM and the end
static timer_t timer;              // belongs to the process `owner`; fork does not pass it on
static sem_t told;                 // posted once, at the first SIGTERM
static atomic_int owner;           // pid; 0: none
static atomic_int begun;

static bool begin(void)
{
    if (atomic_exchange(&begun, 1)) return false;
    timer_settime(timer, 0, &limit, NULL);
    sem_post(&told);
    return true;
}

static double left(void)
{
    struct itimerspec now;
    if (!atomic_load(&begun) || timer_gettime(timer, &now)) return 0;
    return (double)now.it_value.tv_sec + (double)now.it_value.tv_nsec / 1e9;
}

static void end(void)
{
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigaction(SIGTERM, &standard, NULL);
    kill(getpid(), SIGTERM);  // from the handler, where it is blocked: taken on return
}

static void on_sigterm(int number)
{
    int kept = errno;
    if (atomic_load(&owner) != getpid()) before.sa_handler(number);  // forked, not yet renewed: only what was there before us
    else if (begin()) before.sa_handler(number);
    else if (left() <= 0) end();
    errno = kept;
}

// Put our handler before the present one, which is Python's; nothing if it is there already.
static bool stand_in_front(void)
{
    struct sigaction present;
    if (sigaction(SIGTERM, NULL, &present)) return false;
    if (present.sa_handler == on_sigterm) return true;
    if (present.sa_flags & SA_SIGINFO || present.sa_handler == SIG_DFL || present.sa_handler == SIG_IGN) {
        errno = EINVAL;
        return false;
    }
    before = present;
    present.sa_handler = on_sigterm;
    return !sigaction(SIGTERM, &present, NULL);
}

static bool renew(void)
{
    if (atomic_load(&owner) == getpid()) return true;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGTERM};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer)) return false;
    if (sem_init(&told, 0, 0)) return false;
    atomic_store(&begun, 0);
    atomic_store(&owner, getpid());
    return true;
}

static PyObject *py_install(PyObject *module, PyObject *argument)
{
    (void)module;
    double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1.0 && PyErr_Occurred()) return NULL;
    if (!(seconds > 0 && seconds <= LONGEST_SECONDS)) {
        PyErr_SetString(PyExc_ValueError, "expected seconds above 0 and at most a day");
        return NULL;
    }
    limit.it_value.tv_sec = (time_t)seconds;
    limit.it_value.tv_nsec = (long)((seconds - floor(seconds)) * 1e9);
    if (!renew() || !stand_in_front()) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_renew(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    if (!renew()) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_begin(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    if (!renew() || !stand_in_front()) return PyErr_SetFromErrno(PyExc_OSError);
    begin();
    Py_RETURN_NONE;
}

static PyObject *py_wait(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    do failed = sem_wait(&told);
    while (failed && errno == EINTR);
    Py_END_ALLOW_THREADS
    if (failed) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_left(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    return PyFloat_FromDouble(left());
}

static PyObject *py_end(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    end();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"install", py_install, METH_O, "Stand in front of Python's SIGTERM handler; the end comes this many seconds after it."},
    {"renew", py_renew, METH_NOARGS, "Make what a fork did not pass on; nothing in a process that has it."},
    {"begin", py_begin, METH_NOARGS, "Do what the first SIGTERM does, except calling Python's handler."},
    {"wait", py_wait, METH_NOARGS, "Wait for the first SIGTERM."},
    {"left", py_left, METH_NOARGS, "Return the seconds until the end, 0 when it has not begun or is over."},
    {"end", py_end, METH_NOARGS, "End this process by SIGTERM, now."},
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
    .m_name = "_deadline",
    .m_doc = "SIGTERM that ends the process in time, whatever the interpreter does.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__deadline(void) { return PyModuleDef_Init(&definition); }
