"""The receiver over real connections: the SDK's own exporters, every answer of the protocol, TLS and tokens."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from pasta_otel.errors import InputError, MissingError, StateError
from pasta_otel.exporters.ledger import POINTS, Ledger
from pasta_otel.exporters.receiver import Receiver, ReceiverConfig
from tests.support import CASES
from tests.telemetry import KeepingSink, receiving, request, span

PROTOBUF, JSON = "application/x-protobuf", "application/json"
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(["keep"])


@pytest.fixture
def sink(ledger: Ledger) -> KeepingSink:
    return KeepingSink(ledger)


def send_spans(exporter, count: int) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "sdk", "process.pid": 4242}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=64))
    tracer = provider.get_tracer("tests")
    for number in range(count):
        with (
            tracer.start_as_current_span("outer", attributes={"number": number}),
            tracer.start_as_current_span("inner"),
        ):
            pass
    provider.shutdown()


@pytest.mark.parametrize("protocol", ["grpc", "http", "http-gzip", "http-deflate"])
async def test_the_sdk_exporters_deliver_every_span(ledger, sink, protocol):
    async with receiving(ledger, sink) as receiver:
        url = f"{receiver.http_url}/v1/traces"
        exporter = {
            "grpc": lambda: GrpcExporter(f"http://{receiver.grpc_target}", insecure=True),
            "http": lambda: HttpExporter(url),
            "http-gzip": lambda: HttpExporter(url, compression=Compression.Gzip),
            "http-deflate": lambda: HttpExporter(url, compression=Compression.Deflate),
        }[protocol]()
        await asyncio.to_thread(send_spans, exporter, 200)
    assert sorted(sink.names) == ["inner"] * 200 + ["outer"] * 200
    assert ledger.snapshot().received == 400
    group = sink.batches[0].groups[0]
    assert (group.resource.service, group.scope, group.resource.attributes["process.pid"]) == ("sdk", "tests", 4242)
    parents = {
        (batch.trace_id[row], batch.span_id[row])
        for batch in sink.batches
        for row, name in enumerate(batch.name)
        if name == "outer"
    }
    for batch in sink.batches:
        for row, name in enumerate(batch.name):
            assert name == "outer" or (batch.trace_id[row], batch.parent_span_id[row]) in parents


async def test_the_sdk_metric_exporter_is_answered_and_its_points_are_counted():
    points = Ledger([], names=POINTS)
    receiver = Receiver(ReceiverConfig("127.0.0.1:0", "127.0.0.1:0"), [], Ledger([]), point_ledger=points)
    await receiver.start()
    exporter = OTLPMetricExporter(f"{receiver.http_url}/v1/metrics")

    def send() -> None:
        provider = MeterProvider([PeriodicExportingMetricReader(exporter, 60_000)], shutdown_on_exit=False)
        provider.get_meter("tests").create_histogram("lat").record(0.3)
        provider.get_meter("tests").create_counter("hits").add(2)
        provider.shutdown()

    await asyncio.to_thread(send)
    await receiver.stop(0.2)
    assert points.snapshot().received == 2
    assert points.snapshot().rejected == {}


def status_of(response: httpx.Response) -> tuple[int, str]:
    if response.headers["content-type"].startswith(JSON):
        return response.json()["code"], response.json()["message"]
    assert response.headers["content-type"] == PROTOBUF
    status = status_pb2.Status.FromString(response.content)
    return status.code, status.message


@pytest.mark.parametrize("media", [PROTOBUF, JSON])
async def test_every_refusal_has_a_status_body_in_the_requests_own_content_type(ledger, sink, media):
    async with receiving(ledger, sink, max_request_bytes=10_000) as receiver:  # noqa: SIM117 - reads better
        async with httpx.AsyncClient(base_url=receiver.http_url, headers={"content-type": media}) as client:
            answers = {
                "404": await client.post("/v2/traces", content=b""),
                "405": await client.get("/v1/traces"),
                "400": await client.post("/v1/traces", content=b"{\xff"),
                "400 gzip": await client.post("/v1/traces", content=b"plain", headers={"content-encoding": "gzip"}),
                "415": await client.post("/v1/traces", content=b"x", headers={"content-encoding": "br"}),
                "413": await client.post("/v1/traces", content=b"x" * 10_001),
                "413 gzip": await client.post(
                    "/v1/traces", content=gzip.compress(b"\0" * 10_000_000), headers={"content-encoding": "gzip"}
                ),
            }
    for name, answer in answers.items():
        assert answer.status_code == int(name[:3]), name
        assert answer.headers["content-type"] == media
        code, message = status_of(answer)
        assert code > 0
        assert message
    assert answers["405"].headers["allow"] == "POST"
    assert ledger.snapshot().received == 0


async def test_a_chunked_body_over_the_limit_is_cut_off(ledger, sink):
    async def chunks():
        for _ in range(100):
            yield b"x" * 1000

    async with receiving(ledger, sink, max_request_bytes=10_000) as receiver, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{receiver.http_url}/v1/traces", content=chunks(), headers={"content-type": PROTOBUF}
        )
    assert answer.status_code == 413


async def test_an_unknown_content_type_is_refused_in_json(ledger, sink):
    async with receiving(ledger, sink) as receiver, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{receiver.http_url}/v1/traces", content=b"x", headers={"content-type": "text/plain"}
        )
    assert answer.status_code == 415
    assert "text/plain" in status_of(answer)[1]


async def test_a_full_queue_says_when_to_come_back(ledger):
    body = request(span()).SerializeToString()
    async with receiving(ledger, KeepingSink(ledger, room=False)) as receiver:
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{receiver.http_url}/v1/traces", content=body, headers={"content-type": PROTOBUF}
            )
        async with grpc.aio.insecure_channel(receiver.grpc_target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await channel.unary_unary(EXPORT)(body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    detail = status_pb2.Status.FromString(dict(failed.value.trailing_metadata())["grpc-status-details-bin"]).details[0]
    info = error_details_pb2.RetryInfo()
    assert detail.Unpack(info)
    assert info.retry_delay.seconds == 1
    assert ledger.snapshot().received == 0


@pytest.mark.case("O03")
async def test_partial_success_is_answered_alike_by_every_transport(ledger, sink):
    from pasta_otel.exporters.receiver import wire
    from pasta_otel.exporters.receiver.otlpjson import to_protobuf

    text = (CASES / "O03" / "batch.json").read_bytes()
    body = to_protobuf(text, wire.TRACE_REQUEST).body
    async with receiving(ledger, sink) as receiver:
        async with httpx.AsyncClient(base_url=receiver.http_url) as client:
            as_json = await client.post("/v1/traces", content=text, headers={"content-type": f"{JSON}; charset=utf-8"})
            as_protobuf = await client.post("/v1/traces", content=body, headers={"content-type": PROTOBUF})
        async with grpc.aio.insecure_channel(receiver.grpc_target) as channel:
            as_grpc = await channel.unary_unary(EXPORT)(body)
    assert as_json.status_code == as_protobuf.status_code == 200
    partial = ExportTraceServiceResponse.FromString(as_grpc).partial_success
    assert as_protobuf.content == as_grpc
    assert as_json.json()["partialSuccess"] == {"rejectedSpans": "4", "errorMessage": partial.error_message}
    assert partial.rejected_spans == 4
    assert len(sink.names) == 9


async def test_grpc_refuses_what_is_malformed_and_goes_on(ledger, sink):
    async with receiving(ledger, sink, max_request_bytes=10_000) as receiver:  # noqa: SIM117 - reads better
        async with grpc.aio.insecure_channel(receiver.grpc_target) as channel:
            export = channel.unary_unary(EXPORT)
            with pytest.raises(grpc.aio.AioRpcError) as malformed:
                await export(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as large:
                await export(b"x" * 10_001)
            assert await export(request(span()).SerializeToString(), compression=grpc.Compression.Gzip) == b""
    assert malformed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert malformed.value.details().startswith("body:")
    assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sink.names == ["op"]


async def test_a_token_is_needed_where_one_is_set(ledger, sink):
    body = request(span()).SerializeToString()
    async with receiving(ledger, sink, bearer_token="s3cret") as receiver:
        assert "s3cret" not in repr(ReceiverConfig(bearer_token="s3cret"))
        async with httpx.AsyncClient(base_url=receiver.http_url, headers={"content-type": PROTOBUF}) as client:
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
                answer = await client.post("/v1/traces", content=body, headers=given)
                assert (answer.status_code, status_of(answer)[0]) == (401, 16)
            right = await client.post("/v1/traces", content=body, headers={"authorization": "Bearer s3cret"})
        async with grpc.aio.insecure_channel(receiver.grpc_target) as channel:
            export = channel.unary_unary(EXPORT)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await export(body)
            assert await export(body, metadata=[("authorization", "Bearer s3cret")]) == b""
    assert right.status_code == 200
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(sink.names) == 2


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    key, chain = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", str(key), "-out", str(chain),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is missing")
    return str(chain), str(key)


def contents(*names: str) -> list[bytes]:
    return [Path(name).read_bytes() for name in names]


async def test_both_transports_speak_tls(ledger, sink, certificate):
    chain, key = certificate
    body = request(span()).SerializeToString()
    async with receiving(ledger, sink, tls_certificate_file=chain, tls_key_file=key) as receiver:
        context = ssl.create_default_context(cafile=chain)
        async with httpx.AsyncClient(verify=context) as client:
            answer = await client.post(
                f"{receiver.http_url}/v1/traces", content=body, headers={"content-type": PROTOBUF}
            )
        credentials = grpc.ssl_channel_credentials(*contents(chain))
        async with grpc.aio.secure_channel(f"localhost:{receiver.grpc_port}", credentials) as channel:
            assert await channel.unary_unary(EXPORT)(body) == b""
    assert answer.status_code == 200
    assert receiver.http_url.startswith("https://")
    assert len(sink.names) == 2


async def test_a_client_certificate_is_needed_where_a_ca_is_set(ledger, sink, certificate):
    chain, key = certificate
    body = request(span()).SerializeToString()
    pem, secret = contents(chain, key)
    tls = {"tls_certificate_file": chain, "tls_key_file": key, "tls_client_ca_file": chain}
    async with receiving(ledger, sink, **tls) as receiver:
        for own in (False, True):
            context = ssl.create_default_context(cafile=chain)
            if own:
                context.load_cert_chain(chain, key)
            async with httpx.AsyncClient(verify=context) as client:
                post = client.post(f"{receiver.http_url}/v1/traces", content=body, headers={"content-type": PROTOBUF})
                if own:
                    assert (await post).status_code == 200
                else:
                    with pytest.raises(httpx.HTTPError):
                        await post
        anonymous = grpc.ssl_channel_credentials(pem)
        async with grpc.aio.secure_channel(f"localhost:{receiver.grpc_port}", anonymous) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(EXPORT)(body, timeout=10)
        known = grpc.ssl_channel_credentials(pem, secret, pem)
        async with grpc.aio.secure_channel(f"localhost:{receiver.grpc_port}", known) as channel:
            assert await channel.unary_unary(EXPORT)(body) == b""
    assert len(sink.names) == 2


async def test_an_address_in_use_is_named(ledger, sink):
    async with receiving(ledger, sink) as receiver:
        for config in (
            ReceiverConfig(None, f"127.0.0.1:{receiver.http_port}"),
            ReceiverConfig(f"127.0.0.1:{receiver.grpc_port}", None),
        ):
            second = Receiver(config, [sink], ledger)
            with pytest.raises(
                MissingError, match=str((config.http_address or config.grpc_address or "").rpartition(":")[2])
            ):
                await second.start()
        with pytest.raises(StateError):
            await receiver.start()


def test_a_wrong_configuration_names_its_field():
    for field, config in {
        "http_address": {"http_address": "4318"},
        "grpc_address": {"grpc_address": "localhost:99999"},
        "tls_key_file": {"tls_certificate_file": "a"},
        "tls_client_ca_file": {"tls_client_ca_file": "a"},
        "max_request_bytes": {"max_request_bytes": 0},
    }.items():
        with pytest.raises(InputError) as error:
            ReceiverConfig(**config)
        assert error.value.field == field


async def test_a_client_that_goes_away_leaves_the_receiver_working(ledger, sink):
    async with receiving(ledger, sink) as receiver:
        reader, writer = await asyncio.open_connection("127.0.0.1", receiver.http_port)
        writer.write(
            b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\ncontent-length: 999\r\n\r\nabc"
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        del reader
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{receiver.http_url}/v1/traces",
                content=request(span()).SerializeToString(),
                headers={"content-type": PROTOBUF},
            )
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/metrics"])
async def test_a_slash_behind_the_path_is_no_redirect_which_senders_would_not_follow(ledger, sink, path):
    async with receiving(ledger, sink) as receiver, httpx.AsyncClient(base_url=receiver.http_url) as client:
        answer = await client.post(f"{path}/", content=b"{}", headers={"Content-Type": JSON})
        other = await client.post(f"{path}//", content=b"{}", headers={"Content-Type": JSON})
    assert (answer.status_code, answer.json()) == (200, {})
    assert other.status_code == 404
