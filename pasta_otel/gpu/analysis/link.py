"""Which op each piece of GPU work came from: by id where the ids hold, else by thread and time, and said which.

The external id that the profiler writes on GPU work names the op that launched it. Older traces write the correlation
id in the same field, which may by chance equal some op's id: an id counts only when the launch call, if it is known,
lies within the op. Otherwise the innermost op of the launching thread at that moment is taken (method ``time``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from opentelemetry.metrics import Meter

from pasta_otel import semconv
from pasta_otel.gpu.analysis.timeline import OpKind, Ops, Timeline
from pasta_otel.gpu.cupti.rows import API_CALLS, DEVICE_WORK, Rows, is_kind

METHODS: Final = ("none", "id", "time")
ATTRIBUTION_COMPLETE_FROM: Final = 0.8
"""Share of GPU time that must have found its op before conclusions are drawn from the ops."""


@dataclass(frozen=True, slots=True)
class Links:
    """The joins of one timeline.

    Attributes:
        work: GPU kernels, copies and sets.
        call: For each the row number of its launch call in ``calls``; -1 = none in the trace.
        op: For each the row number of its op in ``Timeline.ops``; -1 = none.
        method: For each an index into ``METHODS``.
        calls: API calls.
        call_op: For each call the innermost op around it, by thread and time; -1 = none.
    """

    work: Rows
    call: NDArray[np.int64]
    op: NDArray[np.int64]
    method: NDArray[np.int8]
    calls: Rows
    call_op: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much GPU work found its op, and why the rest did not.

    Attributes:
        work: Pieces of GPU work.
        by_id: Joined by id.
        by_time: Joined by thread and time.
        no_launch: The launch call is not in the trace: it began before the trace did.
        no_op: The launch call lies in no op.
        time_ns: Sum of all durations.
        attributed_ns: Sum of the durations of joined work.
    """

    work: int
    by_id: int
    by_time: int
    no_launch: int
    no_op: int
    time_ns: int
    attributed_ns: int

    @property
    def by_count(self) -> float | None:
        """Return the share of pieces joined; None when there is no GPU work."""
        return (self.by_id + self.by_time) / self.work if self.work else None

    @property
    def by_duration(self) -> float | None:
        """Return the share of GPU time joined; None when there is none."""
        return self.attributed_ns / self.time_ns if self.time_ns else None

    @property
    def incomplete(self) -> bool:
        """Return whether too little GPU time is joined to conclude from ops."""
        return self.by_duration is not None and self.by_duration < ATTRIBUTION_COMPLETE_FROM


def link(timeline: Timeline) -> Links:
    """Join GPU work, launch calls and ops of one timeline (never across timelines: ids are the process's own)."""
    is_work, is_call = is_kind(timeline.rows, DEVICE_WORK), is_kind(timeline.rows, API_CALLS)
    work, calls = timeline.rows[is_work], timeline.rows[is_call]
    call = _calls_of(work, calls)
    call_op = innermost(timeline.ops, calls["thread"], calls["start"])
    op = np.full(len(work), -1, np.int64)
    method = np.zeros(len(work), np.int8)
    by_id = _ops_by_id(timeline, timeline.external[is_work], timeline.external[is_call], call, calls)
    op[by_id >= 0], method[by_id >= 0] = by_id[by_id >= 0], 1
    timed = np.where(call >= 0, call_op[call] if len(call_op) else -1, -1)
    by_time = (op < 0) & (timed >= 0)
    op[by_time], method[by_time] = timed[by_time], 2
    return Links(work, call, op, method, calls, call_op)


def coverage(links: Links) -> Coverage:
    """Count the joins."""
    duration = (links.work["end"] - links.work["start"]).astype(np.int64)
    joined = links.op >= 0
    return Coverage(
        work=len(links.work),
        by_id=int((links.method == 1).sum()),
        by_time=int((links.method == 2).sum()),
        no_launch=int((~joined & (links.call < 0)).sum()),
        no_op=int((~joined & (links.call >= 0)).sum()),
        time_ns=int(duration.sum()),
        attributed_ns=int(duration[joined].sum()),
    )


def record_coverage(meter: Meter, rank: int, found: Coverage) -> None:
    """Export the coverage of one rank as a gauge; a share that cannot be said is absent."""
    spec = semconv.METRICS[semconv.GPU_LINK_COVERAGE]
    gauge = meter.create_gauge(spec.name, spec.unit, spec.description)
    for by, share in (("count", found.by_count), ("duration", found.by_duration)):
        if share is not None:
            gauge.set(share, {semconv.TORCH_RANK: rank, "by": by})


def innermost(
    ops: Ops, thread: NDArray[Any], at: NDArray[Any], chosen: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Return for each (thread, time) the row of the shortest region around it; -1 = none.

    Regions of one thread nest, so that the last one begun that has not ended is the innermost: a stack, swept once.

    Args:
        ops: Host regions.
        thread: Threads asked about.
        at: Times asked about.
        chosen: Which regions count; ops by default.
    """
    out = np.full(len(thread), -1, np.int64)
    wanted = ops["kind"] == OpKind.OP if chosen is None else chosen
    candidates = np.flatnonzero(wanted & ~ops["unfinished"])
    if not len(candidates) or not len(thread):
        return out
    for number in np.unique(thread).tolist():
        mine = candidates[ops["thread"][candidates] == number]
        asked = np.flatnonzero(thread == number)
        if len(mine):
            out[asked] = _sweep(ops, mine, at[asked])
    return out


def _sweep(ops: Ops, rows: NDArray[np.int64], at: NDArray[Any]) -> NDArray[np.int64]:
    order = rows[np.lexsort((-ops["end"][rows].astype(np.int64), ops["start"][rows]))]
    starts, ends = ops["start"][order].tolist(), ops["end"][order].tolist()
    out = np.full(len(at), -1, np.int64)
    stack: list[int] = []
    next_op, count = 0, len(order)
    for position in np.argsort(at, kind="stable").tolist():
        time = int(at[position])
        while next_op < count and starts[next_op] <= time:
            while stack and ends[stack[-1]] <= starts[next_op]:
                stack.pop()
            stack.append(next_op)
            next_op += 1
        while stack and ends[stack[-1]] < time:
            stack.pop()
        if stack:
            out[position] = order[stack[-1]]
    return out


def _calls_of(work: Rows, calls: Rows) -> NDArray[np.int64]:
    """Return the launch call of each piece of work: many pieces may share one (a CUDA graph's replay)."""
    out = np.full(len(work), -1, np.int64)
    usable = np.flatnonzero(calls["correlation"] != 0)
    if not len(usable) or not len(work):
        return out
    order = usable[np.argsort(calls["correlation"][usable], kind="stable")]
    keys = calls["correlation"][order]
    at = np.minimum(np.searchsorted(keys, work["correlation"]), len(keys) - 1)
    found = (keys[at] == work["correlation"]) & (work["correlation"] != 0)
    out[found] = order[at[found]]
    return out


def _ops_by_id(
    timeline: Timeline,
    work_external: NDArray[np.int64],
    call_external: NDArray[np.int64],
    call: NDArray[np.int64],
    calls: Rows,
) -> NDArray[np.int64]:
    ops = timeline.ops
    rows = np.flatnonzero((ops["kind"] == OpKind.OP) & (ops["external"] != 0))
    out = np.full(len(call), -1, np.int64)
    if not len(rows) or not len(call):
        return out
    order = rows[np.argsort(ops["external"][rows], kind="stable")]
    keys = ops["external"][order]
    of_call = np.where(call >= 0, call_external[call] if len(call_external) else 0, 0)
    for external in (work_external, of_call):
        at = np.minimum(np.searchsorted(keys, external), len(keys) - 1)
        candidate = order[at]
        found = (keys[at] == external) & (external != 0) & _launched_within(ops, candidate, call, calls)
        out = np.where((out < 0) & found, candidate, out)
    return out


def _launched_within(ops: Ops, candidate: NDArray[np.int64], call: NDArray[np.int64], calls: Rows) -> NDArray[np.bool_]:
    known = call >= 0
    if not len(calls):
        return ~known
    start, thread = calls["start"][call], calls["thread"][call]
    op = ops[candidate]
    inside = (op["start"] <= start) & (start <= op["end"]) & (op["thread"] == thread)
    within: NDArray[np.bool_] = ~known | inside | (known & op["unfinished"] & (op["start"] <= start))
    return within
