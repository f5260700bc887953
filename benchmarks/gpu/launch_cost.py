"""Cost of a launch by what is recorded, over no capture in the same process; and of a record afterwards.

``python -m benchmarks.gpu.launch_cost``: an ``x.add_(y)`` loop. Each cycle measures CUPTI detached, then attached with
a window open; cycles of all combinations are interleaved.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.harness import capture_of, while_running, write
from pasta_otel._native import _cupti
from pasta_otel.gpu.classes import KernelClasses
from pasta_otel.gpu.cupti.aggregate import KernelHistograms
from pasta_otel.gpu.cupti.capture import T2_WINDOW, T3_WINDOW, WindowKinds
from pasta_otel.gpu.cupti.rows import Kind
from pasta_otel.gpu.cupti.spans import GpuSpans
from pasta_otel.gpu.mapping import Joiner, Regions

LAUNCHES = 1000
CYCLES = 16


def combinations():
    """Return what is recorded by name."""
    base = (Kind.CONCURRENT_KERNEL, Kind.EXTERNAL_CORRELATION)
    return {
        "kernels": WindowKinds((Kind.CONCURRENT_KERNEL,), "none"),
        "kernels + external, launch calls (runtime)": WindowKinds(base, "launches", driver=False),
        "kernels + external, launch calls (runtime and driver)": WindowKinds(base, "launches"),
        "kernels + external, every runtime call": WindowKinds(base, "all", driver=False),
        "kernels + external, every runtime and driver call": WindowKinds(base, "all"),
        "T2: + memcpy, memset": T2_WINDOW,
        "T2 + synchronisation": WindowKinds((*T2_WINDOW.kinds, Kind.SYNCHRONIZATION)),
        "T2 + overhead": WindowKinds((*T2_WINDOW.kinds, Kind.OVERHEAD)),
        "T3: everything": T3_WINDOW,
        "graph trace instead of kernels": WindowKinds((Kind.GRAPH_TRACE, Kind.EXTERNAL_CORRELATION), "launches"),
    }


def run() -> dict:
    """Measure, and return every cycle."""
    capture = capture_of()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, so that a migration is not taken for a cost
    x, y = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")

    def loop() -> float:
        """Return microseconds a launch."""
        began = time.perf_counter_ns()
        for _ in range(LAUNCHES):
            x.add_(y)
        spent = time.perf_counter_ns() - began
        torch.cuda.synchronize()
        return spent / LAUNCHES / 1000

    def entered() -> float:
        _cupti.enter(7)
        try:
            return loop()
        finally:
            _cupti.leave(7)

    for _ in range(30):
        loop()
    regions = Regions(_cupti, time.time_ns)
    regions.recording = True
    regions.enter(1, 7, "model")
    regions.leave(7)
    joiner, histograms = Joiner(regions), KernelHistograms(KernelClasses(), str, time.time_ns)
    spans = GpuSpans(histograms.codes, str, lambda _: True, trace_limit=1 << 60)
    cycles: dict[str, list[dict[str, float]]] = {}
    records = after_ns = span_ns = span_count = 0
    order = [name for name in combinations() for _ in range(CYCLES)]
    random.Random(1).shuffle(order)
    for name in order:
        what = combinations()[name]
        off = min(entered(), entered())
        began = time.perf_counter_ns()
        opened = while_running(partial(capture.open, what), lambda: x.add_(y))
        open_ms = capture.last_switch_ns / 1e6
        assert opened, capture.holder
        on = min(entered(), entered())
        began = time.perf_counter_ns()
        while_running(capture.close, lambda: x.add_(y))
        close_ms = (time.perf_counter_ns() - began) / 1e6
        torch.cuda.synchronize()
        rows = capture.drain()
        began = time.thread_time_ns()
        joined = joiner.join(rows)
        histograms.add(joined, capture.names(), 1.0)
        after_ns += time.thread_time_ns() - began
        records += sum(map(len, rows))
        began = time.thread_time_ns()
        _groups, counts = spans.columns(joined, capture.names(), 0)
        span_ns, span_count = span_ns + time.thread_time_ns() - began, span_count + counts.ok
        entry = {"off": off, "on": on, "open_ms": open_ms, "close_ms": close_ms, "attached": capture.attached}
        cycles.setdefault(name, []).append({**entry, "work": joined.counts.work, "linked": joined.counts.linked})
    stats = capture.stats()
    return {
        "launches": LAUNCHES,
        "cycles": cycles,
        "table": {name: _row(entries) for name, entries in cycles.items()},
        "decode_ns_per_record": stats["decode_ns"] / stats["records"],
        "join_and_aggregate_ns_per_record": after_ns / records,
        "span_columns_ns_per_span": span_ns / max(span_count, 1),
        "region_enter_leave_us": _region_cost(_cupti),
        "stats": stats,
    }


def _row(entries: list[dict[str, float]]) -> dict[str, float]:
    delta = np.array([entry["on"] - entry["off"] for entry in entries])
    rng = np.random.default_rng(0)
    medians = np.median(delta[rng.integers(0, len(delta), (2000, len(delta)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    off = np.median([entry["off"] for entry in entries])
    return {
        "off_us": float(off),
        "added_us": float(np.median(delta)),
        "low": float(low),
        "high": float(high),
        "open_ms": float(np.median([entry["open_ms"] for entry in entries])),
        "close_ms": float(np.median([entry["close_ms"] for entry in entries])),
    }


def _region_cost(cupti) -> float:
    times = []
    for _ in range(20):
        began = time.perf_counter_ns()
        for number in range(1000):
            cupti.enter(number)
            cupti.leave(number)
        times.append((time.perf_counter_ns() - began) / 1e6)
    return float(np.median(times))


def main() -> None:
    answer = run()
    write("launch-cost", answer)
    for name, row in answer["table"].items():
        print(
            f"{name:58s} off {row['off_us']:.2f} us, +{row['added_us']:.2f} us [{row['low']:.2f}, {row['high']:.2f}], "
            f"open {row['open_ms']:.1f} ms, close {row['close_ms']:.1f} ms"
        )
    for key in ("decode_ns_per_record", "join_and_aggregate_ns_per_record", "span_columns_ns_per_span"):
        print(f"{key}: {answer[key]:.1f}")
    print(f"region_enter_leave_us: {answer['region_enter_leave_us']:.3f}; stats {answer['stats']}", flush=True)


if __name__ == "__main__":
    main()
