"""Phases in which the GPU waits for launches, and what in them repeats so exactly that a CUDA graph could replay it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.intervals import length
from pasta_otel.gpu.analysis.link import innermost
from pasta_otel.gpu.analysis.timeline import OpKind
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds
from pasta_otel.gpu.findings.repeats import repeated_regions

KIND = "launch_bound"
PHASES = 3
WHOLE = "the whole trace"


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find ranks with phases whose GPU kernels begin as soon as they are launched, with idle time between."""
    limits = thresholds(KIND)
    for rank in ranks:
        paired = np.flatnonzero(rank.is_kernel & rank.launched_alone)
        order = paired[np.argsort(rank.work["start"][paired], kind="stable")]
        bound = []
        for name, rows in _phases(rank, order):
            if len(rows) < limits["kernels"].value:
                continue
            waiting, idle, span = _measure(rank, rows)
            if waiting >= limits["waiting_share"].value and idle >= limits["idle_share"].value:
                bound.append((idle * span, name, waiting, idle, len(rows)))
        if not bound:
            continue
        bound.sort(reverse=True)
        idle_ns, name, waiting, idle, _ = bound[0]
        evidence = [
            Evidence("waiting_kernels", share, "1", f"of {count} in {phase}; idle {gap:.0%}")
            for _, phase, share, gap, count in bound[:PHASES]
        ]
        evidence += [
            Evidence(
                "graph_candidate", region.repeats, "{time}", f"{region.name}: the same {region.kernels} GPU kernels"
            )
            for region in repeated_regions(rank)
        ]
        yield Finding(
            KIND,
            rank.timeline.rank,
            min(idle_ns / max(rank.window_ns, 1), 1.0),
            f"the GPU waits for launches in {name}: {waiting:.0%} of its kernels found nothing queued, idle {idle:.0%}",
            tuple(evidence),
            "launch less: CUDA graphs or torch.compile(mode='reduce-overhead') for what repeats with equal shapes, or a"
            " larger batch",
            limits,
        )


def _phases(rank: RankTrace, order: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield GPU kernels by the annotation that they were launched in, and all of them."""
    yield WHOLE, order
    ops, calls = rank.timeline.ops, rank.links.calls[rank.links.call[order]]
    inside = innermost(ops, calls["thread"], calls["start"], ops["kind"] == OpKind.ANNOTATION)
    for row in np.unique(inside[inside >= 0]).tolist():
        yield rank.timeline.names[ops["name"][row]], order[inside == row]


def _measure(rank: RankTrace, rows: NDArray[np.int64]) -> tuple[float, float, int]:
    """Return the share of GPU kernels launched after all before them had ended, the idle share, and the span in ns."""
    start, end = rank.work["start"][rows].astype(np.int64), rank.work["end"][rows].astype(np.int64)
    launched = rank.links.calls["start"][rank.links.call[rows]].astype(np.int64)
    waiting = launched[1:] >= np.maximum.accumulate(end)[:-1]
    span = int(end.max() - start.min())
    return float(waiting.mean()), 1 - length(start, end) / max(span, 1), span
