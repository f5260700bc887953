"""The /metrics page, read back by an independent parser."""

from __future__ import annotations

import gzip
import math
import subprocess
import urllib.error
import urllib.request

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import Counter, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pasta_otel import semconv
from pasta_otel.exporters.prometheus import (
    OPENMETRICS,
    TEXT,
    MetricsServer,
    PrometheusReader,
    asgi_app,
    number,
    prefers_openmetrics,
    respond,
)
from pasta_otel.exporters.prometheus_names import label_name, labels, metric_name
from tests.support import tool

OPEN = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def reader():
    return PrometheusReader()


def provider_of(reader, **options):
    return MeterProvider([reader], resource=Resource({"service.name": 'a"b\\c\nd'}), shutdown_on_exit=False, **options)


@pytest.fixture
def meter(reader):
    provider = provider_of(reader)
    yield provider.get_meter("scope", "1.0")
    provider.shutdown()


def page(reader, accept=""):
    return reader.render(accept)[1].decode()


def samples(text, parse=parse_text):
    return [sample for family in parse(text) for sample in family.samples]


def value_of(found, name, **wanted):
    return [s.value for s in found if s.name == name and wanted.items() <= s.labels.items()]


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        ("http.server.request.duration", "s", "histogram", "http_server_request_duration_seconds"),
        ("hw.energy", "J", "counter", "hw_energy_joules_total"),
        ("requests.total", "{request}", "counter", "requests_total"),
        ("speed", "m/s", "gauge", "speed_meters_per_second"),
        ("ratio.of", "1", "gauge", "ratio_of_ratio"),
        ("count.of", "1", "counter", "count_of_total"),
        ("process.memory_bytes", "By", "gauge", "process_memory_bytes"),
        ("2nd--thing", "", "gauge", "_2nd_thing"),
        ("rate", "{packet}/min", "gauge", "rate_per_minute"),
        ("hw.temperature", "Cel", "gauge", "hw_temperature_celsius"),
    ],
)
def test_names_follow_the_specification(name, unit, kind, expected):
    assert metric_name(name, unit, counter=kind == "counter", gauge=kind == "gauge") == expected


def test_labels_that_fall_together_are_joined_in_key_order():
    assert labels({"a.b": 2, "a_b": True, "1x": "y"}) == {"a_b": "2;true", "key_1x": "y"}
    assert label_name("http.route") == "http_route"


def test_both_formats_say_the_same(reader, meter):
    meter.create_counter("jobs", "{job}", 'done "now"\\\n').add(3, {"q": 'x"\\\ny'})
    meter.create_up_down_counter("queue", "{job}", "waiting").add(-2)
    meter.create_gauge("temp", "Cel", "heat").set(41.5)
    meter.create_histogram("lag", "s", "lag", explicit_bucket_boundaries_advisory=[0.5, 1]).record(0.7)
    for text, parse in ((page(reader), parse_text), (page(reader, OPEN), parse_openmetrics)):
        found = samples(text, parse)
        assert value_of(found, "jobs_total", q='x"\\\ny', otel_scope_name="scope", otel_scope_version="1.0") == [3]
        assert value_of(found, "queue") == [-2]
        assert value_of(found, "temp_celsius") == [41.5]
        assert value_of(found, "lag_seconds_bucket", le="0.5") == [0]
        assert value_of(found, "lag_seconds_bucket", le="1.0") == [1]
        assert value_of(found, "target_info", service_name='a"b\\c\nd') == [1]
    assert page(reader, OPEN).endswith("# EOF\n")
    assert "# UNIT lag_seconds seconds" in page(reader, OPEN)


@pytest.mark.case("P05")
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=30), st.lists(st.floats(0, 1e6), unique=True, max_size=5).map(sorted))
def test_the_inf_bucket_is_always_there_and_equals_the_count(values, bounds):
    reader = PrometheusReader()
    provider = provider_of(reader)
    histogram = provider.get_meter("s").create_histogram("h", explicit_bucket_boundaries_advisory=bounds)
    for each in values:
        histogram.record(each)
    for text, parse in ((page(reader), parse_text), (page(reader, OPEN), parse_openmetrics)):
        found = samples(text, parse)
        assert value_of(found, "h_bucket", le="+Inf") == value_of(found, "h_count") == ([len(values)] if values else [])
        assert "+inf" not in text
        buckets = [s.value for s in found if s.name == "h_bucket"]
        assert buckets == sorted(buckets)
        for bound in bounds if values else []:
            assert value_of(found, "h_bucket", le=repr(float(bound))) == [sum(each <= bound for each in values)]
    provider.shutdown()


def test_exemplars_carry_trace_and_span_in_openmetrics_only(reader, meter):
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("t")
    with tracer.start_as_current_span("s") as span:
        meter.create_histogram("lag", "s", explicit_bucket_boundaries_advisory=[1.0]).record(0.25)
        meter.create_counter("jobs").add(1)
    context = span.get_span_context()
    expected = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
    found = samples(page(reader, OPEN), parse_openmetrics)
    bucket = next(s for s in found if s.name == "lag_seconds_bucket" and s.labels["le"] == "1.0")
    assert (bucket.exemplar.labels, bucket.exemplar.value) == (expected, 0.25)
    assert not any(s.exemplar for s in found if s.name == "lag_seconds_bucket" and s.labels["le"] == "+Inf")
    with tracer.start_as_current_span("s"):
        meter.create_counter("jobs").add(1)
    counter = next(s for s in samples(page(reader, OPEN), parse_openmetrics) if s.name == "jobs_total")
    assert counter.exemplar.labels["trace_id"] != expected["trace_id"]
    assert " # {" not in page(reader)


def test_what_the_format_cannot_say_is_skipped_and_counted():
    reader = PrometheusReader()
    views = [View(instrument_name="exp", aggregation=ExponentialBucketHistogramAggregation())]
    provider = provider_of(reader, views=views)
    meter = provider.get_meter("s")
    meter.create_histogram("exp").record(1)
    meter.create_gauge("same").set(1)
    provider.get_meter("other").create_histogram("same").record(1)
    found = samples(page(reader))
    name = "pasta_prometheus_points_skipped_total"
    assert value_of(found, name, reason="exponential_histogram") == [1]
    assert value_of(found, name, reason="type_conflict") == [1]
    assert not [s for s in found if s.name.startswith("exp")]
    provider.shutdown()


def test_delta_points_are_skipped_and_counted():
    reader = PrometheusReader()
    MetricReader.__init__(reader, preferred_temporality={Counter: AggregationTemporality.DELTA})
    provider = provider_of(reader)
    provider.get_meter("s").create_counter("c").add(1)
    assert value_of(samples(page(reader)), "pasta_prometheus_points_skipped_total", reason="delta") == [1]
    provider.shutdown()


def test_numbers_that_are_not_finite_are_spelled_as_the_formats_want():
    assert [number(value) for value in (math.inf, -math.inf, math.nan, 1, 0.25)] == [
        "+Inf",
        "-Inf",
        "NaN",
        "1.0",
        "0.25",
    ]


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=8), max_size=4))
def test_any_attributes_give_a_page_that_parses(attributes):
    reader = PrometheusReader()
    provider = provider_of(reader)
    provider.get_meter("s").create_counter("c", description="any").add(2, attributes)
    for text, parse in ((page(reader), parse_text), (page(reader, OPEN), parse_openmetrics)):
        assert value_of(samples(text, parse), "c_total") == [2]
    provider.shutdown()


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        (OPEN, True),
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            True,
        ),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.5", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
    ],
)
def test_the_format_follows_the_accept_header(accept, wanted):
    assert prefers_openmetrics(accept) is wanted


def test_a_page_is_gzipped_for_who_takes_gzip(reader, meter):
    meter.create_gauge("g", description="d").set(1)
    plain = dict(respond(reader.render, "", "")[0])
    headers, body = respond(reader.render, OPEN, "gzip, deflate")
    assert plain["Content-Type"] == TEXT
    assert "Content-Encoding" not in plain
    assert dict(headers)["Content-Type"] == OPENMETRICS
    assert gzip.decompress(body).decode() == page(reader, OPEN)
    assert "Content-Encoding" not in dict(respond(reader.render, "", "gzip;q=0")[0])


async def test_the_asgi_application_answers_get_and_refuses_post(reader, meter):
    meter.create_gauge("g", description="d").set(1)
    sent = []

    async def send(message):
        sent.append(message)

    app = asgi_app(reader.render)
    await app({"type": "http", "method": "GET", "headers": [(b"accept", OPEN.encode())]}, None, send)
    assert sent[0]["status"] == 200
    assert (b"content-type", OPENMETRICS.encode()) in sent[0]["headers"]
    assert sent[1]["body"].decode() == page(reader, OPEN)
    await app({"type": "http", "method": "POST", "headers": []}, None, send)
    assert sent[2]["status"] == 405


def test_the_small_server_serves_metrics_on_loopback_only(reader, meter):
    meter.create_gauge("g", description="d").set(1)
    server = MetricsServer(reader.render)
    try:
        assert server._server.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert "g{" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/other", timeout=10)
        caught.value.close()
    finally:
        server.close()


def test_every_metric_of_ours_passes_promtool(reader):
    promtool = tool("promtool")
    provider = provider_of(reader)
    meter = provider.get_meter(semconv.SCOPE, "1")
    for spec in semconv.METRICS.values():
        record(meter, spec)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=reader.render("")[1], capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr.decode(), checked.stdout.decode()) == (0, "", "")
    provider.shutdown()


def record(meter: api.Meter, spec):
    arguments = (spec.name, spec.unit, spec.description)
    if spec.instrument == "histogram":
        meter.create_histogram(*arguments).record(0.1, {"k": "v"})
    elif spec.instrument == "gauge":
        meter.create_gauge(*arguments).set(1.5, {"k": "v"})
    elif spec.instrument == "counter":
        meter.create_counter(*arguments).add(1, {"k": "v"})
    else:
        meter.create_up_down_counter(*arguments).add(1, {"k": "v"})
