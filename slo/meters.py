"""How a budget counts: by events, by time slices, or over several indicators that share one budget.

Sources of the definitions: OpenSLO v1, ``budgetingMethod`` and composite SLOs. Where the standard is silent: a slice
without events is good (idle time spends no budget), and slices lie on multiples of their length since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Protocol

from pasta_otel.errors import InputError
from pasta_otel.model import CountRequest, EventCounts, TimeWindow
from pasta_otel.slo.budget import Measured, checked, measure
from pasta_otel.slo.maintenance import ExcludingMeter, Maintenance
from pasta_otel.slo.periods import duration_ns
from pasta_otel.slo.spec.model import SLO

BACKFILL_SLICES = 10_000  # asked for in one tick by all SLOs; the newest first, so that burn rates are right at once
FEWEST_SLICES = 60
FRESH_SLICES, RETRY_TICKS = 2, 60  # newer slices without data are asked for at every tick, older ones now and then


class BudgetMeter(Protocol):
    """Turn windows into requests, and the answers into what they say about the budget."""

    def requests(self, windows: Sequence[TimeWindow]) -> list[CountRequest]:
        """Return what to ask for the windows; the first is the period, all of them end now."""

    def measure(self, windows: Sequence[TimeWindow], answers: Sequence[EventCounts]) -> list[Measured]:
        """Return one result a window."""


class EventMeter:
    """``Occurrences``: every event counts the same."""

    def __init__(self, slo: SLO) -> None:
        self._slo = slo

    def requests(self, windows: Sequence[TimeWindow]) -> list[CountRequest]:
        """Return one request a window."""
        return [CountRequest(self._slo.sli, window) for window in windows]

    def measure(self, windows: Sequence[TimeWindow], answers: Sequence[EventCounts]) -> list[Measured]:
        """Return one result a window."""
        del windows
        return [measure(answer, self._slo.objective) for answer in answers]


class _Slices:
    """The finished slices of one indicator: how bad each was, and which were idle.

    They are remembered, so that a tick asks for the new ones only, and for some older ones until the period is known.
    """

    def __init__(self, slo: SLO, backfill: int) -> None:
        if slo.slice_window is None:
            raise InputError("slices need timeSliceWindow", field=slo.name)
        self.slo, self.weight, self._backfill = slo, float(slo.weight), backfill
        self.slice_ns = duration_ns(slo.slice_window)
        self.bad: dict[int, float] = {}
        self.idle: set[int] = set()
        self._asked: list[int] = []
        self._ticks = self._newest = 0
        self._again: dict[int, int] = {}  # older slices without data, and the tick at which they are asked for again

    def indices(self, windows: Sequence[TimeWindow]) -> list[range]:
        """Return the slices of every window: as many finished ones as it is long, and at least one.

        A calendar period, which comes first, takes no slice that began before it.
        """
        spans = []
        for number, window in enumerate(windows):
            last = window.end_unix_nano // self.slice_ns
            first = last - max(1, -((window.start_unix_nano - window.end_unix_nano) // self.slice_ns))
            if number == 0 and self.slo.window.calendar_start is not None:
                first = max(first, -(-window.start_unix_nano // self.slice_ns))
            spans.append(range(first, last))
        return spans

    def requests(self, windows: Sequence[TimeWindow]) -> list[CountRequest]:
        """Return requests for slices that are not known, the newest first, and forget those before all windows."""
        spans = self.indices(windows)
        first, last = min(span.start for span in spans), max(span.stop for span in spans)
        for index in [index for index in self.bad if index < first]:
            del self.bad[index]
            self.idle.discard(index)
        self._ticks, self._newest = self._ticks + 1, last - 1
        self._again = {index: tick for index, tick in self._again.items() if index >= first}
        self._asked = list(
            islice((index for index in range(last - 1, first - 1, -1) if self._wanted(index)), self._backfill)
        )
        return [
            CountRequest(self.slo.sli, TimeWindow(index * self.slice_ns, (index + 1) * self.slice_ns))
            for index in self._asked
        ]

    def _wanted(self, index: int) -> bool:
        return index not in self.bad and self._again.get(index, 0) <= self._ticks

    def learn(self, answers: Iterable[EventCounts]) -> EventCounts | None:
        """Remember answers; return the first failure, whose slice stays unknown and is asked for again."""
        failed = None
        for index, answer in zip(self._asked, map(checked, answers), strict=True):
            if answer.no_data == "no_traffic":
                self.bad[index] = 0.0
                self.idle.add(index)
            elif answer.no_data is None:
                self.bad[index] = self._bad_share(answer)
            else:
                failed = failed or answer
                if index < self._newest - FRESH_SLICES:
                    self._again[index] = self._ticks + RETRY_TICKS
        return failed

    def _bad_share(self, counts: EventCounts) -> float:
        target = self.slo.slice_target
        if self.slo.method == "RatioTimeslices" or target is None:
            return counts.bad / counts.total
        return float(Fraction(counts.good) < Fraction(target) * Fraction(counts.total))


class SliceMeter:
    """``Timeslices`` and ``RatioTimeslices``: every slice of time counts the same, however busy it was.

    Args:
        parts: One SLO, or the parts of a composite one; of several objectives the strictest holds for all.
        maintenance: Slices that touch one that concerns a part are left out.
        backfill: How many slices a part may ask for at once.

    Raises:
        InputError: The parts have slices of different lengths.
    """

    def __init__(
        self, parts: Sequence[SLO], maintenance: Sequence[Maintenance] = (), backfill: int = BACKFILL_SLICES
    ) -> None:
        self._parts = [_Slices(slo, backfill) for slo in parts]
        self._excluded = [entry.window for entry in maintenance if any(entry.concerns(slo) for slo in parts)]
        self._sizes: list[int] = []
        self._method = parts[0].method
        self._objective = max(slo.objective for slo in parts)
        if len({part.slice_ns for part in self._parts}) > 1:
            raise InputError("the parts of a composite SLO need slices of one length", field=parts[0].composite_of)

    def requests(self, windows: Sequence[TimeWindow]) -> list[CountRequest]:
        """Return the requests of all parts."""
        self._sizes = []
        result: list[CountRequest] = []
        for part in self._parts:
            asked = part.requests(windows)
            self._sizes.append(len(asked))
            result += asked
        return result

    def measure(self, windows: Sequence[TimeWindow], answers: Sequence[EventCounts]) -> list[Measured]:
        """Return one result a window; coverage is below 1 while older slices are still being asked for."""
        rest = iter(answers)
        failures = [part.learn(islice(rest, size)) for part, size in zip(self._parts, self._sizes, strict=True)]
        failed = next((failure for failure in failures if failure is not None), None)
        return [self._window(indices, failed) for indices in self._parts[0].indices(windows)]

    def _window(self, indices: range, failed: EventCounts | None) -> Measured:
        known = [i for i in indices if all(i in part.bad for part in self._parts) and not self._in_maintenance(i)]
        if not indices:
            return Measured(None, "no_traffic", "no slice of the period has finished")
        coverage = len(known) / len(indices)
        if failed is not None and (not known or known[-1] != indices[-1]):
            return Measured(None, failed.no_data, failed.detail, coverage=coverage)
        if not known:
            return Measured(None, "absent", "no finished slice in the window", coverage=coverage)
        if all(index in part.idle for index in known for part in self._parts):
            return Measured(None, "no_traffic", "no events", coverage=coverage)
        bad = Fraction(math.fsum(self._bad(index) for index in known))
        return Measured(
            bad / len(known) / Fraction(1 - self._objective),
            events=len(known),
            bad=float(bad),
            guarded=False,
            coverage=coverage,
        )

    def _in_maintenance(self, index: int) -> bool:
        start = index * self._parts[0].slice_ns
        end = start + self._parts[0].slice_ns
        return any(hole.start_unix_nano < end and start < hole.end_unix_nano for hole in self._excluded)

    def _bad(self, index: int) -> float:
        shares = [part.bad[index] for part in self._parts]
        if self._method == "Timeslices":
            return max(shares)
        return union_of_ratios((share, part.weight) for share, part in zip(shares, self._parts, strict=True))


def union_of_ratios(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the bad share of a RatioTimeslices composite: weighted bad shares add up, at most to 1."""
    return min(1.0, math.fsum(share * weight for share, weight in weighted))


class CompositeMeter:
    """``Occurrences`` over several indicators: their weighted burn rates add up."""

    def __init__(self, meters: Sequence[BudgetMeter], weights: Sequence[Decimal]) -> None:
        self._parts = list(zip(meters, weights, strict=True))
        self._sizes: list[int] = []

    def requests(self, windows: Sequence[TimeWindow]) -> list[CountRequest]:
        """Return the requests of all parts."""
        asked = [meter.requests(windows) for meter, _ in self._parts]
        self._sizes = [len(requests) for requests in asked]
        return [request for requests in asked for request in requests]

    def measure(self, windows: Sequence[TimeWindow], answers: Sequence[EventCounts]) -> list[Measured]:
        """Return one result a window: a part without data leaves nothing to say, an idle part adds nothing."""
        rest = iter(answers)
        parts = [
            (meter.measure(windows, list(islice(rest, size))), weight)
            for (meter, weight), size in zip(self._parts, self._sizes, strict=True)
        ]
        return [add_up([(results[i], weight) for results, weight in parts]) for i in range(len(windows))]


def add_up(parts: Sequence[tuple[Measured, Decimal]]) -> Measured:
    """Return the total of weighted burns."""
    for measured, _ in parts:
        if measured.no_data not in {None, "no_traffic"}:
            return measured
    busy = [(measured, weight) for measured, weight in parts if measured.burn is not None]
    if not busy:
        return parts[0][0]
    return Measured(
        sum((Fraction(weight) * (measured.burn or 0) for measured, weight in busy), Fraction(0)),
        events=sum(measured.events for measured, _ in busy),
        bad=sum(measured.bad for measured, _ in busy),
        guarded=all(measured.guarded for measured, _ in busy),
        degraded=any(measured.degraded for measured, _ in parts),
        coverage=min(measured.coverage for measured, _ in parts),
    )


def meters_of(composites: Iterable[Sequence[SLO]], maintenance: Sequence[Maintenance] = ()) -> list[BudgetMeter]:
    """Return one meter for every SLO or composite; those that count slices share what one tick asks for."""
    groups = list(composites)
    sliced = sum(slo.method != "Occurrences" for parts in groups for slo in parts)
    backfill = max(FEWEST_SLICES, BACKFILL_SLICES // max(1, sliced))
    return [meter_of(parts, maintenance, backfill) for parts in groups]


def meter_of(
    parts: Sequence[SLO], maintenance: Sequence[Maintenance] = (), backfill: int = BACKFILL_SLICES
) -> BudgetMeter:
    """Return the meter of an SLO, or of the parts of a composite one, without the time of planned maintenance.

    Raises:
        InputError: The parts do not count in the same way.
    """
    if len({slo.method for slo in parts}) > 1:
        raise InputError("the parts of a composite SLO need one budgetingMethod", field=parts[0].composite_of)
    if parts[0].method != "Occurrences":
        return SliceMeter(parts, maintenance, backfill)
    meters = [_event_meter(slo, maintenance) for slo in parts]
    return meters[0] if len(parts) == 1 else CompositeMeter(meters, [slo.weight for slo in parts])


def _event_meter(slo: SLO, maintenance: Sequence[Maintenance]) -> BudgetMeter:
    if any(entry.concerns(slo) for entry in maintenance):
        return ExcludingMeter(slo, maintenance)
    return EventMeter(slo)


def evaluated(slos: Sequence[SLO]) -> list[tuple[SLO, tuple[SLO, ...]]]:
    """Return what is evaluated: every SLO with its parts, the parts of a composite one under its name.

    The strictest objective stands for a composite SLO: burn rates add up, each against its own objective.
    """
    groups: dict[str, list[SLO]] = {}
    for slo in slos:
        groups.setdefault(slo.composite_of or slo.name, []).append(slo)
    return [
        (
            parts[0]
            if not parts[0].composite_of
            else replace(parts[0], name=name, objective=max(part.objective for part in parts), composite_of=""),
            tuple(parts),
        )
        for name, parts in groups.items()
    ]
