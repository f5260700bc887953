"""Error-budget arithmetic on counts: sums, never averages of ratios, and comparisons on unrounded numbers.

Definitions (The Site Reliability Workbook, chapter 5; OpenSLO v1 ``Occurrences``):
error budget = 1 - objective; burn rate = (bad / total) / error budget; remaining = 1 - bad / (total x error budget).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

from pasta_otel.model import EventCounts, NoDataReason

NO_TRAFFIC = EventCounts(0.0, 0.0, no_data="no_traffic", detail="no events")
# A source that extrapolates may put good above total by rounding alone (slo-generator#319 saw 1.000091).
ROUNDING = 1e-9


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
    if counts.good > counts.total * (1 + ROUNDING):
        return "invalid", f"more good events ({counts.good:g}) than events ({counts.total:g})"
    return None


def error_ratio(counts: EventCounts) -> float | None:
    """Return the share of bad events, None without data."""
    return None if counts.no_data is not None or counts.total <= 0 else counts.bad / counts.total


def burn_rate(counts: EventCounts, objective: Decimal) -> float | None:
    """Return how many times faster than allowed the budget goes, None without data."""
    ratio = error_ratio(counts)
    return None if ratio is None else ratio / float(1 - objective)


def exceeds(counts: EventCounts, objective: Decimal, factor: Decimal) -> bool | None:
    """Return whether the burn rate is above the factor, decided exactly; None without data."""
    if counts.no_data is not None or counts.total <= 0:
        return None
    limit = Fraction(factor) * Fraction(1 - objective)
    return Fraction(counts.total) - Fraction(counts.good) > limit * Fraction(counts.total)


def remaining(counts: EventCounts, objective: Decimal) -> float | None:
    """Return the share of the error budget that is left: 1 untouched, negative overspent; idle time spends nothing."""
    if counts.no_data == "no_traffic":
        return 1.0
    burn = burn_rate(counts, objective)
    return None if burn is None else 1 - burn


def exhausted_in_ns(left: float | None, burn: float | None, period_ns: int) -> int | None:
    """Return when the budget is gone if it goes on like this, from now, in ns; None when it does not shrink.

    A straight line from the present burn rate: old errors that leave a rolling period would give budget back.
    """
    if left is None or burn is None or burn <= 0:
        return None
    return max(0, int(left * period_ns / burn))


def total_of(parts: Iterable[EventCounts]) -> EventCounts:
    """Return the sum of counts of adjoining windows; parts without traffic add nothing, other gaps are the answer."""
    good = total = 0.0
    degraded = False
    for part in parts:
        if part.no_data not in {None, "no_traffic"}:
            return part
        good, total, degraded = good + part.good, total + part.total, degraded or part.degraded
    return checked(EventCounts(good, total, degraded=degraded))
