"""OTLP metrics as SLI: delta and cumulative, resets and gaps, against exact counts."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from pasta_otel.exporters.ledger import POINTS, Ledger
from pasta_otel.model import CountRequest, TimeWindow
from pasta_otel.slo.budget import checked
from pasta_otel.slo.sources import otlp
from pasta_otel.slo.sources.otlp import CUMULATIVE, DELTA, OtlpLimits, OtlpSource
from pasta_otel.slo.spec.load import check
from pasta_otel.slo.spec.model import OtlpSLI, PointSelector
from pasta_otel.testing.scenarios import END_S, Scenario, scenarios

SECOND = 1_000_000_000
T0 = 1_700_000_000 * SECOND
TOTAL = PointSelector("http.server.requests", (("service.name", "api"),))
BAD = PointSelector("http.server.requests", (("http.response.status_code", "500"), ("service.name", "api")))
SLI = OtlpSLI(TOTAL, bad=BAD)


class Clock:
    def __init__(self, now: int = T0) -> None:
        self.now = now

    def unix_nano(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now


def sums(points, temporality=CUMULATIVE, service="api", metric="http.server.requests") -> SimpleNamespace:
    """Return a batch of (code, start, time, value)."""
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    pair = group.resource.attributes.add()
    pair.key, pair.value.string_value = "service.name", service
    data = group.scope_metrics.add().metrics.add()
    data.name = metric
    data.sum.aggregation_temporality, data.sum.is_monotonic = temporality, True
    for code, start, time, value in points:
        point = data.sum.data_points.add(start_time_unix_nano=start, time_unix_nano=time, as_int=value)
        attribute = point.attributes.add()
        attribute.key, attribute.value.int_value = "http.response.status_code", code
    return SimpleNamespace(body=request.SerializeToString(), points=len(points))


def count(source: OtlpSource, start: int, end: int, now: int | None = None):
    (answer,) = source.counts([CountRequest(SLI, TimeWindow(start, end))], now or end)
    return checked(answer)


def test_cumulative_points_count_by_their_growth():
    source = OtlpSource([SLI], Clock())
    source.offer_points(sums([(200, T0, T0 + 10 * SECOND, 100), (500, T0, T0 + 10 * SECOND, 4)]))
    source.offer_points(sums([(200, T0, T0 + 20 * SECOND, 150), (500, T0, T0 + 20 * SECOND, 5)]))
    whole = count(source, T0, T0 + 20 * SECOND)
    assert (whole.good, whole.total) == (150, 155)
    last = count(source, T0 + 10 * SECOND, T0 + 20 * SECOND)
    assert (last.good, last.total) == (50, 51)


def test_what_a_series_counted_before_we_watched_is_not_an_event_of_now():
    source = OtlpSource([SLI], Clock())
    source.offer_points(sums([(200, T0 - 3600 * SECOND, T0 + 10 * SECOND, 100_000)]))
    source.offer_points(sums([(200, T0 - 3600 * SECOND, T0 + 20 * SECOND, 100_007)]))
    assert count(source, T0, T0 + 20 * SECOND).total == 7


def test_a_restart_counts_the_new_value_whole_even_when_it_is_larger():
    source = OtlpSource([SLI], Clock())
    source.offer_points(sums([(200, T0, T0 + 10 * SECOND, 5)]))
    source.offer_points(sums([(200, T0 + 15 * SECOND, T0 + 20 * SECOND, 9)]))
    source.offer_points(sums([(200, T0 + 15 * SECOND, T0 + 30 * SECOND, 3)]))  # dropped without a new start time
    assert count(source, T0, T0 + 30 * SECOND).total == 5 + 9 + 3


def test_two_instances_are_two_series_and_another_service_is_none():
    source = OtlpSource([SLI], Clock())
    for service in ("api", "other"):
        source.offer_points(sums([(200, T0, T0 + SECOND, 1), (404, T0, T0 + SECOND, 1)], service=service))
    source.offer_points(sums([(200, T0, T0 + SECOND, 50)], metric="rpc.server.requests"))
    assert count(source, T0, T0 + SECOND).total == 2


def test_delta_points_count_as_they_are_and_a_retried_one_once():
    source = OtlpSource([SLI], Clock())
    batch = sums([(200, T0, T0 + SECOND, 10), (500, T0, T0 + SECOND, 1)], DELTA)
    source.offer_points(batch)
    source.offer_points(batch)
    assert count(source, T0, T0 + SECOND).total == 11


def test_silence_is_stale_no_point_is_absent_and_a_point_from_the_future_is_refused():
    clock = Clock()
    ledger = Ledger(["slo"], names=POINTS)
    source = OtlpSource([SLI], clock, ledger)
    assert count(source, T0, T0 + SECOND).no_data == "absent"
    ledger.receive(1)
    source.offer_points(sums([(200, T0, T0 + 3600 * SECOND, 10)]))
    assert count(source, T0, T0 + SECOND).no_data == "absent"
    ledger.receive(1)
    source.offer_points(sums([(200, T0, T0 + SECOND, 10)]))
    assert count(source, T0, T0 + SECOND).total == 10
    assert count(source, T0, T0 + 400 * SECOND).no_data == "stale"
    account = ledger.snapshot().sinks["slo"]
    assert (account.ok, dict(account.dropped), account.pending) == (1, {"future": 1}, 0)


def test_coverage_says_since_when_we_watch():
    source = OtlpSource([SLI], Clock())
    source.offer_points(sums([(200, T0, T0 + 60 * SECOND, 10)]))
    assert count(source, T0 - 180 * SECOND, T0 + 60 * SECOND).coverage == 0.25


def histogram(time: int, counts: list[int], bounds: list[float]) -> SimpleNamespace:
    request = ExportMetricsServiceRequest()
    data = request.resource_metrics.add().scope_metrics.add().metrics.add()
    data.name = "http.server.request.duration"
    data.histogram.aggregation_temporality = CUMULATIVE
    data.histogram.data_points.add(
        start_time_unix_nano=T0, time_unix_nano=time, bucket_counts=counts, explicit_bounds=bounds, count=sum(counts)
    )
    return SimpleNamespace(body=request.SerializeToString(), points=1)


@pytest.mark.parametrize(
    ("threshold", "good", "exact"), [(0.25, 7, True), (0.5, 9, True), (0.3, 7, False), (1e9, 9, False)]
)
def test_latency_counts_whole_buckets_and_says_when_the_threshold_lies_inside_one(threshold, good, exact):
    metric = "http.server.request.duration"
    sli = OtlpSLI(PointSelector(metric), good=PointSelector(metric, threshold=threshold))
    source = OtlpSource([sli], Clock())
    source.offer_points(histogram(T0 + SECOND, [3, 4, 2, 1], [0.1, 0.25, 0.5]))
    (answer,) = source.counts([CountRequest(sli, TimeWindow(T0, T0 + SECOND))], T0 + SECOND)
    assert (answer.good, answer.total) == (good, 10)
    assert ("lower bound" in answer.detail) == (not exact)


@pytest.mark.parametrize(
    ("threshold", "good", "exact"),
    [(0.25, 5, True), (0.5, 8, True), (0.3, 5, False), (64.0, 11, True), (0.1, 2, False)],
)
def test_an_exponential_histogram_counts_whole_buckets_too(threshold, good, exact):
    """Scale 0: bounds are the powers of two. 2 zeros, 1 in (1/16, 1/8], 2 in (1/8, 1/4], 3 in (1/4, 1/2], 3 in (1/2, 1]."""
    request = ExportMetricsServiceRequest()
    data = request.resource_metrics.add().scope_metrics.add().metrics.add()
    data.name = "lag"
    data.exponential_histogram.aggregation_temporality = CUMULATIVE
    point = data.exponential_histogram.data_points.add(
        start_time_unix_nano=T0, time_unix_nano=T0 + SECOND, count=11, zero_count=2, scale=0
    )
    point.positive.offset = -4
    point.positive.bucket_counts.extend([1, 2, 3, 3])
    sli = OtlpSLI(PointSelector("lag"), good=PointSelector("lag", threshold=threshold))
    source = OtlpSource([sli], Clock())
    source.offer_points(SimpleNamespace(body=request.SerializeToString(), points=1))
    (answer,) = source.counts([CountRequest(sli, TimeWindow(T0, T0 + SECOND))], T0 + SECOND)
    assert (answer.good, answer.total) == (good, 11)
    assert ("lower bound" in answer.detail) == (not exact)


def fed(scenario: Scenario, temporality: int) -> OtlpSource:
    """Return a source that got a scenario's history as points of two series."""
    clock = Clock(scenario.times_s[0] * SECOND)
    source = OtlpSource([SLI], clock, limits=OtlpLimits(retention_ns=400 * 86_400 * SECOND))
    clock.now = END_S * SECOND
    series = {}
    if scenario.has_total_series:
        good = [total - bad for total, bad in zip(scenario.total, scenario.bad, strict=True)]
        series = {200: good, 500: scenario.bad} if scenario.has_bad_series else {200: scenario.total}
    points = []
    for code, increments in series.items():
        start, values = scenario.times_s[0], scenario.counter(increments)
        for number, (at, value) in enumerate(values):
            if number == scenario.reset_at:
                start = scenario.times_s[number - 1]
            shown = increments[number] if temporality == DELTA else int(value)
            points.append((code, start * SECOND, at * SECOND, shown))
    for first in range(0, len(points), 1000):
        source.offer_points(sums(points[first : first + 1000], temporality))
    return source


def check_exact(chosen: list[Scenario]) -> None:
    for scenario in chosen:
        for temporality in (DELTA, CUMULATIVE):
            source = fed(scenario, temporality)
            for width in (300, 3600, 86_400, scenario.period_days * 86_400):
                answer = count(source, (END_S - width) * SECOND, END_S * SECOND)
                good, total = scenario.exact(END_S - width, END_S)
                place = (scenario.name, temporality, width)
                if not scenario.has_total_series:
                    assert answer.no_data == "absent", place
                elif total == 0:
                    assert answer.no_data == "no_traffic", place
                else:
                    assert (answer.good, answer.total) == (good, total), place


def test_otlp_metrics_equal_exact_counts():
    check_exact(scenarios(periods=(7,), seeds=1))


@pytest.mark.slow
def test_otlp_metrics_equal_exact_counts_in_every_scenario():
    check_exact(scenarios())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=30))
def test_any_history_of_growth_and_restarts_adds_up(history):
    source, start, value = OtlpSource([SLI], Clock()), T0, 0
    for number, (growth, restart) in enumerate(history, 1):
        time = T0 + number * SECOND
        if restart:
            start, value = time - SECOND, 0
        value += growth
        source.offer_points(sums([(200, start, time, value)]))
    total = sum(growth for growth, _ in history)
    answer = count(source, T0, T0 + len(history) * SECOND)
    assert answer.total == total if total else answer.no_data == "no_traffic"


SPEC = """
apiVersion: openslo/v1
kind: SLI
metadata: {name: i}
spec:
  ratioMetric:
    counter: true
    good: {metricSource: {type: otlp, spec: {metric: http.server.request.duration, threshold: 0.25, where: {code: 200}}}}
    total: {metricSource: {type: otlp, spec: {metric: http.server.request.duration, where: {code: 200}}}}
"""


def test_the_source_is_named_in_openslo(tmp_path):
    file = tmp_path / "sli.yaml"
    file.write_text(textwrap.dedent(SPEC))
    (read,) = check([file]).objects
    selector = PointSelector("http.server.request.duration", (("code", "200"),))
    assert read.ratio.otlp == OtlpSLI(selector, good=PointSelector(selector.metric, selector.where, 0.25))


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("threshold: 0.25, ", "", "meaningless_ratio"),
        ("good:", "bad:", None),
        ("metric: http.server.request.duration, threshold", "name: x, threshold", "unknown_field"),
        (
            "type: otlp, spec: {metric: http.server.request.duration, where",
            "type: spans, spec: {service: a, where",
            "type",
        ),
    ],
)
def test_a_wrong_otlp_indicator_is_refused(tmp_path, old, new, kind):
    file = tmp_path / "sli.yaml"
    assert old in SPEC
    file.write_text(SPEC.replace(old, new, 1))
    kinds = {problem.kind for problem in check([file]).errors}
    assert kind in kinds if kind else not kinds


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(-1, 61), st.integers(1, 62)), min_size=1, max_size=5),
)
def test_points_in_any_order_are_counted_in_their_windows(points, windows):
    """Delta points of many instances, out of order among each other, asked for in between."""
    clock = Clock(T0 + 100 * SECOND)
    source = OtlpSource([SLI], clock)
    for number, (at, value) in enumerate(points):
        source.offer_points(sums([(200, T0, T0 + at * SECOND, value)], DELTA, service="api"))
        source._last.clear()  # each point from an instance of its own
        for start, length in windows:
            expected = sum(v for t, v in points[: number + 1] if start < t <= start + length)
            answer = count(source, T0 + start * SECOND, T0 + (start + length) * SECOND)
            assert answer.total == expected if expected else answer.no_data == "no_traffic"


def test_what_is_older_than_the_retention_is_forgotten_and_the_rest_still_counts():
    clock = Clock()
    source = OtlpSource([SLI], clock, limits=OtlpLimits(retention_ns=2000 * SECOND))
    for at in range(1, 5001):
        clock.now = T0 + at * SECOND
        source.offer_points(sums([(200, T0, T0 + at * SECOND, at)]))
    growth = source._growth[TOTAL]
    assert len(growth.times) <= 2000 + 1024
    assert count(source, T0 + 3500 * SECOND, T0 + 5000 * SECOND).total == 1500


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0])
@pytest.mark.parametrize("temporality", [DELTA, CUMULATIVE])
def test_a_number_that_is_no_count_is_dropped_and_poisons_nothing(value, temporality):
    ledger = Ledger(["slo"], names=POINTS)
    clock = Clock()
    source = OtlpSource([SLI], clock, ledger)
    bad = sums([(200, T0, T0 + 10 * SECOND, 0)], temporality)
    request = ExportMetricsServiceRequest.FromString(bad.body)
    request.resource_metrics[0].scope_metrics[0].metrics[0].sum.data_points[0].as_double = value
    ledger.receive(1)
    source.offer_points(SimpleNamespace(body=request.SerializeToString(), points=1))
    ledger.receive(1)
    source.offer_points(sums([(200, T0, T0 + 20 * SECOND, 7)], temporality))
    assert count(source, T0, T0 + 30 * SECOND).total == 7
    assert dict(ledger.snapshot().sinks["slo"].dropped) == {"invalid": 1}


def test_series_that_ended_make_room_for_new_ones(monkeypatch):
    monkeypatch.setattr(otlp, "MAX_SERIES", 3)
    clock = Clock()
    source = OtlpSource([OtlpSLI(PointSelector("http.server.requests"), bad=BAD)], clock)
    total = PointSelector("http.server.requests")

    def pod(name: str, value: int) -> None:
        source.offer_points(sums([(200, clock.now - 10 * SECOND, clock.now, value)], service=name))

    def events() -> float:
        window = TimeWindow(clock.now - 3600 * SECOND, clock.now)
        return source.counts([CountRequest(OtlpSLI(total, bad=BAD), window)], clock.now)[0].total

    for number in range(3):
        clock.now += 60 * SECOND
        pod(f"old-{number}", 5)
    clock.now += 60 * SECOND
    pod("one-too-many", 5)
    assert events() == 15
    clock.now += 25 * 3600 * SECOND
    pod("new", 4)
    assert events() == 4
    source.offer_points(sums([(200, T0 + 50 * SECOND, clock.now, 9)], service="old-0"))
    assert events() == 4  # it began so long ago that its 5 may have been counted already
