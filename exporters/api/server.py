"""Serve an ASGI application from a thread of its own, each answer in one write."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pasta_otel.errors import InputError, MissingError

START_SECONDS = 10.0
MOST_PORT = 65_535


class OneWriteTransport:
    """Join what one pass of the event loop writes.

    uvicorn writes head and body apart. Two segments meet Nagle's algorithm and delayed acknowledgement somewhere on
    the way, which costs a poller 44 ms (docs/reference/response.md).
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._chunks: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Keep the data until the loop's next pass."""
        if not self._chunks:
            self._loop.call_soon(self._flush)
        self._chunks.append(data)

    def close(self) -> None:
        """Write what is kept, then close."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        chunks, self._chunks = self._chunks, []
        if chunks and not self._transport.is_closing():
            self._transport.write(b"".join(chunks))


class OneWriteProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, over a transport that joins writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own narrowing
        """Put the joining transport between."""
        super().connection_made(OneWriteTransport(transport, self.loop))  # type: ignore[arg-type]  # a proxy of one


def check_address(host: str, port: int) -> None:
    """Check where to listen.

    Raises:
        InputError: The host is empty: to the system that means every address; or there is no such port.
    """
    if not host.strip():
        raise InputError("expected an address to listen on", field="--host")
    if not 0 <= port <= MOST_PORT:
        raise InputError(f"must be from 0 (any free one) to {MOST_PORT}", field="--port")


class ApiServer:
    """A running server; loopback unless told otherwise.

    Args:
        app: What it serves.
        host: Address to bind.
        port: Port; 0 = any free one, see ``port``.
        certfile: PEM certificate chain for TLS, or empty.
        keyfile: Its key.

    Raises:
        InputError: No address is named, which the system would take for all of them, or the port is none.
        MissingError: The port is taken (``start``).
    """

    def __init__(
        self, app: ASGIApp, *, host: str = "127.0.0.1", port: int = 4320, certfile: str = "", keyfile: str = ""
    ) -> None:
        check_address(host, port)
        self.host, self.port = host, port
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=OneWriteProtocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
                ssl_certfile=certfile or None,
                ssl_keyfile=keyfile or None,
            )
        )
        self.scheme = "https" if certfile else "http"
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    @property
    def url(self) -> str:
        """Return the base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def start(self) -> None:
        """Bind, then serve until ``stop``; returns when requests are answered.

        Raises:
            MissingError: The address cannot be bound, or the server did not come up.
        """
        listener = self._bind()
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, args=[listener], name="pasta-api", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                why = f": {self._failure}" if self._failure is not None else ""
                raise MissingError(f"the API server on {self.host}:{self.port} did not start{why}", how="see its log")
            time.sleep(0.005)

    def stop(self) -> None:
        """Stop accepting, let running answers finish, and wait for it."""
        self._server.should_exit = True
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=10.0)

    def _serve(self, listener: socket.socket) -> None:
        try:
            self._server.run(sockets=[listener])
        except OSError as error:  # too many open files, and the like
            self._failure = error
            listener.close()

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
            listener.listen(512)
        except (OSError, TypeError, ValueError) as error:  # the latter two: a name that is none
            listener.close()
            reason = getattr(error, "strerror", None) or error
            raise MissingError(
                f"cannot listen on {self.host}:{self.port}: {reason}", how="choose another port or address"
            ) from error
        return listener
