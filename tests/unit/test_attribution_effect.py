"""Effect sizes and the comparison of two windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.model import Samples
from pasta_otel.slo.attribution.effect import cliffs_delta, compare, proportion_z, rank_z, robust_z, sorted_values
from pasta_otel.slo.attribution.thresholds import Thresholds

VALUES = st.lists(st.integers(0, 10**12), min_size=1, max_size=60)


def by_definition(before: list[int], after: list[int]) -> float:
    pairs = [(b > a) - (b < a) for a in before for b in after]
    return sum(pairs) / len(pairs)


@given(VALUES, VALUES)
def test_cliffs_delta_is_what_its_definition_says(before: list[int], after: list[int]):
    assert cliffs_delta(sorted_values(before), sorted_values(after)) == pytest.approx(by_definition(before, after))


@given(VALUES, VALUES)
def test_swapping_the_windows_turns_the_sign(before: list[int], after: list[int]):
    a, b = sorted_values(before), sorted_values(after)
    assert cliffs_delta(a, b) == pytest.approx(-cliffs_delta(b, a))


@given(VALUES)
def test_a_window_does_not_differ_from_itself(values: list[int]):
    samples = Samples(tuple(values), len(values), requests=len(values))
    shift = compare(samples, samples, len(values), len(values))
    assert (shift.delta, shift.tail, shift.slower_ns) == (0.0, 0.0, 0.0)
    assert not shift.passes(Thresholds())


@given(VALUES, st.integers(2, 50))
def test_growth_splits_into_slower_and_more_calls_without_a_rest(values: list[int], requests: int):
    before = Samples(tuple(values), len(values))
    after = Samples(tuple(v * 3 + 7 for v in values), len(values) * 2)
    shift = compare(before, after, requests, requests + 1)
    whole = shift.calls_after * shift.mean_after_ns - shift.before_ns
    assert shift.slower_ns + shift.more_calls_ns == pytest.approx(whole, rel=1e-9, abs=1e-3)


def test_rank_z_agrees_with_a_textbook_mann_whitney_case():
    # n = m = 10, U = 75: z = (75 - 50) / sqrt(10 * 10 * 21 / 12) = 1.8898
    assert rank_z(2 * 75 / 100 - 1, 10, 10) == pytest.approx(1.8898, abs=1e-4)


def test_proportion_z_agrees_with_a_textbook_case():
    # 15 of 100 against 30 of 100: pooled 0.225, z = 0.15 / sqrt(0.225 * 0.775 * 0.02) = 2.540
    assert proportion_z(15, 100, 30, 100) == pytest.approx(2.540, abs=1e-3)
    assert proportion_z(0, 0, 1, 10) == 0.0
    assert proportion_z(0, 10, 0, 10) == 0.0


def test_robust_z_survives_a_constant_baseline():
    assert robust_z(np.array([100.0] * 5), np.array([110.0])) == pytest.approx(10.0)
    assert robust_z(np.array([]), np.array([1.0])) == 0.0


def test_a_stall_of_few_calls_passes_by_its_tail_although_delta_is_small():
    before = Samples(tuple(range(100, 300)), 200, requests=200)
    after = Samples((*range(100, 270), *[5000] * 30), 200, requests=200)
    shift = compare(before, after, 200, 200)
    assert shift.tail == pytest.approx(0.10)
    assert shift.passes(Thresholds(min_delta=0.5))


def test_a_key_that_the_baseline_never_saw_is_more_calls_and_not_slower():
    shift = compare(None, Samples((5, 5), 2), 10, 2)
    assert shift.slower_ns == 0.0
    assert shift.more_calls_ns == 5.0
