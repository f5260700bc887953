"""The receiver as one thing to start and stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.metrics import Meter

from pasta_otel.clock import Clock
from pasta_otel.errors import MissingError, StateError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver.batch import PointSink, SpanSink
from pasta_otel.exporters.receiver.config import ReceiverConfig, split_address
from pasta_otel.exporters.receiver.grpc import add_port, grpc_server
from pasta_otel.exporters.receiver.http import EmbeddedServer, otlp_app, server_config
from pasta_otel.exporters.receiver.intake import Intake


class Receiver:
    """Receive OTLP by gRPC and HTTP and hand every accepted span to every sink.

    Args:
        config: Addresses, limits, TLS, token.
        sinks: What takes the spans; they are not started or stopped here.
        ledger: Account of spans, made with the sinks' names.
        point_sinks: What takes metric points.
        point_ledger: Account of metric points, made with the point sinks' names.
        clock: Wall clock.
        meter: Where refused requests are counted.
    """

    def __init__(  # noqa: PLR0913 - the parts of the world that it uses
        self,
        config: ReceiverConfig,
        sinks: Sequence[SpanSink],
        ledger: Ledger,
        *,
        point_sinks: Sequence[PointSink] = (),
        point_ledger: Ledger | None = None,
        clock: Clock | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._config = config
        self._intake = Intake(
            sinks, ledger, point_sinks=point_sinks, point_ledger=point_ledger, clock=clock, meter=meter
        )
        self._grpc: Any = None
        self._http: EmbeddedServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self.grpc_port: int | None = None
        self.http_port: int | None = None

    @property
    def intake(self) -> Intake:
        """The transport-free part, for tests and for in-process senders."""
        return self._intake

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP endpoint, once started."""
        scheme = "https" if self._config.tls_certificate_file else "http"
        return f"{scheme}://{self._host(self._config.http_address)}:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        """``host:port`` of the gRPC endpoint, once started."""
        return f"{self._host(self._config.grpc_address)}:{self.grpc_port}"

    def trouble(self) -> str:
        """Return what is wrong now; empty = nothing."""
        task = self._http_task
        return "OTLP/HTTP is served no longer" if task is not None and task.done() else ""

    def limits(self) -> Mapping[str, tuple[int, int]]:
        """Return nothing: the receiver keeps no queue of its own."""
        return {}

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            StateError: It runs already.
            MissingError: An address cannot be bound; says which.
        """
        if self._http_task is not None or self._grpc is not None:
            raise StateError("the receiver runs already")
        try:
            if self._config.http_address is not None:
                await self._start_http(self._config.http_address)
            if self._config.grpc_address is not None:
                await self._start_grpc(self._config.grpc_address)
        except BaseException:
            await self.stop(0.0)
            raise

    async def stop(self, grace_s: float = 2.0) -> None:
        """Stop listening; requests in flight have ``grace_s`` seconds. Sinks are drained by their owner."""
        if self._grpc is not None:
            await self._grpc.stop(grace_s)
            self._grpc = None
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await asyncio.wait([self._http_task], timeout=grace_s + 1.0)
            if not self._http_task.done():
                self._http_task.cancel()
                await asyncio.gather(self._http_task, return_exceptions=True)
        self._http, self._http_task = None, None

    async def _start_http(self, address: str) -> None:
        listener = _bind(address)
        self.http_port = listener.getsockname()[1]
        self._http = EmbeddedServer(server_config(otlp_app(self._intake, self._config), self._config))
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]), name="otlp-http")
        while not self._http.started:
            if self._http_task.done():
                listener.close()
                self._http_task.result()
                raise MissingError(f"cannot serve OTLP/HTTP on {address}")
            await asyncio.sleep(0.005)

    async def _start_grpc(self, address: str) -> None:
        self._grpc = grpc_server(self._intake, self._config)
        try:
            self.grpc_port = add_port(self._grpc, address, self._config)
        except RuntimeError as error:
            raise _taken("gRPC", address, str(error)) from error
        if not self.grpc_port:
            raise _taken("gRPC", address, "")
        await self._grpc.start()

    @staticmethod
    def _host(address: str | None) -> str:
        host = split_address(address or "", "address")[0]
        return f"[{host}]" if ":" in host else host


def _bind(address: str) -> socket.socket:
    host, port = split_address(address, "http_address")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _taken("HTTP", address, str(error)) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise _taken("HTTP", address, str(error)) from error
    return listener


def _taken(protocol: str, address: str, why: str) -> MissingError:
    return MissingError(
        f"cannot listen for OTLP/{protocol} on {address}{f' ({why})' if why else ''}", how="choose another address"
    )
