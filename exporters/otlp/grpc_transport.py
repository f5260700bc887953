"""One request over gRPC, spoken with ``h2`` on a socket of our own.

Not grpcio: its core threads do not survive ``fork`` (with GRPC_ENABLE_FORK_SUPPORT a forked child hung in six of ten
runs of case D01, and closing the channel before the fork could hang too). A unary call is one header frame, one message
and one trailer, so plain HTTP/2 does it, and a socket can be aborted at shutdown and dropped in a child.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import socket
import zlib
from collections.abc import Iterable
from typing import Any, Literal
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from pasta_otel.errors import MissingError
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.transport import (
    RETRY_STATUS,
    USER_AGENT,
    Reply,
    gzipped,
    limit_socket,
    load_codecs,
    open_socket,
    partial_success,
    remaining_s,
    tls_context,
    trouble,
)

METHODS = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
# gRPC "Status codes and their use in gRPC", in the order of their numbers
CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
# OTLP specification, "Failures" (gRPC); RESOURCE_EXHAUSTED only with RetryInfo
RETRY_CODES = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
_PREFIX = 5  # gRPC message: one byte "compressed", four bytes length
_READ_SIZE = 65536


class GrpcTransport:
    """OTLP over gRPC with one kept connection."""

    def __init__(self, config: OtlpConfig, signal: Literal["traces", "metrics"] = "traces") -> None:
        load_codecs()
        self._h2 = _import_h2()
        self._host, self._port, tls = _target(config)
        self._compress = config.compression == "gzip"
        self._context = tls_context(config) if tls else None
        if self._context is not None:
            self._context.set_alpn_protocols(["h2"])
        self._headers = self._request_headers(config, METHODS[signal])
        self._sock: socket.socket | None = None
        self._http2: Any = None

    def _request_headers(self, config: OtlpConfig, method: str) -> list[tuple[str, str]]:
        return [
            (":method", "POST"),
            (":scheme", "https" if self._context else "http"),
            (":path", method),
            (":authority", f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", USER_AGENT),
            *([("grpc-encoding", "gzip")] if self._compress else []),
            *((key.lower(), value) for key, value in config.headers),
        ]

    def post(self, body: bytes, deadline: float) -> Reply:
        """Send one request; a kept connection that the server had closed is opened again once, at once."""
        data = gzipped(body) if self._compress else body
        message = bytes([self._compress]) + len(data).to_bytes(4, "big") + data
        for kept in (self._sock is not None, False):
            try:
                return self._exchange(message, deadline)
            except (OSError, self._h2.exceptions.ProtocolError) as error:
                self.close()
                if not kept or not isinstance(error, (ConnectionError, self._h2.exceptions.ProtocolError)):
                    return trouble(error)
        return Reply("retry", "connection")

    def _exchange(self, message: bytes, deadline: float) -> Reply:
        sock = self._connect(deadline)
        http2 = self._http2
        stream = http2.get_next_available_stream_id()
        timeout = ("grpc-timeout", f"{max(int(remaining_s(deadline) * 1000), 1)}m")
        http2.send_headers(stream, [*self._headers, timeout])
        answer = _Answer(self._h2, stream)
        self._send_message(sock, stream, message, answer, deadline)
        while not answer.ended:
            self._receive(sock, answer, deadline)
        if answer.connection_ended:
            self.close()
        return answer.reply()

    def _send_message(self, sock: socket.socket, stream: int, message: bytes, answer: _Answer, deadline: float) -> None:
        view, sent = memoryview(message), 0
        while sent < len(message) and not answer.ended:
            room = min(self._http2.local_flow_control_window(stream), self._http2.max_outbound_frame_size)
            if room <= 0:
                self._receive(sock, answer, deadline)
                continue
            part = view[sent : sent + room]
            sent += len(part)
            self._http2.send_data(stream, bytes(part), end_stream=sent == len(message))
            limit_socket(sock, deadline)
            sock.sendall(self._http2.data_to_send())

    def _receive(self, sock: socket.socket, answer: _Answer, deadline: float) -> None:
        limit_socket(sock, deadline)
        data = sock.recv(_READ_SIZE)
        if not data:
            msg = "the collector closed the connection"
            raise ConnectionResetError(msg)
        for event in self._http2.receive_data(data):
            if isinstance(event, self._h2.events.DataReceived):
                self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            answer.take(event)
        sock.sendall(self._http2.data_to_send())

    def _connect(self, deadline: float) -> socket.socket:
        if self._sock is None:
            self._sock = open_socket(self._host, self._port, self._context, deadline)
            settings = self._h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
            self._http2 = self._h2.connection.H2Connection(settings)
            self._http2.initiate_connection()
            self._sock.sendall(self._http2.data_to_send())
        limit_socket(self._sock, deadline)
        return self._sock

    def abort(self) -> None:
        """End a request in flight: its ``recv`` returns at once."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        sock, self._sock, self._http2 = self._sock, None, None
        if sock is not None:
            sock.close()

    def after_fork(self) -> None:
        """Close our copy of the parent's socket; the parent's connection stays as it is."""
        self.close()


class _Answer:
    """What one stream has brought so far."""

    def __init__(self, h2: Any, stream: int) -> None:
        self._events, self._stream = h2.events, stream
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self.ended = self.connection_ended = False
        self._reset = ""

    def take(self, event: Any) -> None:
        events = self._events
        if isinstance(event, events.ConnectionTerminated):
            self.connection_ended = True
            if event.last_stream_id is not None and event.last_stream_id < self._stream:
                self.ended, self._reset = True, "goaway"  # this request was not processed
        elif getattr(event, "stream_id", None) != self._stream:
            return
        elif isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
            self._headers.update(event.headers)
        elif isinstance(event, events.DataReceived):
            self._body += event.data
        elif isinstance(event, events.StreamEnded):
            self.ended = True
        elif isinstance(event, events.StreamReset):
            self.ended, self._reset = True, "reset"

    def reply(self) -> Reply:
        headers = self._headers
        status = int(headers.get(":status", "0"))
        if "grpc-status" not in headers:
            if status and status != 200:
                return Reply("retry" if status in RETRY_STATUS else "refused", f"http_{status}")
            return Reply("retry", f"grpc_{self._reset or 'unknown'}")
        if headers["grpc-status"] == "0":
            rejected, words = partial_success("application/x-protobuf", self._message())
            return Reply("ok", rejected=rejected, message=words)
        return _failure(headers)

    def _message(self) -> bytes:
        data = bytes(self._body[_PREFIX:])
        if self._body[:1] == b"\x01":
            with contextlib.suppress(zlib.error):
                return zlib.decompress(data, 16 + zlib.MAX_WBITS)
            return b""
        return data


def _failure(headers: dict[str, str]) -> Reply:
    number = headers["grpc-status"]
    name = CODES[int(number)] if number.isdigit() and int(number) < len(CODES) else "UNKNOWN"
    wait = _retry_info(headers.get("grpc-status-details-bin", ""))
    retry = name in RETRY_CODES or (name == "RESOURCE_EXHAUSTED" and wait is not None)
    return Reply(
        "retry" if retry else "refused",
        f"grpc_{name.lower()}",
        message=unquote(headers.get("grpc-message", "")),
        retry_after_s=wait if retry else None,
    )


def _retry_info(encoded: str) -> float | None:
    """Return the pause in ``google.rpc.RetryInfo``, seconds (the header is base64, padding optional)."""
    try:
        details: Iterable[Any] = Status.FromString(base64.b64decode(encoded + "=" * (-len(encoded) % 4))).details
        for detail in details:
            info = RetryInfo()
            if detail.Unpack(info):
                return float(info.retry_delay.ToTimedelta().total_seconds())
    except (DecodeError, binascii.Error):
        return None
    return None


def _target(config: OtlpConfig) -> tuple[str, int, bool]:
    """Return host, port and whether to use TLS; without a scheme the ``insecure`` setting decides."""
    url = config.url
    tls = url.scheme == "https" or (not url.scheme and not config.insecure)
    return url.host, config.port, tls


def _import_h2() -> Any:
    try:
        import h2.config  # noqa: PLC0415  an optional extra
        import h2.connection  # noqa: PLC0415
        import h2.events  # noqa: PLC0415
        import h2.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise MissingError("OTLP over gRPC needs h2", how="pip install 'pasta-otel[sidecar]'") from error
    return h2
