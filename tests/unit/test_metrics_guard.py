"""A meter whose memory is bounded, whatever attributes come; and metrics by OTLP."""

from __future__ import annotations

import threading

import pytest
from opentelemetry.metrics import Observation
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pasta_otel.exporters.metrics import CARDINALITY_LIMIT, build_meter_provider
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.counts import SinkCounts, observe
from pasta_otel.exporters.otlp.sender import Sender
from pasta_otel.exporters.otlp.transport import Reply

OVERFLOW = {"otel.metric.overflow": True}


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader):
    built = build_meter_provider(readers=[reader])
    yield built
    built.shutdown()


def points(reader):
    data = reader.get_metrics_data()
    groups = data.resource_metrics if data else []
    return [
        point
        for group in groups
        for scope in group.scope_metrics
        for m in scope.metrics
        for point in m.data.data_points
    ]


def record(meter, kind, attributes):
    if kind == "counter":
        meter.create_counter("i").add(1, attributes)
    elif kind == "updown":
        meter.create_up_down_counter("i").add(1, attributes)
    elif kind == "histogram":
        meter.create_histogram("i").record(1, attributes)
    else:
        meter.create_gauge("i").set(1, attributes)


@pytest.mark.parametrize("kind", ["counter", "updown", "histogram", "gauge"])
def test_the_limit_holds_for_every_instrument_and_nothing_is_lost(reader, provider, kind):
    meter = provider.get_meter("m")
    for number in range(CARDINALITY_LIMIT + 500):
        record(meter, kind, {"user": number})
    found = points(reader)
    assert len(found) == CARDINALITY_LIMIT
    surplus = next(point for point in found if dict(point.attributes) == OVERFLOW)
    if kind != "gauge":
        total = sum(point.count if kind == "histogram" else point.value for point in found)
        assert total == CARDINALITY_LIMIT + 500
        assert (surplus.count if kind == "histogram" else surplus.value) == 501


@pytest.mark.parametrize(("kind", "expected"), [("counter", 15), ("up_down_counter", 15), ("gauge", 9)])
def test_observable_instruments_fold_their_surplus(reader, kind, expected):
    provider = build_meter_provider(readers=[reader], limit=5)

    def fixed(_):
        values = [1, 1, 1, 1, 4, 2, 9]
        return [Observation(value, {"n": number}) for number, value in enumerate(values)]

    getattr(provider.get_meter("m"), f"create_observable_{kind}")("o", [fixed])
    by_attributes = {tuple(point.attributes.items()): point.value for point in points(reader)}
    assert by_attributes.pop(tuple(OVERFLOW.items())) == expected
    assert by_attributes == {(("n", number),): 1 for number in range(4)}
    provider.shutdown()


def test_sets_that_were_known_before_the_limit_stay_themselves(reader, provider):
    counter = provider.get_meter("m").create_counter("c")
    for number in range(3000):
        counter.add(1, {"n": number})
        counter.add(1, {"first": "one"})
    found = {tuple(point.attributes.items()): point.value for point in points(reader)}
    assert found[("first", "one"),] == 3000


def test_two_creations_of_one_instrument_share_one_limit(reader, provider):
    for number in range(5000):
        provider.get_meter("m").create_counter("c").add(1, {"n": number})
    assert len(points(reader)) == CARDINALITY_LIMIT


def test_attributes_that_cannot_be_hashed_are_counted_too(reader):
    provider = build_meter_provider(readers=[reader], limit=3)
    for number in range(10):
        provider.get_meter("m").create_counter("c").add(1, {"list": [str(number)]})
    assert len(points(reader)) == 3
    provider.shutdown()


def test_many_threads_stay_near_the_limit(reader):
    provider = build_meter_provider(readers=[reader], limit=100)
    counter = provider.get_meter("m").create_counter("c")
    threads = [
        threading.Thread(target=lambda base=base: [counter.add(1, {"n": base * 1000 + n}) for n in range(1000)])
        for base in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = points(reader)
    assert len(found) <= 100 + 4
    assert sum(point.value for point in found) == 4000


class Kept:
    def __init__(self):
        self.bodies = []

    def post(self, body, deadline):
        self.bodies.append(body)
        return Reply("ok")

    def abort(self): ...
    def close(self): ...
    def after_fork(self): ...


def test_metrics_leave_by_otlp_with_this_processs_identity(monkeypatch):
    from pasta_otel.exporters import metrics as module

    kept = Kept()
    monkeypatch.setattr(module, "Sender", lambda config, signal: Sender(config, transport=kept))
    provider = build_meter_provider(config=OtlpConfig("http://127.0.0.1:9/v1/metrics"), interval_s=60)
    provider.get_meter("m").create_counter("c").add(7)
    provider.shutdown()
    request = ExportMetricsServiceRequest.FromString(kept.bodies[-1])
    keys = [pair.key for pair in request.resource_metrics[0].resource.attributes]
    assert sorted(keys) == sorted(set(keys))
    assert {"service.instance.id", "process.pid", "host.name"} <= set(keys)
    assert request.resource_metrics[0].scope_metrics[0].metrics[0].sum.data_points[0].as_int == 7


def observed(reader) -> dict[str, float]:
    return {point.attributes["from"]: point.value for point in points(reader)}


@pytest.mark.parametrize("kind", ["counter", "up_down_counter", "gauge"])
def test_every_callback_of_an_instrument_that_is_made_twice_is_asked(reader, provider, kind):
    for owner in ("first", "second"):
        create = getattr(provider.get_meter("m"), f"create_observable_{kind}")
        create("i", [lambda _, owner=owner: [Observation(2, {"from": owner}), Observation(3, {"from": "both"})]])
    assert observed(reader) == {"first": 2, "second": 2, "both": 3 if kind == "gauge" else 6}
    assert observed(reader) == {"first": 2, "second": 2, "both": 3 if kind == "gauge" else 6}


def test_callbacks_of_one_instrument_share_one_limit(reader):
    meter = build_meter_provider(readers=[reader], limit=4).get_meter("m")
    for owner in range(2):
        callback = lambda _, owner=owner: [Observation(1, {"n": 3 * owner + n}) for n in range(3)]  # noqa: E731
        meter.create_observable_counter("i", [callback])
    assert len(points(reader)) == 4
    assert sum(point.value for point in points(reader)) == 6


def test_a_callback_that_fails_costs_only_itself(reader, provider, caplog):
    def fails(_):
        yield Observation(1, {"from": "before"})
        raise ValueError("no")

    meter = provider.get_meter("m")
    meter.create_observable_gauge("i", [fails])
    meter.create_observable_gauge("i", [lambda _: [Observation(2, {"from": "other"})]])
    assert observed(reader) == {"before": 1, "other": 2}
    assert "a callback of an instrument failed" in caplog.text


def test_the_accounts_of_all_sinks_of_a_process_are_exported(reader, provider):
    for sink in ("otlp_spans", "otlp_rows"):
        counts = SinkCounts(10, 7, {"queue_full": 2}, 1)
        observe(provider.get_meter("m"), sink, lambda counts=counts: counts)
    found = {(point.attributes["sink"], point.attributes.get("reason"), point.value) for point in points(reader)}
    assert found == {
        (sink, reason, value)
        for sink in ("otlp_spans", "otlp_rows")
        for reason, value in ((None, 7), ("queue_full", 2), (None, 1))
    }
