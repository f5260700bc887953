"""The host waits for the GPU in the middle of a step: which call, from which line, for how much of the step.

A call that can wait counts only as far as GPU work was queued or ran within it: the rest of a cudaFree is the driver's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.calls import frees_memory, outermost, synchronizing
from pasta_otel.gpu.analysis.intervals import covered, intersection, times
from pasta_otel.gpu.analysis.launches import outstanding
from pasta_otel.gpu.analysis.link import innermost
from pasta_otel.gpu.analysis.timeline import OpKind
from pasta_otel.gpu.cupti.rows import Rows
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "sync_stall"
PLACES = 5
LINE = re.compile(r"^(?!(?:.*/)?torch/).*\.py\(\d+\)")
"""A Python frame with a line, ``model.py(123): forward``, outside torch itself."""
WAIT_LESS = (
    "keep values on the GPU until the end of the step: no .item(), .cpu(), print, data-dependent branch;"
    " copy with non_blocking=True from pinned memory"
)
FREE_LESS = (
    "keep memory: cudaFree waits for all work queued. No torch.cuda.empty_cache() within a step; leave the allocator"
    " room, so that it need not give blocks back to get others (expandable_segments:True, equal shapes)"
)


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find ranks whose host spends much of the window in calls that wait for GPU work."""
    limits = thresholds(KIND)
    for rank in ranks:
        waits, pending = _waits(rank), outstanding(rank.links)
        waited_ns = covered(times(waits), *pending)
        waits, waited_ns = waits[waited_ns > 0], waited_ns[waited_ns > 0]
        if len(waits) < limits["calls"].value or not rank.window_ns:
            continue
        total_ns = intersection(times(waits), pending)  # threads that wait at once count once
        share = total_ns / (sum(end - start for start, end in rank.steps) or rank.window_ns)
        if share < limits["step_share"].value:
            continue
        of = "steps" if rank.steps else "time"
        frees = np.array([frees_memory(rank.name(row)) for row in waits], np.bool_)
        by_frees = waited_ns[frees].sum() > waited_ns[~frees].sum()
        yield Finding(
            KIND,
            rank.timeline.rank,
            min(share, 1.0),
            f"the host waits for the GPU in {len(waits)} calls, {share:.0%} of the {of}"
            + (", mostly where it gives memory back" if by_frees else ""),
            tuple(_places(rank, waits, waited_ns)),
            FREE_LESS if by_frees else WAIT_LESS,
            limits,
        )


def _waits(rank: RankTrace) -> Rows:
    """Return the waiting calls between the first and the last piece of GPU work: the final wait is not a stall."""
    calls = rank.links.calls
    launches = calls[np.unique(rank.links.call[rank.links.call >= 0])]
    if not len(launches):
        return calls[:0]
    inside = (calls["start"] >= launches["start"].min()) & (calls["start"] < launches["start"].max())
    if steps := rank.steps:
        inside &= np.any([(calls["start"] >= start) & (calls["start"] < end) for start, end in steps], axis=0)
    return outermost(calls[synchronizing(rank.timeline, calls) & inside])


def _places(rank: RankTrace, waits: Rows, duration: NDArray[np.int64]) -> Iterable[Evidence]:
    ops = rank.timeline.ops
    op = innermost(ops, waits["thread"], waits["start"])
    lines = np.array([LINE.match(name) is not None for name in rank.timeline.names], np.bool_)
    frame = innermost(ops, waits["thread"], waits["start"], (ops["kind"] == OpKind.PYTHON) & lines[ops["name"]])
    totals: dict[str, list[int]] = {}
    for row, in_op, in_frame, ns in zip(waits, op.tolist(), frame.tolist(), duration.tolist(), strict=True):
        where = [rank.name(row)]
        if in_op >= 0:
            where.append(f"in {rank.timeline.names[ops['name'][in_op]]}")
        if in_frame >= 0:
            where.append(f"at {rank.timeline.names[ops['name'][in_frame]]}")
        elif in_op >= 0 and ops["stack"][in_op]:
            where.append(f"at {rank.timeline.names[ops['stack'][in_op]].splitlines()[0]}")
        entry = totals.setdefault(" ".join(where), [0, 0])
        entry[0] += ns
        entry[1] += 1
    for place, (ns, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:PLACES]:
        yield Evidence("wait", ns / 1e9, "s", f"{place} ({count} times)")
