"""Long stretches in which a GPU does nothing, and what the host did meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.calls import takes_memory
from pasta_otel.gpu.analysis.intervals import gaps, times
from pasta_otel.gpu.analysis.launches import outstanding
from pasta_otel.gpu.analysis.link import innermost
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "idle_gap"
TOP = 3
OTHER_HOST_WORK = (
    "see what the host did: data loading (num_workers, prefetch), Python between steps, compilation, or waiting for"
    " another rank"
)
MEMORY_CALLS = (
    "the host was in a memory call: at a program's begin that creates the context and loads libraries (profile after"
    " warm-up steps); later the allocator gives memory back (no torch.cuda.empty_cache(), more room)"
)


QUEUED = (
    "work was queued and did not begin: see what it waited for on its stream: an event of another stream, a collective"
    " of another rank, a host callback, or another process on this GPU"
)


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find devices whose long gaps add up to a share of the window."""
    limits = thresholds(KIND)
    for rank in ranks:
        for device in np.unique(rank.work["device"]).tolist():
            mine = rank.work["device"] == device
            start, end = gaps(*times(rank.work[mine]))
            window = int(rank.work["end"][mine].max() - rank.work["start"][mine].min())
            long = np.flatnonzero(end - start >= limits["gap_ns"].value)
            total = int((end[long] - start[long]).sum())
            if not window or total / window < limits["window_share"].value:
                continue
            longest = long[np.argsort(start[long] - end[long])][:TOP]
            evidence = [Evidence("gaps", len(long), "{gap}", f"of at least {limits['gap_ns'].value / 1e6:.0f} ms")]
            told = [_meanwhile(rank, mine, (int(start[gap]), int(end[gap]))) for gap in longest.tolist()]
            for gap, (where, _) in zip(longest.tolist(), told, strict=True):
                evidence.append(Evidence("gap", int(end[gap] - start[gap]) / 1e9, "s", where))
            gpu = rank.timeline.device_name(device)
            yield Finding(
                KIND,
                rank.timeline.rank,
                total / window,
                f"{gpu} is idle for {total / window:.0%} of the time in {len(long)} long gaps",
                tuple(evidence),
                told[0][1],
                limits,
            )


def _meanwhile(rank: RankTrace, mine: NDArray[np.bool_], gap: tuple[int, int]) -> tuple[str, str]:
    """Return what went on in the middle of a gap, and what to do about it."""
    middle = gap[0] + (gap[1] - gap[0]) // 2
    launched, _ = outstanding(rank.links)
    queued = int((mine & (launched < middle) & (rank.work["start"] >= gap[1])).sum())
    call, op = _host_at(rank, middle)
    where = f"host in {' in '.join(name for name in (call, op) if name) or 'no op of the trace'}"
    if queued:
        return f"{where}; {queued} launched and not begun", QUEUED
    return where, MEMORY_CALLS if takes_memory(call) else OTHER_HOST_WORK


def _host_at(rank: RankTrace, at: int) -> tuple[str, str]:
    """Return the API call that a thread was in and the op around it, or else an op; "" = none."""
    calls, ops, names = rank.links.calls, rank.timeline.ops, rank.timeline.names
    covering = np.flatnonzero((calls["start"] <= at) & (calls["end"] >= at))
    if len(covering):
        inside, call = rank.links.call_op[covering[:1]], rank.name(calls[covering[0]])
    else:
        threads = np.unique(calls["thread"])
        inside, call = innermost(ops, threads, np.full(len(threads), at, np.uint64)), ""
    return call, next((names[ops["name"][op]] for op in inside.tolist() if op >= 0), "")
