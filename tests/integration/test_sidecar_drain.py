"""A stop ends within its time, whatever hangs, and every span is accounted for."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pasta_otel.app.drain import Drain
from pasta_otel.app.sidecar import Sidecar
from tests.integration.serving import ask, options
from tests.telemetry import request, span

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture
def mute() -> Iterator[str]:
    """An upstream that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def stopped(sidecar: Sidecar) -> tuple[float, list[dict[str, Any]]]:
    """Return how long a stop with a full forwarder took, in seconds, and what was announced."""
    events: list[dict[str, Any]] = []
    stop, ready = asyncio.Event(), asyncio.Event()

    def announce(event: dict[str, Any]) -> None:
        events.append(event)
        ready.set()

    task = asyncio.create_task(sidecar.run(stop, announce))
    await asyncio.wait_for(ready.wait(), 30)
    body = request(span()).SerializeToString()
    assert (await asyncio.to_thread(ask, f"{events[0]['otlp_http']}/v1/traces", body, PROTOBUF))[0] == 200
    await asyncio.sleep(0.2)
    began = time.monotonic()
    stop.set()
    await task
    return time.monotonic() - began, events


async def test_an_upstream_that_never_answers_does_not_hold_a_stop_longer_than_its_drain(mute: str):
    took, events = await stopped(Sidecar(options(upstream=mute, drain_seconds=2.0), environ={}))
    assert took < 10  # 2 s, and time for a slow machine; the parts one by one took 16 s
    sinks = events[-1]["ledger"]["sinks"]
    assert sinks["upstream"] == {"ok": 0, "dropped": {"shutdown": 1}, "pending": 0}
    assert sinks["store"] == {"ok": 1, "dropped": {}, "pending": 0}


async def test_a_part_that_hangs_is_left_behind(mute: str, monkeypatch: pytest.MonkeyPatch):
    sidecar = Sidecar(options(upstream=mute, drain_seconds=1.0), environ={})
    monkeypatch.setattr(sidecar._api, "stop", lambda: time.sleep(15))
    took, events = await stopped(sidecar)
    assert took < 10
    assert events[-1]["ledger"]["sinks"]["store"]["ok"] == 1


async def test_a_step_that_fails_does_not_keep_the_others_from_coming(caplog: pytest.LogCaptureFixture):
    drain, done = Drain(1.0), []

    def fail() -> None:
        raise OSError(5, "broken")

    assert await drain.step("one", fail)
    assert await drain.step("two", lambda: done.append(2))
    assert done == [2]
    assert "stop of one: OSError" in caplog.text


def test_no_time_left_is_a_little_time():
    assert Drain(0.0).left() == 0.05


def test_the_end_of_the_process_has_its_share_of_the_time():
    for seconds, left in ((10.0, 9.0), (100.0, 99.0), (1.0, 0.9)):
        assert Drain(seconds, lambda: 5.0).left() == pytest.approx(left)
