"""What is retried, what is not, and the exact account of every answer (case O08), over real HTTP and gRPC."""

from __future__ import annotations

import logging
import threading
from email.utils import formatdate

import pytest
from opentelemetry.sdk.trace import TracerProvider

from pasta_otel.errors import InputError
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.sender import Outcome, Sender, limit_unheard
from pasta_otel.exporters.otlp.spans import PastaSpanExporter, clean_span
from pasta_otel.exporters.otlp.text import clean_utf8
from pasta_otel.exporters.otlp.transport import Reply, retry_after_seconds
from tests.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, attributes
from tests.support import case, free_port


def ten_spans():
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("t")
    spans = [tracer.start_span(f"s{i}") for i in range(10)]
    for span in spans:
        span.end()
    return spans


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def export(answers, timeout_s=10.0, **config):
    with HttpReceiver(answers) as receiver:
        exporter = PastaSpanExporter(OtlpConfig(receiver.endpoint, timeout_s=timeout_s, **config))
        exporter.export(ten_spans())
        exporter.shutdown()
    return receiver, exporter.counts()


O08 = case("O08", "responses.json")


@pytest.mark.case("O08")
@pytest.mark.parametrize("row", range(4))
def test_answers_of_2xx_are_read_and_never_retried(row, caplog):
    answer = O08[row]
    receiver, counts = export([Answer(answer["status"], answer["body"])])
    delivered = case("O08", "expected.json")["delivered"][row]
    assert (counts.received, counts.ok, counts.dropped.get("rejected", 0), counts.pending) == (
        10,
        delivered,
        10 - delivered,
        0,
    )
    assert len(receiver.requests) == 1
    message = (answer["body"].get("partialSuccess") or {}).get("errorMessage")
    assert len(warnings_of(caplog)) == (1 if message else 0)
    assert not message or message in warnings_of(caplog)[0]


@pytest.mark.case("O08")
@pytest.mark.parametrize("status", case("O08", "expected.json")["retry_status"])
def test_transient_answers_are_retried(status):
    scripted = next(answer for answer in O08 if answer["status"] == status)
    receiver, counts = export([Answer(status, headers=scripted.get("headers"))])
    assert (counts.ok, dict(counts.dropped), len(receiver.requests)) == (10, {}, 2)
    pause = receiver.times[1] - receiver.times[0]
    assert pause >= (2.0 if status == 429 else 0.8)  # Retry-After: 2; back-off 1 s with 20 % jitter


@pytest.mark.case("O08")
@pytest.mark.parametrize("status", case("O08", "expected.json")["no_retry_status"])
def test_final_answers_are_not_retried_and_counted(status):
    receiver, counts = export([Answer(status)])
    assert (counts.ok, dict(counts.dropped), len(receiver.requests)) == (0, {f"http_{status}": 10}, 1)


def test_retry_after_is_seconds_or_a_date():
    assert retry_after_seconds("7", 0.0) == 7.0
    assert retry_after_seconds(formatdate(1_000_000_030, usegmt=True), 1_000_000_000.0) == 30.0
    assert retry_after_seconds(formatdate(1_000_000_000, usegmt=True), 1_000_000_030.0) == 0.0
    assert [retry_after_seconds(text, 0.0) for text in (None, "soon", "-1", "nan")] == [None] * 4


class Scripted:
    """A transport that answers from a list, with time that only moves when someone waits."""

    def __init__(self, replies):
        self.replies, self.posts = list(replies), []

    def post(self, body, deadline):
        self.posts.append(deadline)
        return self.replies.pop(0)

    def abort(self): ...
    def close(self): ...
    def after_fork(self): ...


def test_no_retry_starts_when_its_pause_would_pass_the_deadline():
    transport = Scripted([Reply("retry", "http_503", retry_after_s=60.0)])
    assert Sender(OtlpConfig(timeout_s=10), transport=transport).send(b"", 10) == Outcome(0, 10, "http_503")
    assert len(transport.posts) == 1


def test_a_rejected_count_above_the_batch_never_makes_the_account_negative():
    transport = Scripted([Reply("ok", rejected=99, message="m")])
    assert Sender(OtlpConfig(), transport=transport).send(b"", 10) == Outcome(0, 10, "rejected")


def test_limit_ends_a_pause_that_no_longer_fits():
    sender = Sender(OtlpConfig(timeout_s=60), transport=Scripted([Reply("retry", "http_503", retry_after_s=50.0)]))
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(sender.send(b"", 3)))
    thread.start()
    sender.limit(0.2)
    thread.join(10)
    assert outcomes == [Outcome(0, 3, "http_503")]


def test_a_refused_connection_is_dropped_by_the_deadline_with_one_warning(caplog):
    sender = Sender(OtlpConfig(f"http://127.0.0.1:{free_port()}/v1/traces", timeout_s=0.5))
    assert [sender.send(b"", 10).reason for _ in range(3)] == ["connection"] * 3
    assert len(warnings_of(caplog)) == 1


def test_a_kept_connection_that_the_server_closed_is_opened_again_without_a_pause():
    with HttpReceiver([Answer(headers={"Connection": "close"})]) as receiver:
        sender = Sender(OtlpConfig(receiver.endpoint))
        assert [sender.send(b"", 1).ok for _ in range(3)] == [1, 1, 1]
        sender.close()


def test_headers_and_gzip_arrive_and_secrets_stay_out_of_repr():
    receiver, counts = export([], headers=(("authorization", "Bearer s3cret"),), compression="gzip")
    assert counts.ok == 10
    assert receiver.headers[0]["authorization"] == "Bearer s3cret"
    assert receiver.headers[0]["content-encoding"] == "gzip"
    assert "s3cret" not in repr(OtlpConfig(headers=(("authorization", "Bearer s3cret"),)))


def test_grpc_reads_partial_success_and_retries_unavailable(caplog):
    script = [
        Answer("UNAVAILABLE"),
        Answer(200, {"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too long"}}),
    ]
    with GrpcReceiver(script) as receiver:
        exporter = PastaSpanExporter(OtlpConfig(receiver.endpoint, protocol="grpc", headers=(("X-Key", "v"),)))
        exporter.export(ten_spans())
        counts = exporter.counts()
        exporter.shutdown()
    assert (counts.ok, dict(counts.dropped), len(receiver.requests)) == (7, {"rejected": 3}, 2)
    assert receiver.headers[0]["x-key"] == "v"
    assert len(warnings_of(caplog)) == 1


def test_grpc_does_not_retry_a_final_code():
    with GrpcReceiver([Answer("INVALID_ARGUMENT")]) as receiver:
        sender = Sender(OtlpConfig(receiver.endpoint, protocol="grpc"))
        assert sender.send(b"", 4) == Outcome(0, 4, "grpc_invalid_argument")
        sender.close()


def test_batches_above_the_byte_limit_are_split_and_a_lone_giant_is_dropped():
    spans = ten_spans()
    with HttpReceiver() as receiver:
        exporter = PastaSpanExporter(OtlpConfig(receiver.endpoint, max_request_bytes=500))
        giant = TracerProvider(shutdown_on_exit=False).get_tracer("t").start_span("g" * 1000)
        giant.end()
        exporter.export([*spans, giant])
        exporter.shutdown()
    assert dict(exporter.counts().dropped) == {"too_large": 1}
    assert sorted(span.name for _, span in receiver.spans()) == sorted(f"s{i}" for i in range(10))
    assert all(request.ByteSize() <= 500 for request in receiver.requests)


@pytest.mark.case("O01")
def test_text_is_cut_on_a_character_and_bad_bytes_are_replaced():
    expected = case("O01", "expected.json")
    rows = [clean_utf8(bytes.fromhex(row["hex"]), row["byte_limit"]) for row in case("O01", "values.json")["rows"]]
    assert rows[0] == expected["row1"]
    assert rows[1].endswith(expected["row2_ends_with"])
    assert rows[1].startswith("\N{REPLACEMENT CHARACTER}")
    assert rows[2:] == [expected["row3"], expected["row4"]]
    assert clean_utf8("comm\udcff") == "comm\N{REPLACEMENT CHARACTER}"
    assert clean_utf8("e\N{COMBINING ACUTE ACCENT}\U0001f600", 6) == "e\N{COMBINING ACUTE ACCENT}"


@pytest.mark.case("O01")
def test_one_bad_string_does_not_cost_the_batch():
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("t")
    good, bad_bytes = tracer.start_span("good"), tracer.start_span("bytes")
    bad_bytes.set_attribute("comm", clean_utf8(b"\xff\xfeabc"))
    surrogate = tracer.start_span("n\udcff")
    surrogate.set_attribute("k\udcff", ["v\udcff"])
    surrogate.add_event("e\udcff", {"a\udcff": "b\udcff"})
    from opentelemetry.trace import Status, StatusCode

    surrogate.set_status(Status(StatusCode.ERROR, "m\udcff"))
    spans = [good, bad_bytes, surrogate]
    for span in spans:
        span.end()
    with HttpReceiver() as receiver:
        exporter = PastaSpanExporter(OtlpConfig(receiver.endpoint))
        exporter.export(spans)
        exporter.shutdown()
    assert exporter.counts().ok == case("O01", "expected.json")["delivered"] == len(receiver.spans())
    received = {span.name: span for _, span in receiver.spans()}
    bad = received["n\N{REPLACEMENT CHARACTER}"]
    assert attributes(bad.attributes) == {"k\N{REPLACEMENT CHARACTER}": ["v\N{REPLACEMENT CHARACTER}"]}
    assert bad.events[0].name == "e\N{REPLACEMENT CHARACTER}"
    assert attributes(bad.events[0].attributes) == {"a\N{REPLACEMENT CHARACTER}": "b\N{REPLACEMENT CHARACTER}"}
    assert bad.status.message == "m\N{REPLACEMENT CHARACTER}"
    assert attributes(received["bytes"].attributes)["comm"].endswith("abc")


def test_clean_spans_are_passed_on_as_they_are():
    span = ten_spans()[0]
    assert clean_span(span) is span


def test_the_signals_own_variables_win_and_the_general_endpoint_gets_a_path():
    assert OtlpConfig.from_env({}).endpoint == "http://localhost:4318/v1/traces"
    base = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1/x/", "OTEL_EXPORTER_OTLP_HEADERS": "a=1,b=%20"}
    assert OtlpConfig.from_env(base).endpoint == "http://c:1/x/v1/traces"
    assert OtlpConfig.from_env(base, signal="metrics").endpoint == "http://c:1/x/v1/metrics"
    assert OtlpConfig.from_env(base).headers == (("a", "1"), ("b", ""))
    own = base | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://d/y", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip"}
    assert OtlpConfig.from_env(own).endpoint == "https://d/y"
    assert OtlpConfig.from_env(own).compression == "gzip"
    grpc = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert (OtlpConfig.from_env(grpc).protocol, OtlpConfig.from_env(grpc).endpoint) == ("grpc", "http://localhost:4317")


def test_timeouts_are_seconds_and_large_ones_milliseconds():
    assert OtlpConfig.from_env({"OTEL_EXPORTER_OTLP_TIMEOUT": "3"}).timeout_s == 3.0
    assert OtlpConfig.from_env({"OTEL_EXPORTER_OTLP_TIMEOUT": "10000"}).timeout_s == 10.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(name, value):
    with pytest.raises(InputError) as caught:
        OtlpConfig.from_env({name: value})
    assert caught.value.field == name


REFUSED = Reply("refused", "connection", message="nobody is there")


def test_at_the_end_only_those_that_never_took_anything_are_hurried_all_by_one_deadline():
    config = OtlpConfig("http://127.0.0.1:9")
    now = [100.0]
    heard, *unheard = (Sender(config, transport=Scripted([Reply("ok")]), monotonic=lambda: now[0]) for _ in range(3))
    heard.send(b"x", 1)
    limit_unheard(2.0)
    now[0] += 1.5
    limit_unheard(2.0)
    assert [sender._limit_s for sender in unheard] == [102.0, 102.0]
    assert heard._limit_s > 1e9


def test_at_the_end_losses_are_told_once_per_destination(caplog):
    there, elsewhere = OtlpConfig("http://127.0.0.1:9/once"), OtlpConfig("http://127.0.0.1:7/once")
    senders = [Sender(config, transport=Scripted([REFUSED, REFUSED])) for config in (there, there, elsewhere)]
    for sender in senders[:2]:
        sender.send(b"x", 1)
    assert len(warnings_of(caplog)) == 2, "while it runs each speaks for itself"
    for sender in senders:
        sender._warned.clear()
        sender.limit_unheard(2.0)
        sender.send(b"x", 1)
    assert len(warnings_of(caplog)) == 4
