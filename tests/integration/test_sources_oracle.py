"""Two oracles over the same histories: exact counting for spans, the real engine for Prometheus and the generated rules."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import httpx
import pytest

from pasta_otel.errors import MissingError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver.batch import Group, ResourceInfo, SpanBatch
from pasta_otel.exporters.store import DuckDBSpanStore, StoreConfig
from pasta_otel.model import CountRequest, SpanSLI, TimeWindow
from pasta_otel.slo.budget import checked, error_ratio, measure, remaining
from pasta_otel.slo.periods import period_at
from pasta_otel.slo.rules.build import build
from pasta_otel.slo.rules.build import error_ratio as error_ratio_rule
from pasta_otel.slo.sources.prometheus import PrometheusConfig, PrometheusSource
from pasta_otel.slo.sources.spans import SpanSource
from pasta_otel.slo.spec.model import SLO, Bucket, DurationText, PrometheusSLI, WindowSpec
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.prometheus import PrometheusServer, tool
from pasta_otel.testing.promql import increase
from pasta_otel.testing.scenarios import END_S, KINDS, PERIODS_DAYS, Scenario, scenarios

SECOND = 1_000_000_000
WINDOWS_S = (300, 3600, 1800, 21_600, 7200, 86_400, 259_200)
OBJECTIVE = Decimal("0.99")
ALL = scenarios()
FEW = [s for s in ALL if s.name.endswith("-0") and (s.kind, s.period_days) in {
    ("steady", 7), ("steady", 30), ("spike", 28), ("idle", 7), ("idle", 90), ("reset", 30), ("no_errors", 7),
    ("no_total", 28), ("uneven", 30), ("dst_month", 30), ("late_start", 7), ("spike", 90),
}]  # fmt: skip


def test_there_are_at_least_sixty_scenarios_and_twelve_of_them_in_make_test():
    assert len(ALL) >= 60
    assert len({scenario.name for scenario in ALL}) == len(ALL)
    assert {(s.kind, s.period_days) for s in ALL} == {(kind, days) for kind in KINDS for days in PERIODS_DAYS}
    assert len(FEW) == 12


def windows(scenario: Scenario) -> list[tuple[int, int]]:
    """Return (start, end] windows in seconds: the alerting ones, and the period."""
    if scenario.kind == "dst_month":
        spec = WindowSpec(DurationText(1, "M"), datetime(2023, 1, 1), "America/New_York")  # noqa: DTZ001  # local by definition
        period = period_at(spec, END_S * SECOND)
        start = period.start_unix_nano // SECOND
        # the month has 721 hours: the clocks went back on 5 November 2023
        assert period.end_unix_nano // SECOND - start == 721 * 3600
        return [(END_S - w, END_S) for w in WINDOWS_S] + [(start, END_S)]
    return [(END_S - w, END_S) for w in (*WINDOWS_S, scenario.period_days * 86_400)]


def test_a_month_with_a_clock_change_has_an_hour_more_than_its_days_say():
    zone = ZoneInfo("America/New_York")
    hours = (datetime(2023, 12, 1, tzinfo=zone).timestamp() - datetime(2023, 11, 1, tzinfo=zone).timestamp()) / 3600
    assert hours == 721


# ---- (a) spans


def fill(store: DuckDBSpanStore, ledger: Ledger, scenario: Scenario, first_id: int) -> int:
    resource = ResourceInfo(scenario.name.encode(), scenario.name, {})
    listed = list(scenario.events())
    for at in range(0, len(listed), 20_000):
        part = listed[at : at + 20_000]
        n = len(part)
        ids = range(first_id + at, first_id + at + n)
        store_batch = SpanBatch(
            b"", END_S * SECOND, [Group(resource, "", n)],
            trace_id=[i.to_bytes(16, "big") for i in ids], span_id=[i.to_bytes(8, "big") for i in ids],
            parent_span_id=[bytes(8)] * n, name=["POST /orders"] * n, kind=[2] * n,
            start_time_unix_nano=[end - 1000 for end, _ in part], end_time_unix_nano=[end for end, _ in part],
            status=[0 if good else 2 for _, good in part], status_message=[""] * n, trace_state=[""] * n,
            attributes=["{}"] * n, events=[None] * n, links=[None] * n,
        )  # fmt: skip
        ledger.receive(n)
        assert store.offer(store_batch)
        assert store.flush(20)
    return first_id + len(listed)


class _Clock:
    def unix_nano(self) -> int:
        return END_S * SECOND

    def monotonic_ns(self) -> int:
        return END_S * SECOND


def check_spans(chosen: list[Scenario]) -> None:
    config = StoreConfig(max_age_s=400 * 86_400.0, grace_s=4e8, queue_spans=1_000_000)
    ledger = Ledger(["store"])
    store = DuckDBSpanStore.open(":memory:", ledger, config=config, clock=_Clock())
    try:
        next_id = 1
        for scenario in chosen:
            next_id = fill(store, ledger, scenario, next_id)
        asked = [(scenario, window) for scenario in chosen for window in windows(scenario)]
        requests = [CountRequest(SpanSLI(s.name), TimeWindow(a * SECOND, b * SECOND)) for s, (a, b) in asked]
        answers = SpanSource(store, 4 * 10**17).counts(requests, END_S * SECOND)
        for (scenario, window), answer in zip(asked, answers, strict=True):
            good, total = scenario.exact(*window)
            if total:
                assert (answer.no_data, answer.good, answer.total) == (None, good, total), (scenario.name, window)
            else:
                assert answer.no_data == "no_traffic", (scenario.name, window)
    finally:
        store.close()


def test_spans_equal_exact_counts():
    check_spans([scenario for scenario in FEW if scenario.period_days < 90])


@pytest.mark.slow
def test_spans_equal_exact_counts_in_every_scenario():
    check_spans(ALL)


# ---- (b) the real engine


def sli(scenario: Scenario) -> PrometheusSLI:
    return PrometheusSLI(
        total=f'sum(increase(total_total{{s="{scenario.name}"}}[{{{{.window}}}}]))',
        bad=f'sum(increase(bad_total{{s="{scenario.name}"}}[{{{{.window}}}}]))',
    )


def histogram_series():
    """A histogram from two targets that spell their bounds differently: per minute 6 up to 1, 2 up to 2.5, 2 above."""
    times = range(END_S - 7200, END_S + 1, 60)
    rows = [("a", "1", 3), ("a", "2.5", 4), ("a", "+Inf", 5), ("b", "1.0", 3), ("b", "2.5", 4), ("b", "+Inf", 5)]
    buckets = [
        ("lat_bucket", {"t": t, "le": le}, [(at, (at - times[0]) / 60 * n) for at in times]) for t, le, n in rows
    ]
    return buckets + [("lat_count", {"t": t}, [(at, (at - times[0]) / 60 * 5) for at in times]) for t in "ab"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory, request):
    try:
        tool("prometheus"), tool("promtool")
    except MissingError as missing:
        pytest.skip(str(missing))
    slow = "slow" in (request.config.option.markexpr or "") and "not slow" in request.config.option.markexpr
    chosen = FEW if slow else ALL
    server = PrometheusServer(tmp_path_factory.mktemp("prometheus"))
    server.backfill(
        [("total_total", {"s": s.name}, s.counter(s.total)) for s in chosen if s.has_total_series]
        + [("bad_total", {"s": s.name}, s.counter(s.bad)) for s in chosen if s.has_bad_series]
        + histogram_series()
    )
    with server:
        yield server


def modelled(scenario: Scenario, window: tuple[int, int]) -> tuple[float | None, float | None]:
    """Return (total, bad) as our reimplementation of this version's ``increase`` has them."""
    found = [
        increase([(at * 1000, value) for at, value in scenario.counter(increments)], window[0] * 1000, window[1] * 1000)
        if exists
        else None
        for increments, exists in (
            (scenario.total, scenario.has_total_series),
            (scenario.bad, scenario.has_bad_series),
        )
    ]
    total, bad = (item.value if item is not None else None for item in found)
    return total, bad


def check_engine(engine: PrometheusServer, chosen: list[Scenario]) -> None:
    source = PrometheusSource(PrometheusConfig(engine.url, clock_tolerance_seconds=1e12))
    asked = [(scenario, window) for scenario in chosen for window in windows(scenario)]
    requests = [CountRequest(sli(s), TimeWindow(a * SECOND, b * SECOND)) for s, (a, b) in asked]
    answers = [checked(answer) for answer in source.counts(requests, END_S * SECOND)]
    source.close()
    for (scenario, window), answer in zip(asked, answers, strict=True):
        total, bad = modelled(scenario, window)
        place = (scenario.name, window)
        if total is None:
            assert answer.no_data == "absent", place
        elif total == 0:
            assert answer.no_data == "no_traffic", place
        else:
            assert answer.total == pytest.approx(total, rel=1e-9), place
            assert answer.bad == pytest.approx(bad or 0.0, rel=1e-9, abs=1e-9), place
            check_gap(scenario, window, answer.good, answer.total)


def check_gap(scenario: Scenario, window: tuple[int, int], good: float, total: float) -> None:
    """Evaluated on samples, over series that exist from the window's start, the engine counts exactly."""
    if scenario.times_s[0] <= window[0] and window[0] in scenario.times_s:
        exact = scenario.exact(*window)
        assert (good, total) == (pytest.approx(exact[0], rel=1e-9), pytest.approx(exact[1], rel=1e-9))


def test_the_prometheus_source_equals_the_reimplementation_of_increase(engine):
    check_engine(engine, FEW)


@pytest.mark.slow
def test_the_prometheus_source_equals_the_reimplementation_in_every_scenario(engine):
    check_engine(engine, ALL)


def test_a_window_longer_than_the_data_says_how_much_of_it_is_covered(engine):
    scenario = next(s for s in FEW if s.kind == "steady" and s.period_days == 7)
    end = END_S * SECOND
    spans = [86_400, 7 * 86_400, 14 * 86_400, 28 * 86_400]
    source = PrometheusSource(PrometheusConfig(engine.url, clock_tolerance_seconds=1e12))
    requests = [CountRequest(sli(scenario), TimeWindow(end - width * SECOND, end)) for width in spans]
    answers = source.counts(requests, end)
    sent = source.requests_sent
    source.counts(requests, end)
    assert source.requests_sent - sent == sent  # not asked again, and not a request of its own
    source.close()
    assert [answer.coverage for answer in answers] == pytest.approx([1.0, 1.0, 0.5, 0.25], abs=0.06)


@pytest.mark.case("P03")
@pytest.mark.parametrize(
    ("threshold", "good", "said"), [("1", 6, ""), ("2.5", 8, ""), ("2", 6, "between the bounds 1 and 2.5")]
)
def test_a_latency_objective_over_a_real_histogram(engine, threshold, good, said):
    indicator = PrometheusSLI(total="sum(increase(lat_count[{{.window}}]))", bucket=Bucket("lat", Decimal(threshold)))
    source = PrometheusSource(PrometheusConfig(engine.url, clock_tolerance_seconds=1e12))
    end = END_S * SECOND
    (answer,) = source.counts([CountRequest(indicator, TimeWindow(end - 3600 * SECOND, end))], end)
    source.close()
    assert (answer.good, answer.total) == (pytest.approx(good * 60), pytest.approx(10 * 60))
    assert said in answer.detail


def instant(engine: PrometheusServer, query: str) -> float | None:
    answer = httpx.post(f"{engine.url}/api/v1/query", data={"query": query, "time": str(END_S)}, timeout=60).json()
    assert answer["status"] == "success", answer
    result = answer["data"]["result"]
    assert len(result) <= 1
    return float(result[0]["value"][1]) if result else None


def check_rules(engine: PrometheusServer, chosen: list[Scenario]) -> None:
    for scenario in chosen:
        for start, end in windows(scenario):
            text = f"{end - start}s"
            got = instant(engine, error_ratio_rule(sli(scenario), (end - start) * SECOND, text))
            total, bad = modelled(scenario, (start, end))
            if not total:
                assert got is None, (scenario.name, text)
            else:
                assert got == pytest.approx((bad or 0.0) / total, rel=1e-9, abs=1e-12), (scenario.name, text)


def test_the_generated_ratios_equal_the_reimplementation(engine):
    check_rules(engine, FEW)


@pytest.mark.slow
def test_the_generated_ratios_equal_the_reimplementation_in_every_scenario(engine):
    check_rules(engine, ALL)


def test_uneven_traffic_gives_the_true_ratio_where_the_mean_of_ratios_is_many_times_under(engine):
    """Sloth's optimised period rule averages 5-minute ratios; ours divides sums. Both on the same series, by the engine."""
    scenario = next(s for s in FEW if s.kind == "uneven")
    period = scenario.period_days * 86_400
    good, total = scenario.exact(END_S - period, END_S)
    truth = 1 - good / total
    ours = instant(engine, error_ratio_rule(sli(scenario), period * SECOND, f"{period}s"))
    five = error_ratio_rule(sli(scenario), 600 * SECOND, "10m")  # samples lie 5 minutes apart
    mean = instant(engine, f"avg_over_time(({five})[{period}s:5m])")
    assert ours == pytest.approx(truth, rel=1e-6)
    assert mean is not None
    assert truth / mean > 5


def test_an_idle_end_leaves_the_period_budget_known(engine):
    scenario = next(s for s in FEW if s.kind == "idle" and s.period_days == 7)
    slo = SLO(scenario.name, "web", OBJECTIVE, sli(scenario), WindowSpec(DurationText(7, "d")))
    source = PrometheusSource(PrometheusConfig(engine.url, clock_tolerance_seconds=1e12))
    end = END_S * SECOND
    short, period = source.counts(
        [CountRequest(slo.sli, TimeWindow(end - w * SECOND, end)) for w in (300, 7 * 86_400)], end
    )
    source.close()
    assert checked(short).no_data == "no_traffic"
    left = remaining(measure(period, OBJECTIVE))
    good, total = scenario.exact(END_S - 7 * 86_400, END_S)
    assert left == pytest.approx(1 - (1 - good / total) / 0.01, rel=1e-6)
    assert error_ratio(checked(short)) is None


def test_every_alert_expression_is_accepted_by_the_engine(engine):
    scenario = next(s for s in FEW if s.kind == "steady")
    slo = SLO(scenario.name, "web", OBJECTIVE, sli(scenario), WindowSpec(DurationText(30, "d")))
    for group in build(slo, load_windows(), "test"):
        for rule in group.rules:
            instant(engine, rule["expr"])
