"""RowExporter: the account stays exact, memory bounded and the caller undisturbed, whatever the collector does."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.row_exporter import RowExporter
from pasta_otel.exporters.otlp.spans import PastaSpanExporter, PastaSpanProcessor, build_tracer_provider
from pasta_otel.model import OpSpan, SpanColumns, SpanSite
from tests.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, attributes
from tests.support import free_port, wait_for

SITE = SpanSite("encoder.layers.3", 1, (("pasta.torch.module.path", "encoder.layers.3"),))


def row(number=1, **changes):
    return OpSpan(7, number, 1, time.monotonic_ns(), time.monotonic_ns(), 42, SITE)._replace(**changes)


def rows_to(endpoint, **options):
    config = {key: options.pop(key) for key in ("protocol", "timeout_s", "max_request_bytes") if key in options}
    return RowExporter(OtlpConfig(endpoint, **config), resource=lambda: {"service.name": "svc"}, **options)


def columns(count):
    rng = np.random.default_rng(1)
    times = np.full(count, 1_700_000_000_000_000_000, np.uint64)
    return SpanColumns(
        rng.integers(0, 256, (count, 16), np.uint8), rng.integers(0, 256, (count, 8), np.uint8), np.zeros((count, 8), np.uint8),
        times, times + np.uint64(5), np.zeros(count, np.int32), [SITE], {"gpu.kernel.name": ["gemm"] * count},
    )  # fmt: skip


def assert_exact(counts):
    assert counts.received == counts.ok + sum(counts.dropped.values()) + counts.pending


@pytest.mark.parametrize(("protocol", "peer"), [("http/protobuf", HttpReceiver), ("grpc", GrpcReceiver)])
def test_rows_and_columns_arrive_with_wall_times_and_identity(protocol, peer):
    with peer() as receiver:
        exporter = rows_to(receiver.endpoint, protocol=protocol)
        before = time.time_ns()
        assert exporter.offer(row(1, status_message="ValueError"))
        assert exporter.offer_many([row(number) for number in range(2, 11)]) == 9
        assert exporter.offer_columns(columns(25))
        assert exporter.shutdown(10)
    counts = exporter.counts()
    assert (counts.received, counts.ok, dict(counts.dropped), counts.pending) == (35, 35, {}, 0)
    spans = receiver.spans()
    assert len(spans) == 35
    resource, first = next((resource, span) for resource, span in spans if span.span_id == (1).to_bytes(8, "big"))
    assert abs(first.start_time_unix_nano - before) < 60_000_000_000  # wall time, not 1970
    assert attributes(first.attributes) == {"pasta.torch.module.path": "encoder.layers.3", "thread.id": 42}
    assert (first.status.code, first.status.message) == (2, "ValueError")
    assert resource["service.name"] == "svc"
    assert {"service.instance.id", "process.pid"} <= resource.keys()


def test_a_bad_row_costs_one_row():
    with HttpReceiver() as receiver:
        exporter = rows_to(receiver.endpoint)
        exporter.offer_many([row(1), row(2, span_id=2**64), row(3, site="not a site"), row(4)])
        exporter.shutdown(10)
    assert (exporter.counts().ok, dict(exporter.counts().dropped)) == (2, {"invalid": 2})
    assert len(receiver.spans()) == 2


def test_columns_that_cannot_be_encoded_are_counted_and_the_worker_lives():
    with HttpReceiver() as receiver:
        exporter = rows_to(receiver.endpoint)
        bad = columns(3)
        exporter.offer_columns(SpanColumns(*(getattr(bad, f) for f in bad.__slots__[:7]), {"k": [1, 2]}))
        exporter.force_flush(10)
        exporter.offer(row())
        exporter.shutdown(10)
    assert (exporter.counts().ok, dict(exporter.counts().dropped)) == (1, {"encode": 3})


def test_large_batches_are_split_below_the_byte_limit():
    with HttpReceiver() as receiver:
        exporter = rows_to(receiver.endpoint, max_request_bytes=2000)
        exporter.offer_columns(columns(100))
        exporter.shutdown(10)
    assert len(receiver.spans()) == exporter.counts().ok == 100
    assert all(request.ByteSize() <= 2000 for request in receiver.requests)


def test_a_dead_collector_costs_bounded_memory_and_every_drop_is_counted():
    exporter = rows_to(f"http://127.0.0.1:{free_port()}/v1/traces", queue_size=1000, batch_size=100, timeout_s=30)
    one = row()
    for _ in range(20):
        exporter.offer_many([one] * 500)
    for _ in range(2000):
        exporter.offer(one)
    assert len(exporter._state.rows) <= 1000
    for _ in range(10):
        exporter.offer_columns(columns(1000))
    assert exporter._state.batch_rows <= 4000
    counts = exporter.counts()
    assert counts.received == 22_000
    assert counts.dropped["queue_full"] > 15_000
    assert_exact(counts)
    started = time.monotonic()
    assert not exporter.shutdown(1.0)
    assert time.monotonic() - started < 10  # its timeout is 1 s; ten allows for a busy machine
    counts = exporter.counts()
    assert (counts.pending, counts.ok) == (0, 0)
    assert_exact(counts)


@pytest.mark.parametrize(("protocol", "peer"), [("http/protobuf", HttpReceiver), ("grpc", GrpcReceiver)])
def test_a_hung_collector_neither_slows_the_caller_nor_holds_shutdown(protocol, peer):
    with peer([Answer(hang=True)] * 50) as receiver:
        exporter = rows_to(receiver.endpoint, protocol=protocol, queue_size=50_000, batch_size=10, timeout_s=60)
        exporter.offer_many([row(number) for number in range(1, 30)])
        wait_for(lambda: receiver.requests)
        one, costs = row(), []
        for _ in range(2000):
            started = time.perf_counter_ns()
            exporter.offer(one)
            costs.append(time.perf_counter_ns() - started)
        assert sorted(costs)[len(costs) // 2] < 1_000_000  # under 1 ms; it is near 0.3 us
        started = time.monotonic()
        assert not exporter.shutdown(1.0)
        assert time.monotonic() - started < 10  # not the request's 60 s
        counts = exporter.counts()
        assert (counts.pending, dict(counts.dropped)) == (0, {"shutdown": 2029})
        assert not exporter.offer(one)
        assert exporter.counts().dropped["shutdown"] == 2030
        assert_exact(exporter.counts())
        wait_for(lambda: not exporter._state.thread.is_alive())


@pytest.mark.parametrize(("protocol", "peer"), [("http/protobuf", HttpReceiver), ("grpc", GrpcReceiver)])
def test_an_sdk_provider_ends_in_time_with_a_hung_collector(protocol, peer):
    with peer([Answer(hang=True)] * 50) as receiver:
        config = OtlpConfig(receiver.endpoint, protocol, timeout_s=60)
        provider = build_tracer_provider(config, shutdown_timeout_s=1.0)
        processor = provider._active_span_processor._span_processors[0]
        tracer = provider.get_tracer("t")
        for _ in range(1000):
            tracer.start_span("s").end()
        wait_for(lambda: receiver.requests)
        started = time.monotonic()
        provider.shutdown()
        assert time.monotonic() - started < 15  # not 60 s and not the SDK's 30 s
        counts = wait_for(processor.counts)
        assert (counts.received, counts.ok, counts.pending) == (1000, 0, 0)
        assert sum(counts.dropped.values()) == 1000


def test_spans_pushed_out_of_a_full_sdk_queue_are_counted(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "64")
    with HttpReceiver() as receiver:
        provider = build_tracer_provider(OtlpConfig(receiver.endpoint))
        processor = provider._active_span_processor._span_processors[0]
        tracer = provider.get_tracer("t")
        for _ in range(3000):
            tracer.start_span("s").end()
        provider.shutdown()
        counts = processor.counts()
        tracer.start_span("late").end()
        late = processor.counts()
    assert counts.received == 3000
    assert counts.ok == len(receiver.spans())
    assert counts.pending == 0
    assert_exact(counts)
    assert (late.received, late.dropped["shutdown"]) == (3001, counts.dropped.get("shutdown", 0) + 1)


def test_many_threads_lose_nothing_and_the_account_is_exact_at_every_moment():
    with HttpReceiver() as receiver:
        exporter = rows_to(receiver.endpoint, batch_size=500, schedule_delay_s=0.01)
        watching, wrong = threading.Event(), []

        def watch():
            while not watching.is_set():
                counts = exporter.counts()
                if counts.received != counts.ok + sum(counts.dropped.values()) + counts.pending:
                    wrong.append(counts)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda base: [exporter.offer(row(base * 10_000 + n + 1)) for n in range(2500)], range(4)))
        assert exporter.shutdown(30)
        watching.set()
        watcher.join()
    assert not wrong
    assert exporter.counts().ok == 10_000 == len({span.span_id for _, span in receiver.spans()})


def test_a_collector_that_comes_back_gets_what_waited():
    port = free_port()
    exporter = rows_to(f"http://127.0.0.1:{port}/v1/traces", timeout_s=30)
    exporter.offer_many([row(number) for number in range(1, 101)])
    with HttpReceiver([Answer(503)]) as receiver:
        exporter._sender._transport._port = receiver.server.server_port
        assert exporter.force_flush(30)
        assert exporter.shutdown(10)
    assert exporter.counts().ok == 100
    assert len({span.span_id for _, span in receiver.spans()}) == 100


def test_flush_says_when_the_time_was_not_enough():
    with HttpReceiver([Answer(hang=True)]) as receiver:
        exporter = rows_to(receiver.endpoint, timeout_s=60)
        exporter.offer(row())
        assert not exporter.force_flush(0.2)
        exporter.shutdown(0.5)


def test_nothing_starts_before_the_first_row_and_an_idle_exporter_stops_at_once():
    exporter = rows_to("http://127.0.0.1:9/v1/traces")
    assert exporter._state.thread is None
    assert exporter.force_flush(0.1)
    assert exporter.shutdown(5)
    assert exporter._state.thread is None


def test_the_account_is_exported_as_metrics():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    with HttpReceiver([Answer(400)]) as receiver:
        exporter = rows_to(receiver.endpoint, meter=provider.get_meter("t"), sink="rows")
        exporter.offer(row())
        exporter.force_flush(10)
        exporter.offer_many([row(), row()])
        exporter.shutdown(10)
    scope = reader.get_metrics_data().resource_metrics[0].scope_metrics[0]
    points = {(m.name, p.attributes.get("reason")): p.value for m in scope.metrics for p in m.data.data_points}
    assert points == {
        ("pasta.sink.spans.ok", None): 2,
        ("pasta.sink.spans.dropped", "http_400"): 1,
        ("pasta.sink.spans.pending", None): 0,
    }
    provider.shutdown()


def test_our_own_requests_are_not_traced():
    seen = []
    from opentelemetry.instrumentation.utils import is_instrumentation_enabled

    class Spy:
        def post(self, body, deadline):
            from pasta_otel.exporters.otlp.transport import Reply

            seen.append(is_instrumentation_enabled())
            return Reply("ok")

        def abort(self): ...
        def close(self): ...
        def after_fork(self): ...

    from pasta_otel.exporters.otlp.sender import Sender

    exporter = rows_to("http://127.0.0.1:9/v1/traces", sender=Sender(OtlpConfig(), transport=Spy()))
    exporter.offer(row())
    exporter.shutdown(10)
    assert seen == [False]


def test_the_providers_resource_has_a_name_an_instance_and_a_host(monkeypatch):
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    provider = build_tracer_provider(OtlpConfig("http://127.0.0.1:9/v1/traces"))
    found = provider.resource.attributes
    assert found["service.name"].startswith("unknown_service:")
    assert {"service.instance.id", "process.pid", "host.name", "telemetry.sdk.name"} <= found.keys()
    provider.shutdown()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "orders")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=mine,deployment.environment.name=t")
    provider = build_tracer_provider(OtlpConfig("http://127.0.0.1:9/v1/traces"), attributes={"service.name": "x"})
    assert provider.resource.attributes["service.name"] == "orders"
    assert provider.resource.attributes["service.instance.id"] == "mine"
    provider.shutdown()


def test_an_exporter_that_is_shut_down_counts_what_still_comes():
    exporter = PastaSpanExporter(OtlpConfig("http://127.0.0.1:9/v1/traces"))
    processor = PastaSpanProcessor(exporter)
    processor.shutdown()
    exporter.export([object(), object()])
    assert dict(exporter.counts().dropped) == {"shutdown": 2}
