"""Does a GPU kernel ever begin before its launch call? ``python -m benchmarks.gpu.clocks [SECONDS]``, default 300.

One process decodes tokens with eager PyTorch while the capture service opens window after window. In each window the
raw start of every GPU kernel, copy and set is compared with the start of the call that launched it, before anything is
clamped or joined; so clocks that part by more than the time between the two are seen. Every violation has to be below
the residual that is exported for its window. This is a check of clocks and no measurement of overhead.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from benchmarks.gpu.harness import capture_of, while_running, write
from benchmarks.gpu.models import WORKLOADS
from pasta_otel import semconv
from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti.capture import T2_WINDOW
from pasta_otel.gpu.cupti.devices import device_uuid
from pasta_otel.gpu.cupti.rows import API_CALLS, DEVICE_WORK, ROW, Rows, is_kind
from pasta_otel.gpu.cupti.service import GpuCapture
from pasta_otel.gpu.governor import Governor
from pasta_otel.gpu.mapping import Regions

SECONDS = 300.0
WINDOW_NS = 300_000_000


def gaps(batches: list[Rows]) -> np.ndarray:
    """Return how long after its launch call began each piece of GPU work began, ns; negative = before."""
    rows = np.concatenate(batches) if batches else np.empty(0, ROW)
    calls, work = rows[is_kind(rows, API_CALLS)], rows[is_kind(rows, DEVICE_WORK)]
    work = work[work["start"] != 0]
    if not len(calls) or not len(work):
        return np.empty(0, np.int64)
    calls = calls[np.argsort(calls["correlation"], kind="stable")]
    at = np.minimum(np.searchsorted(calls["correlation"], work["correlation"]), len(calls) - 1)
    known = calls["correlation"][at] == work["correlation"]
    return work["start"][known].astype(np.int64) - calls["start"][at[known]].astype(np.int64)


class Checked(GpuCapture):
    """The capture service, which notes each window's gaps."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.checks: list[dict] = []
        self._gaps = np.empty(0, np.int64)

    def digest(self, batches, edges=()):
        batches = list(batches)
        self._gaps = gaps(batches)
        return super().digest(batches, edges)

    def window(self, length_ns, what=T2_WINDOW):
        report = super().window(length_ns, what)
        if report is not None:
            counts = report.joined.counts
            early = self._gaps[self._gaps < 0]
            self.checks.append(
                {
                    "recorded_ms": report.cost.recorded_ns / 1e6,
                    "checked": len(self._gaps),
                    "work": counts.work,
                    "linked": counts.linked,
                    "violations": len(early),
                    "worst_ns": max(int(-early.min()) if len(early) else 0, counts.worst_early_ns),
                    "smallest_gap_ns": int(self._gaps.min()) if len(self._gaps) else None,
                    "joiner_violations": counts.early,
                    "residual_ns": report.offset.residual_ns,
                }
            )
        return report


def run(seconds: float = SECONDS) -> dict:
    """Decode for so many seconds, and return every window's check."""
    step = WORKLOADS["gpt2-decode-b1"]()
    for _ in range(20):
        step()
    regions, reader = Regions(_cupti, time.time_ns), InMemoryMetricReader()
    governor = Governor(1.0, time.monotonic_ns, headroom=1.0, window_ns=WINDOW_NS, min_period_ns=0)
    service = Checked(capture_of(), regions, governor, device_id=device_uuid)
    service.register(MeterProvider([reader]).get_meter("clocks"))
    regions.enter_request(1, 2)
    service.start()
    began = time.monotonic()
    steps = 0
    while time.monotonic() - began < seconds:
        regions.enter(1, 3, "model")
        step()
        regions.leave(3)
        steps += 1
    exported = _exported(reader)
    while_running(service.stop, step)
    checks = service.checks
    return {
        "seconds": time.monotonic() - began,
        "steps": steps,
        "duty": governor.duty,
        "windows": checks,
        "checked": sum(check["checked"] for check in checks),
        "violations": sum(check["violations"] for check in checks),
        "worst_ns": max((check["worst_ns"] for check in checks), default=0),
        "above_residual": sum(check["worst_ns"] >= check["residual_ns"] for check in checks if check["worst_ns"]),
        "failed_windows": service.windows["failed"],
        "counts": str(service.counts),
        "exported": exported,
        "stats": service.capture.stats(),
    }


def _exported(reader: InMemoryMetricReader) -> dict[str, float]:
    wanted = (semconv.GPU_CLOCK_RESIDUAL, semconv.GPU_CLOCK_VIOLATIONS)
    data = reader.get_metrics_data()
    found = (
        {}
        if data is None
        else {
            metric.name: metric.data.data_points[0].value
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name in wanted and metric.data.data_points
        }
    )
    return {name: found.get(name, float("nan")) for name in wanted}


def passed(answer: dict) -> bool:
    """Return whether enough was checked, and every violation was below its window's exported residual."""
    enough = answer["checked"] > 0 and answer["checked"] >= 0.99 * sum(w["work"] for w in answer["windows"])
    agree = answer["violations"] <= sum(window["joiner_violations"] for window in answer["windows"])
    return enough and agree and answer["above_residual"] == 0 and answer["failed_windows"] == 0


def summary(answer: dict) -> str:
    """Return what was found, in a few lines."""
    residuals = [window["residual_ns"] for window in answer["windows"]] or [0]
    smallest = min((w["smallest_gap_ns"] for w in answer["windows"] if w["checked"]), default=0)
    ratio = answer["violations"] / max(answer["checked"], 1)
    return (
        f"clocks: {answer['seconds']:.0f} s, {len(answer['windows'])} windows, duty {answer['duty']:.1%}, "
        f"{answer['checked']} launches checked, {answer['violations']} violations (ratio {ratio:.2e}), worst "
        f"{answer['worst_ns']} ns, windows with one above its residual: {answer['above_residual']}; smallest gap "
        f"{smallest} ns; residual {min(residuals)} to {max(residuals)} ns; exported {answer['exported']}; "
        f"{answer['counts']}\n{'PASS' if passed(answer) else 'FAIL'}: every violation is below the exported residual"
    )


def main() -> int:
    answer = run(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
    write("clocks", answer)
    print(summary(answer), flush=True)
    return 0 if passed(answer) else 1


if __name__ == "__main__":
    sys.exit(main())
