"""TLS by both protocols: a certificate of the configured CA is taken, any other is refused and not retried."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.sender import Outcome, Sender
from tests.otlp_receiver import HttpReceiver

EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is missing: it makes the test's certificate")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


@pytest.fixture
def https(certificate):
    with HttpReceiver() as receiver:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
        yield receiver.endpoint.replace("http:", "https:")


@pytest.fixture
def grpcs(certificate):
    grpc = pytest.importorskip("grpc")
    method = grpc.unary_unary_rpc_method_handler(lambda body, context: b"")
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, {"Export": method}),))
    credentials = grpc.ssl_server_credentials([(certificate[1].read_bytes(), certificate[0].read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"https://127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize(("fixture", "protocol"), [("https", "http/protobuf"), ("grpcs", "grpc")])
def test_only_a_certificate_of_the_configured_ca_is_trusted(fixture, protocol, certificate, request):
    endpoint = request.getfixturevalue(fixture)
    for trusted, expected in ((str(certificate[0]), Outcome(3)), (None, Outcome(0, 3, "tls"))):
        sender = Sender(OtlpConfig(endpoint, protocol, timeout_s=5, certificate=trusted))
        assert sender.send(b"", 3) == expected
        sender.close()
