"""A synthetic order service: its traces and host counters with noise, and one fault put into the second window."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from pasta_otel.model import HostSample, TimeWindow
from pasta_otel.semconv import CGROUP_PERIODS, CGROUP_THROTTLED_PERIODS, CGROUP_THROTTLED_TIME, CPU_TIME, RUN_DELAY
from pasta_otel.testing.spans import Kind, MemorySpan, MemorySpanStore

MS = 1_000_000
SECOND = 1_000_000_000
LAYERS = 6
LEAVES = ("norm1", "attn", "norm2", "ff1", "ff2")
LEAF_MS = {"norm1": 0.1, "attn": 0.9, "norm2": 0.1, "ff1": 0.6, "ff2": 0.6}
BASELINE = TimeWindow(1_000 * SECOND, 1_030 * SECOND)
BURNING = TimeWindow(1_030 * SECOND, 1_060 * SECOND)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong in one window.

    Attributes:
        slow_dependency_ms: Most extra time in the recommendation service's handler (it rises over the window).
        network_ms: Extra time on the way to the recommendation service.
        dependency_errors: Share of recommendation calls that fail, and the order with them.
        timeout_ms: The order API gives up on a recommendation after this time, and fails; 0 = never.
        throttled: The model process has a CPU quota.
        contended: A hog shares the model's CPU.
        slow_layer: Layer whose own time grows; -1 = none.
        extra_calls: How many more payment calls each order makes.
        slow_own_ms: Extra time in the order API itself.
    """

    slow_dependency_ms: float = 0.0
    network_ms: float = 0.0
    dependency_errors: float = 0.0
    timeout_ms: float = 0.0
    throttled: bool = False
    contended: bool = False
    slow_layer: int = -1
    extra_calls: int = 0
    slow_own_ms: float = 0.0


class _Trace:
    """Lay out one request sequentially."""

    def __init__(self, rng: random.Random, trace_id: str, start: int, trouble: Trouble, age: float) -> None:
        self.rng, self.trace_id, self.now, self.trouble, self.age = rng, trace_id, start, trouble, age
        self.spans: list[MemorySpan] = []
        self.failed = False

    def work(self, mean_ms: float) -> None:
        self.now += int(self.rng.lognormvariate(0.0, 0.25) * mean_ms * MS)

    def span(self, parent: str, service: str, operation: str, kind: Kind) -> _Open:
        return _Open(self, parent, service, operation, kind)


class _Open:
    def __init__(self, trace: _Trace, parent: str, service: str, operation: str, kind: Kind) -> None:
        self.trace, self.parent, self.service, self.operation, self.kind = trace, parent, service, operation, kind
        self.span_id = f"{trace.rng.getrandbits(64):016x}"
        self.start, self.error, self.module, self.peer = trace.now, False, "", ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.trace.spans.append(
            MemorySpan(
                self.trace.trace_id,
                self.span_id,
                self.parent,
                self.service,
                self.operation,
                self.kind,
                self.start,
                self.trace.now,
                self.error,
                self.module,
                self.peer,
            )
        )


def _call(trace: _Trace, parent: str, callee: str, times_ms: tuple[float, float], *, fails: bool) -> None:
    network_ms, handler_ms = times_ms
    with trace.span(parent, "order-api", "GET", "client") as client:
        client.peer = callee
        trace.work(network_ms)
        with trace.span(client.span_id, callee, f"GET /{callee}", "server") as server:
            trace.work(handler_ms)
            server.error = fails
        client.error = fails
        trace.work(network_ms)


def _recommend(trace: _Trace, parent: str) -> None:
    trouble = trace.trouble
    fails = trace.rng.random() < trouble.dependency_errors
    slow = trouble.slow_dependency_ms * trace.age
    begin = trace.now
    _call(trace, parent, "recommendations", (0.6 + trouble.network_ms / 2, 3.0 + slow), fails=fails)
    late = trouble.timeout_ms and trace.now - begin > trouble.timeout_ms * MS
    if late:
        _give_up(trace, begin)
    trace.failed |= fails or bool(late)


def _give_up(trace: _Trace, begin: int) -> None:
    """End the caller's client span at its timeout, as an error; the callee goes on."""
    client = trace.spans.pop()
    trace.now = begin + int(trace.trouble.timeout_ms * MS)
    trace.spans.append(
        MemorySpan(
            client.trace_id,
            client.span_id,
            client.parent_span_id,
            client.service,
            client.operation,
            client.kind,
            client.start_time_unix_nano,
            trace.now,
            error=True,
            peer=client.peer,
        )
    )


def _stall(trace: _Trace, share: float, stall_ms: float, work_ms: float) -> None:
    """Lose the CPU now and then, with a probability in proportion to the work done."""
    if trace.rng.random() < share * work_ms:
        trace.work(stall_ms)


def _leaf(trace: _Trace, parent: str, path: str, work_ms: float) -> None:
    with trace.span(parent, "model", path, "internal") as leaf:
        leaf.module = path
        trace.work(work_ms)
        if trace.trouble.throttled:
            _stall(trace, 0.05, 45.0, work_ms)
        if trace.trouble.contended:
            _stall(trace, 0.30, 4.0, work_ms)


def _model(trace: _Trace, parent: str) -> None:
    with trace.span(parent, "order-api", "POST", "client") as client:
        client.peer = "model"
        trace.work(0.5)
        with trace.span(client.span_id, "model", "POST /predict", "server") as server:
            trace.work(1.0)
            for layer in range(LAYERS):
                path = f"encoder.layers.{layer}"
                with trace.span(server.span_id, "model", path, "internal") as block:
                    block.module = path
                    trace.work(0.1)
                    if layer == trace.trouble.slow_layer:
                        trace.work(25.0)
                    for leaf in LEAVES:
                        _leaf(trace, block.span_id, f"{path}.{leaf}", LEAF_MS[leaf])
        trace.work(0.5)


def request(rng: random.Random, start: int, trouble: Trouble, age: float) -> list[MemorySpan]:
    """Return the spans of one order."""
    trace = _Trace(rng, f"{rng.getrandbits(128):032x}", start, trouble, age)
    with trace.span("", "order-api", "POST /orders", "server") as root:
        trace.work(2.0 + trouble.slow_own_ms)
        _recommend(trace, root.span_id)
        for _ in range(1 + trouble.extra_calls):
            _call(trace, root.span_id, "payment", (0.6, 5.0), fails=False)
        _model(trace, root.span_id)
        root.error = trace.failed
    return trace.spans


def _host(window: TimeWindow, offset: float, trouble: Trouble) -> list[HostSample]:
    readings: list[HostSample] = []
    for second in range(30):
        at = window.start_unix_nano + second * SECOND
        pace = {CPU_TIME: 0.4, RUN_DELAY: 0.6 if trouble.contended else 0.02}
        if trouble.throttled:
            pace |= {CGROUP_PERIODS: 10.0, CGROUP_THROTTLED_PERIODS: 8.0, CGROUP_THROTTLED_TIME: 0.5}
        readings += [HostSample("model", 77, metric, at, offset + second * rate) for metric, rate in pace.items()]
        readings.append(HostSample("order-api", 78, CPU_TIME, at, offset + second * 0.1))
        readings.append(HostSample("order-api", 78, RUN_DELAY, at, offset + second * 0.004))
    return readings


def world(seed: int, trouble: Trouble, requests: int = 120) -> MemorySpanStore:
    """Return a store that holds a normal window (BASELINE) and a troubled one (BURNING)."""
    rng = random.Random(seed)  # noqa: S311 - reproducible noise, not a secret
    spans: list[MemorySpan] = []
    for window, fault in ((BASELINE, Trouble()), (BURNING, trouble)):
        step = 28 * SECOND // requests
        for index in range(requests):
            spans += request(rng, window.start_unix_nano + index * step, fault, index / requests)
    host = [*_host(BASELINE, 100.0, Trouble()), *_host(BURNING, 200.0, trouble)]
    return MemorySpanStore(spans, host)
