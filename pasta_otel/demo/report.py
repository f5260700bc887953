"""``report.json``: what happened in one run of the demo, by the names that the schema fixes."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from pasta_otel.demo.faults import Fault, FaultName
from pasta_otel.demo.judge import judge
from pasta_otel.demo.load import RequestRecord
from pasta_otel.demo.offline import Crossing, first_crossing
from pasta_otel.demo.scenario import Story
from pasta_otel.demo.stage import StageOptions
from pasta_otel.demo.watch import Watch
from pasta_otel.slo.spec.model import SLO
from pasta_otel.slo.windows import BurnRateWindows

SCHEMA = "https://pasta-otel.example/schemas/report.schema.json"
NS = 1_000_000_000
RELIEF_NS = 1 * NS  # from the action, or the removal of the fault, to requests that count as after it
PACKAGES = ("pasta-otel", "opentelemetry-sdk", "torch", "duckdb", "starlette", "httpx", "uvicorn")


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a report is made of.

    Attributes:
        name: The fault's name.
        fault: The fault.
        options: How the demo was set up.
        story: What happened.
        watch: Readings.
        requests: The load generator's log.
        slos: What was watched.
        windows: With which windows.
    """

    name: FaultName
    fault: Fault
    options: StageOptions
    story: Story
    watch: Watch
    requests: Sequence[RequestRecord]
    slos: Sequence[SLO]
    windows: BurnRateWindows

    @property
    def crossing(self) -> Crossing | None:
        """Return when the log says that an SLO began to burn after the fault."""
        return first_crossing(self.requests, self.slos, self.windows, self.story.injected)


def build(run: Run) -> dict[str, Any]:
    """Return the report."""
    story = run.story
    causes = run.watch.causes()
    problems = [*judge(run.fault.expected, causes, story.actions), *_course(run)]
    return {
        "$schema": SCHEMA,
        "fault": run.name,
        "seed": run.options.seed,
        "injected": story.fault_words,
        "injected_at": _rfc3339(story.injected_unix_nano),
        "expected": _expected(run.fault),
        "passed": not problems,
        "problems": problems,
        "detected_after_s": _after(story, story.detected),
        "answered_after_s": _after(story, story.answered),
        "removed_after_s": _after(story, story.removed),
        "recovered_after_s": _after(story, story.recovered),
        "causes": causes,
        "attribution": _attribution(run.watch),
        "actions": story.actions,
        "slo": {"before": story.before, "during": story.during, "after": story.after},
        "offline": _offline(run),
        "load": _load(run),
        "spans": story.spans,
        "environment": environment(run),
    }


def environment(run: Run) -> dict[str, Any]:
    """Return what the run ran on and with; no host name, no path."""
    return {
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "device": run.story.device,
        "rate_per_s": run.options.rate,
        "tick_s": run.options.tick_seconds,
        "grace_s": run.options.grace_seconds,
        "windows": run.windows.name,
        "upstream": run.options.upstream is not None,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _expected(fault: Fault) -> dict[str, Any]:
    expected = fault.expected
    return {"kinds": sorted(expected.kinds), "target": expected.target, "degrades": expected.degrades}


def _course(run: Run) -> list[str]:
    """Return what is wrong with the course of events, apart from causes and actions."""
    story, nothing_wrong = run.story, not run.fault.expected.kinds
    if nothing_wrong:
        return ["an SLO burned although nothing was wrong"] if story.detected else []
    if not story.detected:
        return ["no SLO burned"]
    return [] if story.recovered else ["the SLOs did not recover"]


def _attribution(watch: Watch) -> dict[str, Any] | None:
    answer = watch.attributions.get(watch.first_burned or "")
    return None if answer is None else {name: value for name, value in answer.items() if name != "causes"}


def _offline(run: Run) -> dict[str, Any]:
    crossing, story = run.crossing, run.story
    if crossing is None:
        return {"slo": None, "crossed_after_s": None, "detection_lag_s": None}
    lag = round((story.detected - crossing.monotonic_ns) / NS, 3) if story.detected else None
    return {
        "slo": crossing.slo,
        "crossed_after_s": _after(story, crossing.monotonic_ns),
        "detection_lag_s": lag,
    }


def _load(run: Run) -> dict[str, Any]:
    story, requests = run.story, run.requests
    relief = (story.answered if run.fault.expected.degrades else story.removed) or story.removed
    parts = {
        "before": [r for r in requests if r.end_monotonic_ns <= story.injected],
        "during": [r for r in requests if story.injected < r.end_monotonic_ns <= relief],
        "after": [r for r in requests if r.start_monotonic_ns > relief + RELIEF_NS],
    }
    return {
        "requests": len(requests),
        "outcomes": dict(Counter(record.outcome for record in requests)),
        "degraded": sum(record.degraded for record in requests),
        "calls": dict(Counter(name for record in requests for name in record.calls)),
        "latency_ms": {name: _quantiles(part) for name, part in parts.items()},
    }


def _quantiles(records: Sequence[RequestRecord]) -> dict[str, float] | None:
    values = sorted(record.latency_ms for record in records if record.outcome != "not_sent")
    if not values:
        return None
    return {
        name: values[min(len(values) - 1, int(share * len(values)))] for name, share in (("p50", 0.5), ("p95", 0.95))
    }


def _after(story: Story, at_ns: int) -> float | None:
    return round((at_ns - story.injected) / NS, 3) if at_ns else None


def _rfc3339(unix_nano: int) -> str | None:
    if not unix_nano:
        return None
    return datetime.fromtimestamp(unix_nano / NS, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
