"""What happened on the host to sampled traces, as spans that link to the span it happened in."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from pasta_otel import semconv
from pasta_otel.ebpf import layout
from pasta_otel.ebpf.observer import Harvest
from pasta_otel.ebpf.probes import Api
from pasta_otel.ebpf.totals import event_name
from pasta_otel.ebpf.wall_clock import WallClock
from pasta_otel.model import HostSpan, LinkColumn, SpanColumns, SpanSite, StringColumn

TRACE_LIMIT = 200
TRACES = 4096
"""So many traces are remembered for the limit, the oldest forgotten first."""

_Key = tuple[bytes, bytes, int, int]  # trace, span, process, API


class HostSpans:
    """Makes host spans of harvests, so many a trace and no more.

    Args:
        apis: Which number means what.
        service_of: Service name of a process, or empty.
        limit: Most host spans a trace.
        outcomes: Counted here: ok, capped, unsampled.
    """

    def __init__(
        self,
        apis: Mapping[int, Api],
        service_of: Callable[[int], str],
        limit: int = TRACE_LIMIT,
        outcomes: Counter[str] | None = None,
    ) -> None:
        self._apis, self._service_of, self._limit = apis, service_of, limit
        self._early: list[layout.Event] = []  # they came in the moment in which their epoch began
        self._traces: OrderedDict[bytes, int] = OrderedDict()
        self.outcomes = Counter() if outcomes is None else outcomes

    def take(self, harvest: Harvest) -> list[HostSpan]:
        """Return one span per slow event, and one per (span, API) for the events that are no spans already."""
        alone: dict[_Key, list[layout.Event]] = {}
        spans = []
        for event in self._early:  # spans already, whose sums come now
            alone.setdefault(_key(event), []).append(event)
        for event in harvest.events:
            if self._admits(event.trace_id, event.link, event.sampled):
                alone.setdefault(_key(event), []).append(event)
                spans.append(self._of_event(event))
        for item in harvest.aggregates:
            told = alone.get(_key(item))
            left = item
            if told:
                within = [event for event in told if event.end_ns <= item.last_ns][: item.events]
                alone[_key(item)] = [event for event in told if event not in within]
                left = _without(item, within)
            if left.events and self._admits(item.trace_id, item.link, item.sampled):
                spans.append(self._of_aggregate(left))
        new = {*harvest.events} if alone else ()
        self._early = [event for events in alone.values() for event in events if event in new]
        return spans

    def _admits(self, trace_id: bytes, link: str, sampled: bool) -> bool:
        if link != "slot":
            return False
        if not sampled:
            self.outcomes["unsampled"] += 1
            return False
        count = self._traces.get(trace_id, 0)
        if count >= self._limit:
            self.outcomes["capped"] += 1
            return False
        self._traces[trace_id] = count + 1
        if len(self._traces) > TRACES:
            self._traces.popitem(last=False)
        self.outcomes["ok"] += 1
        return True

    def _of_event(self, event: layout.Event) -> HostSpan:
        duration = event.end_ns - event.start_ns
        return HostSpan(
            event.trace_id, event.span_id, "slot", event.start_ns, event.end_ns, event_name(self._apis[event.api]),
            self._service_of(event.tgid), event.tgid, event.tid, 1, duration, duration, event.size,
        )  # fmt: skip

    def _of_aggregate(self, item: layout.Aggregate) -> HostSpan:
        return HostSpan(
            item.trace_id, item.span_id, "slot", item.first_ns, item.last_ns, event_name(self._apis[item.api]),
            self._service_of(item.tgid), item.tgid, item.tid, item.events, item.sum_ns, item.max_ns, item.size,
        )  # fmt: skip


def _key(item: layout.Event | layout.Aggregate) -> _Key:
    return item.trace_id, item.span_id, item.tgid, item.api


def _without(item: layout.Aggregate, alone: Sequence[layout.Event]) -> layout.Aggregate:
    """Return a sum without the events that are spans of their own.

    What was the longest of the others is not known exactly: no longer than the bound of the last bucket of the
    histogram that has one left, nor than their sum.
    """
    if not alone:
        return item
    durations = [event.end_ns - event.start_ns for event in alone]
    buckets = [*item.histogram]
    for duration in durations:
        buckets[bisect_right(layout.BOUNDS_NS, duration)] -= 1
    last = max((place for place, count in enumerate(buckets) if count > 0), default=0)
    total = max(item.sum_ns - sum(durations), 0)
    longest = min(total, item.max_ns, *layout.BOUNDS_NS[last : last + 1])
    return item._replace(
        events=item.events - len(alone),
        sum_ns=total,
        max_ns=longest,
        size=max(item.size - sum(event.size for event in alone), 0),
        histogram=tuple(max(count, 0) for count in buckets),
    )


def host_columns(spans: Sequence[HostSpan], clock: WallClock, new_id: Callable[[], int]) -> SpanColumns:
    """Return host spans as columns: in the trace they belong to, with a link and no parent.

    They are no children of the application's spans: those belong to somebody else, who knows nothing of them.
    """
    import numpy as np  # noqa: PLC0415 - an optional extra, and 10 MB that an agent without spans does not need

    count = len(spans)
    names = [*dict.fromkeys(span.name for span in spans)]
    place = {name: number for number, name in enumerate(names)}
    traces = np.frombuffer(b"".join(span.trace_id for span in spans), np.uint8).reshape(count, 16)
    linked = np.frombuffer(b"".join(span.linked_span_id for span in spans), np.uint8).reshape(count, 8)
    ids = np.frombuffer(b"".join(new_id().to_bytes(8, "big") for _ in spans), np.uint8).reshape(count, 8)

    def integers(values: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.fromiter(values, np.int64, count)

    return SpanColumns(
        trace_id=traces,
        span_id=ids,
        parent_span_id=np.zeros((count, 8), np.uint8),
        start_time_unix_nano=clock.convert(integers(span.start_monotonic_ns for span in spans)),
        end_time_unix_nano=clock.convert(integers(span.end_monotonic_ns for span in spans)),
        site=integers(place[span.name] for span in spans).astype(np.int32),
        sites=[SpanSite(name, attributes=((semconv.HOST_EVENT, name),)) for name in names],
        attributes={
            semconv.PROCESS_PID: integers(span.pid for span in spans),
            semconv.THREAD_ID: integers(span.thread_id for span in spans),
            semconv.HOST_EVENTS: integers(span.events for span in spans),
            semconv.HOST_TIME_TOTAL: integers(span.total_ns for span in spans) / 1e9,
            semconv.HOST_TIME_MAX: integers(span.max_ns for span in spans) / 1e9,
            semconv.HOST_SIZE: integers(span.size for span in spans),
            semconv.HOST_SERVICE: _services(spans),
        },
        links=LinkColumn(traces, linked, ((semconv.LINK_METHOD, "slot"),)),
    )


def _services(spans: Sequence[HostSpan]) -> StringColumn:
    import numpy as np  # noqa: PLC0415 - as above

    names = [*dict.fromkeys(span.service for span in spans)]
    place = {name: number if name else -1 for number, name in enumerate(names)}
    return StringColumn(np.fromiter((place[span.service] for span in spans), np.int32, len(spans)), names)
