"""When did the SLOs start to burn, by the load generator's own log? A second opinion that uses none of our spans.

The windows, their guards and the objectives come from the same files; the arithmetic is written again, over events, not
over spans in a store: an SLO burns at the first event at whose end long and short window both exceed the factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pasta_otel.demo.load import RequestRecord
from pasta_otel.model import SpanSLI
from pasta_otel.slo.periods import length_ns
from pasta_otel.slo.spec.model import SLO
from pasta_otel.slo.windows import BurnRateWindows


@dataclass(frozen=True, slots=True)
class Event:
    """One answered order as an SLO sees it."""

    end_ns: int
    good: bool


@dataclass(frozen=True, slots=True)
class Crossing:
    """The first crossing of a threshold.

    Attributes:
        slo: Which SLO.
        monotonic_ns: CLOCK_MONOTONIC of the event that crossed it.
    """

    slo: str
    monotonic_ns: int


def first_crossing(
    records: Sequence[RequestRecord], slos: Sequence[SLO], windows: BurnRateWindows, since_ns: int
) -> Crossing | None:
    """Return the first crossing of any span SLO at or after ``since_ns`` (monotonic), or None."""
    found = [
        Crossing(slo.name, at)
        for slo in slos
        if isinstance(slo.sli, SpanSLI)
        and (at := crossing_ns(events(records, slo.sli), slo, windows, since_ns)) is not None
    ]
    return min(found, key=lambda crossing: crossing.monotonic_ns, default=None)


def events(records: Sequence[RequestRecord], sli: SpanSLI) -> list[Event]:
    """Return the events of an SLI over the order API's server spans, in the order in which they ended."""
    answered = (record for record in records if record.outcome != "not_sent")
    return sorted((Event(r.end_monotonic_ns, _is_good(r, sli)) for r in answered), key=lambda event: event.end_ns)


def crossing_ns(events: Sequence[Event], slo: SLO, windows: BurnRateWindows, since_ns: int) -> int | None:
    """Return when one SLO first exceeded a pair of windows, or None."""
    period_ns = length_ns(slo.window, 0)
    for index, event in enumerate(events):
        seen = events[: index + 1]
        for row in windows.rows:
            limit = Fraction(row.factor(period_ns)) * (1 - Fraction(slo.objective))
            long = _window(seen, event.end_ns - row.long_ns)
            short = _window(seen, event.end_ns - row.short_ns)
            enough = len(long) >= windows.min_events and _bad(long) >= windows.min_bad_events
            if event.end_ns >= since_ns and enough and _ratio(long) > limit and _ratio(short) > limit:
                return event.end_ns
    return None


def _window(seen: Sequence[Event], after_ns: int) -> Sequence[Event]:
    first = len(seen)
    while first and seen[first - 1].end_ns > after_ns:
        first -= 1
    return seen[first:]


def _bad(events: Sequence[Event]) -> int:
    return sum(not event.good for event in events)


def _ratio(events: Sequence[Event]) -> Fraction:
    return Fraction(_bad(events), len(events)) if events else Fraction(0)


def _is_good(record: RequestRecord, sli: SpanSLI) -> bool:
    # a server span has status ERROR for 5xx alone (OpenTelemetry HTTP conventions); no answer at all is one as well
    failed = record.status is None or record.status >= 500
    slow = sli.threshold_ns is not None and record.end_monotonic_ns - record.start_monotonic_ns > sli.threshold_ns
    return not (sli.good_status and failed) and not slow
