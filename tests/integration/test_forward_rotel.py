"""rotel, a collector that is not ours, on both sides; and an upstream that dies and comes back."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from pasta_otel.exporters.forward import ForwardConfig, Forwarder
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.receiver import Intake
from tests.support import free_port
from tests.telemetry import KeepingSink, Rotel, receiving, request, rotel, rotel_to, span

pytestmark = pytest.mark.timeout(90)


def upstream_config(protocol: str, grpc_port: int, http_port: int, **options) -> ForwardConfig:
    if protocol == "grpc":
        return ForwardConfig(OtlpConfig(f"http://127.0.0.1:{grpc_port}", "grpc", compression="gzip"), **options)
    return ForwardConfig(OtlpConfig(f"http://127.0.0.1:{http_port}/v1/traces", compression="gzip"), **options)


async def until(condition, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - another thread's state has no event
            await asyncio.sleep(0.02)


def batch(number: int, size: int = 50) -> bytes:
    spans = [span(f"op-{number}-{i}", identifier=number * size + i + 1, attributes={"n": i}) for i in range(size)]
    return request(*spans, service="through").SerializeToString()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_rotel_takes_what_we_forward_and_we_take_what_rotel_forwards(tmp_path, protocol):
    """Our receiver -> our forwarder -> rotel -> our receiver: every span comes through, unchanged."""
    last_ledger = Ledger(["keep"])
    last = KeepingSink(last_ledger)
    async with receiving(last_ledger, last) as end:
        target = f"http://{end.grpc_target}" if protocol == "grpc" else end.http_url
        with rotel(tmp_path, *rotel_to(target, protocol)) as middle:
            ledger = Ledger(["upstream", "keep"])
            first = KeepingSink(ledger)
            forwarder = Forwarder(upstream_config(protocol, middle.grpc_port, middle.http_port), ledger)
            forwarder.start()
            async with receiving(ledger, forwarder, first) as start, httpx.AsyncClient() as client:
                for number in range(20):
                    answer = await client.post(
                        f"{start.http_url}/v1/traces",
                        content=batch(number),
                        headers={"content-type": "application/x-protobuf"},
                    )
                    assert answer.status_code == 200
            await asyncio.to_thread(forwarder.stop)
            await until(lambda: len(last.names) >= 1000)
    assert sorted(last.names) == sorted(first.names)
    assert sorted(text for kept in last.batches for text in kept.attributes) == sorted(
        text for kept in first.batches for text in kept.attributes
    )
    assert {group.resource.service for kept in last.batches for group in kept.groups} == {"through"}
    upstream = ledger.snapshot().sinks["upstream"]
    assert (upstream.ok, dict(upstream.dropped), upstream.pending) == (1000, {}, 0)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_the_account_balances_while_upstream_is_killed_and_restarted(tmp_path, protocol):
    grpc_port, http_port = free_port(), free_port()
    ledger = Ledger(["upstream"])
    config = upstream_config(protocol, grpc_port, http_port, retry_initial_s=0.05, retry_max_s=0.3, retry_deadline_s=60)
    forwarder = Forwarder(config, ledger)
    forwarder.start()
    intake = Intake([forwarder], ledger)
    sent = 0

    async def send(batches: int) -> None:
        nonlocal sent
        for _ in range(batches):
            intake.traces(batch(sent))
            sent += 1
            assert ledger.snapshot().balanced
            await asyncio.sleep(0.005)

    upstream = await asyncio.to_thread(
        Rotel, tmp_path, "--exporter", "blackhole", grpc_port=grpc_port, http_port=http_port
    )
    await send(40)
    await until(lambda: ledger.snapshot().sinks["upstream"].ok > 0)
    upstream.stop(signal.SIGKILL)
    await send(40)
    assert ledger.snapshot().sinks["upstream"].pending > 0
    upstream = await asyncio.to_thread(
        Rotel, tmp_path, "--exporter", "blackhole", grpc_port=grpc_port, http_port=http_port
    )
    try:
        await send(40)
        await asyncio.to_thread(forwarder.stop, 20.0)
    finally:
        upstream.stop()
    snapshot = ledger.snapshot()
    assert snapshot.received == sent * 50 == 6000
    assert snapshot.balanced
    assert snapshot.sinks["upstream"].pending == 0
    assert snapshot.sinks["upstream"].ok == 6000  # the outage was shorter than the retry deadline: nothing was lost


async def test_what_cannot_be_delivered_is_dropped_at_shutdown_and_counted():
    ledger = Ledger(["upstream"])
    forwarder = Forwarder(upstream_config("http", free_port(), free_port()), ledger)
    forwarder.start()
    intake = Intake([forwarder], ledger)
    for number in range(5):
        intake.traces(batch(number))
    await asyncio.to_thread(forwarder.stop, 0.3)
    intake.traces(batch(9))
    snapshot = ledger.snapshot()
    assert snapshot.balanced
    assert snapshot.sinks["upstream"].pending == 0
    assert dict(snapshot.sinks["upstream"].dropped) == {"shutdown": 300}
