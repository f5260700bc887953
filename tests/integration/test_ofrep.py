"""OFREP with real peers: the OpenFeature SDK and our own client against the served API and the real engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from openfeature import api
from openfeature.contrib.provider.ofrep import OFREPProvider
from openfeature.exception import ErrorCode
from opentelemetry.metrics import NoOpMeterProvider

from pasta_otel import slo
from pasta_otel.clock import SystemClock
from pasta_otel.errors import InputError
from pasta_otel.exporters.api import ApiProviders, ApiServer, create_app
from pasta_otel.exporters.flagd import FlagdFile
from pasta_otel.model import Attribution, Cause, TimeWindow
from pasta_otel.slo.actions.ofrep_client import OfrepTransport
from pasta_otel.slo.actions.response import build_response
from pasta_otel.slo.actions.times import from_rfc3339
from pasta_otel.slo.evaluation import Evaluation, SLOState
from pasta_otel.slo.policy import parse_policy

FLAG, EDGE = "degrade.recommendations", "order-api -> recommendations"
METER = NoOpMeterProvider().get_meter("test")
WAIT_SECONDS = 20.0
CAPTURE = {"tier": 3, "targets": [{"service": "model", "operation": "POST /risk"}], "until": "2027-01-15T08:05:00Z"}


class Controller:
    """The real engine behind the real API."""

    def __init__(self, folder, port=0, ttl_seconds=60):
        self.clock = SystemClock()
        document = {
            "mode": "enforce",
            "ttl_seconds": ttl_seconds,
            "dependencies": {"recommendations": {"critical": False, "flag": FLAG, "breaker": EDGE}},
        }
        self.response = build_response(
            parse_policy(document),
            folder / "audit.jsonl",
            clock=self.clock,
            meter=METER,
            environ={},
            on_flags=FlagdFile(folder / "flags.json").write,
        )
        self.response.start()
        self.engine = self.response.engine
        app = create_app(ApiProviders(flags=self.engine, actions=self.engine.recent))
        self.server = ApiServer(app, port=port)
        self.server.start()
        self.url = self.server.url

    def burn(self):
        now = self.clock.unix_nano()
        window = TimeWindow(now - 1, now)
        cause = Cause("edge_latency", "recommendations", EDGE, 0.9, ())
        state = SLOState(
            "latency", "order-api", 0.99, "burning", now, attribution=Attribution((cause,), window, window)
        )
        return self.engine.respond(Evaluation(now, (state,)))

    def stop(self):
        self.server.stop()
        self.response.stop()


@pytest.fixture
def controller(tmp_path):
    made = Controller(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def openfeature(controller):
    provider = OFREPProvider(controller.url, timeout=5.0)
    api.set_provider_and_wait(provider)
    yield api.get_client()
    api.shutdown()
    provider.session.close()


@pytest.fixture
def app():
    yield slo
    slo.shutdown()


def eventually(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.005)


def test_an_openfeature_client_reads_the_flag_before_during_and_after(controller, openfeature):
    assert openfeature.get_boolean_value(FLAG, True) is False
    controller.burn()
    details = openfeature.get_boolean_details(FLAG, False)
    assert (details.value, details.variant, details.error_code) == (True, "on", None)
    assert details.flag_metadata["expires_at"].endswith("Z")
    controller.engine.pin(FLAG, False, "alice", "drill")
    assert openfeature.get_boolean_details(FLAG, True).value is False


def test_an_openfeature_client_reads_the_capture_flag_as_an_object(controller, openfeature):
    assert openfeature.get_object_value("pasta.capture", {})["tier"] == 2
    controller.engine.pin("pasta.capture", CAPTURE, "alice", "look closer")
    assert openfeature.get_object_value("pasta.capture", {}) == CAPTURE


def test_an_openfeature_client_gets_its_default_for_what_is_wrong(openfeature):
    details = openfeature.get_boolean_details("degrade.nothing", True)
    assert (details.value, details.error_code) == (True, ErrorCode.FLAG_NOT_FOUND)
    details = openfeature.get_string_details(FLAG, "mine")
    assert (details.value, details.error_code) == ("mine", ErrorCode.TYPE_MISMATCH)


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        ("/degrade.nothing", b"{}", 404, {"key": "degrade.nothing", "errorCode": "FLAG_NOT_FOUND"}),
        (f"/{FLAG}", b"{", 400, {"key": FLAG, "errorCode": "PARSE_ERROR"}),
        (f"/{FLAG}", b"[]", 400, {"key": FLAG, "errorCode": "PARSE_ERROR"}),
        (f"/{FLAG}", b'{"context": 7}', 400, {"key": FLAG, "errorCode": "INVALID_CONTEXT"}),
        ("", b"\xff", 400, {"errorCode": "PARSE_ERROR"}),
        ("", b'{"context": []}', 400, {"errorCode": "INVALID_CONTEXT"}),
    ],
)
def test_errors_are_those_of_the_protocol(controller, path, body, status, expected):
    response = httpx.post(f"{controller.url}/ofrep/v1/evaluate/flags{path}", content=body)
    assert response.status_code == status
    answer = response.json()
    assert answer.pop("errorDetails")
    assert answer == expected


def test_the_bulk_answer_has_an_etag_that_changes_only_with_the_flags(controller):
    url = f"{controller.url}/ofrep/v1/evaluate/flags"
    first = httpx.post(url, json={"context": {"targetingKey": "u"}})
    assert [flag["key"] for flag in first.json()["flags"]] == [FLAG, "pasta.capture"]
    etag = first.headers["etag"]
    again = httpx.post(url, headers={"If-None-Match": f'"other", W/{etag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    controller.burn()
    controller.burn()
    changed = httpx.post(url, headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != etag


def test_the_configuration_names_us(controller):
    answer = httpx.get(f"{controller.url}/ofrep/v1/configuration")
    assert answer.json()["name"] == "pasta-otel"
    assert httpx.get(f"{controller.url}/ofrep/v1/configuration", headers={"If-None-Match": answer.headers["etag"]}
                     ).status_code == 304  # fmt: skip


def test_our_client_keeps_one_connection_over_many_polls(controller, monkeypatch):
    transport, connections = OfrepTransport(controller.url), []
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: connections.append(a) or connect(*a, **k))
    first = transport.fetch("")
    assert first.flags[FLAG].value is False
    for _ in range(5):
        assert transport.fetch(first.etag).flags is None
    controller.burn()
    assert transport.fetch(first.etag).flags[FLAG].value is True
    assert len(connections) == 1
    transport.close()


def test_an_application_degrades_hears_of_it_and_its_breaker_opens(controller, app):
    app.configure(url=controller.url, poll_seconds=0.02)
    heard, breaker = [], app.breaker("recommendations", open_seconds=30)

    @app.handler("recommendations")
    def on_change(on):
        heard.append(on)

    assert app.wait_ready(WAIT_SECONDS)
    assert app.flag(FLAG) is False
    controller.burn()
    eventually(lambda: app.flag(FLAG) is True and heard == [True])
    assert breaker.state is app.BreakerState.OPEN
    controller.engine.pin(FLAG, False, "alice", "drill")
    eventually(lambda: app.flag(FLAG) is False and heard == [True, False])
    assert breaker.state is app.BreakerState.CLOSED
    assert app.flag("pasta.capture", {}) == {"tier": 2, "targets": [], "until": ""}


def test_breakers_and_handlers_made_before_follow_the_controller_that_is_configured_later(controller, app):
    heard, breaker = [], app.breaker("recommendations", open_seconds=30)  # nobody answers at the default address
    app.handler("recommendations")(heard.append)
    app.configure(url=controller.url, poll_seconds=0.02)
    assert app.breaker("recommendations") is breaker
    controller.burn()
    eventually(lambda: heard == [True] and breaker.state is app.BreakerState.OPEN)
    app.configure(url=controller.url, poll_seconds=0.03)
    assert app.wait_ready(WAIT_SECONDS)
    controller.engine.pin(FLAG, False, "alice", "drill")
    eventually(lambda: heard == [True, False] and breaker.state is app.BreakerState.CLOSED)


@pytest.mark.parametrize(("argument", "authorization"), [({}, "Bearer s3cret"), ({"token": ""}, None)])
def test_the_token_comes_from_the_environment_unless_it_is_given(app, monkeypatch, argument, authorization):
    seen = []

    class Controller(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.headers["Authorization"])
            self.send_error(503)

        def log_message(self, *_): ...

    monkeypatch.setenv("PASTA_API_TOKEN", "s3cret\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Controller) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        app.configure(url=f"http://127.0.0.1:{server.server_port}", poll_seconds=0.02, **argument)
        eventually(lambda: seen)
        app.shutdown()
        server.shutdown()
    assert set(seen) == {authorization}


def test_ready_means_that_the_controller_has_answered_though_it_came_up_late(app, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    app.configure(url=f"http://127.0.0.1:{port}", poll_seconds=0.02)
    assert app.wait_ready(0.2) is False, "polls failed: asked is not answered"

    class Late(BaseHTTPRequestHandler):
        def do_POST(self):
            body = b'{"flags": []}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_): ...

    with ThreadingHTTPServer(("127.0.0.1", port), Late) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        assert app.wait_ready(WAIT_SECONDS) is True
        app.shutdown()
        server.shutdown()


@pytest.mark.parametrize("name", ["poll_seconds", "ttl_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused_by_name(app, name, seconds):
    with pytest.raises(InputError, match=f"^{name}: "):
        app.configure(**{name: seconds})


SERVE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_ofrep import Controller
controller = Controller(Path(sys.argv[2]), ttl_seconds=float(sys.argv[3]))
controller.burn()
print(controller.url, flush=True)
time.sleep(600)
"""


@pytest.fixture
def doomed(tmp_path):
    """A controller in a process of its own, to be killed; its flag lives 2 s."""
    here = os.path.dirname(__file__)  # noqa: PTH120 - for sys.path
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, here, str(tmp_path), "2"], stdout=subprocess.PIPE, text=True
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


def test_when_the_controller_is_killed_the_flag_reverts_by_its_ttl(doomed, app, tmp_path):
    process, url = doomed
    app.configure(url=url, poll_seconds=0.02, ttl_seconds=60)
    changes = []
    app.handler("recommendations")(changes.append)
    eventually(lambda: app.flag(FLAG))
    process.send_signal(signal.SIGKILL)
    process.wait()
    flagd = json.loads((tmp_path / "flags.json").read_text())["flags"][FLAG]
    expires = from_rfc3339(flagd["metadata"]["expires_at"])
    assert app.flag(FLAG) is True or time.time_ns() >= expires  # the last value holds until its TTL
    eventually(lambda: not app.flag(FLAG))
    assert time.time_ns() >= expires
    eventually(lambda: changes == [True, False])
    condition = flagd["targeting"]["if"][0]["<"]
    assert condition[0] == {"var": "$flagd.timestamp"}
    assert condition[1] <= time.time()  # flagd by itself serves the default now
    assert flagd["defaultVariant"] == "off"


@pytest.fixture
def hung():
    """A server that accepts and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


@pytest.fixture
def dripping():
    """A server that sends one byte of body at a time, for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve():
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.01):
                    connection.sendall(b" ")
        except OSError:
            return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop.set()
    thread.join()
    listener.close()


def test_neither_a_hung_nor_a_dripping_nor_a_dead_controller_is_waited_for(hung, dripping):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for url in (hung, dripping, dead):
        transport = OfrepTransport(url, timeout_seconds=0.3)
        with pytest.raises(OSError, match=r"."):
            transport.fetch("")
        transport.close()


def test_a_request_never_touches_the_network(hung, app, monkeypatch):
    """Not a measurement: whatever thread reads a flag opens no socket and takes no lock that the poller may hold."""
    app.configure(url=hung, poll_seconds=0.01)
    breaker, me = app.breaker("recommendations"), threading.get_ident()
    connect = socket.socket.connect

    def watched(self, *args):
        assert threading.get_ident() != me, "a request did I/O"
        return connect(self, *args)

    monkeypatch.setattr(socket.socket, "connect", watched)
    for _ in range(2000):
        assert app.flag(FLAG) is False
        breaker.call(int)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"flags": [', b"\xff", b'{"flags": []}' + b" " * (1 << 20)])
def test_a_bad_answer_costs_one_poll_and_nothing_else(body):
    class Odd:
        async def __call__(self, scope, receive, send):
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
            )
            await send({"type": "http.response.body", "body": body})

    server = ApiServer(Odd(), port=0)
    server.start()
    transport = OfrepTransport(server.url)
    with pytest.raises((OSError, ValueError), match=r"."):
        transport.fetch("")
    transport.close()
    server.stop()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_polls_for_itself(controller, app):
    app.configure(url=controller.url, poll_seconds=0.02)
    breaker = app.breaker("recommendations")
    heard = threading.Event()
    app.handler("recommendations")(lambda on: heard.set() if on else None)
    assert app.wait_ready(WAIT_SECONDS)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)  # the flag is on by now
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline and not (app.flag(FLAG) and heard.is_set()):
            time.sleep(0.005)
        good = app.flag(FLAG) and heard.is_set() and breaker.state is app.BreakerState.OPEN
        os._exit(0 if good else 1)
    controller.burn()
    os.write(tell, b"x")
    _, status = os.waitpid(child, 0)
    os.close(told)
    os.close(tell)
    assert os.waitstatus_to_exitcode(status) == 0
