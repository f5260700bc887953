"""Notifications: a real receiver, retries, refusals, bounded queue, secrets."""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.metrics import NoOpMeterProvider

from pasta_otel.errors import InputError, MissingError
from pasta_otel.slo.notify import LogChannel, Notification, Notifier, WebhookChannel, make_channels
from pasta_otel.slo.notify.channels import secrets_of
from pasta_otel.slo.policy import Channel

METER = NoOpMeterProvider().get_meter("test")
WAIT_SECONDS = 10
MESSAGE = Notification(
    slo="latency",
    service="order-api",
    summary="SLO latency of order-api burns",
    cause="edge_latency order-api -> recommendations",
    starts_at="2027-01-15T08:00:00.000000Z",
    mode="enforce",
    annotations={
        "owner": "team-orders",
        "runbook": "https://runbooks.example/orders",
        "dashboard": "https://d.example",
    },
)


@pytest.fixture
def receiver():
    """A webhook receiver that answers with the statuses it is given, then 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.received.append((self.path, self.headers["Idempotency-Key"], json.loads(body)))
            self.send_response(server.statuses.pop(0) if server.statuses else 200)
            self.end_headers()

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.received, server.statuses = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/hook?key=s3cret"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def deliver(notifier, channel="hook"):
    heard = threading.Event()
    answers = []
    notifier.submit(channel, MESSAGE, lambda problem: (answers.append(problem), heard.set()))
    notifier.start()
    assert heard.wait(WAIT_SECONDS)
    notifier.stop()
    return answers[0]


def test_a_webhook_gets_an_alertmanager_body_with_owner_runbook_and_dashboard(receiver):
    assert deliver(Notifier([WebhookChannel("hook", receiver.url)], METER)) == ""
    ((path, key, body),) = receiver.received
    assert path == "/hook?key=s3cret"
    assert (body["version"], body["status"], body["receiver"], body["truncatedAlerts"]) == ("4", "firing", "hook", 0)
    (alert,) = body["alerts"]
    assert alert["labels"] == {
        "alertname": "SLOBurning",
        "slo": "latency",
        "service": "order-api",
        "cause": "edge_latency order-api -> recommendations",
    }
    assert {"owner", "runbook", "dashboard", "summary"} <= alert["annotations"].keys()
    assert (alert["startsAt"], alert["endsAt"]) == (MESSAGE.starts_at, "0001-01-01T00:00:00Z")
    assert key == alert["fingerprint"] == MESSAGE.id


def test_a_busy_receiver_is_tried_again_with_the_same_identity(receiver):
    receiver.statuses = [503, 429]
    assert deliver(Notifier([WebhookChannel("hook", receiver.url)], METER, retry_seconds=(0.01, 0.01))) == ""
    assert len(receiver.received) == 3
    assert len({key for _, key, _ in receiver.received}) == 1


@pytest.mark.parametrize(("statuses", "tries", "problem"), [([404], 1, "status 404"), ([500] * 9, 3, "status 500")])
def test_a_refusal_is_final_and_so_is_the_last_retry(receiver, statuses, tries, problem):
    receiver.statuses = statuses
    notifier = Notifier([WebhookChannel("hook", receiver.url)], METER, retry_seconds=(0.01, 0.01))
    assert deliver(notifier) == problem
    assert len(receiver.received) == tries


def test_a_receiver_that_is_not_there_is_an_error_without_the_secret(receiver, caplog):
    channel = WebhookChannel("hook", "http://127.0.0.1:1/hook?key=s3cret")
    with caplog.at_level(logging.ERROR):
        problem = deliver(Notifier([channel], METER, retry_seconds=()))
    assert "refused" in problem
    assert "s3cret" not in problem + caplog.text


def test_the_log_channel_writes_the_summary(caplog):
    with caplog.at_level(logging.WARNING):
        assert deliver(Notifier([LogChannel()], METER), "log") == ""
    assert MESSAGE.summary in caplog.messages


def test_what_does_not_fit_the_queue_is_dropped_and_said():
    notifier, answers = Notifier([LogChannel()], METER), []
    for _ in range(257):
        notifier.submit("log", MESSAGE, answers.append)
    assert answers == ["queue full"]
    notifier.submit("pager", MESSAGE, answers.append)
    assert answers[-1] == "no such channel"


def test_stopping_between_two_tries_leaves_the_message_for_the_next_start(receiver):
    receiver.statuses = [503]
    notifier, answers = Notifier([WebhookChannel("hook", receiver.url)], METER, retry_seconds=(600,)), []
    notifier.submit("hook", MESSAGE, answers.append)
    notifier.start()
    while not receiver.received:
        threading.Event().wait(0.005)
    notifier.stop()
    assert answers == []


def test_channels_take_their_secret_from_the_environment():
    declared = (Channel("log", "log"), Channel("oncall", "webhook", url_env="ONCALL"))
    environ = {"ONCALL": "https://hooks.example/s3cret"}
    assert [channel.name for channel in make_channels(declared, environ)] == ["log", "oncall"]
    assert secrets_of(declared, environ) == ["https://hooks.example/s3cret"]
    with pytest.raises(MissingError, match="notify oncall: no address; set ONCALL"):
        make_channels(declared, {})
    with pytest.raises(InputError, match=r"notify oncall.url") as refusal:
        make_channels(declared, {"ONCALL": "s3cret"})
    assert "s3cret" not in str(refusal.value)
