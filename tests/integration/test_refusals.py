"""Who is refused is told so, and what to set: a wrong or missing token, a server without what was asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.metrics import NoOpMeterProvider

from pasta_otel.cli import main
from pasta_otel.clock import SystemClock
from pasta_otel.errors import InputError
from pasta_otel.exporters.api import ApiProviders, ApiServer, create_app
from pasta_otel.slo.actions.ofrep_client import OfrepTransport
from pasta_otel.slo.flags import FlagClient
from pasta_otel.slo.sources.question import ask
from pasta_otel.slo.sources.remote import fetch_states
from tests.otlp_receiver import Answer, HttpReceiver

TOKEN = "t0k3n"


def no_slos() -> dict[str, object]:
    return {"time": "", "slos": []}


@pytest.fixture
def guarded() -> Iterator[ApiServer]:
    server = ApiServer(create_app(ApiProviders(slos=no_slos), token=TOKEN), port=0)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bare() -> Iterator[ApiServer]:
    """A server that watches no SLO and holds no flags."""
    server = ApiServer(create_app(ApiProviders()), port=0)
    server.start()
    yield server
    server.stop()


def said_by_flags(url: str, token: str, caplog: pytest.LogCaptureFixture) -> str:
    transport = OfrepTransport(url, token=token)
    meter = NoOpMeterProvider().get_meter("test")
    client = FlagClient(transport, SystemClock(), poll_seconds=1, ttl_seconds=1, meter=meter)
    with caplog.at_level(logging.WARNING):
        assert not client.poll()
        assert not client.poll()
    transport.close()
    (line,) = caplog.messages
    return line


def test_flags_without_a_token_name_the_variable(guarded: ApiServer, caplog: pytest.LogCaptureFixture):
    assert "status 401: set PASTA_API_TOKEN" in said_by_flags(guarded.url, "", caplog)


def test_flags_with_a_wrong_token_say_that_it_is_wrong(guarded: ApiServer, caplog: pytest.LogCaptureFixture):
    line = said_by_flags(guarded.url, "wr0ng", caplog)
    assert "status 401: it does not take this PASTA_API_TOKEN" in line
    assert "wr0ng" not in line


def test_flags_of_a_server_that_has_none_say_what_it_lacks(bare: ApiServer, caplog: pytest.LogCaptureFixture):
    assert "status 404: no flags are served there; give the sidecar or controller --slo and --state" in said_by_flags(
        bare.url, "", caplog
    )


@pytest.mark.parametrize("call", [fetch_states, lambda url, token=None: ask(url, {"service": "a"}, token=token)])
def test_a_question_without_a_token_or_with_a_wrong_one_names_the_variable(call, guarded: ApiServer):
    with pytest.raises(InputError, match="wants a token: set PASTA_API_TOKEN"):
        call(guarded.url)
    with pytest.raises(InputError, match="does not take the token of PASTA_API_TOKEN") as caught:
        call(guarded.url, token="wr0ng")
    assert "wr0ng" not in str(caught.value)


def test_the_right_token_is_taken(guarded: ApiServer):
    assert fetch_states(guarded.url, token=TOKEN) == no_slos()


def test_states_of_a_server_that_watches_nothing_say_what_it_lacks(bare: ApiServer):
    with pytest.raises(InputError, match="without --slo"):
        fetch_states(bare.url)


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "OTEL_EXPORTER_OTLP_HEADERS"), (404, "OTEL_EXPORTER_OTLP_ENDPOINT"), (403, "OTEL_EXPORTER_OTLP_HEADERS")],
)
def test_an_import_that_is_refused_says_what_to_set(
    status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    span = {"traceId": "01" * 16, "spanId": "02" * 8, "name": "a", "startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    file = tmp_path / "spans.json"
    file.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    with HttpReceiver([Answer(status)] * 2) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint.removesuffix("/v1/traces"))
        with pytest.raises(SystemExit) as stopped:
            main(["import", str(file), "--to", "otlp"])
    assert stopped.value.code == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pasta-otel: ")]
    assert f"http_{status}" in line
    assert words in line
    assert "start it" not in line
