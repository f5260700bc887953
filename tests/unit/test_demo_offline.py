"""The offline check finds, in the load generator's log alone, when an SLO began to burn."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.demo.load import RequestRecord
from pasta_otel.demo.objectives import fit, threshold_ms
from pasta_otel.demo.offline import first_crossing
from pasta_otel.demo.stage import data_file
from pasta_otel.slo.spec.load import check, load
from pasta_otel.slo.windows import load_windows

SECOND = 1_000_000_000
SLOS = {slo.name: slo for slo in load([data_file("slo.yaml")]).slos}
WINDOWS = load_windows("demo")


def order(number: int, end_s: float, latency_ms: float = 20.0, status: int | None = 201) -> RequestRecord:
    end, took = int(end_s * SECOND), int(latency_ms * 1e6)
    outcome = "ok" if status == 201 else "failed" if status else "unreachable"
    return RequestRecord(number, end - took, end, end - took, end, latency_ms, status, outcome)


def steady(seconds: float, rate: float = 5.0, first: float = 0.0, **how) -> list[RequestRecord]:
    return [order(n, first + n / rate, **how) for n in range(int(seconds * rate))]


def crossed(records, since_s=0.0, names=tuple(SLOS)):
    found = first_crossing(records, [SLOS[name] for name in names], WINDOWS, int(since_s * SECOND))
    return found and (found.slo, found.monotonic_ns / SECOND)


def test_normal_service_never_crosses():
    assert crossed(steady(60)) is None


def test_errors_cross_when_they_exceed_the_factor_times_the_budget_in_both_windows():
    # 2.4 x 5 % = 12 % of the long window: 50 good orders, then the 7th bad one makes 7/57 = 12.3 %
    records = steady(10) + steady(5, first=10, status=502)
    assert crossed(records, since_s=10) == ("orders-available", 10 + 6 / 5)


def test_slow_orders_cross_the_latency_objective_only():
    # 2.4 x 10 % = 24 %: the 16th slow order makes 16/66 = 24.2 %
    records = steady(10) + steady(5, first=10, latency_ms=81)
    assert crossed(records, since_s=10) == ("orders-fast", 10 + 15 / 5)


def test_what_happened_before_the_fault_is_history_not_a_crossing():
    records = steady(4, status=502) + steady(40, first=4)
    assert crossed(records, since_s=12) is None


def test_a_burst_that_is_over_does_not_cross_by_the_long_window_alone():
    burst = steady(20) + steady(2, first=20, status=502)
    assert crossed(burst + steady(10, first=22), since_s=27.5) is None


def test_few_events_never_cross():
    assert crossed(steady(1, status=502)) is None  # 5 events; the demo's windows want 10


def test_an_order_that_was_never_answered_is_bad_and_one_never_sent_is_nothing():
    unanswered = steady(10) + steady(5, first=10, status=None)
    assert crossed(unanswered, since_s=10)[0] == "orders-available"
    unsent = [RequestRecord(n, 0, SECOND, 0, SECOND, 0.0, None, "not_sent") for n in range(50)]
    assert crossed(unsent) is None


@settings(deadline=None, max_examples=20)
@given(st.floats(0.1, 5000.0), st.floats(1.0, 20.0))
def test_the_latency_objective_leaves_room_above_the_usual_and_stays_a_valid_slo(tmp_path_factory, fastest, busy):
    limit = threshold_ms(median_ms=fastest * busy, fastest_ms=fastest)
    assert limit >= max(80, min(4 * fastest * busy, 7 * fastest) - 1e-6)
    assert limit <= max(80, 7 * fastest + 10)
    file = tmp_path_factory.mktemp("slo") / "slo.yaml"
    file.write_text(fit(data_file("slo.yaml").read_text(), limit))
    spec = check([file])
    assert not spec.errors
    assert {slo.sli.threshold_ns for slo in spec.slos} == {None, limit * 1_000_000}
    assert f"at most {limit} ms" in file.read_text()
