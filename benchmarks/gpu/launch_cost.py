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
from pasta_otel.gpu.cupti.capture import T2_WINDOW, T3_WINDOW, Capture, WindowKinds
from pasta_otel.gpu.cupti.rows import Kind
from pasta_otel.gpu.cupti.spans import GpuSpans
from pasta_otel.gpu.mapping import JoinCounts, Joiner, Regions

LAUNCHES = 1000
CYCLES = 16
REGION = 7
MOST_US, MOST_RECORD_US = 3.0, 0.3


def combinations():
    """Return what is recorded by name."""
    base = (Kind.CONCURRENT_KERNEL, Kind.EXTERNAL_CORRELATION)
    return {
        "kernels": WindowKinds((Kind.CONCURRENT_KERNEL,), "none"),
        "kernels + external, launch calls (runtime)": WindowKinds(base, "launches", driver=False),
        "kernels + external, launch calls (runtime and driver)": WindowKinds(base, "launches"),
        "kernels + external, every runtime call": WindowKinds(base, "all", driver=False),
        "kernels + external, every runtime and driver call": WindowKinds(base, "all"),
        "T2: + copies (also between GPUs), memset": T2_WINDOW,
        "T2 + synchronisation": WindowKinds((*T2_WINDOW.kinds, Kind.SYNCHRONIZATION)),
        "T2 + overhead": WindowKinds((*T2_WINDOW.kinds, Kind.OVERHEAD)),
        "T3: everything": T3_WINDOW,
        "graph trace instead of kernels": WindowKinds((Kind.GRAPH_TRACE, Kind.EXTERNAL_CORRELATION), "launches"),
    }


class Loop:
    """``x.add_(y)`` on one core, so that a migration is not taken for a cost."""

    def __init__(self) -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        self.x, self.y = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
        for _ in range(30):
            self.microseconds()

    def once(self) -> None:
        """Launch once."""
        self.x.add_(self.y)

    def microseconds(self) -> float:
        """Return microseconds a launch, the lower of two loops inside a region."""
        return min(self._inside_a_region(), self._inside_a_region())

    def _inside_a_region(self) -> float:
        x, y = self.x, self.y
        _cupti.enter(REGION)
        began = time.perf_counter_ns()
        for _ in range(LAUNCHES):
            x.add_(y)
        spent = time.perf_counter_ns() - began
        torch.cuda.synchronize()
        _cupti.leave(REGION)
        return spent / LAUNCHES / 1000


class Afterwards:
    """What is done with a window's records, and how long each part takes on its thread."""

    def __init__(self) -> None:
        regions = Regions(_cupti, time.time_ns)
        regions.recording = True
        regions.enter(1, REGION, "model")
        regions.leave(REGION)
        self._joiner, self._histograms = Joiner(regions), KernelHistograms(KernelClasses(), str, time.time_ns)
        self._spans = GpuSpans(self._histograms.codes, str, lambda _: True, trace_limit=1 << 60)
        self.records = self.join_ns = self.span_ns = self.spans = 0

    def digest(self, capture: Capture) -> JoinCounts:
        """Join, aggregate and make the spans of a window."""
        rows, names = capture.drain(), capture.names()
        began = time.thread_time_ns()
        joined = self._joiner.join(rows)
        self._histograms.add(joined, names, 1.0)
        between = time.thread_time_ns()
        _groups, counts = self._spans.columns(joined, names, 0)
        self.join_ns, self.span_ns = self.join_ns + between - began, self.span_ns + time.thread_time_ns() - between
        self.records, self.spans = self.records + sum(map(len, rows)), self.spans + counts.ok
        return joined.counts


def cycle(capture: Capture, loop: Loop, afterwards: Afterwards, what: WindowKinds) -> dict[str, float]:
    """Measure the loop without and with a window of these kinds."""
    off = loop.microseconds()
    opened = while_running(partial(capture.open, what), loop.once)
    open_ms = capture.last_switch_ns / 1e6
    assert opened, capture.holder
    on = loop.microseconds()
    began = time.perf_counter_ns()
    while_running(capture.close, loop.once)
    close_ms = (time.perf_counter_ns() - began) / 1e6
    torch.cuda.synchronize()
    counts = afterwards.digest(capture)
    entry = {"off": off, "on": on, "open_ms": open_ms, "close_ms": close_ms, "attached": capture.attached}
    return {**entry, "work": counts.work, "linked": counts.linked}


def run() -> dict:
    """Measure, and return every cycle."""
    capture = capture_of()
    loop, afterwards = Loop(), Afterwards()
    cycles: dict[str, list[dict[str, float]]] = {}
    order = [name for name in combinations() for _ in range(CYCLES)]
    random.Random(1).shuffle(order)
    for name in order:
        cycles.setdefault(name, []).append(cycle(capture, loop, afterwards, combinations()[name]))
    stats = capture.stats()
    return {
        "launches": LAUNCHES,
        "cycles": cycles,
        "table": {name: _row(entries) for name, entries in cycles.items()},
        "decode_ns_per_record": stats["decode_ns"] / stats["records"],
        "join_and_aggregate_ns_per_record": afterwards.join_ns / afterwards.records,
        "span_columns_ns_per_span": afterwards.span_ns / max(afterwards.spans, 1),
        "region_enter_leave_us": _region_cost(_cupti),
        "stats": stats,
    }


def verdicts(answer: dict) -> list[str]:
    """Return the bars with PASS or FAIL."""
    added = answer["table"]["kernels + external, every runtime call"]["added_us"]
    record = (answer["decode_ns_per_record"] + answer["join_and_aggregate_ns_per_record"]) / 1000
    launch, digest = ("PASS" if held else "FAIL" for held in (added <= MOST_US, record < MOST_RECORD_US))
    return [
        f"{launch}: kernels + external ids + runtime {added:.2f} us a launch <= {MOST_US} us",
        f"{digest}: decoding + aggregation {record:.3f} us a record < {MOST_RECORD_US} us",
    ]


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
    print(f"region_enter_leave_us: {answer['region_enter_leave_us']:.3f}; stats {answer['stats']}")
    print(*verdicts(answer), sep="\n", flush=True)


if __name__ == "__main__":
    main()
