"""How a receiver listens; validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_otel.errors import InputError

MAX_REQUEST_BYTES = 20 * 1024 * 1024  # the OpenTelemetry Collector's default for OTLP/HTTP


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """Addresses, limits and secrets of one receiver.

    Attributes:
        grpc_address: ``host:port`` for OTLP/gRPC; port 0 takes a free one; None serves no gRPC.
        http_address: ``host:port`` for OTLP/HTTP; port 0 takes a free one; None serves no HTTP.
        max_request_bytes: Largest request, before and after decompression.
        tls_certificate_file: PEM certificate chain; with it both transports speak TLS.
        tls_key_file: PEM private key.
        tls_client_ca_file: PEM CA; with it clients must show a certificate that it signed.
        bearer_token: Required in ``Authorization: Bearer``; None accepts everybody.
    """

    grpc_address: str | None = "127.0.0.1:4317"
    http_address: str | None = "127.0.0.1:4318"
    max_request_bytes: int = MAX_REQUEST_BYTES
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    tls_client_ca_file: str | None = None
    bearer_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check what would otherwise fail at the first request."""
        for name in ("grpc_address", "http_address"):
            address = getattr(self, name)
            if address is not None:
                split_address(address, name)
        if bool(self.tls_certificate_file) != bool(self.tls_key_file):
            raise InputError("certificate and key belong together", field="tls_key_file")
        if self.tls_client_ca_file and not self.tls_certificate_file:
            raise InputError("needs a certificate", field="tls_client_ca_file")
        if self.max_request_bytes < 1:
            raise InputError("must be positive", field="max_request_bytes")


def split_address(address: str, field_name: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[v6]:port``.

    Raises:
        InputError: It has another form; names the field.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"expected host:port, got {address!r}", field=field_name)
    return host.strip("[]"), int(port)
