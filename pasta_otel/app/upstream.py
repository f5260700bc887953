"""Where a sidecar forwards to, from the standard variables; never to itself."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping

from pasta_otel.app.options import SidecarOptions
from pasta_otel.errors import InputError
from pasta_otel.exporters.forward import ForwardConfig
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.transport import tls_context
from pasta_otel.urls import HTTP_SCHEMES, Url, read_url

OPTION, VARIABLE = "--upstream", "OTEL_EXPORTER_OTLP_ENDPOINT"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def forward_config(options: SidecarOptions, environ: Mapping[str, str]) -> ForwardConfig | None:
    """Return the destination of ``options.upstream``, with headers, TLS and time-outs of ``OTEL_EXPORTER_OTLP_*``.

    Raises:
        InputError: The destination cannot be used, or is this sidecar's own port; names the option, or the variable
            where that gave it.
    """
    if not options.upstream:
        return None
    general = {
        name: value
        for name, value in environ.items()
        if name.startswith("OTEL_EXPORTER_OTLP_") and not name.endswith(("_ENDPOINT", "_PROTOCOL"))
    }
    general |= {VARIABLE: options.upstream, "OTEL_EXPORTER_OTLP_PROTOCOL": options.upstream_protocol}
    named = VARIABLE if environ.get(VARIABLE) == options.upstream else OPTION
    _read(options.upstream, named)
    try:
        traces, metrics = (OtlpConfig.from_env(general, signal) for signal in ("traces", "metrics"))
    except InputError as error:
        if error.field != VARIABLE:
            raise
        raise InputError(error.message, field=named) from error
    _check_certificates(traces)
    _check_certificates(metrics)
    refuse_loop(options, (options.otlp_grpc_port, options.otlp_http_port), named)
    return ForwardConfig(traces, metrics)


def refuse_loop(options: SidecarOptions, ports: Iterable[int | None], named: str = OPTION) -> None:
    """Refuse an upstream that is one of our own ports, however its address is spelt.

    Args:
        options: The upstream, and the address that we listen on.
        ports: The ports that we listen on; 0 and None are none.
        named: What the error names.

    Raises:
        InputError: Spans would go round for ever.
    """
    url = _read(options.upstream, named)
    host, port = url.host, url.default_port
    if not options.receive or port not in {own for own in ports if own}:
        return
    if _reaches_us(_addresses(host), _addresses(options.host)):
        raise InputError(f"{host}:{port} is this sidecar's own port: spans would go round for ever", field=named)


def _reaches_us(there: Iterable[Address], here: Iterable[Address]) -> bool:
    own = set(here)
    if any(address.is_unspecified for address in own):
        return any(_is_of_this_machine(address) for address in there)
    return any(address in own for address in map(_as_connected, there))


def _as_connected(address: Address) -> Address:
    """Return what a connection to the wildcard address reaches: loopback."""
    if not address.is_unspecified:
        return address
    return ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")


def _is_of_this_machine(address: Address) -> bool:
    """Return whether an address is one of our own interfaces': only such a one can be bound."""
    if address.is_unspecified or address.is_loopback:
        return True
    try:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _addresses(host: str) -> set[Address]:
    """Return every address of a name, short forms as ``127.1`` too; none when it cannot be resolved now."""
    try:
        found = socket.getaddrinfo(host.strip("[]").rstrip("."), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    plain = (ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found)
    return {getattr(address, "ipv4_mapped", None) or address for address in plain}


def _read(upstream: str, named: str) -> Url:
    expected = "a URL with a host, as http://collector:4318"
    return read_url(upstream, field=named, schemes=("", *HTTP_SCHEMES), expected=expected)


def _check_certificates(config: OtlpConfig) -> None:
    if config.url.scheme == "http":
        return
    try:
        tls_context(config)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(file for file in (config.certificate, config.client_certificate, config.client_key) if file)
        why = getattr(error, "strerror", None) or str(error)
        named = "OTEL_EXPORTER_OTLP_CERTIFICATE"
        raise InputError(f"cannot be used: {why}", file=files or None, field=named) from error
