"""The Prometheus source over TLS: a real Prometheus with a private CA, passwords and client certificates, and a proxy."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import pytest

from pasta_otel.app.sources import build_sources
from pasta_otel.clock import SystemClock
from pasta_otel.config import load_settings
from pasta_otel.errors import InputError, MissingError
from pasta_otel.model import CountRequest, TimeWindow
from pasta_otel.slo.sources.prometheus import PrometheusConfig, PrometheusSource
from pasta_otel.slo.spec.load import load
from pasta_otel.slo.spec.model import SLO, PrometheusSLI
from pasta_otel.testing.prometheus import PrometheusServer, tool

SECOND = 1_000_000_000
PASSWORD = "open sesame"  # of a server that lives for a test
BCRYPT = "$2b$04$abcdefghijklmnopqrstuu/LVz6MZlItEy42I2juLihZ66HnQx/cy"
SLI = PrometheusSLI(total="vector(100)", bad="vector(1)")
SPEC = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: web}
spec:
  service: web
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  indicator: {metadata: {name: i}, spec: {ratioMetric: {counter: true, bad: {metricSource: {type: Prometheus, spec: {query: vector(1)}}}, total: {metricSource: {type: Prometheus, spec: {query: vector(100)}}}}}}
  objectives: [{target: 0.9}]
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory) -> Path:
    """A CA of our own, and certificates for a server, a client, and a client of somebody else's CA."""
    folder = tmp_path_factory.mktemp("pki")

    def openssl(*arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()

    try:
        for ca in ("ca", "other-ca"):
            openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                    "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN=pasta test {ca}")  # fmt: skip
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other-ca")):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key",
                "-out", f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial",
                "-days", "2", "-extfile", "san", "-out", f"{name}.pem")  # fmt: skip
    return folder


class TlsPrometheus(PrometheusServer):
    """A Prometheus that asks for a client certificate of our CA, and for a password."""

    pki: Path

    def _wait(self) -> None:
        self.url = self.url.replace("http://", "https://")
        context = ssl.create_default_context(cafile=str(self.pki / "ca.pem"))
        context.load_cert_chain(self.pki / "client.pem", self.pki / "client.key")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                with urlopen(f"{self.url}/-/ready", timeout=1, context=context):  # our own server
                    return
            except OSError as error:
                if getattr(error, "code", 0) == 401:
                    return
                time.sleep(0.1)
        raise MissingError("Prometheus did not become ready")


@pytest.fixture(scope="module")
def server(pki, tmp_path_factory):
    try:
        tool("prometheus")
    except MissingError as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("prometheus")
    web = {
        "tls_server_config": {
            "cert_file": str(pki / "server.pem"),
            "key_file": str(pki / "server.key"),
            "client_auth_type": "RequireAndVerifyClientCert",
            "client_ca_file": str(pki / "ca.pem"),
        },
        "basic_auth_users": {"pasta": BCRYPT},
    }
    (folder / "web.yml").write_text(json.dumps(web))
    tls = TlsPrometheus(folder, arguments=[f"--web.config.file={folder / 'web.yml'}"])
    tls.pki = pki
    with tls:
        yield tls


def ask(url: str, sli: PrometheusSLI = SLI, **config):
    source = PrometheusSource(PrometheusConfig(url, timeout_seconds=5, **config))
    now = time.time_ns()
    try:
        return source.counts([CountRequest(sli, TimeWindow(now - 3600 * SECOND, now))], now)[0]
    finally:
        source.close()


def files(pki: Path, name: str = "client") -> tuple[str, str]:
    return str(pki / f"{name}.pem"), str(pki / f"{name}.key")


def test_a_private_ca_a_client_certificate_and_a_password_open_a_real_server(server, pki):
    counts = ask(server.url, ca_file=str(pki / "ca.pem"), cert=files(pki), basic_auth=("pasta", PASSWORD))
    assert (counts.good, counts.total, counts.no_data) == (99, 100, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ca_file": None, "cert": None}, "CERTIFICATE_VERIFY_FAILED"),
        ({"ca_file": "other-ca"}, "CERTIFICATE_VERIFY_FAILED"),
        ({"cert": None}, "alert"),
        ({"cert": "stranger"}, "alert"),
        ({"basic_auth": ("pasta", "close sesame")}, "HTTP 401"),
        ({"basic_auth": None}, "HTTP 401"),
        ({"basic_auth": None, "bearer_token": "not a password"}, "HTTP 401"),
    ],
    ids=["system CAs", "another CA", "no certificate", "a stranger's", "wrong password", "no password", "a token"],
)
def test_whatever_is_missing_or_wrong_is_absent_data_that_says_what(server, pki, change, words):
    good = {"ca_file": "ca", "cert": "client", "basic_auth": ("pasta", PASSWORD)} | change
    ca, cert = good["ca_file"], good["cert"]
    counts = ask(
        server.url,
        **good | {"ca_file": str(pki / f"{ca}.pem") if ca else None, "cert": files(pki, cert) if cert else None},
    )
    assert counts.no_data == "absent"
    assert words in counts.detail
    assert PASSWORD not in counts.detail
    assert "close sesame" not in counts.detail


def test_the_settings_carry_all_of_it(server, pki, tmp_path):
    (tmp_path / "slo.yaml").write_text(SPEC)
    (slo,) = load([tmp_path]).slos
    certificate, key = files(pki)
    environ = {
        "URL": server.url,
        "CA_FILE": str(pki / "ca.pem"),
        "CERT_FILE": certificate,
        "KEY_FILE": key,
        "BASIC_AUTH": f"pasta:{PASSWORD}",
    }
    assert count(slo, environ) == (99, 100, None)
    both = tmp_path / "both.pem"
    both.write_text(Path(certificate).read_text() + Path(key).read_text())
    assert count(slo, {**environ, "CERT_FILE": str(both), "KEY_FILE": ""}) == (99, 100, None)
    with pytest.raises(InputError, match="needs its certificate"):
        count(slo, {**environ, "CERT_FILE": ""})
    with pytest.raises(InputError, match="cannot load TLS files"):
        count(slo, {**environ, "KEY_FILE": files(pki, "stranger")[1]})


def count(slo: SLO, environ: dict[str, str]):
    settings = load_settings({f"PASTA_PROMETHEUS_{name}": value for name, value in environ.items()})
    sources, now = build_sources([slo], settings, SystemClock()), time.time_ns()
    try:
        (counts,) = sources.source.counts([CountRequest(slo.sli, TimeWindow(now - 3600 * SECOND, now))], now)
    finally:
        sources.close()
    return counts.good, counts.total, counts.no_data


class Proxy(BaseHTTPRequestHandler):
    """What stands before many a Prometheus: TLS and a bearer token."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        known = self.headers.get("Authorization") == "Bearer t0ken" and self.headers.get("X-Scope-OrgID") == "team"
        series = [
            {"metric": {"pasta_query": str(number)}, "value": [time.time(), value]}
            for number, value in enumerate(("100", "1"))
        ]
        body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": series}}).encode()
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(body if known else b"<html>forbidden</html>")

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def proxy(pki):
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files(pki, "server"))
    listener.socket = context.wrap_socket(listener.socket, server_side=True)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield f"https://localhost:{listener.server_address[1]}"
    listener.shutdown()
    listener.server_close()
    thread.join(5)


def test_a_bearer_token_and_a_tenant_open_a_proxy_and_a_wrong_one_does_not(proxy, pki):
    good = {"ca_file": str(pki / "ca.pem"), "bearer_token": "t0ken", "headers": {"X-Scope-OrgID": "team"}}
    assert ask(proxy, **good).total == 100
    for wrong in ({"bearer_token": "guess"}, {"bearer_token": None}, {"headers": {}}):
        counts = ask(proxy, **good | wrong)
        assert (counts.no_data, counts.detail) == ("absent", "HTTP 403: no Prometheus answer")
    with pytest.raises(InputError, match="exclude each other"):
        ask(proxy, **good, basic_auth=("a", "b"))
