"""Long stretches in which a GPU does nothing, and what the host did meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pasta_otel.gpu.analysis.intervals import gaps
from pasta_otel.gpu.analysis.link import innermost
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "idle_gap"
TOP = 3


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find devices whose long gaps add up to a share of the window."""
    limits = thresholds(KIND)
    for rank in ranks:
        for device in np.unique(rank.work["device"]).tolist():
            mine = rank.work[rank.work["device"] == device]
            window = int(mine["end"].max() - mine["start"].min())
            start, end = gaps(mine["start"].astype(np.int64), mine["end"].astype(np.int64))
            long = np.flatnonzero(end - start >= limits["gap_ns"].value)
            total = int((end[long] - start[long]).sum())
            if not window or total / window < limits["window_share"].value:
                continue
            longest = long[np.argsort(start[long] - end[long])][:TOP]
            evidence = [Evidence("gaps", len(long), "{gap}", f"of at least {limits['gap_ns'].value / 1e6:.0f} ms")]
            for gap in longest.tolist():
                seconds = int(end[gap] - start[gap]) / 1e9
                evidence.append(Evidence("gap", seconds, "s", _meanwhile(rank, int(start[gap]), int(end[gap]))))
            yield Finding(
                KIND,
                rank.timeline.rank,
                total / window,
                f"GPU {device} is idle for {total / window:.0%} of the time in {len(long)} long gaps",
                tuple(evidence),
                "see what the host did: data loading (num_workers, prefetch), Python between steps, compilation, or"
                " waiting for another rank",
                limits,
            )


def _meanwhile(rank: RankTrace, start: int, end: int) -> str:
    """Return the op or the API call that most of the gap's launching thread was in, by its middle."""
    calls = rank.links.calls
    covering = calls[(calls["start"] <= start + (end - start) // 2) & (calls["end"] >= start + (end - start) // 2)]
    if len(covering):
        return f"host in {rank.name(covering[0])}"
    threads = np.unique(calls["thread"])
    inside = innermost(rank.timeline.ops, threads, np.full(len(threads), start + (end - start) // 2, np.uint64))
    names = [rank.timeline.names[rank.timeline.ops["name"][op]] for op in inside.tolist() if op >= 0]
    return f"host in {names[0]}" if names else "host in no op of the trace"
