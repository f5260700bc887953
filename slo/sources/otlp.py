"""SLIs from OTLP metrics that the receiver hands on: delta and cumulative sums and histograms, resets and gaps.

Only the points that some SLO selects are kept, as growth per (selector, time), so memory is bounded by SLOs and time.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from pasta_otel.clock import Clock
from pasta_otel.model import CountRequest, EventCounts, TimeWindow
from pasta_otel.slo.spec.model import OtlpSLI, PointSelector
from pasta_otel.slo.spec.otlp import attribute_text

NS_PER_SECOND = 1_000_000_000
DELTA, CUMULATIVE = 1, 2  # opentelemetry.proto.metrics.v1.AggregationTemporality
_NO_RECORDED_VALUE = 1
MAX_SERIES = 100_000
ENDED_NS, FORGET_EVERY_NS = 24 * 3600 * NS_PER_SECOND, 60 * NS_PER_SECOND
FORGET_FROM = 1024
HISTOGRAMS = ("histogram", "exponential_histogram")
BOUND_ROUNDING = 1e-12  # of a bound's logarithm: floating point


class PointBatch(Protocol):
    """What the receiver hands on."""

    @property
    def body(self) -> bytes:
        """Return a serialised ``ExportMetricsServiceRequest``."""

    @property
    def points(self) -> int:
        """Return how many points it holds."""


class PointLedger(Protocol):
    """The account of points."""

    def settle(self, sink: str, ok: int = 0, dropped: Mapping[str, int] | None = None) -> None:
        """Move pending points of a sink to ok or dropped."""


@dataclass(frozen=True, slots=True)
class OtlpLimits:
    """Bounds.

    Attributes:
        retention_ns: How long growth is kept: the longest period of the SLOs.
        stale_ns: Silence of a total after which nothing can be said.
        future_ns: How far a point's time may lie ahead of our clock.
    """

    retention_ns: int = 31 * 86_400 * NS_PER_SECOND
    stale_ns: int = 300 * NS_PER_SECOND
    future_ns: int = 60 * NS_PER_SECOND


class _Point(NamedTuple):
    """One number of one series at one time; ``exact`` is False when a threshold lies inside a bucket."""

    key: tuple[Any, ...]
    attributes: Mapping[str, str]
    start_ns: int
    time_ns: int
    temporality: int
    value: float
    exact: bool


@dataclass(slots=True)
class _Growth:
    """Growth of one selector by time, kept sorted, with running sums that are brought up to date when asked for.

    Counts are whole numbers below 2^53, for which the sums are exact.
    """

    times: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    summed: int = 0
    base: float = 0.0
    newest_ns: int = 0
    exact: bool = True
    resets: int = 0

    def add(self, time_ns: int, value: float) -> None:
        at = bisect_left(self.times, time_ns)
        if at < len(self.times) and self.times[at] == time_ns:
            self.values[at] += value
        else:
            self.times.insert(at, time_ns)
            self.values.insert(at, value)
            self.sums.insert(at, 0.0)
        self.summed = min(self.summed, at)

    def within(self, window: TimeWindow) -> float:
        """Return the growth of points whose time lies in (start, end]: a point reports what happened before it."""
        self._sum_up()
        return self._until(window.end_unix_nano) - self._until(window.start_unix_nano)

    def forget(self, before_ns: int) -> None:
        """Drop what is too old, many at a time."""
        at = bisect_left(self.times, before_ns)
        if at >= FORGET_FROM:
            self._sum_up()
            self.base = self.sums[at - 1]
            del self.times[:at], self.values[:at], self.sums[:at]
            self.summed -= at

    def _until(self, time_ns: int) -> float:
        at = bisect_left(self.times, time_ns + 1)
        return self.sums[at - 1] if at else self.base

    def _sum_up(self) -> None:
        total = self.sums[self.summed - 1] if self.summed else self.base
        for i in range(self.summed, len(self.values)):
            total += self.values[i]
            self.sums[i] = total
        self.summed = len(self.values)


class OtlpSource:
    """A sink of the receiver, and a source of the controller.

    Args:
        slis: The indicators that will be asked for.
        clock: Wall time.
        ledger: Account of points; this sink's name in it is ``slo``.
        limits: Bounds.
    """

    name = "slo"

    def __init__(
        self, slis: Iterable[OtlpSLI], clock: Clock, ledger: PointLedger | None = None, limits: OtlpLimits | None = None
    ) -> None:
        self._clock, self._ledger, self._limits = clock, ledger, limits or OtlpLimits()
        selectors = {selector for sli in slis for selector in (sli.total, sli.good, sli.bad) if selector is not None}
        self._by_metric: dict[str, list[PointSelector]] = {}
        for selector in selectors:
            self._by_metric.setdefault(selector.metric, []).append(selector)
        self._growth = {selector: _Growth() for selector in selectors}
        self._last: dict[tuple[Any, ...], tuple[int, int, float]] = {}
        self._born_ns = clock.unix_nano()
        self._next_forgetting_ns = 0
        self._lock = threading.Lock()

    # ---- in

    def offer_points(self, batch: PointBatch) -> bool:
        """Take a batch at once; points that no SLO selects are settled as ok, wrong ones as dropped with the reason."""
        dropped: Counter[str] = Counter()
        request = ExportMetricsServiceRequest.FromString(batch.body)
        with self._lock:
            for selector, point in self._selected(request):
                reason = self._take(selector, point)
                if reason:
                    dropped[reason] += 1
        if self._ledger is not None:
            lost = min(sum(dropped.values()), batch.points)
            self._ledger.settle(self.name, ok=batch.points - lost, dropped=_at_most(dropped, lost))
        return True

    def _selected(self, request: ExportMetricsServiceRequest) -> Iterator[tuple[PointSelector, _Point]]:
        for resource_metrics in request.resource_metrics:
            resource = _texts(resource_metrics.resource.attributes)
            for scope_metrics in resource_metrics.scope_metrics:
                for metric in scope_metrics.metrics:
                    for selector in self._by_metric.get(metric.name, ()):
                        for point in _points(metric, resource, scope_metrics.scope.name, selector):
                            if all(point.attributes.get(key) == value for key, value in selector.where):
                                yield selector, point

    def _take(self, selector: PointSelector, point: _Point) -> str:
        """Add a point's growth; return why it cannot count, or nothing."""
        growth, now = self._growth[selector], self._clock.unix_nano()
        if point.time_ns > now + self._limits.future_ns:
            return "future"
        if point.time_ns < now - self._limits.retention_ns:
            return "late"
        if not math.isfinite(point.value) or point.value < 0:
            return "invalid"  # one NaN would stay in every later sum
        last = self._last.get((selector, *point.key))
        if last is not None and point.time_ns <= last[1]:
            return "out_of_order"
        if last is None and len(self._last) >= MAX_SERIES and not self._forgot_series(now):
            return "too_many_series"
        self._last[selector, *point.key] = (point.start_ns, point.time_ns, point.value)
        growth.newest_ns = max(growth.newest_ns, point.time_ns)
        growth.exact = growth.exact and point.exact
        growth.add(point.time_ns, self._grown(growth, point, last))
        growth.forget(now - self._limits.retention_ns)
        return ""

    def _forgot_series(self, now: int) -> bool:
        """Make room by forgetting series that ended long ago: pods come and go for as long as we run."""
        if now < self._next_forgetting_ns:
            return False
        self._next_forgetting_ns = now + FORGET_EVERY_NS
        self._last = {key: last for key, last in self._last.items() if last[1] >= now - ENDED_NS}
        return len(self._last) < MAX_SERIES

    def _grown(self, growth: _Growth, point: _Point, last: tuple[int, int, float] | None) -> float:
        """Return by how much a series grew.

        A cumulative series seen for the first time counts whole if it began while we were watching; what it had counted
        before that happened at times that we do not know: so it is with one that began so long ago that we may have
        forgotten it. One that restarted counts whole.
        """
        if point.temporality == DELTA:
            return point.value
        if last is None:
            known_since = max(self._born_ns, self._clock.unix_nano() - ENDED_NS)
            return point.value if point.start_ns >= known_since else 0.0
        restarted = point.value < last[2] or (point.start_ns > last[0] and point.start_ns >= last[1])
        growth.resets += restarted
        return point.value if restarted else point.value - last[2]

    # ---- out

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order."""
        with self._lock:
            return [self._count(request, now_unix_nano) for request in requests]

    def _count(self, request: CountRequest, now_unix_nano: int) -> EventCounts:
        sli = request.sli
        if not isinstance(sli, OtlpSLI) or sli.total not in self._growth:
            return EventCounts(0.0, 0.0, no_data="absent", detail="not an otlp indicator that is watched")
        total = self._growth[sli.total]
        if not total.newest_ns:
            return EventCounts(0.0, 0.0, no_data="absent", detail=f"no point of {sli.total.metric} has come")
        silence = request.window.end_unix_nano - total.newest_ns
        if silence > self._limits.stale_ns:
            detail = f"no point of {sli.total.metric} for {silence / 1e9:.0f} s"
            return EventCounts(0.0, 0.0, no_data="stale", detail=detail)
        events = total.within(request.window)
        part = self._growth[sli.bad or sli.good or sli.total]
        counted = part.within(request.window)
        return EventCounts(
            events - counted if sli.bad is not None else counted,
            events,
            detail="" if part.exact else _bound(sli),
            coverage=self._coverage(request.window, now_unix_nano),
        )

    def _coverage(self, window: TimeWindow, now_unix_nano: int) -> float:
        since = max(self._born_ns, now_unix_nano - self._limits.retention_ns)
        length = window.end_unix_nano - window.start_unix_nano
        return min(1.0, max(0.0, (window.end_unix_nano - since) / length)) if length > 0 else 0.0


def _bound(sli: OtlpSLI) -> str:
    selector = sli.bad or sli.good or sli.total
    return (
        f"{selector.threshold:g} is not a bucket bound of {selector.metric}: what lies in its bucket counts as above,"
        " so this is a lower bound"
    )


def _at_most(dropped: Counter[str], limit: int) -> dict[str, int]:
    """Return reasons that add up to the limit: a point that fails for two selectors is one point in the account."""
    result: dict[str, int] = {}
    for reason, count in sorted(dropped.items()):
        take = min(count, limit)
        if take:
            result[reason], limit = take, limit - take
    return result


def _points(metric: Any, resource: Mapping[str, str], scope: str, selector: PointSelector) -> Iterator[_Point]:
    kind = metric.WhichOneof("data")
    data = getattr(metric, kind) if kind else None
    if kind not in {"sum", *HISTOGRAMS} or data is None or (kind == "sum" and not data.is_monotonic):
        return
    if kind == "sum" and selector.threshold is not None:
        return
    for point in data.data_points:
        if point.flags & _NO_RECORDED_VALUE:
            continue
        own = _texts(point.attributes)
        value, exact = _value(kind, point, selector.threshold)
        yield _Point(
            (tuple(sorted(resource.items())), scope, tuple(sorted(own.items()))),
            {**resource, **own},
            point.start_time_unix_nano,
            point.time_unix_nano,
            data.aggregation_temporality,
            value,
            exact,
        )


def _value(kind: str, point: Any, threshold: float | None) -> tuple[float, bool]:
    """Return a point's number, and whether it is exact: a threshold inside a bucket counts the buckets below it."""
    if kind == "sum":
        return (float(point.as_int) if point.WhichOneof("value") == "as_int" else float(point.as_double)), True
    if threshold is None:
        return float(point.count), True
    if kind == "exponential_histogram":
        return _exponential(point, threshold)
    bounds = list(point.explicit_bounds)
    below = sum(count for count, bound in zip(point.bucket_counts, bounds, strict=False) if bound <= threshold)
    return float(below), threshold in bounds


def _exponential(point: Any, threshold: float) -> tuple[float, bool]:
    """Return how many values lie at or below a threshold above 0, by whole buckets.

    Source: opentelemetry-proto, ExponentialHistogramDataPoint: bucket i holds (base^i, base^(i+1)], where
    base = 2^(2^-scale). Compared as logarithms, so that no scale or offset overflows.
    """
    below = float(point.zero_count + sum(point.negative.bucket_counts))
    exact = threshold >= point.zero_threshold
    width, limit = 2.0 ** -max(-64, min(64, point.scale)), math.log2(threshold)
    for number, count in enumerate(point.positive.bucket_counts):
        index = point.positive.offset + number
        if (index + 1) * width <= limit + BOUND_ROUNDING:
            below += count
        elif count and index * width < limit - BOUND_ROUNDING:
            exact = False
    return below, exact


def _texts(attributes: Any) -> dict[str, str]:
    return {
        pair.key: attribute_text(getattr(pair.value, pair.value.WhichOneof("value") or "string_value"))
        for pair in attributes
    }
