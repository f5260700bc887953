"""Case D01 as a program: parent 5 spans, two forked children 10 each, parent 5 more. Run by test_fork.py.

Usage: fork_scenario.py {rows,sdk} {http/protobuf,grpc} ENDPOINT {quiet,busy,locked,inflight}
Prints one JSON object: the children's exit states and how many spans the busy thread emitted.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings

from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.resource import ProcessIdentity
from pasta_otel.exporters.otlp.row_exporter import RowExporter
from pasta_otel.exporters.otlp.spans import build_tracer_provider
from pasta_otel.model import OpSpan, SpanSite

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork beside threads: that is the case


class Rows:
    def __init__(self, config):
        identity = ProcessIdentity()
        self.exporter = RowExporter(config, resource=lambda: {"service.name": "d01"}, identity=identity)
        self.sites = {}

    def emit(self, name):
        now = time.monotonic_ns()
        site = self.sites.setdefault(name, SpanSite(name))
        self.exporter.offer(OpSpan(int.from_bytes(os.urandom(16)), int.from_bytes(os.urandom(8)), 0, now, now, 1, site))

    def flush(self):
        return self.exporter.force_flush(4.0)

    def shutdown(self):
        return self.exporter.shutdown(4.0)

    def lock(self):
        return self.exporter._state.changed


class Sdk:
    def __init__(self, config):
        self.provider = build_tracer_provider(config, attributes={"service.name": "d01"}, shutdown_timeout_s=4.0)
        self.tracer = self.provider.get_tracer("d01")

    def emit(self, name):
        self.tracer.start_span(name).end()

    def flush(self):
        return self.provider.force_flush()

    def shutdown(self):
        self.provider.shutdown()
        return True

    def lock(self):
        return self.provider._active_span_processor._span_processors[0]._count_lock


def background(out, mode, stop, emitted):
    """Keep another thread inside emit: in a tight loop, or holding the very lock that emit takes."""
    ready = threading.Event()

    def busy():
        while not stop.is_set() and emitted[0] < 20_000:
            out.emit(f"busy-{os.getpid()}")
            emitted[0] += 1
            ready.set()

    def locked():
        with out.lock():
            ready.set()
            stop.wait()

    thread = threading.Thread(target={"busy": busy, "locked": locked}[mode], daemon=True)
    thread.start()
    ready.wait()
    return thread


def child(out):
    for _ in range(10):
        out.emit(str(os.getpid()))
    os._exit(0 if out.flush() else 3)


def main(kind, protocol, endpoint, mode):
    out = {"rows": Rows, "sdk": Sdk}[kind](OtlpConfig(endpoint, protocol, timeout_s=4.0))
    for _ in range(5):
        out.emit(str(os.getpid()))
    if protocol == "grpc" or mode == "quiet":
        out.flush()  # the channel or connection is open when the fork comes
    if mode == "inflight":
        assert not out.exporter.force_flush(0.3)  # the worker is reading the answer's body when the fork comes
    stop, emitted = threading.Event(), [0]
    thread = background(out, mode, stop, emitted) if mode in {"busy", "locked"} else None
    started = time.monotonic()
    children = [os.fork() or child(out) for _ in range(2)]
    if mode == "busy":
        time.sleep(0.05)
    stop.set()
    states = [os.waitpid(pid, 0)[1] for pid in children]
    took = time.monotonic() - started
    if thread:
        thread.join()
    for _ in range(5):
        out.emit(str(os.getpid()))
    stopped = out.shutdown()
    print(  # noqa: T201  the report of the program
        json.dumps(
            {
                "states": states,
                "children_s": took,
                "busy": emitted[0],
                "stopped": stopped,
                "pids": [os.getpid(), *children],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
