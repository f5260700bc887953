"""Where telemetry goes, from the standard ``OTEL_EXPORTER_OTLP_*`` variables.

Source: opentelemetry-specification, protocol/exporter.md. One deviation, shared with the Python SDK's own exporters so
that one variable means one thing in one process: ``OTEL_EXPORTER_OTLP_TIMEOUT`` is read as seconds. Values of 1000 and
more can only be the specification's milliseconds and are read as such.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from pasta_otel.errors import InputError
from pasta_otel.headers import read_headers
from pasta_otel.urls import HTTP_SCHEMES, Url, read_url

Protocol = Literal["http/protobuf", "grpc"]
Compression = Literal["none", "gzip"]
Signal = Literal["traces", "metrics"]

DEFAULT_TIMEOUT_S = 10.0
MILLISECONDS_FROM = 1000.0
MAX_REQUEST_BYTES = 4_000_000  # gRPC servers refuse messages above 4 MiB unless told otherwise
HTTP_ENDPOINT = "http://localhost:4318"
GRPC_ENDPOINT = "http://localhost:4317"


@dataclass(frozen=True, slots=True)
class OtlpConfig:
    """One OTLP destination.

    Attributes:
        endpoint: Full URL (HTTP), or scheme, host and port (gRPC). User and password in it become a header.
        protocol: ``http/protobuf`` or ``grpc``.
        headers: Sent with every request; never logged.
        timeout_s: Total time for one batch, retries included, seconds.
        compression: ``none`` or ``gzip``.
        certificate: PEM file of the CA that signs the server's certificate.
        client_certificate: PEM file of our certificate (mutual TLS).
        client_key: PEM file of its key.
        insecure: gRPC without TLS for an endpoint that has no scheme.
        max_request_bytes: Greatest uncompressed request; larger batches are split.
    """

    endpoint: str = field(default=HTTP_ENDPOINT + "/v1/traces", repr=False)  # a query may hold a token
    protocol: Protocol = "http/protobuf"
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_S
    compression: Compression = "none"
    certificate: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None
    insecure: bool = False
    max_request_bytes: int = MAX_REQUEST_BYTES

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the field."""
        if self.protocol not in {"http/protobuf", "grpc"}:
            raise InputError(f"expected http/protobuf or grpc, got {self.protocol!r}", field="protocol")
        if self.compression not in {"none", "gzip"}:
            raise InputError(f"expected none or gzip, got {self.compression!r}", field="compression")
        if not self.timeout_s > 0:
            raise InputError(f"expected a time above 0 s, got {self.timeout_s!r}", field="timeout_s")
        url = _read_endpoint(self.endpoint, self.protocol, "endpoint")
        if url.authorization:
            object.__setattr__(self, "endpoint", url.plain)
            if not any(name.lower() == "authorization" for name, _ in self.headers):
                object.__setattr__(self, "headers", (*self.headers, ("authorization", url.authorization)))

    @property
    def url(self) -> Url:
        """Return the endpoint's parts."""
        return _read_endpoint(self.endpoint, self.protocol, "endpoint")

    @property
    def target(self) -> str:
        """Return host and port, for messages (no path, no credentials)."""
        host = self.url.host
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{self.port}"

    @property
    def port(self) -> int:
        """Return the port to connect to: the endpoint's, or its scheme's own."""
        url = self.url
        return url.port or (80 if url.scheme == "http" or (not url.scheme and self.insecure) else 443)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, signal: Signal = "traces") -> OtlpConfig:
        """Return the destination that the environment names; the signal's own variables win over the general ones.

        Raises:
            InputError: A value cannot be used; names the variable.
        """
        env = _Environment(os.environ if environ is None else environ, signal)
        protocol = env.get("PROTOCOL", "http/protobuf")
        if protocol not in {"http/protobuf", "grpc"}:
            raise InputError(f"expected http/protobuf or grpc, got {protocol!r}", field=env.name("PROTOCOL"))
        compression = env.get("COMPRESSION", "none").lower()
        if compression not in {"none", "gzip"}:
            raise InputError(f"expected none or gzip, got {compression!r}", field=env.name("COMPRESSION"))
        return cls(
            endpoint=_grpc_endpoint(env) if protocol == "grpc" else _http_endpoint(env),
            protocol=cast("Protocol", protocol),
            headers=tuple(read_headers(env.get("HEADERS", ""), field=env.name("HEADERS")).items()),
            timeout_s=_timeout(env),
            compression=cast("Compression", compression),
            certificate=env.get("CERTIFICATE", "") or None,
            client_certificate=env.get("CLIENT_CERTIFICATE", "") or None,
            client_key=env.get("CLIENT_KEY", "") or None,
            insecure=env.get("INSECURE", "").lower() == "true",
        )


class _Environment:
    """The variables of one signal: specific name first, then the general one; empty counts as unset."""

    def __init__(self, environ: Mapping[str, str], signal: Signal) -> None:
        self._environ, self._signal = environ, signal

    def name(self, key: str) -> str:
        specific = f"OTEL_EXPORTER_OTLP_{self._signal.upper()}_{key}"
        return specific if self._environ.get(specific, "").strip() else f"OTEL_EXPORTER_OTLP_{key}"

    def get(self, key: str, default: str) -> str:
        return self._environ.get(self.name(key), "").strip() or default

    @property
    def signal(self) -> Signal:
        return self._signal


def _http_endpoint(env: _Environment) -> str:
    """Return the URL: the signal's own as it is, the general one with the signal's path appended."""
    endpoint = env.get("ENDPOINT", HTTP_ENDPOINT)
    name = env.name("ENDPOINT")
    path = _read_endpoint(endpoint, "http/protobuf", name).path
    if name == "OTEL_EXPORTER_OTLP_ENDPOINT":
        return f"{endpoint.rstrip('/')}/v1/{env.signal}"
    return endpoint if path else f"{endpoint}/"


def _grpc_endpoint(env: _Environment) -> str:
    endpoint = env.get("ENDPOINT", GRPC_ENDPOINT)
    _read_endpoint(endpoint, "grpc", env.name("ENDPOINT"))
    return endpoint


def _read_endpoint(endpoint: str, protocol: str, field: str) -> Url:
    """Return the parts of an endpoint that the protocol can use; raises InputError naming the field."""
    if protocol == "grpc":
        expected = "[http://|https://]host:port"
        return read_url(endpoint, field=field, schemes=("", *HTTP_SCHEMES), expected=expected)
    return read_url(endpoint, field=field, expected="an http or https URL")


def _timeout(env: _Environment) -> float:
    text = env.get("TIMEOUT", str(DEFAULT_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"expected a time above 0, got {text!r}", field=env.name("TIMEOUT"))
    return value / 1000 if value >= MILLISECONDS_FROM else value
