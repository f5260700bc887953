"""The HTTP API as it is served: state, pins, metrics, health, tokens, TLS, errors."""

from __future__ import annotations

import socket
import ssl
import subprocess

import httpx
import pytest

from pasta_otel.errors import InputError, MissingError
from pasta_otel.exporters.api import ApiProviders, ApiServer, create_app

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Flags:
    """A provider with one flag."""

    def __init__(self):
        self.entry = {"key": "degrade.x", "value": False, "reason": "DEFAULT", "variant": "off", "metadata": {}}
        self.pins = []

    def evaluate(self, key):
        return self.entry if key == "degrade.x" else None

    def evaluate_all(self):
        return [self.entry]

    def pin(self, key, value, by, reason):
        if key != "degrade.x":
            raise InputError("no such flag", field=key, kind="not_found")
        if reason == "disk":
            raise OSError(28, "No space left on device")
        if reason == "fixed":
            raise InputError("pinned by the policy file", field=key, kind="conflict")
        self.pins.append((key, value, by, reason))
        self.entry = {**self.entry, "value": value}
        return self.entry

    def unpin(self, key, by):
        self.pins.append((key, by))
        return self.entry


def attribute(question):
    if "slo" not in question:
        raise InputError("missing", field="slo")
    if question["slo"] == "no-store":
        raise MissingError("no span store", how="start the sidecar")
    return {"slo": question["slo"], "causes": []}


FULL = ApiProviders(
    flags=Flags(),
    slos=lambda: [{"name": "latency", "verdict": "ok"}],
    actions=lambda limit: [{"action": "notify"}] * min(limit, 3),
    ledger=lambda: {"received": 7},
    trace=lambda trace_id: {"trace_id": trace_id, "spans": []} if trace_id == TRACE else None,
    attribute=attribute,
    metrics=lambda accept: ("application/openmetrics-text; version=1.0.0", accept.encode()),
    health=lambda: (True, {"store": "ok"}),
)


@pytest.fixture(scope="module")
def url():
    server = ApiServer(create_app(FULL), port=0)
    server.start()
    yield server.url
    server.stop()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/api/v1/slos", {"slos": [{"name": "latency", "verdict": "ok"}]}),
        ("/api/v1/actions?limit=2", {"actions": [{"action": "notify"}] * 2}),
        ("/api/v1/actions", {"actions": [{"action": "notify"}] * 3}),
        ("/api/v1/ledger", {"received": 7}),
        (f"/api/v1/traces/{TRACE}", {"trace_id": TRACE, "spans": []}),
        (f"/api/v1/traces/{TRACE.upper()}", {"trace_id": TRACE, "spans": []}),
        ("/healthz", {"status": "ok", "store": "ok"}),
    ],
)
def test_state_is_answered_as_json(url, path, expected):
    response = httpx.get(url + path)
    assert (response.status_code, response.json()) == (200, expected)
    assert response.headers["content-type"] == "application/json"


def test_metrics_come_in_the_form_that_was_asked_for(url):
    response = httpx.get(url + "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0"
    assert response.text == "application/openmetrics-text"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/api/v1/actions?limit=0", None, 400, "limit: expected a whole number from 1 to 10000, got '0'"),
        ("GET", "/api/v1/actions?limit=many", None, 400, "limit: expected a whole number from 1 to 10000, got 'many'"),
        ("GET", "/api/v1/traces/xyz", None, 400, "trace id: expected 32 hexadecimal digits"),
        ("GET", "/api/v1/traces/" + "0" * 32, None, 404, "0" * 32 + ": no such trace in the store"),
        ("POST", "/api/v1/attribute", b"{}", 400, "slo: missing"),
        ("POST", "/api/v1/attribute", b'{"slo": "no-store"}', 503, "no span store; start the sidecar"),
        ("POST", "/api/v1/attribute", b"[1]", 400, "body: expected an object"),
        ("PUT", "/api/v1/flags/degrade.x/pin", b"{}", 400, "value: missing"),
        ("PUT", "/api/v1/flags/degrade.x/pin", b'{"value": true, "by": 7}', 400,
         "by: expected text of at most 200 characters"),
        ("PUT", "/api/v1/flags/degrade.y/pin", b'{"value": true}', 404, "degrade.y: no such flag"),
        ("PUT", "/api/v1/flags/degrade.x/pin", b'{"value": true, "reason": "fixed"}', 409,
         "degrade.x: pinned by the policy file"),
        ("PUT", "/api/v1/flags/degrade.x/pin", b'{"value": true, "reason": "disk"}', 503,
         "not done: No space left on device"),
        ("GET", "/nothing", None, 404, "Not Found"),
        ("POST", "/metrics", b"", 405, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_a_wrong_request_gets_one_error_that_names_the_field(url, method, path, body, status, message):
    response = httpx.request(method, url + path, content=body)
    assert response.status_code == status
    assert response.json()["error"]["message"] == message


def test_bad_json_and_long_bodies_are_refused(url):
    response = httpx.put(url + "/api/v1/flags/degrade.x/pin", content=b"{")
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("body: not JSON")
    assert httpx.put(url + "/api/v1/flags/degrade.x/pin", content=b" " * (1 << 20 | 1)).status_code == 413


def test_a_person_pins_and_unpins_by_request(url):
    response = httpx.put(url + "/api/v1/flags/degrade.x/pin", json={"value": True, "by": "alice", "reason": "drill"})
    assert (response.status_code, response.json()["value"]) == (200, True)
    assert httpx.request("DELETE", url + "/api/v1/flags/degrade.x/pin", json={"by": "alice"}).status_code == 200
    assert FULL.flags.pins == [("degrade.x", True, "alice", "drill"), ("degrade.x", "alice")]


def test_what_the_process_cannot_answer_is_not_there():
    server = ApiServer(create_app(ApiProviders(health=lambda: (False, {"store": "full"}))), port=0)
    server.start()
    try:
        assert httpx.get(server.url + "/api/v1/slos").status_code == 404
        assert httpx.post(server.url + "/ofrep/v1/evaluate/flags").status_code == 404
        response = httpx.get(server.url + "/healthz")
        assert (response.status_code, response.json()) == (503, {"status": "failing", "store": "full"})
    finally:
        server.stop()


def test_a_token_is_needed_where_one_is_set_but_not_for_health():
    server = ApiServer(create_app(FULL, token="s3cret"), port=0)
    server.start()
    try:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            response = httpx.get(server.url + "/api/v1/slos", headers=headers)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(server.url + "/api/v1/slos", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert httpx.get(server.url + "/healthz").status_code == 200
    finally:
        server.stop()


def test_it_speaks_tls_when_told_to(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    names = ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, *names], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    server = ApiServer(create_app(FULL), port=0, certfile=str(cert), keyfile=str(key))
    server.start()
    try:
        context = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(server.url + "/api/v1/slos", verify=context).status_code == 200
    finally:
        server.stop()


def test_a_taken_port_is_one_clear_error(url):
    port = int(url.rsplit(":", 1)[1])
    with pytest.raises(MissingError, match=f"cannot listen on 127.0.0.1:{port}"):
        ApiServer(create_app(FULL), port=port).start()


def test_an_answer_arrives_in_one_piece_and_connections_are_kept(url):
    host, port = url.removeprefix("http://").split(":")
    request = b"POST /ofrep/v1/evaluate/flags/degrade.x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for _ in range(20):
            connection.sendall(request)
            answer = connection.recv(65_536)  # one segment: head and body
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"content-length: %d" % len(body) in head.lower()
