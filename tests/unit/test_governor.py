import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.gpu.governor import (
    MAX_WAIT_NS,
    MAX_WINDOW_NS,
    MIN_WINDOW_NS,
    Calibration,
    Governor,
    WindowCost,
)

SECOND = 1_000_000_000


class Clock:
    def __init__(self):
        self.ns = 5 * SECOND

    def __call__(self):
        return self.ns


def run(
    governor, clock, seconds, *, launches_per_s, launch_ns, switch_ns=12_000_000, cpu_per_launch_ns=300, on_window=None
):
    """Drive a governor over a program that launches at a known rate; returns true overhead and scaled launches."""
    end, spent, scaled = clock.ns + int(seconds * SECOND), 0.0, 0.0
    begin = clock.ns
    while True:
        clock.ns += governor.wait_ns()
        if clock.ns >= end:
            return spent / (clock.ns - begin), scaled
        began, length = clock.ns, governor.window_ns()
        clock.ns += length + switch_ns
        launches = round(launches_per_s * length / SECOND)
        spent += launches * (launch_ns + cpu_per_launch_ns) + switch_ns
        weight = governor.book(WindowCost(began, length, launches, switch_ns, launches * cpu_per_launch_ns))
        scaled += launches * weight
        if on_window:
            on_window()


@settings(max_examples=60, deadline=None)
@given(
    budget=st.sampled_from([0.002, 0.01, 0.05]),
    launches_per_s=st.sampled_from([0, 100, 5_000, 50_000, 200_000]),
    switch_ms=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_the_cost_stays_within_the_budget_whatever_the_program_does(budget, launches_per_s, switch_ms, seed):
    clock, rng = Clock(), random.Random(seed)
    governor = Governor(budget, clock, launch_ns=3_000, random_unit=rng.random)
    cost, _ = run(governor, clock, 300, launches_per_s=launches_per_s, launch_ns=3_000, switch_ns=switch_ms * 1_000_000)
    # within 300 s the ledger may be one expected window ahead of what its guess for the first windows allowed
    assert cost <= budget
    assert governor.cost == pytest.approx(cost, rel=0.01, abs=1e-6)


def test_scaled_totals_are_right_at_duty_5_percent_for_a_minute():
    clock = Clock()
    governor = Governor(
        0.05, clock, launch_ns=3_000, random_unit=random.Random(1).random, window_ns=100_000_000, min_period_ns=SECOND
    )
    _, scaled = run(governor, clock, 60, launches_per_s=20_000, launch_ns=3_000)
    assert 0.02 < governor.duty < 0.2
    assert scaled == pytest.approx(60 * 20_000, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_scaled_totals_are_right_when_every_window_is_a_twentieth_of_its_interval(seed):
    clock, rng, scaled = Clock(), random.Random(seed), 0.0
    governor = Governor(0.01, clock)
    end = clock.ns + 60 * SECOND
    while clock.ns < end:
        length = 50_000_000
        clock.ns += int(0.95 * SECOND * (0.75 + rng.random() / 2)) + length
        launches = sum(1 for _ in range(20_000 // 20) if rng.random() < 0.98)  # a noisy rate of 19,600 a second
        scaled += launches * governor.book(WindowCost(clock.ns - length, length, launches, 0, 0))
    assert governor.duty == pytest.approx(0.05, rel=0.1)
    assert scaled == pytest.approx((clock.ns - (end - 60 * SECOND)) / SECOND * 19_600, rel=0.05)


def window_after(governor, clock, cost, times):
    for _ in range(times):
        clock.ns += 30 * SECOND
        governor.book(WindowCost(clock.ns, *cost))
    return governor.window_ns()


def test_a_window_lasts_as_long_as_its_period_pays_for():
    clock = Clock()
    governor = Governor(0.01, clock, launch_ns=3_000)  # 0.5 % of 30 s pay for 150 ms, of which switching takes 12
    rate_of_30_percent = (100_000_000, 10_000, 12_000_000, 0)
    assert window_after(governor, clock, rate_of_30_percent, 30) == pytest.approx(138_000_000 / 0.3, rel=0.05)
    assert window_after(governor, clock, (100_000_000, 0, 12_000_000, 0), 60) == MAX_WINDOW_NS
    assert window_after(governor, clock, (1_000_000, 1_000_000, 100_000, 0), 60) == MIN_WINDOW_NS


def test_where_switching_eats_the_period_a_window_still_records_for_as_much_again():
    clock = Clock()
    governor = Governor(0.0005, clock, launch_ns=3_000)  # pays for 7.5 ms in 30 s
    length = window_after(governor, clock, (100_000_000, 10_000, 12_000_000, 0), 30)
    assert length == pytest.approx(12_000_000 / 0.3, rel=0.05)
    assert governor.wait_ns() > 40 * SECOND  # 24 ms at 0.025 % take longer than a period


def test_a_cupti_that_stays_attached_is_booked_between_windows():
    def cost_after_a_minute(attached, launches_per_window):
        clock = Clock()
        governor = Governor(0.01, clock, launch_ns=0)
        governor.book(WindowCost(clock.ns, 100_000_000, launches_per_window, 0, 0, attached=attached))
        clock.ns += 60 * SECOND
        governor.book(WindowCost(clock.ns, 100_000_000, 0, 0, 0))
        clock.ns += 60 * SECOND
        return governor.cost

    assert cost_after_a_minute(False, 1_000) == 0
    assert cost_after_a_minute(True, 1_000) == pytest.approx(10_000 * 1.8e-6 / 2, rel=1e-6)  # for one minute of two


def test_the_period_doubles_with_every_thousand_windows_that_detached():
    clock = Clock()
    governor = Governor(1.0, clock, random_unit=lambda: 0.5, window_ns=1_000_000)
    periods = {}
    for number in range(2_500):
        governor.book(WindowCost(clock.ns, 1_000_000, 0, 0, 0, attached=number % 5 == 4))
        periods[governor.wait_ns()] = number
        clock.ns += governor.wait_ns()
    assert list(periods) == [30 * SECOND, 60 * SECOND, 120 * SECOND]
    assert periods[30 * SECOND] == 1_247  # four of five windows detached


def test_windows_are_at_least_a_period_apart():
    clock = Clock()
    governor = Governor(1.0, clock, random_unit=lambda: 0.5)
    assert governor.wait_ns() < SECOND
    governor.book(WindowCost(clock.ns, 1_000_000, 0, 0, 0))
    assert governor.wait_ns() == 30 * SECOND


def test_a_busy_gpu_halves_the_share():
    clock, busy = Clock(), [0.5]
    governor = Governor(0.01, clock, utilization=lambda: busy[0], random_unit=lambda: 0.5, window_ns=50_000_000)
    calm = governor.wait_ns()
    busy[0] = 0.95
    assert governor.wait_ns() == pytest.approx(2 * calm, rel=1e-6)


def test_no_budget_means_no_window():
    assert Governor(0.0, Clock()).wait_ns() == MAX_WAIT_NS


def test_waits_are_spread_so_that_windows_do_not_fall_into_step():
    clock, rng = Clock(), random.Random(3)
    waits = {Governor(0.01, clock, random_unit=rng.random).wait_ns() for _ in range(20)}
    assert len(waits) == 20
    assert max(waits) / min(waits) > 1.2


def test_calibration_finds_a_slowdown_and_its_error():
    calibration, rng = Calibration(), random.Random(0)
    assert calibration.slowdown() is None
    for _ in range(400):
        calibration.observe("decode", int(rng.gauss(1_000_000, 50_000)), inside=False)
        calibration.observe("decode", int(rng.gauss(1_300_000, 50_000)), inside=True)
        calibration.observe("rare", 5, inside=False)
    mean, error = calibration.slowdown()
    assert mean == pytest.approx(0.3, abs=0.02)
    assert 0 < error < 0.01


def test_a_slowdown_that_is_surely_larger_than_computed_makes_windows_rarer():
    def cost_with(slowdown):
        clock = Clock()
        rng = random.Random(0)
        governor = Governor(0.01, clock, launch_ns=3_000, random_unit=rng.random, min_period_ns=SECOND)
        for _ in range(200):
            governor.calibration.observe("decode", 1_000_000, inside=False)
            governor.calibration.observe("decode", int(1_000_000 * (1 + slowdown)), inside=True)
        run(governor, clock, 120, launches_per_s=20_000, launch_ns=3_000)
        return governor.duty

    assert cost_with(0.3) > 1.5 * cost_with(1.5) > 0
