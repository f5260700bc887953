"""Good and total events of many SLIs and windows in one grouped pass over the spans."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pasta_otel.correlate import SpanFlag
from pasta_otel.exporters.store.columns import MAX_INT64
from pasta_otel.exporters.store.dimensions import OperationId
from pasta_otel.model import CountRequest, EventCounts, SpanSLI

MAX_BINS = 64  # distinct latency thresholds of one pass; above, bins would outnumber the spans' operations
MAX_CUTS = 64  # of one indicator; above (slices), a join finds the segment, and nobody else's windows are cut up
KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
Where = tuple[tuple[str, str | int | float | bool], ...]


class Tally(NamedTuple):
    """Events of one (segment of time, operation, threshold), each weighing what it stands for."""

    total: float = 0.0
    ok: float = 0.0
    fast: float = 0.0
    ok_and_fast: float = 0.0
    unknown: int = 0

    def plus(self, other: Tally) -> Tally:
        """Return the sum."""
        return Tally(
            self.total + other.total,
            self.ok + other.ok,
            self.fast + other.fast,
            self.ok_and_fast + other.ok_and_fast,
            self.unknown + other.unknown,
        )

    def good(self, sli: SpanSLI) -> float:
        """Return the events that met the SLI's conditions."""
        if sli.threshold_ns is None:
            return self.ok if sli.good_status else self.total
        return self.ok_and_fast if sli.good_status else self.fast


class Plan:
    """What one pass has to group by, for the requests that share a ``where``."""

    def __init__(self, requests: Sequence[CountRequest], operations: Sequence[OperationId]) -> None:
        self.requests = requests
        by_service: dict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
        for number, (service, name, kind) in enumerate(operations):
            by_service[service, kind].append((number, name))
        self._ops: dict[tuple[str, str | None, str], tuple[int, ...]] = {}
        for request in requests:
            sli: SpanSLI = request.sli
            key = (sli.service, sli.operation, sli.kind)
            if key not in self._ops:
                members = by_service[sli.service, KINDS[sli.kind]]
                self._ops[key] = tuple(op for op, name in members if sli.operation in (None, name))
        self.cuts = sorted(
            {cut for request in requests for cut in (request.window.start_unix_nano, request.window.end_unix_nano)}
        )
        self._segment = {cut: number for number, cut in enumerate(self.cuts)}

    def ops(self, sli: SpanSLI) -> tuple[int, ...]:
        """Return the numbers of the operations that an SLI is about."""
        return self._ops[sli.service, sli.operation, sli.kind]

    def probes(self) -> list[tuple[int, int]]:
        """Return the distinct (operation, threshold) pairs; no threshold is the largest one."""
        return sorted({(op, _threshold(request.sli)) for request in self.requests for op in self.ops(request.sli)})

    def segments(self, request: CountRequest) -> range:
        """Return the segments that make up a request's window."""
        window = request.window
        return range(self._segment[window.start_unix_nano], self._segment[window.end_unix_nano])


def _threshold(sli: SpanSLI) -> int:
    return MAX_INT64 if sli.threshold_ns is None else sli.threshold_ns


def segment_source(cursor: Any, cuts: Sequence[int]) -> tuple[str, str]:
    """Return SQL for a span's segment and for the spans: bisection between few cuts, a join over many.

    Registers the table ``cut`` when there are many; the caller unregisters it.
    """
    if len(cuts) <= 2 * MAX_CUTS:
        return segment_expression(cuts), "spans s"
    starts = np.array(cuts[:-1], dtype=np.int64)
    cursor.register("cut", {"start_ns": starts, "segment": np.arange(len(starts), dtype=np.int64)})
    return "cut.segment", "spans s asof join cut on s.end_unix_nano >= cut.start_ns"


def segment_expression(cuts: Sequence[int]) -> str:
    """Return SQL that says between which two cuts ``end_unix_nano`` lies, by bisection."""
    return _bisection("s.end_unix_nano < {}", cuts[1:-1])


def bin_expression(thresholds: Sequence[int]) -> str:
    """Return SQL that says how many of the sorted thresholds ``duration_ns`` exceeds, by bisection."""
    return _bisection("s.duration_ns <= {}", thresholds)


def _bisection(below: str, limits: Sequence[int]) -> str:
    """Return SQL for the number of limits that are not ``below``."""

    def branch(low: int, high: int) -> str:
        if high == low:
            return str(low)
        middle = (low + high) // 2
        condition = below.format(limits[middle])
        return f"case when {condition} then {branch(low, middle)} else {branch(middle + 1, high)} end"

    return branch(0, len(limits))


def tallies(cursor: Any, plan: Plan, where: Where, grace_ns: int) -> dict[tuple[int, int, int], Tally]:
    """Scan the spans once and return the tally of every (segment, operation, threshold)."""
    probes = plan.probes()
    if not probes or len(plan.cuts) < 2:
        return {}
    conditions, values = _attribute_conditions(where)
    conditions = (
        f"s.end_unix_nano >= {plan.cuts[0]} and s.end_unix_nano < {plan.cuts[-1]} and s.end_unix_nano > 0"
        f" and s.lateness_ns <= {grace_ns} {conditions}"
    )
    ops, thresholds = (np.array(column) for column in zip(*probes, strict=True))
    cursor.register("probe", {"op_id": ops.astype(np.int32), "threshold_ns": thresholds.astype(np.int64)})
    try:
        if len(set(thresholds.tolist())) <= MAX_BINS:
            return _binned(cursor, plan, conditions, values)
        return _joined(cursor, plan, conditions, values)
    finally:
        cursor.unregister("probe")
        cursor.unregister("cut")


def _binned(cursor: Any, plan: Plan, conditions: str, values: Sequence[str]) -> dict[tuple[int, int, int], Tally]:
    """Group every span once, by the bin between two thresholds that its duration falls into, and add the bins up."""
    probes = plan.probes()
    limits = sorted({threshold for _, threshold in probes})
    segment, source = segment_source(cursor, plan.cuts)
    query = f"""
        select {segment} as segment, s.op_id as op_id, {bin_expression(limits)} as bin,
               sum(s.weight), coalesce(sum(s.weight) filter (s.status <> 2), 0),
               count_if((s.flags & {int(SpanFlag.SAMPLED)}) != 0)
        from {source} where s.op_id in (select op_id from probe) and {conditions}
        group by all"""  # noqa: S608 - our own numbers; attribute values are parameters
    bins: dict[tuple[int, int], dict[int, tuple[float, float, int]]] = defaultdict(dict)
    for segment, op, number, total, ok, unknown in cursor.execute(query, values).fetchall():
        bins[segment, op][number] = (total, ok, unknown)
    thresholds: dict[int, list[int]] = defaultdict(list)
    for op, threshold in probes:
        thresholds[op].append(threshold)
    return {
        (segment, op, threshold): _tally(found, limits.index(threshold))
        for (segment, op), found in bins.items()
        for threshold in thresholds[op]
    }


def _tally(bins: Mapping[int, tuple[float, float, int]], last: int) -> Tally:
    """Return the tally of a threshold: durations in the bins up to its own are within it."""
    fast = [values for number, values in bins.items() if number <= last]
    return Tally(
        math.fsum(total for total, _, _ in bins.values()),
        math.fsum(ok for _, ok, _ in bins.values()),
        math.fsum(total for total, _, _ in fast),
        math.fsum(ok for _, ok, _ in fast),
        sum(unknown for _, _, unknown in bins.values()),
    )


def _joined(cursor: Any, plan: Plan, conditions: str, values: Sequence[str]) -> dict[tuple[int, int, int], Tally]:
    """Join every span with the thresholds of its operation: for so many of them that bins would not stay few."""
    segment, source = segment_source(cursor, plan.cuts)
    query = f"""
        with grouped as (
          select {segment} as segment, s.op_id as op_id, p.threshold_ns as threshold_ns,
                 s.status = 2 as failed, s.duration_ns <= p.threshold_ns as fast, s.weight as weight,
                 (s.flags & {int(SpanFlag.SAMPLED)}) != 0 as unknown
          from {source} join probe p on s.op_id = p.op_id where {conditions}
        )
        select segment, op_id, threshold_ns, sum(weight), coalesce(sum(weight) filter (not failed), 0),
               coalesce(sum(weight) filter (fast), 0), coalesce(sum(weight) filter (fast and not failed), 0),
               count_if(unknown)
        from grouped group by all"""  # noqa: S608 - our own numbers; attribute values are parameters
    return {(row[0], row[1], row[2]): Tally(*row[3:]) for row in cursor.execute(query, values).fetchall()}


def _attribute_conditions(where: Where) -> tuple[str, list[str]]:
    """Compare as text: an attribute 200 equals "200", as people write it in YAML."""
    conditions, values = "", []
    for key, value in where:
        conditions += " and json_extract_string(s.attributes, ?) = ?"
        pointer = "/" + key.replace("~", "~0").replace("/", "~1")
        values += [pointer, value if isinstance(value, str) else json.dumps(value)]
    return conditions, values


def count(  # noqa: PLR0913, PLR0917 - the store's state and the question
    open_cursor: Callable[[], Any],
    requests: Sequence[CountRequest],
    operations: Sequence[OperationId],
    now_unix_nano: int,
    since_unix_nano: int,
    grace_ns: int,
) -> list[EventCounts]:
    """Return one EventCounts a request, in order; one pass for each distinct ``where``, one more where slices are."""
    answers: list[EventCounts | None] = [_unanswerable(request, now_unix_nano) for request in requests]
    times = Counter(request.sli for number, request in enumerate(requests) if answers[number] is None)
    passes: Mapping[tuple[Where, bool], list[int]] = _group(
        ((request.sli.where, times[request.sli] > MAX_CUTS), number)
        for number, request in enumerate(requests)
        if answers[number] is None
    )
    for (where, _), numbers in passes.items():
        plan = Plan([requests[number] for number in numbers], operations)
        with open_cursor() as cursor:
            found = tallies(cursor, plan, where, grace_ns)
        for number in numbers:
            answers[number] = _answer(plan, requests[number], found, now_unix_nano, since_unix_nano)
    return [answer for answer in answers if answer is not None]


def _group(pairs: Iterable[tuple[tuple[Where, bool], int]]) -> Mapping[tuple[Where, bool], list[int]]:
    groups: dict[tuple[Where, bool], list[int]] = defaultdict(list)
    for key, number in pairs:
        groups[key].append(number)
    return groups


def _unanswerable(request: CountRequest, now_unix_nano: int) -> EventCounts | None:
    sli, window = request.sli, request.window
    if not isinstance(sli, SpanSLI):
        return EventCounts(0, 0, "invalid", f"the span store cannot answer for {type(sli).__name__}")
    if sli.kind not in KINDS:
        return EventCounts(0, 0, "invalid", f"kind {sli.kind!r} is none of {', '.join(KINDS)}")
    if window.end_unix_nano <= window.start_unix_nano:
        return EventCounts(0, 0, "invalid", "the window is empty")
    if window.start_unix_nano >= now_unix_nano:
        return EventCounts(0, 0, "future", "the window has not begun", coverage=0.0)
    return None


def _answer(
    plan: Plan,
    request: CountRequest,
    found: Mapping[tuple[int, int, int], Tally],
    now_unix_nano: int,
    since_unix_nano: int,
) -> EventCounts:
    threshold = _threshold(request.sli)
    tally = Tally()
    for op in plan.ops(request.sli):
        for segment in plan.segments(request):
            part = found.get((segment, op, threshold))
            if part is not None:
                tally = tally.plus(part)
    covered = coverage(request, now_unix_nano, since_unix_nano)
    if tally.unknown:
        detail = f"{tally.unknown} spans were sampled with unknown probability (no th: in tracestate)"
        return EventCounts(0, 0, "sampled", detail, coverage=covered)
    if tally.total == 0:
        return EventCounts(0, 0, "no_traffic", "no event ended in the window", coverage=covered)
    return EventCounts(tally.good(request.sli), tally.total, coverage=covered)


def coverage(request: CountRequest, now_unix_nano: int, since_unix_nano: int) -> float:
    """Return the share of the window's elapsed part that the store was there for."""
    start, end = request.window.start_unix_nano, min(request.window.end_unix_nano, now_unix_nano)
    return max(0.0, min(1.0, (end - max(start, since_unix_nano)) / (end - start)))


__all__ = ["KINDS", "Plan", "Tally", "count", "coverage", "segment_expression", "tallies"]
