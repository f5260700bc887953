"""Error-budget arithmetic on counts: sums, never averages of ratios, and comparisons on unrounded numbers.

Definitions (The Site Reliability Workbook, chapter 5; OpenSLO v1 ``Occurrences``):
error budget = 1 - objective; burn rate = (bad / total) / error budget; remaining = 1 - bad / (total x error budget).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from pasta_otel.model import EventCounts, NoDataReason

NO_TRAFFIC = EventCounts(0.0, 0.0, no_data="no_traffic", detail="no events")
# A source that extrapolates two counters apart may put good a little above total: slo-generator#319 saw 1.000091.
EXTRAPOLATION = 1e-3


@dataclass(frozen=True, slots=True)
class Measured:
    """What one window says about a budget.

    Attributes:
        burn: Burn rate, exact; None = nothing can be said.
        no_data: Why nothing can be said.
        detail: The reason in words.
        events: Events (or slices) in the window.
        bad: Bad ones among them (with a fraction for ratios).
        guarded: Guards on numbers of events apply.
        degraded: The source answered with a warning.
        coverage: Share of the window that the source can answer for.
    """

    burn: Fraction | None
    no_data: NoDataReason | None = None
    detail: str = ""
    events: float = 0.0
    bad: float = 0.0
    guarded: bool = True
    degraded: bool = False
    coverage: float = 1.0

    @property
    def rate(self) -> float | None:
        """Return the burn rate as a float."""
        return None if self.burn is None else float(self.burn)

    def exceeds(self, factor: Decimal) -> bool | None:
        """Return whether the burn rate is above the factor, decided exactly; None without data."""
        return None if self.burn is None else self.burn > _fraction(factor)


def checked(counts: EventCounts) -> EventCounts:
    """Return the counts, or the reason why they say nothing: a lying source must not become a verdict."""
    if counts.no_data is not None:
        return counts
    wrong = _wrong(counts)
    if wrong is not None:
        reason, detail = wrong
        return replace(counts, no_data=reason, detail=detail)
    if counts.total == 0:
        return replace(NO_TRAFFIC, coverage=counts.coverage, degraded=counts.degraded)
    return replace(counts, good=min(counts.good, counts.total))


def _wrong(counts: EventCounts) -> tuple[NoDataReason, str] | None:
    if math.isnan(counts.good) or math.isnan(counts.total):
        return "nan", "the source answered NaN"
    if math.isinf(counts.good) or math.isinf(counts.total):
        return "invalid", "the source answered an infinite count"
    if counts.good < 0 or counts.total < 0:
        return "invalid", "the source answered a negative count"
    if counts.good > counts.total * (1 + EXTRAPOLATION):
        return "invalid", f"more good events ({counts.good:g}) than events ({counts.total:g})"
    return None


def measure(counts: EventCounts, objective: Decimal) -> Measured:
    """Return what the counts of one window say about the budget of an objective."""
    counts = checked(counts)
    if counts.no_data is not None:
        return Measured(None, counts.no_data, counts.detail, degraded=counts.degraded, coverage=counts.coverage)
    total, budget = _exact(counts.total), _fraction(1 - objective)
    bad = total - _exact(counts.good)
    return Measured(
        Fraction(bad * budget.denominator, total * budget.numerator),
        events=counts.total,
        bad=float(bad),
        guarded=not counts.ratio_only,
        degraded=counts.degraded,
        coverage=counts.coverage,
    )


@lru_cache(maxsize=4096)
def _fraction(number: Decimal) -> Fraction:
    return Fraction(number)


def _exact(number: float) -> int | Fraction:
    """Return a float's exact value; whole numbers, which counts mostly are, as the faster int."""
    return int(number) if float(number).is_integer() else Fraction(number)


def error_ratio(counts: EventCounts) -> float | None:
    """Return the share of bad events, None without data."""
    return None if counts.no_data is not None or counts.total <= 0 else counts.bad / counts.total


def burn_rate(counts: EventCounts, objective: Decimal) -> float | None:
    """Return how many times faster than allowed the budget goes, None without data."""
    return measure(counts, objective).rate


def exceeds(counts: EventCounts, objective: Decimal, factor: Decimal) -> bool | None:
    """Return whether the burn rate is above the factor, decided exactly; None without data."""
    return measure(counts, objective).exceeds(factor)


def remaining(measured: Measured, elapsed: Fraction = Fraction(1)) -> float | None:
    """Return the share of the error budget that is left: 1 untouched, negative overspent; idle time spends nothing.

    Args:
        measured: What the period so far says.
        elapsed: Share of the period that ``measured`` stands for: below 1 where the whole period's budget is known
            although it has not ended (slices of a calendar period).
    """
    if measured.no_data == "no_traffic":
        return 1.0
    return None if measured.burn is None else float(1 - measured.burn * elapsed)


def exhausted_in_ns(left: float | None, burn: float | None, period_ns: int, ahead_ns: int | None = None) -> int | None:
    """Return when the budget is gone if it goes on like this, from now, in ns; None when it lasts.

    A straight line from the present burn rate: old errors that leave a rolling period would give budget back.

    Args:
        left: Share of the budget that is left.
        burn: Burn rate.
        period_ns: Length of the period.
        ahead_ns: How far the line may be drawn: a calendar period's budget is new when the next one begins, and after
            a whole rolling period every error of today has left it. None = the length of the period.
    """
    if left is None or burn is None or burn <= 0:
        return None
    gone = max(0, int(left * period_ns / burn))
    return None if gone > (period_ns if ahead_ns is None else ahead_ns) else gone


def total_of(parts: Iterable[EventCounts]) -> EventCounts:
    """Return the sum of counts of adjoining windows; parts without traffic add nothing, other gaps are the answer."""
    good = total = 0.0
    degraded, coverage, ratio_only = False, 1.0, False
    for part in map(checked, parts):
        if part.no_data not in {None, "no_traffic"}:
            return part
        good, total, degraded = good + part.good, total + part.total, degraded or part.degraded
        coverage, ratio_only = min(coverage, part.coverage), ratio_only or part.ratio_only
    return checked(EventCounts(good, total, degraded=degraded, coverage=coverage, ratio_only=ratio_only))
