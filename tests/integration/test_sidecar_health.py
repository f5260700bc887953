"""``/healthz`` fails when spans are lost, a thread has died or SLOs are not evaluated, and says which."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pasta_otel.app.health import Health
from pasta_otel.app.sidecar import Sidecar
from pasta_otel.exporters.forward import Forwarder
from tests.integration.serving import ask, options, running
from tests.telemetry import SERVER, request, span

SPEC = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: checkout}
spec:
  service: demo
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  indicator:
    metadata: {name: i}
    spec: {ratioMetric: {counter: true,
      good: {metricSource: {type: spans, spec: {service: demo, good: status != error}}},
      total: {metricSource: {type: spans, spec: {service: demo}}}}}
  objectives: [{target: 0.95}]
"""
PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Hand:
    now = 0

    def unix_nano(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now


class Part:
    def __init__(self, trouble: str = "") -> None:
        self.said = trouble

    def trouble(self) -> str:
        return self.said

    def limits(self) -> Mapping[str, tuple[int, int]]:
        return {"queue": (1, 9)}


def test_every_part_can_fail_and_limits_are_always_told():
    store = Part()
    health = Health([threading.current_thread()], {"store": store}, None, 1.0, Hand())
    limits = {"limits": {"store.queue": {"used": 1, "most": 9}}}
    assert health() == (True, limits)
    store.said = "spans are lost"
    assert health() == (False, {"store": "spans are lost"} | limits)


def test_a_thread_that_has_died_is_named():
    thread = threading.Thread(target=int, name="pasta-slo")
    thread.start()
    thread.join()
    assert Health([thread], {}, None, 1.0, Hand())() == (False, {"dead_threads": ["pasta-slo"], "limits": {}})


def test_evaluations_that_stop_coming_are_seen_and_a_new_one_clears_it():
    clock, evaluations = Hand(), [object()]
    health = Health([], {}, lambda: evaluations[-1], 10.0, clock)
    assert health()[0]
    clock.now += 100 * 10**9
    assert health()[0]
    clock.now += 10**9
    healthy, details = health()
    assert (healthy, details["slo"]) == (False, "no evaluation for 101 s; see the log")
    evaluations.append(object())
    assert health()[0]


def send(url: str, count: int) -> None:
    now = time.time_ns()
    spans = [span(identifier=number + 1, kind=SERVER, start=now - 10**6, end=now) for number in range(count)]
    assert ask(f"{url}/v1/traces", request(*spans).SerializeToString(), PROTOBUF)[0] == 200


async def test_lost_spans_fail_health_and_the_slo_names_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slo.yaml").write_text(SPEC)
    given = options(slo_paths=(str(tmp_path / "slo.yaml"),), windows="demo", tick_seconds=0.2, grace_seconds=0.5)
    sidecar = Sidecar(given, environ={})

    def insert(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sidecar.store._writer, "_insert", insert)
    async with running(sidecar) as at:
        assert (await asyncio.to_thread(ask, f"{at['api']}/healthz"))[0] == 200
        deadline = time.monotonic() + 20
        state: dict[str, Any] = {}
        while state.get("reason") != "partial" and time.monotonic() < deadline:
            await asyncio.to_thread(send, at["otlp_http"], 20)
            await asyncio.sleep(0.2)
            states = (await asyncio.to_thread(ask, f"{at['api']}/api/v1/slos"))[1]["slos"]
            state = states[0] if states else {}
        status, health = await asyncio.to_thread(ask, f"{at['api']}/healthz")
    assert (state["verdict"], state["reason"]) == ("no_data", "partial")
    assert state["detail"].endswith("spans could not be stored: [Errno 28] No space left on device")
    assert (status, health["status"]) == (503, "failing")
    assert "No space left on device" in health["store"]


async def test_a_forwarder_or_writer_that_died_fails_health(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Forwarder, "_run", lambda self: None)
    sidecar = Sidecar(options(upstream="http://127.0.0.1:9"), environ={})
    monkeypatch.setattr(sidecar.store._writer._thread, "is_alive", lambda: False)
    async with running(sidecar) as at:
        status, health = await asyncio.to_thread(ask, f"{at['api']}/healthz")
        monkeypatch.undo()
    assert status == 503
    assert (health["upstream"], health["store"]) == (
        "the thread that forwards has died",
        "the thread that writes has died",
    )
    assert set(health["limits"]) == {"store.queue_spans", "upstream.queue_bytes"}


async def test_a_controller_whose_thread_died_fails_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slo.yaml").write_text(SPEC)
    sidecar = Sidecar(options(slo_paths=(str(tmp_path / "slo.yaml"),)), environ={})
    monkeypatch.setattr(sidecar._controller, "run", lambda *_: None)
    async with running(sidecar) as at:
        status, health = await asyncio.to_thread(ask, f"{at['api']}/healthz")
    assert (status, health["dead_threads"]) == (503, ["pasta-slo"])
