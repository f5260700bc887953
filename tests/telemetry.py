"""Shared by the tests of receiver, store and forwarder: spans to send, sinks that keep them, and rotel."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Receiver, ReceiverConfig, SpanBatch
from tests.support import free_port, rotel_binary, wait_for

SECOND = 1_000_000_000
T0 = 1_700_000_000 * SECOND
INTERNAL, SERVER, CLIENT = 1, 2, 3


def attributes(values: dict[str, Any]) -> list[KeyValue]:
    pairs = []
    for key, value in values.items():
        pair = KeyValue(key=key)
        field = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}[type(value)]
        setattr(pair.value, field, value)
        pairs.append(pair)
    return pairs


def span(
    name: str = "op",
    *,
    trace: int = 1,
    identifier: int = 1,
    parent: int = 0,
    start: int = T0,
    end: int = T0 + SECOND,
    kind: int = INTERNAL,
    error: bool = False,
    trace_state: str = "",
    **extra: Any,
) -> dict[str, Any]:
    """Return one span's fields; ``attributes`` may be given as a dict."""
    return {
        "name": name,
        "trace_id": trace.to_bytes(16, "big"),
        "span_id": identifier.to_bytes(8, "big"),
        "parent_span_id": parent.to_bytes(8, "big") if parent else b"",
        "start_time_unix_nano": start,
        "end_time_unix_nano": end,
        "kind": kind,
        "trace_state": trace_state,
        "status": {"code": 2} if error else None,
        "attributes": attributes(extra.pop("attributes", {})),
        **extra,
    }


def request(*spans: dict[str, Any], service: str = "demo", **resource: Any) -> ExportTraceServiceRequest:
    """Return a trace request of one resource."""
    message = ExportTraceServiceRequest()
    resource_spans = message.resource_spans.add()
    resource_spans.resource.attributes.extend(attributes({"service.name": service, **resource}))
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = "tests"
    for fields in spans:
        scope_spans.spans.add(**fields)
    return message


def spans_of(bodies: Sequence[bytes]) -> list[Any]:
    """Return every span of serialised requests."""
    return [
        found
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for found in scope.spans
    ]


class KeepingSink:
    """Keeps every batch and settles it at once."""

    def __init__(self, ledger: Ledger, name: str = "keep", room: bool = True):
        self.name, self.room, self.ledger = name, room, ledger
        self.batches: list[SpanBatch] = []

    def has_room(self, spans: int) -> bool:
        return self.room

    def offer(self, batch: SpanBatch) -> bool:
        self.batches.append(batch)
        self.ledger.settle(self.name, ok=len(batch))
        return True

    @property
    def names(self) -> list[str]:
        return [name for batch in self.batches for name in batch.name]


@asynccontextmanager
async def receiving(ledger: Ledger, *sinks: Any, **config: Any) -> AsyncIterator[Receiver]:
    """Run a receiver on free loopback ports."""
    receiver = Receiver(
        ReceiverConfig(**{"grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", **config}), sinks, ledger
    )
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.stop(0.5)


class Rotel:
    """A running rotel: an OTLP collector that is not ours."""

    def __init__(self, folder: Path, *arguments: str, grpc_port: int = 0, http_port: int = 0):
        self.grpc_port, self.http_port = grpc_port or free_port(), http_port or free_port()
        self.log = folder / f"rotel-{self.grpc_port}.log"
        self._out = (folder / f"rotel-{self.grpc_port}.out").open("ab")
        command = [
            rotel_binary(), "start",
            "--otlp-grpc-endpoint", f"127.0.0.1:{self.grpc_port}",
            "--otlp-http-endpoint", f"127.0.0.1:{self.http_port}",
            "--pid-file", str(folder / f"rotel-{self.grpc_port}.pid"), "--log-file", str(self.log),
            "--batch-timeout", "50ms", *arguments,
        ]  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("ROTEL_", "OTEL_"))}
        self.process = subprocess.Popen(command, stdout=self._out, stderr=self._out, env=environment)
        wait_for(lambda: _listens(self.grpc_port) and _listens(self.http_port))

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._out.close()


@contextmanager
def rotel(folder: Path, *arguments: str) -> Iterator[Rotel]:
    running = Rotel(folder, *arguments)
    try:
        yield running
    finally:
        running.stop()


def rotel_to(target: str, protocol: str) -> tuple[str, ...]:
    """Return rotel's arguments for sending on to an OTLP endpoint."""
    return (
        "--exporter", "otlp", "--otlp-exporter-endpoint", target, "--otlp-exporter-protocol", protocol,
        "--otlp-exporter-retry-initial-backoff", "100ms", "--otlp-exporter-retry-max-backoff", "300ms",
    )  # fmt: skip


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0
