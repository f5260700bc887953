"""An instrumented program whose children do traced work: ``fork_program.py HOW``; each of three processes makes 4 spans."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys

import torch
from opentelemetry import trace

import pasta_otel

CALLS = 2  # each one span of the SDK and one of a module


def work(_: int = 0) -> int:
    model, tracer = torch.nn.Linear(2, 2), trace.get_tracer("t")
    for _ in range(CALLS):
        with tracer.start_as_current_span("request"):
            model(torch.zeros(1, 2))
    return os.getpid()


def work_in_child() -> None:
    pasta_otel.instrument()  # does nothing where the parent's is inherited
    work()


def processes(method: str) -> None:
    context = multiprocessing.get_context(method)
    children = [context.Process(target=work_in_child) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0, child.exitcode


def executor(method: str) -> None:
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context, initializer=pasta_otel.instrument) as pool:
        barrier = list(pool.map(work, range(2)))
        assert barrier


def bare(how: str) -> None:
    """Fork without multiprocessing; such a child flushes its provider, as documented."""
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            work()
            provider = trace.get_tracer_provider()
            getattr(provider, how)()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, _, method = sys.argv[1].partition("-")
    if kind == "late":  # the parent itself is not instrumented
        processes(method)
        work()
    else:
        if len(sys.argv) > 2:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor

            trace.set_tracer_provider(TracerProvider())
            trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
        pasta_otel.instrument()
        work()
        {"process": processes, "executor": executor, "bare": bare}[kind](method)
