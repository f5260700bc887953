"""One request over HTTP, and the answer in the sender's terms.

``http.client`` and not the pooled transport of ``opentelemetry-exporter-http-transport``: that one hides the socket, so
a request to a hung collector could not be aborted at shutdown, and its client never reads a 2xx body, where OTLP says
which spans were refused.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Literal, Protocol

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from pasta_otel import __version__
from pasta_otel.exporters.otlp.config import OtlpConfig, Signal

RETRY_STATUS = frozenset({429, 502, 503, 504})  # OTLP specification, "Retryable Response Codes"
ANSWER_LIMIT_BYTES = 65536
ANSWER_WORDS = 200
"""Characters of a refusal that are told."""
CONNECT_TIMEOUT_S = 3.0  # an address that answers nothing must not eat the whole deadline
GZIP_LEVEL = 1  # a third of level 6's CPU for a tenth more bytes, on span batches
USER_AGENT = f"OTel-OTLP-Exporter-Python-pasta-otel/{__version__}"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one request.

    Attributes:
        kind: ``ok`` (taken, perhaps partly), ``retry`` (transient) or ``refused`` (the same bytes will fail again).
        reason: A stable word for the drop counter: ``http_503``, ``connection``, ``timeout``, ``grpc_unavailable``.
        rejected: Spans or points that the receiver refused of a taken request (partial success).
        message: The receiver's words.
        retry_after_s: When the receiver said to come back, seconds from now.
    """

    kind: Literal["ok", "retry", "refused"]
    reason: str = ""
    rejected: int = 0
    message: str = ""
    retry_after_s: float | None = None


class Transport(Protocol):
    """What the sender needs of a protocol."""

    def post(self, body: bytes, deadline: float) -> Reply:
        """Send one request and return the answer by ``deadline`` (monotonic, s); never raises for network trouble."""

    def abort(self) -> None:
        """End a request in flight, from another thread."""

    def close(self) -> None:
        """Release the connection."""

    def after_fork(self) -> None:
        """Forget the parent's connection, in the child."""


def gzipped(body: bytes) -> bytes:
    """Return a gzip member (``gzip.compress`` would stamp the time of day into it)."""
    deflate = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return deflate.compress(body) + deflate.flush()


class HttpTransport:
    """OTLP over HTTP with one kept connection."""

    def __init__(self, config: OtlpConfig) -> None:
        load_codecs()
        url = config.url
        self._host, self._port, self._tls = url.host, config.port, url.scheme == "https"
        self._path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._compress = config.compression == "gzip"
        self._headers = {"Content-Type": "application/x-protobuf", "User-Agent": USER_AGENT, **dict(config.headers)}
        if self._compress:
            self._headers["Content-Encoding"] = "gzip"
        self._context = tls_context(config) if self._tls else None
        self._connection: http.client.HTTPConnection | None = None
        self._parents: list[http.client.HTTPConnection] = []

    def post(self, body: bytes, deadline: float) -> Reply:
        """Send one request; a kept connection that the server had closed is opened again once, at once."""
        data = gzipped(body) if self._compress else body
        kept = self._connection is not None
        try:
            return self._exchange(data, deadline)
        except (http.client.RemoteDisconnected, ConnectionError, http.client.CannotSendRequest) as error:
            self.close()
            if not kept:
                return Reply("retry", "connection", message=_words(error))
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return trouble(error)
        try:
            return self._exchange(data, deadline)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return trouble(error)

    def _exchange(self, data: bytes, deadline: float) -> Reply:
        connection = self._connect(deadline)
        connection.request("POST", self._path, body=data, headers=self._headers)
        limit_socket(connection.sock, deadline)
        response = connection.getresponse()
        limit_socket(connection.sock, deadline)
        answer = response.read(ANSWER_LIMIT_BYTES)
        if not response.isclosed() or response.will_close:
            self.close()
        return _read_reply(response.status, response.headers, answer)

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        connection = self._connection
        if connection is None:
            remaining = min(remaining_s(deadline), CONNECT_TIMEOUT_S)
            connection = (
                http.client.HTTPSConnection(self._host, self._port, timeout=remaining, context=self._context)
                if self._tls
                else http.client.HTTPConnection(self._host, self._port, timeout=remaining)
            )
            connection.connect()
            self._connection = connection
        limit_socket(connection.sock, deadline)
        return connection

    def abort(self) -> None:
        """End a request in flight: its ``recv`` returns at once."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def after_fork(self) -> None:
        """Close our copy of the parent's socket; the parent's connection stays as it is.

        Only the descriptor: closing the connection object would wait for the lock of a buffered reader that the
        parent's worker may have held at the fork, and so would freeing it, which is why it is kept.
        """
        connection, self._connection = self._connection, None
        if connection is not None and connection.sock is not None:
            self._parents.append(connection)
            with contextlib.suppress(OSError):
                os.close(connection.sock.detach())


def open_socket(host: str, port: int, context: ssl.SSLContext | None, deadline: float) -> socket.socket:
    """Return a connected socket, with TLS if a context is given."""
    sock = socket.create_connection((host, port), timeout=min(remaining_s(deadline), CONNECT_TIMEOUT_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(sock, server_hostname=host) if context else sock


def load_codecs() -> None:
    """Load what the first ``connect`` would import.

    A fork while the worker's thread imports leaves that module locked for ever in the child, whose own first connect
    then hangs in ``getaddrinfo`` (seen in one of 50 runs of case D01).
    """
    "localhost".encode("idna")


def make_transport(config: OtlpConfig, signal: Signal = "traces") -> Transport:
    """Return the transport of the configured protocol."""
    if config.protocol == "grpc":
        from pasta_otel.exporters.otlp.grpc_transport import GrpcTransport  # noqa: PLC0415  it imports this module

        return GrpcTransport(config, signal)
    return HttpTransport(config)


def tls_context(config: OtlpConfig) -> ssl.SSLContext:
    """Return a verifying client context with the configured certificates."""
    context = ssl.create_default_context(cafile=config.certificate)
    if config.client_certificate:
        context.load_cert_chain(config.client_certificate, config.client_key)
    return context


def remaining_s(deadline: float) -> float:
    """Return the seconds left until a monotonic deadline; raises TimeoutError when none are."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("no time left")
    return remaining


def limit_socket(sock: socket.socket | None, deadline: float) -> None:
    """Let the socket's next operation wait no longer than the deadline."""
    if sock is not None:
        sock.settimeout(remaining_s(deadline))


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def trouble(error: Exception) -> Reply:
    """Return what a failed exchange means: transient, except for a certificate that does not verify."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Reply("refused", "tls", message=_words(error))
    reason = "timeout" if isinstance(error, TimeoutError) else "connection"
    return Reply("retry", reason, message=_words(error))


def _read_reply(status: int, headers: Message, answer: bytes) -> Reply:
    if 200 <= status < 300:
        rejected, message = partial_success(headers.get("Content-Type", ""), answer)
        return Reply("ok", rejected=rejected, message=message)
    kind: Literal["retry", "refused"] = "retry" if status in RETRY_STATUS else "refused"
    wait = retry_after_seconds(headers.get("Retry-After"), time.time()) if kind == "retry" else None
    return Reply(kind, f"http_{status}", message=_said(headers, answer), retry_after_s=wait)


def _said(headers: Message, answer: bytes) -> str:
    """Return the words of an answer that is no success: a ``google.rpc.Status`` by specification, text by many."""
    text = answer.decode("utf-8", "replace")
    try:
        if headers.get_content_type() == "application/x-protobuf":
            text = Status.FromString(answer).message
        elif headers.get_content_type() == "application/json":
            text = str(json.loads(answer)["message"])
    except (DecodeError, ValueError, TypeError, KeyError):
        pass  # the header does not say what the body is
    words = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(words.split())[:ANSWER_WORDS]


def retry_after_seconds(value: str | None, now_unix_s: float) -> float | None:
    """Return the pause a ``Retry-After`` header asks for: seconds, or an HTTP date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - now_unix_s, 0.0)
    except (TypeError, ValueError):
        return None


def partial_success(content_type: str, answer: bytes) -> tuple[int, str]:
    """Return how many items a 2xx answer says were rejected, and its message.

    Field 1 of every OTLP response is the partial success, with a count in field 1 and a text in field 2, so one message
    class reads those of traces and of metrics.
    """
    if not answer:
        return 0, ""
    try:
        if content_type.startswith("application/json"):
            return _partial_from_json(json.loads(answer))
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
    except (DecodeError, ValueError, TypeError, AttributeError):
        return 0, ""  # 2xx is a success whatever its body is
    return max(int(partial.rejected_spans), 0), str(partial.error_message)


def _partial_from_json(document: Mapping[str, Mapping[str, str | int]]) -> tuple[int, str]:
    partial = document.get("partialSuccess") or {}
    rejected = partial.get("rejectedSpans") or partial.get("rejectedDataPoints") or 0
    return max(int(rejected), 0), str(partial.get("errorMessage", ""))


__all__ = ["HttpTransport", "Reply", "Transport", "gzipped", "make_transport", "partial_success", "retry_after_seconds"]
