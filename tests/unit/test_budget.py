"""Budget arithmetic: sums of counts, exact comparisons, and nothing that a silent or lying source could turn into a verdict."""

from __future__ import annotations

import csv
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.model import EventCounts
from pasta_otel.slo.budget import (
    burn_rate,
    checked,
    error_ratio,
    exceeds,
    exhausted_in_ns,
    measure,
    remaining,
    total_of,
)

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
OBJECTIVES = st.decimals(min_value=0, max_value=Decimal("0.99999"), places=5)
COUNTS = st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)).map(
    lambda pair: EventCounts(float(min(pair)), float(max(pair)))
)


@pytest.mark.case("S01")
def test_idle_stretches_spend_nothing_and_poison_nothing():
    expected = json.loads((CASES / "S01" / "expected.json").read_text())
    with (CASES / "S01" / "slots.csv").open() as file:
        slots = [(int(row["total"]), int(row["errors"])) for row in csv.DictReader(file)]
    parts = [checked(EventCounts(float(total - errors), float(total))) for total, errors in slots]
    hour, objective = total_of(parts), Decimal("0.999")
    assert (hour.bad, hour.total) == (1, 300)
    assert error_ratio(hour) == pytest.approx(expected["error_ratio"])
    assert burn_rate(hour, objective) == pytest.approx(expected["burn"])
    assert remaining(measure(hour, objective)) == pytest.approx(expected["remaining"])
    idle = parts[5]
    assert burn_rate(idle, objective) is expected["idle_window_burn"]
    assert idle.no_data == "no_traffic"
    whole_hour_idle = total_of([idle] * 12)
    assert remaining(measure(whole_hour_idle, objective)) == expected["idle_hour_remaining"]
    assert burn_rate(whole_hour_idle, objective) is None


@pytest.mark.parametrize(
    ("good", "total", "reason"),
    [
        (math.nan, 1.0, "nan"),
        (1.0, math.nan, "nan"),
        (1.0, math.inf, "invalid"),
        (-1.0, 5.0, "invalid"),
        (5.0, -1.0, "invalid"),
        (6.0, 5.0, "invalid"),
        (0.0, 0.0, "no_traffic"),
    ],
)
def test_counts_that_cannot_be_are_no_data_with_a_reason(good, total, reason):
    counts = checked(EventCounts(good, total))
    assert counts.no_data == reason
    assert counts.detail
    assert burn_rate(counts, Decimal("0.9")) is None
    assert exceeds(counts, Decimal("0.9"), Decimal(1)) is None


def test_a_burn_just_above_the_factor_exceeds_it_although_it_rounds_to_the_factor():
    # 14.44 rounded to one digit is 14.4, and slo-generator compared the rounded number
    assert exceeds(EventCounts(98556.0, 100000.0), Decimal("0.999"), Decimal("14.4"))
    assert not exceeds(EventCounts(98560.0, 100000.0), Decimal("0.999"), Decimal("14.4"))


def test_exhaustion_is_a_straight_line_from_the_present_burn():
    assert exhausted_in_ns(0.5, 2.0, 3600) == 900
    assert exhausted_in_ns(-0.2, 2.0, 3600) == 0
    assert exhausted_in_ns(0.5, 0.0, 3600) is None
    assert exhausted_in_ns(None, 2.0, 3600) is None


@settings(deadline=None)
@given(COUNTS, OBJECTIVES, st.decimals(min_value=0, max_value=100, places=3))
def test_the_comparison_equals_exact_rational_arithmetic(counts, objective, factor):
    counts = checked(counts)
    if counts.no_data:
        return
    exact = Fraction(int(counts.bad), int(counts.total)) / Fraction(1 - objective)
    assert exceeds(counts, objective, factor) == (exact > Fraction(factor))


@settings(deadline=None)
@given(st.lists(COUNTS, min_size=1, max_size=20))
def test_the_ratio_of_a_sum_is_not_changed_by_how_it_was_cut(parts):
    whole = total_of(map(checked, parts))
    assert total_of([whole]) == whole
    assert whole.total == sum(part.total for part in parts)


@settings(deadline=None)
@given(COUNTS, OBJECTIVES)
def test_remaining_and_burn_over_one_window_add_up_to_one(counts, objective):
    counts = checked(counts)
    burn, left = burn_rate(counts, objective), remaining(measure(counts, objective))
    assert left == (1.0 if burn is None else pytest.approx(1 - burn))


def test_two_extrapolated_counters_may_disagree_by_a_thousandth_and_no_more():
    """Good over total of 1.000091 was seen from Prometheus (slo-generator#319); twice as many is a lie."""
    assert checked(EventCounts(1000.091, 1000.0)).good == 1000.0
    assert checked(EventCounts(1002.0, 1000.0)).no_data == "invalid"


def test_a_projection_ends_with_the_period_it_is_about():
    day = 86_400 * 10**9
    assert exhausted_in_ns(0.5, 2.0, 30 * day) == 7.5 * day
    assert exhausted_in_ns(0.9, 0.5, 30 * day) is None  # 54 days: every error of today has left the period by then
    assert exhausted_in_ns(0.5, 2.0, 30 * day, ahead_ns=7 * day) is None  # a calendar month ends in a week
    assert exhausted_in_ns(-0.5, 2.0, 30 * day, ahead_ns=7 * day) == 0
