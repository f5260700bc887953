"""One HTTP question to a Prometheus-compatible server: authenticated, bounded in time and size whatever it sends."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx

from pasta_otel.errors import InputError
from pasta_otel.slo.sources.prometheus_answers import Value
from pasta_otel.urls import Url, read_url

NS_PER_SECOND = 1_000_000_000
ANSWER_LIMIT = 64 * 1024 * 1024  # of JSON, unpacked: a lying server must not fill our memory


@dataclass(frozen=True, slots=True)
class PrometheusConfig:
    """How to reach a server.

    Attributes:
        url: Base URL, without ``/api/v1``.
        headers: Further headers, e.g. ``X-Scope-OrgID``; values never appear in messages.
        bearer_token: Sent as ``Authorization: Bearer``.
        basic_auth: User and password.
        ca_file: CA certificates for TLS, None = the system's.
        cert: Client certificate and key files.
        timeout_seconds: For one request, from the connection to the last byte.
        deadline_seconds: For one tick: what has not been asked by then has no data.
        batch_characters: A request's query is at most about this long.
        batch_expressions: A request holds at most so many expressions.
        clock_tolerance_seconds: How far the server's clock may be off.
    """

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    bearer_token: str | None = field(default=None, repr=False)
    basic_auth: tuple[str, str] | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert: tuple[str, str] | None = None
    timeout_seconds: float = 10.0
    deadline_seconds: float = 30.0
    batch_characters: int = 60_000
    batch_expressions: int = 120
    clock_tolerance_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Check the URL and that there is one kind of credentials."""
        self.parts()
        if self.bearer_token and self.basic_auth:
            raise InputError("a bearer token and basic authentication exclude each other", field="prometheus.auth")

    def parts(self) -> Url:
        """Return the URL's parts; user and password in it count where no other authentication is set."""
        return read_url(self.url, field="prometheus.url", expected="a URL with http:// or https://")


class Reply(NamedTuple):
    """What a server sent: its status and its JSON object, empty when it sent none."""

    status: int
    document: Mapping[str, Any]


class PrometheusClient:
    """A connection pool to one server.

    Args:
        config: Where and how.
        transport: For tests; None = the network.
    """

    def __init__(self, config: PrometheusConfig, transport: httpx.BaseTransport | None = None) -> None:
        self._config = config
        url = config.parts()
        headers = {"Accept": "application/json"}
        if url.authorization and config.basic_auth is None:
            headers["Authorization"] = url.authorization
        headers |= config.headers
        if config.bearer_token:
            headers["Authorization"] = f"Bearer {config.bearer_token}"
        try:
            self._client = httpx.Client(
                base_url=url.plain.rstrip("/"),
                headers=headers,
                auth=config.basic_auth,
                verify=_tls(config),
                timeout=config.timeout_seconds,
                transport=transport,
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InputError(f"not a URL or header that can be sent: {error}", field="prometheus.url") from error
        self.requests_sent = 0

    def close(self) -> None:
        """Close the connections; whoever still waits for an answer gets an error."""
        self._client.close()

    def post(self, path: str, form: Mapping[str, str], now_unix_nano: int) -> Reply | Value:
        """Return the reply, or why there is none; never raises for what a server does."""
        self.requests_sent += 1
        until = time.monotonic() + self._config.timeout_seconds
        try:
            with self._client.stream("POST", path, data=form) as response:
                clock = self._clock_problem(response, now_unix_nano)
                body = None if clock is not None else _read(response, until)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed while it waited
            return Value(wrong="absent", detail=f"{type(error).__name__}: {error}")
        if clock is not None:
            return clock
        if body is None:
            limits = f"{self._config.timeout_seconds:g} s or {ANSWER_LIMIT} bytes"
            return Value(wrong="absent", detail=f"the answer had not ended after {limits}")
        return Reply(response.status_code, _document(body))

    def _clock_problem(self, answer: httpx.Response, now_unix_nano: int) -> Value | None:
        """A server whose clock is wrong has its samples at wrong times: its windows are not ours."""
        try:
            said = parsedate_to_datetime(answer.headers["Date"]).replace(tzinfo=UTC).timestamp()
        except (KeyError, ValueError, TypeError, OverflowError):
            return None
        ahead = said - now_unix_nano / NS_PER_SECOND
        if abs(ahead) <= self._config.clock_tolerance_seconds:
            return None
        where = "ahead of" if ahead > 0 else "behind"
        return Value(
            wrong="future" if ahead > 0 else "stale", detail=f"the server's clock is {abs(ahead):.0f} s {where} ours"
        )


def _read(response: httpx.Response, until: float) -> bytes | None:
    """Return the body; None when it grows too large or drips on past its time."""
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > ANSWER_LIMIT or time.monotonic() > until:
            return None
    return bytes(body)


def _document(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _tls(config: PrometheusConfig) -> ssl.SSLContext | bool:
    if config.ca_file is None and config.cert is None:
        return True
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
        if config.cert is not None:
            context.load_cert_chain(*config.cert)
    except OSError as error:
        raise InputError(f"cannot load TLS files: {error}", field="prometheus.tls") from error
    return context
