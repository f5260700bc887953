"""Real peers: rotel takes what both exporters send by both protocols, and passes it on unchanged."""

from __future__ import annotations

import socket
import subprocess

import pytest

from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.row_exporter import RowExporter
from pasta_otel.exporters.otlp.spans import build_tracer_provider
from pasta_otel.model import OpSpan, SpanSite
from tests.otlp_receiver import HttpReceiver, attributes
from tests.support import free_port, rotel_binary, wait_for


@pytest.fixture
def rotel(tmp_path):
    ports = {"grpc": free_port(), "http/protobuf": free_port()}
    with HttpReceiver() as upstream:
        log = (tmp_path / "out").open("w")
        process = subprocess.Popen(
            [
                rotel_binary(), "start", "--otlp-grpc-endpoint", f"127.0.0.1:{ports['grpc']}",
                "--otlp-http-endpoint", f"127.0.0.1:{ports['http/protobuf']}", "--exporter", "otlp",
                "--otlp-exporter-endpoint", upstream.endpoint.removesuffix("/v1/traces"),
                "--otlp-exporter-protocol", "http", "--pid-file", str(tmp_path / "pid"), "--log-file", str(tmp_path / "log"),
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            wait_for(lambda: all(listens(port) for port in ports.values()))
            yield ports, upstream
        finally:
            process.terminate()
            process.wait(10)
            log.close()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def config_for(ports, protocol, compression):
    path = "" if protocol == "grpc" else "/v1/traces"
    return OtlpConfig(f"http://127.0.0.1:{ports[protocol]}{path}", protocol, compression=compression)


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_rotel_receives_rows_and_sdk_spans(rotel, protocol, compression):
    ports, upstream = rotel
    config = config_for(ports, protocol, compression)
    site = SpanSite("encoder.layers.3", 1, (("pasta.torch.module.path", "encoder.layers.3"), ("code.line.number", 7)))
    rows = RowExporter(config, resource=lambda: {"service.name": "rows"})
    rows.offer_many([OpSpan(1 << 100, n, n - 1, 10 * n, 10 * n + 5, 1, site) for n in range(1, 5001)])
    assert rows.shutdown(20)
    provider = build_tracer_provider(config, attributes={"service.name": "sdk"})
    with provider.get_tracer("t").start_as_current_span("outer", attributes={"k": "v\udcff"}):
        pass
    provider.shutdown()
    assert rows.counts().ok == 5000
    wait_for(lambda: len(upstream.spans()) == 5001)
    received = upstream.spans()
    ours = [span for resource, span in received if resource["service.name"] == "rows"]
    assert {int.from_bytes(span.span_id, "big") for span in ours} == set(range(1, 5001))
    assert attributes(ours[0].attributes) == {
        "pasta.torch.module.path": "encoder.layers.3",
        "code.line.number": 7,
        "thread.id": 1,
    }
    assert all(span.end_time_unix_nano - span.start_time_unix_nano == 5 for span in ours)
    (sdk,) = [span for resource, span in received if resource["service.name"] == "sdk"]
    assert attributes(sdk.attributes) == {"k": "v\N{REPLACEMENT CHARACTER}"}
