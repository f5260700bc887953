"""The attribution's questions: one grouped scan each over ``span_times``, no joins between spans."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pasta_otel.correlate import flag_names
from pasta_otel.exporters.store.dimensions import Dimensions
from pasta_otel.exporters.store.traces import ROLE_EDGE, ROLE_MODULE, ROLE_OPERATION
from pasta_otel.model import EdgeKey, HostSample, ModuleKey, OperationKey, Samples, SpanRef, TimeWindow

_SERVER = 2  # SpanKind
_EXAMPLES = 3
_FAILED_FIRST = 2**61  # added to a failed span's value, so that failures come before slow ones


class _Grouping(NamedTuple):
    """What one question groups, and by what."""

    role: int
    value: str
    source: str
    keys: str


_OPERATIONS = ("operations d on t.key_id = d.op_id", "d.service, d.operation")
_EDGES = ("edges d on t.key_id = d.edge_id", "d.caller, d.callee")
_MODULES = ("modules d on t.key_id = d.module_id", "d.service, d.module")


class Questions:
    """Answer ``pasta_otel.slo.attribution.ports.SpanStore`` and ``HostSeries`` from DuckDB.

    Args:
        open_cursor: Returns a new cursor; each question has its own, so questions may be asked from any thread.
        dimensions: What the numbers mean.
    """

    def __init__(self, open_cursor: Callable[[], Any], dimensions: Dimensions) -> None:
        self._cursor, self._dimensions = open_cursor, dimensions

    def operation_self_times(
        self, window: TimeWindow, through: OperationKey | None, limit: int
    ) -> dict[OperationKey, Samples]:
        """Return self times by (service, operation); spans of several kinds with one name are one operation."""
        rows = self._grouped(_Grouping(ROLE_OPERATION, "self_ns", *_OPERATIONS), window, through, limit)
        return {OperationKey(row[0], row[1]): _samples(row) for row in rows}

    def edges(self, value: str, window: TimeWindow, through: OperationKey | None, limit: int) -> dict[EdgeKey, Samples]:
        """Return ``gap_ns`` or ``duration_ns`` by (caller, callee)."""
        rows = self._grouped(_Grouping(ROLE_EDGE, value, *_EDGES), window, through, limit)
        return {EdgeKey(row[0], row[1]): _samples(row) for row in rows}

    def module_self_times(
        self, window: TimeWindow, through: OperationKey | None, limit: int
    ) -> dict[ModuleKey, Samples]:
        """Return self times by (service, module path)."""
        rows = self._grouped(_Grouping(ROLE_MODULE, "self_ns", *_MODULES), window, through, limit)
        return {ModuleKey(row[0], row[1]): _samples(row) for row in rows}

    def known_requests(self) -> dict[OperationKey, TimeWindow]:
        """Return when the first and the last server span of each (service, operation) ended."""
        query = f"""
            select o.service, o.operation, min(s.end_unix_nano), max(s.end_unix_nano)
            from spans s join operations o using (op_id)
            where o.kind = {_SERVER} and s.end_unix_nano > 0 group by all"""  # noqa: S608 - our own numbers
        with self._cursor() as cursor:
            rows = cursor.execute(query).fetchall()
        return {OperationKey(service, name): TimeWindow(first, last + 1) for service, name, first, last in rows}

    def _grouped(
        self, grouping: _Grouping, window: TimeWindow, through: OperationKey | None, limit: int
    ) -> list[tuple[Any, ...]]:
        routes = None if through is None else self._dimensions.routes_through(*through)
        if routes == []:
            return []
        chosen = "" if routes is None else "and t.route_id in (select unnest(?::integer[]))"
        query = f"""
            select {grouping.keys}, count(*), count_if(t.error), count(distinct t.trace_lo),
                   arg_min(t.{grouping.value}, hash(t.span_id), {max(1, limit)}),
                   arg_max([t.trace_hi, t.trace_lo, t.span_id],
                           t.{grouping.value} // 2 + t.error::bigint * {_FAILED_FIRST},
                           {_EXAMPLES})
            from span_times t join {grouping.source}
            where t.role = {grouping.role} and t.end_unix_nano >= {window.start_unix_nano}
              and t.end_unix_nano < {window.end_unix_nano} {chosen}
            group by all"""  # noqa: S608 - our own names and numbers
        with self._cursor() as cursor:
            rows: list[tuple[Any, ...]] = cursor.execute(query, [] if routes is None else [routes]).fetchall()
        return rows

    def host_samples(self, window: TimeWindow) -> list[HostSample]:
        """Return the readings of a window, ordered by (service, pid, metric, time)."""
        query = """select service, pid, metric, time_unix_nano, value from host_samples
                   where time_unix_nano >= ? and time_unix_nano < ? order by 1, 2, 3, 4"""
        with self._cursor() as cursor:
            rows = cursor.execute(query, [window.start_unix_nano, window.end_unix_nano]).fetchall()
        return [HostSample(*row) for row in rows]

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """Return every span of a trace, earliest first, for a waterfall."""
        number = int(trace_id, 16)
        query = """
            select o.service, o.operation, o.kind, s.span_id, s.parent_span_id, s.raw_start_unix_nano,
                   s.raw_end_unix_nano, s.duration_ns, s.status, s.status_message, s.flags, s.attributes, s.events,
                   s.links, r.attributes, t.self_ns, t.gap_ns, t.flags
            from spans s join operations o using (op_id) left join resources r using (resource_id)
              left join span_times t
                on t.trace_hi = s.trace_hi and t.trace_lo = s.trace_lo and t.span_id = s.span_id
                and t.end_unix_nano = s.end_unix_nano
            where s.trace_hi = ? and s.trace_lo = ?
            order by s.raw_start_unix_nano, s.span_id"""
        with self._cursor() as cursor:
            rows = cursor.execute(query, [number >> 64, number & (2**64 - 1)]).fetchall()
        return [_record(trace_id, row) for row in rows]

    def slow_requests(self, service: str, operation: str, window: TimeWindow, n: int) -> list[dict[str, Any]]:
        """Return the slowest server spans of an operation, slowest first."""
        query = """
            select s.trace_hi, s.trace_lo, s.span_id, s.duration_ns, s.status, s.end_unix_nano
            from spans s join operations o using (op_id)
            where o.service = ? and (? = '*' or o.operation = ?) and o.kind = 2
              and s.end_unix_nano >= ? and s.end_unix_nano < ?
            order by s.duration_ns desc limit ?"""
        values = [service, operation, operation, window.start_unix_nano, window.end_unix_nano, n]
        with self._cursor() as cursor:
            rows = cursor.execute(query, values).fetchall()
        return [
            {
                "ref": span_ref(high, low, span),
                "duration_ns": duration,
                "error": status == 2,
                "end_time_unix_nano": end,
            }
            for high, low, span, duration, status, end in rows
        ]


def span_ref(trace_hi: int, trace_lo: int, span_id: int) -> SpanRef:
    """Return stored numbers as the hex ids that people see."""
    return SpanRef(f"{trace_hi:016x}{trace_lo:016x}", f"{span_id:016x}")


def _samples(row: Sequence[Any]) -> Samples:
    _, _, count, errors, requests, values, examples = row
    return Samples(tuple(values), count, int(errors), requests, tuple(span_ref(*example) for example in examples))


def _record(trace_id: str, row: Sequence[Any]) -> dict[str, Any]:
    service, name, kind, span, parent, start, end, duration, status, message, flags = row[:11]
    attributes, events, links, resource, self_ns, gap_ns, structure = row[11:]
    return {
        "trace_id": trace_id,
        "span_id": f"{span:016x}",
        "parent_span_id": f"{parent:016x}" if parent else None,
        "service": service,
        "name": name,
        "kind": kind,
        "start_time_unix_nano": start,
        "end_time_unix_nano": end,
        "duration_ns": duration,
        "self_time_ns": self_ns,
        "edge_gap_ns": gap_ns if kind == 3 else None,
        "status": {0: "unset", 1: "ok", 2: "error"}.get(status, "unset"),
        "status_message": message,
        "flags": flag_names(flags | (structure or 0)),
        "attributes": json.loads(attributes),
        "events": json.loads(events) if events else [],
        "links": json.loads(links) if links else [],
        "resource": json.loads(resource) if resource else {},
    }
