"""A traced program under observation: ``app.py LIBRARY MODE``. Writes what it did as JSON lines, waits for a line between."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

from pasta_otel.publish import publish_context
from pasta_otel.publish.runtime import ContextWatcher

LIBRARY = ctypes.CDLL(sys.argv[1])
PROVIDER = TracerProvider(resource=Resource({"service.name": f"app-{sys.argv[2]}"}))
TRACER = PROVIDER.get_tracer("app")
write_lock = threading.Lock()


def tell(**fields: object) -> None:
    with write_lock:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def traced(name: str):
    """Run the body within a span; yields what the span will be told to the test as."""
    calls: dict[str, list[tuple[int, int]]] = {}
    with TRACER.start_as_current_span(name) as span:
        yield calls
        found = span.get_span_context()
    ids = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
    tell(event="span", name=name, pid=os.getpid(), tid=threading.get_native_id(), calls=calls, **ids)


def call(calls: dict[str, list[tuple[int, int]]], name: str, *arguments: object) -> None:
    function = getattr(LIBRARY, name)
    start = time.monotonic_ns()
    function(*arguments)
    calls.setdefault(name, []).append((start, time.monotonic_ns()))


def every_function() -> None:
    names = json.loads(os.environ["PASTA_TEST_FUNCTIONS"])
    with traced("every") as calls:
        for name in names:
            size = ctypes.c_size_t(1000)
            call(
                calls,
                name,
                *((ctypes.c_void_p(1), size) if "Alloc" in name else (ctypes.c_uint64(1), ctypes.c_uint64(2), size)),
            )


def work(count: int) -> None:
    with traced("outer") as outer:
        call(outer, "cuLaunchKernel")
        with traced("inner") as inner:
            for _ in range(count):
                call(inner, "cuLaunchKernel")
                call(inner, "cuStreamSynchronize", None)
        call(outer, "cuGraphLaunch")


def threads() -> None:
    started = [threading.Thread(target=work, args=(5 + number,)) for number in range(6)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


async def task(count: int) -> None:
    with traced("task") as calls:
        for _ in range(count):
            call(calls, "cuLaunchKernel")
            await asyncio.sleep(0)
            call(calls, "cuGraphLaunch")
            await asyncio.sleep(0.001)
            call(calls, "cuStreamSynchronize", None)
        await asyncio.to_thread(call, calls, "cuCtxSynchronize")


async def untraced_task(count: int) -> None:
    for _ in range(count):
        LIBRARY.cuMemFree_v2()
        await asyncio.sleep(0)


async def tasks() -> None:
    await asyncio.gather(*(task(5 + number) for number in range(6)), untraced_task(20))


def uvloop_tasks() -> None:
    import uvloop  # after publishing began, as uvicorn does

    uvloop.run(cancelled_and_tasks())


async def cancelled_and_tasks() -> None:
    """Leave an untraced task and one that ends by cancellation among the others."""
    cancelled = asyncio.create_task(until_cancelled())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(tasks(), cancelled)


async def until_cancelled() -> None:
    with traced("cancelled") as calls:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            call(calls, "cuGraphLaunch")


def uvloop_callbacks() -> None:
    """Call from a plain callback of the loop, which nobody can follow, with a span that it attaches and leaves."""
    import uvloop

    def callback() -> None:
        context_api.attach(trace.set_span_in_context(TRACER.start_span("left")))
        LIBRARY.cuLaunchKernel()

    async def main() -> None:
        asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(0.01)

    uvloop.run(main())


async def in_worker_threads(count: int) -> None:
    import anyio.to_thread

    with traced("worker") as calls:
        for _ in range(count):
            await anyio.to_thread.run_sync(call, calls, "cuLaunchKernel")
            await asyncio.sleep(0)
    await anyio.to_thread.run_sync(LIBRARY.cuMemFree_v2)


async def anyio_threads() -> None:
    await asyncio.gather(*(in_worker_threads(5 + number) for number in range(4)))


def fork() -> None:
    with traced("parent") as calls:
        call(calls, "cuLaunchKernel")
        child = os.fork()
        if not child:
            in_child()
        call(calls, "cuLaunchKernel")
    os.waitpid(child, 0)


def in_child() -> None:
    context_api.attach(trace.set_span_in_context(trace.INVALID_SPAN))
    tell(event="child", pid=os.getpid())
    sys.stdin.readline()
    work(5)
    os._exit(0)


def fork_at_once() -> None:
    """Fork a child that works within a span and ends before anybody can have looked at it."""
    child = os.fork()
    if not child:
        context_api.attach(trace.set_span_in_context(trace.INVALID_SPAN))
        work(5)
        os._exit(0)
    os.waitpid(child, 0)


def become() -> None:
    """Start this program anew in the same process."""
    with traced("before") as calls:
        call(calls, "cuLaunchKernel")
    os.execv(sys.executable, [sys.executable, sys.argv[0], sys.argv[1], "work"])


def fault() -> None:
    """Touch every page of a file that is not in memory, without reading ahead."""
    with Path(sys.argv[3]).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        pages.madvise(mmap.MADV_RANDOM)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with traced("fault"):
            sum(pages[start] for start in range(0, len(pages), mmap.PAGESIZE))


def migrate() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    with traced("migrate"):
        for turn in range(10):
            os.sched_setaffinity(0, {cpus[turn % 2]})


def spin() -> None:
    """Want a CPU all the time, for a quarter of a second of it."""
    os.sched_setaffinity(0, {int(sys.argv[3])})
    with traced("spin"):
        begin = time.process_time()
        while time.process_time() - begin < 0.25:
            pass


MODES = {
    "uvloop": uvloop_tasks,
    "callbacks": uvloop_callbacks,
    "anyio": lambda: asyncio.run(anyio_threads()),
    "fault": fault,
    "migrate": migrate,
    "spin": spin,
    "every": every_function,
    "threads": threads,
    "asyncio": lambda: asyncio.run(tasks()),
    "stale": lambda: asyncio.run(tasks()),
    "fork": fork,
    "fork_at_once": fork_at_once,
    "become": become,
    "work": lambda: work(5),
}

if sys.argv[2] == "stale":  # as with an event loop that is not asyncio's own: its steps cannot be followed
    ContextWatcher.observed_loops = ()
publish_context(PROVIDER.resource.attributes)
tell(event="ready", pid=os.getpid())
sys.stdin.readline()
if sys.argv[2] == "spans":
    for _ in range(int(sys.argv[3])):
        with TRACER.start_as_current_span("one"):
            LIBRARY.cuLaunchKernel()
elif sys.argv[2] == "flood":
    with traced("flood") as flooded:
        LIBRARY.pasta_flood(ctypes.c_long(int(sys.argv[3])))
else:
    MODES[sys.argv[2]]()
tell(event="done", pid=os.getpid())
sys.stdin.readline()
