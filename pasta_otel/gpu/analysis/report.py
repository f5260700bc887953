"""All of the analysis of a job in one document, for ``--to json`` and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pasta_otel.gpu.analysis.breakdown import TemporalBreakdown, by_class, by_name, temporal_breakdown
from pasta_otel.gpu.analysis.critical_path import critical_path
from pasta_otel.gpu.analysis.host import host_times
from pasta_otel.gpu.analysis.launches import launches, queue_lengths
from pasta_otel.gpu.analysis.link import Links, coverage, link
from pasta_otel.gpu.analysis.modules import by_module, by_op
from pasta_otel.gpu.analysis.timeline import NO_NUMBER, Timeline
from pasta_otel.gpu.analysis.utilization import utilization

TOP = 20


def analyze(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Analyze all ranks of a job.

    Returns:
        A document with one entry a rank; times in ns, shares 0..1; what cannot be said is absent.
    """
    return {"ranks": [analyze_rank(timeline) for timeline in timelines]}


def analyze_rank(timeline: Timeline) -> dict[str, Any]:
    """Analyze one rank."""
    links = link(timeline)
    path = critical_path(timeline, links=links)
    document = {
        "rank": timeline.rank,
        "source": timeline.source,
        "complete": timeline.complete,
        "events": {"gpu_work": len(links.work), "api_calls": len(links.calls), "host_regions": len(timeline.ops)},
        "devices": [_device(entry) for entry in temporal_breakdown(timeline)],
        "streams": _streams(timeline, links),
        "classes": [asdict(entry) for entry in by_class(timeline)],
        "kernels": [asdict(entry) for entry in by_name(timeline, TOP)],
        "ops": [asdict(entry) for entry in by_op(timeline, links)[:TOP]],
        "modules": [asdict(entry) for entry in by_module(timeline, links)[:TOP]],
        "launches": _launches(links),
        "coverage": _coverage(links),
    }
    if not len(links.work) and len(timeline.ops):
        document["host"] = _host(timeline)
    if path is not None:
        document["critical_path"] = {"duration_ns": path.end_ns - path.start_ns, "totals_ns": path.totals_ns()}
    return document


def _host(timeline: Timeline) -> dict[str, Any]:
    found = host_times(timeline)
    ops, modules = ([asdict(entry) for entry in entries[:TOP]] for entries in (found.ops, found.modules))
    return {"threads": found.threads, "busy_ns": found.busy_ns, "ops": ops, "modules": modules}


def _device(entry: TemporalBreakdown) -> dict[str, Any]:
    device = _number(entry.device)
    return _present(
        {
            **asdict(entry),
            "device": device,
            "non_compute_ns": entry.non_compute_ns,
            "overlap_ratio": entry.overlap_ratio,
        }
    )


def _streams(timeline: Timeline, links: Links) -> list[dict[str, Any]]:
    queues = queue_lengths(links)
    return [
        _present(
            {
                "device": _number(key.device),
                "stream": _number(key.stream),
                "busy_ratio": share,
                "queue_length_max": queues[key].most if key in queues else None,
            }
        )
        for key, share in utilization(timeline).streams.items()
    ]


def _launches(links: Links) -> dict[str, Any]:
    found = launches(links)
    if not len(found):
        return {"pairs": 0}
    middle, high = np.quantile(found.delay_ns, (0.5, 0.99)).tolist()
    return {
        "pairs": len(found),
        "call_ns": int(found.call_ns.sum()),
        "gpu_ns": int(found.gpu_ns.sum()),
        "delay_ns": int(found.delay_ns.sum()),
        "delay_p50_ns": round(middle),
        "delay_p99_ns": round(high),
        "calls_longer_than_work": int((found.call_ns > found.gpu_ns).sum()),
    }


def _coverage(links: Links) -> dict[str, Any]:
    found = coverage(links)
    shares = {"by_count": found.by_count, "by_duration": found.by_duration}
    return _present({**asdict(found), **shares, "attribution_incomplete": found.incomplete})


def _number(value: int) -> int | None:
    return None if value == NO_NUMBER else value


def _present(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value is not None}
