"""An in-memory span store: answers the attribution's questions from a list of spans, in plain Python."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pasta_otel.model import EdgeKey, HostSample, ModuleKey, OperationKey, Samples, SpanRef, TimeWindow
from pasta_otel.slo.attribution.ports import SAMPLE_LIMIT

Kind = Literal["server", "client", "internal"]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """One span as the attribution sees it; ``module`` is set for torch module spans, ``peer`` for client spans."""

    trace_id: str
    span_id: str
    parent_span_id: str
    service: str
    operation: str
    kind: Kind
    start_time_unix_nano: int
    end_time_unix_nano: int
    error: bool = False
    module: str = ""
    peer: str = ""

    @property
    def duration_ns(self) -> int:
        """Return end minus start."""
        return self.end_time_unix_nano - self.start_time_unix_nano


@dataclass
class MemorySpanStore:
    """Implements ``SpanStore``, ``RequestDirectory`` and ``HostSeries`` over lists."""

    spans: Sequence[MemorySpan] = ()
    host: Sequence[HostSample] = ()
    _children: dict[tuple[str, str], list[MemorySpan]] = field(default_factory=lambda: defaultdict(list), init=False)

    def __post_init__(self) -> None:
        """Index the children of every span."""
        for span in self.spans:
            self._children[span.trace_id, span.parent_span_id].append(span)

    def operation_self_times(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[OperationKey, Samples]:
        """Return the self time of server and internal spans."""
        spans = [s for s in self._select(window, through) if s.kind != "client" and not s.module]
        return _group(spans, lambda s: OperationKey(s.service, s.operation), self._self_ns, limit)

    def edge_gaps(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[EdgeKey, Samples]:
        """Return client minus server duration per edge."""
        spans = [s for s in self._select(window, through) if s.kind == "client"]
        return _group(spans, self._edge, lambda s: s.duration_ns - self._server_ns(s), limit)

    def edge_durations(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[EdgeKey, Samples]:
        """Return client durations per edge."""
        spans = [s for s in self._select(window, through) if s.kind == "client"]
        return _group(spans, self._edge, lambda s: s.duration_ns, limit)

    def module_self_times(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[ModuleKey, Samples]:
        """Return the self time of module spans."""
        spans = [s for s in self._select(window, through) if s.module]
        return _group(spans, lambda s: ModuleKey(s.service, s.module), self._self_ns, limit)

    def known_requests(self) -> Mapping[OperationKey, TimeWindow]:
        """Return every (service, operation) with server spans, and from the first to the last of their ends."""
        ends: dict[OperationKey, list[int]] = defaultdict(list)
        for span in self.spans:
            if span.kind == "server":
                ends[OperationKey(span.service, span.operation)].append(span.end_time_unix_nano)
        return {key: TimeWindow(min(times), max(times) + 1) for key, times in ends.items()}

    def host_samples(self, window: TimeWindow) -> Sequence[HostSample]:
        """Return the readings in the window."""
        inside = [s for s in self.host if window.start_unix_nano <= s.time_unix_nano < window.end_unix_nano]
        return sorted(inside, key=lambda s: (s.service, s.pid, s.metric, s.time_unix_nano))

    def _select(self, window: TimeWindow, through: OperationKey | None) -> list[MemorySpan]:
        start, end = window.start_unix_nano, window.end_unix_nano
        inside = [s for s in self.spans if start <= s.end_time_unix_nano < end]
        if through is None:
            return inside
        traces = {
            s.trace_id
            for s in self.spans
            if s.kind == "server" and s.service == through.service and through.operation in {"*", s.operation}
        }
        return [s for s in inside if s.trace_id in traces]

    def _self_ns(self, span: MemorySpan) -> int:
        return span.duration_ns - union_ns(
            (max(c.start_time_unix_nano, span.start_time_unix_nano), min(c.end_time_unix_nano, span.end_time_unix_nano))
            for c in self._children[span.trace_id, span.span_id]
        )

    def _server(self, span: MemorySpan) -> MemorySpan | None:
        return next((c for c in self._children[span.trace_id, span.span_id] if c.kind == "server"), None)

    def _server_ns(self, span: MemorySpan) -> int:
        server = self._server(span)
        return server.duration_ns if server else 0

    def _edge(self, span: MemorySpan) -> EdgeKey:
        server = self._server(span)
        return EdgeKey(span.service, server.service if server else span.peer)


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    covered, reach = 0, None
    for start, end in sorted(intervals):
        begin = start if reach is None else max(start, reach)
        if end > begin:
            covered += end - begin
        reach = end if reach is None else max(reach, end)
    return covered


def _group(
    spans: Iterable[MemorySpan], key: Callable[[MemorySpan], Key], value: Callable[[MemorySpan], int], limit: int
) -> dict[Key, Samples]:
    groups: dict[Key, list[tuple[int, MemorySpan]]] = defaultdict(list)
    for span in spans:
        groups[key(span)].append((value(span), span))
    return {name: _samples(rows, limit) for name, rows in groups.items()}


def _samples(rows: list[tuple[int, MemorySpan]], limit: int) -> Samples:
    values = [value for value, _ in rows]
    if len(values) > limit:
        values = random.Random(0).sample(values, limit)  # noqa: S311 - a uniform sample, not a secret
    worst = sorted(rows, key=lambda row: (row[1].error, row[0], row[1].span_id), reverse=True)[:3]
    return Samples(
        values_ns=tuple(values),
        count=len(rows),
        errors=sum(span.error for _, span in rows),
        requests=len({span.trace_id for _, span in rows}),
        examples=tuple(SpanRef(span.trace_id, span.span_id) for _, span in worst),
    )
