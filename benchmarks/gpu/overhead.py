"""Overhead of governed capture: blocks of 200 ms in randomised ABBA order, all blocks kept.

``python -m benchmarks.gpu.overhead WORKLOAD PAIRS``. The governor's clock runs only in blocks with capture, so that
these see the whole of its budget. Beside it, in the same run: torch.profiler, and what the governor says it costs.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time

import numpy as np
import torch
from opentelemetry import context as context_api
from opentelemetry import trace
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.harness import abba, bootstrap_ratio, capture_of, write
from benchmarks.gpu.models import WORKLOADS
from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti.devices import device_uuid
from pasta_otel.gpu.cupti.service import ARM_S, GpuCapture
from pasta_otel.gpu.cupti.torch_watch import TorchWatch
from pasta_otel.gpu.governor import Governor
from pasta_otel.gpu.mapping import Regions

BLOCK_S = 0.2
BUDGET = 0.01
NARROW = 0.01
"""A wider interval decides nothing: then the computed direct cost does."""
SPAN = trace.SpanContext(0x1234, 0x5678, is_remote=False, trace_flags=trace.TraceFlags(1))
MIN_PERIOD_NS = 6_000_000_000
"""A fifth of the service's: the budget holds either way, and more windows tell more in the same time."""


class Governed:
    """The capture service, run only inside the blocks that are with capture.

    As in the service, the thread sleeps until a window is due: a thread that looks every few milliseconds whether one
    is costs a launch-bound Python program 3 to 4 % by itself.
    """

    def __init__(self, budget: float = BUDGET) -> None:
        self.capture = capture_of()
        self._before, self._since = 0, None
        governor = Governor(budget, self.clock, random_unit=random.Random(5).random, min_period_ns=MIN_PERIOD_NS)
        regions = Regions(_cupti, time.time_ns)
        TorchWatch(self.capture, regions).install()
        self.service = GpuCapture(self.capture, regions, governor, device_id=device_uuid)
        self.reports = []
        self.in_window = False
        self._due: queue.SimpleQueue[float] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def clock(self) -> int:
        """Return the time spent in blocks with capture, ns."""
        return self._before + (time.monotonic_ns() - self._since if self._since is not None else 0)

    def begin(self) -> None:
        """Begin a block with capture; where a window is due in it, the block lasts until that is digested."""
        self._since = time.monotonic_ns()
        wait = self.service.governor.wait_ns()
        if wait < BLOCK_S * 1e9:
            self.in_window = True
            self._due.put(wait / 1e9)

    def end(self) -> None:
        """End a block with capture."""
        self._before += time.monotonic_ns() - self._since
        self._since = None

    def _run(self) -> None:
        while True:
            due = self._due.get()
            time.sleep(max(0.0, due - ARM_S))
            self.service.arm()
            report = self.service.window(self.service.governor.window_ns())
            if report is not None:
                self.reports.append(self._facts(report))
            self.in_window = False

    def _facts(self, report) -> dict:
        cost, counts = report.cost, report.joined.counts
        return {
            "recorded_ms": cost.recorded_ns / 1e6,
            "switch_ms": cost.switch_ns / 1e6,
            "cpu_ms": cost.cpu_ns / 1e6,
            "launches": cost.launches,
            "nodes": cost.nodes,
            "work": counts.work,
            "linked": counts.linked,
            "early": counts.early,
            "worst_early_ns": counts.worst_early_ns,
            "incomplete": counts.incomplete,
            "residual_ns": report.offset.residual_ns,
            "attached_after": self.capture.attached,
        }


def block(step, seconds: float, wait_for=lambda: False) -> tuple[float, int]:
    """Run steps for a while, and on while something must end first; returns seconds and steps."""
    torch.cuda.synchronize()
    began, steps = time.perf_counter(), 0
    while True:
        step()
        steps += 1
        if time.perf_counter() - began >= seconds and not wait_for():
            break
    torch.cuda.synchronize()
    return time.perf_counter() - began, steps


def profiled(step, pairs: int) -> dict:
    """Measure torch.profiler (CUDA activity only) over the same blocks; its own start and stop are not counted."""
    on, off = [], []
    for with_profiler in abba(pairs, seed=2):
        if not with_profiler:
            off.append(block(step, BLOCK_S))
            continue
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True):
            on.append(block(step, BLOCK_S))
    return {**bootstrap_ratio(np.array(on), np.array(off)), "on": on, "off": off}


def run(workload: str, pairs: int) -> dict:
    """Measure one workload."""
    step = WORKLOADS[workload]()
    for _ in range(20):
        step()
    block(step, 1.0)
    governed = Governed()
    regions = governed.service.regions
    regions.enter_request(SPAN.trace_id, SPAN.span_id)
    context_api.attach(trace.set_span_in_context(trace.NonRecordingSpan(SPAN)))  # backward passes belong to it
    on, off = [], []
    began = time.time()
    for with_capture in abba(pairs):
        if with_capture:
            governed.begin()
            on.append(block(_entered(step, regions), BLOCK_S, lambda: governed.in_window))
            governed.end()
        else:
            off.append(block(_entered(step, regions), BLOCK_S))
    governor = governed.service.governor
    answer = {
        "workload": workload,
        "budget": BUDGET,
        "pairs": len(on),
        "seconds": time.time() - began,
        "step_ms_off": float(1000 * np.sum([s for s, _ in off]) / np.sum([n for _, n in off])),
        "overhead": bootstrap_ratio(np.array(on), np.array(off)),
        "direct_cost": governor.cost,
        "duty": governor.duty,
        "windows": governed.reports,
        "counts": str(governed.service.counts),
        "stats": governed.capture.stats(),
        "classes": _by_class(governed.service),
        "on": on,
        "off": off,
    }
    answer["torch_profiler"] = profiled(step, 4)
    return answer


def _entered(step, regions):
    def run():
        regions.enter(SPAN.trace_id, 0x9999, "model")
        step()
        regions.leave(0x9999)

    return run


def _by_class(service) -> dict[str, float]:
    spent: dict[str, float] = {}
    for point in service.points():
        name = point.attributes.get("gpu.kernel.class", "overflow")
        spent[name] = spent.get(name, 0.0) + point.total
    return spent


def verdict(answer: dict) -> str:
    """Return whether the budget is held, and by which number: the interval, or the computed cost where it is wide."""
    overhead, cost = answer["overhead"], answer["direct_cost"]
    if not answer["windows"]:
        return "FAIL: no window opened"
    if overhead["high"] - overhead["low"] <= NARROW:
        return f"{'PASS' if overhead['high'] <= BUDGET else 'FAIL'} by measurement"
    return f"{'PASS' if cost <= BUDGET else 'FAIL'} by computed cost (the interval is wider than one point)"


def summary(answer: dict) -> str:
    """Return one line."""
    o, p = answer["overhead"], answer["torch_profiler"]
    switch = [w["switch_ms"] for w in answer["windows"]] or [0]
    return (
        f"{answer['workload']}: {answer['pairs']} pairs, step {answer['step_ms_off']:.3f} ms, "
        f"overhead {o['mean']:+.2%} "
        f"[{o['low']:+.2%}, {o['high']:+.2%}], direct {answer['direct_cost']:.2%}, duty {answer['duty']:.2%}, "
        f"{len(answer['windows'])} windows, switch {np.median(switch):.1f} ms; torch.profiler {p['mean']:+.1%} "
        f"[{p['low']:+.1%}, {p['high']:+.1%}]; {answer['counts']}; {verdict(answer)}"
    )


def main() -> None:
    workload, pairs = sys.argv[1], int(sys.argv[2])
    answer = run(workload, pairs)
    write(f"overhead-{workload}", answer)
    print(summary(answer), flush=True)


if __name__ == "__main__":
    main()
