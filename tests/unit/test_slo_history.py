"""What a running controller keeps for the status page: bounded, true, and gone with its SLO."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.model import TimeWindow
from pasta_otel.slo.evaluation import BurnRate, SLOState
from pasta_otel.slo.history import POINTS, History
from pasta_otel.slo.report import rfc3339

SECOND = 10**9
T0 = 1_700_000_000 * SECOND


def state(now: int, left: float | None, *, start: int = 0, name: str = "web") -> SLOState:
    rate = BurnRate("page", 1, 1, 14.4, left, left, exceeded=False)
    return SLOState(name, "web", 0.9, "ok", 0, (rate,), left, period=TimeWindow(start, now))


def test_a_month_of_ticks_stays_few_points_over_the_whole_of_it():
    history = History()
    for tick in range(30_000):
        history.add([state(T0 + tick * 10 * SECOND, 1 - tick / 30_000)], T0 + tick * 10 * SECOND)
    points = history.points()["web"]
    assert POINTS <= len(points) <= 2 * POINTS
    assert points[0]["time"] == rfc3339(T0)
    assert points[-1]["time"] == rfc3339(T0 + 29_999 * 10 * SECOND)
    assert points[-1]["remaining"] == pytest.approx(1 / 30_000)
    middle = points[len(points) // 2]
    assert 0.25 < middle["remaining"] < 0.75


def test_what_lies_before_the_period_or_after_a_clock_that_was_set_back_is_dropped():
    history = History()
    for tick in range(10):
        history.add([state(T0 + tick * SECOND, 0.5)], T0 + tick * SECOND)
    history.add([state(T0 + 5 * SECOND, 0.25)], T0 + 5 * SECOND)
    assert [point["remaining"] for point in history.points()["web"]] == [0.5] * 5 + [0.25]
    history.add([state(T0 + 6 * SECOND, 0.9, start=T0 + 4 * SECOND)], T0 + 6 * SECOND)
    assert [point["remaining"] for point in history.points()["web"]] == [0.5, 0.25, 0.9]


def test_no_data_is_a_gap_and_an_slo_that_is_gone_is_forgotten():
    history = History()
    history.add([state(T0, None), state(T0, 1.0, name="other")], T0)
    history.add([state(T0 + SECOND, 1.0)], T0 + SECOND)
    points = history.points()
    assert set(points) == {"web"}
    assert points["web"][0] == {"time": rfc3339(T0), "remaining": None, "burn": None}


@settings(deadline=None)
@given(st.lists(st.integers(-100, 1000), min_size=1, max_size=300), st.integers(2, 20))
def test_however_time_goes_points_are_few_in_order_and_end_with_the_newest(steps, most):
    history, now = History(most), T0
    for step in steps:
        now += step * SECOND
        history.add([state(now, 0.5)], now)
        times = [point["time"] for point in history.points()["web"]]
        assert len(times) <= most
        assert times == sorted(set(times))
        assert times[-1] == rfc3339(now)
