"""Where a sidecar forwards to, from the standard variables; never to itself."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from pasta_otel.app.options import SidecarOptions
from pasta_otel.errors import InputError
from pasta_otel.exporters.forward import ForwardConfig
from pasta_otel.exporters.otlp.config import OtlpConfig

LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}  # noqa: S104  # compared with, not bound to


def forward_config(options: SidecarOptions, environ: Mapping[str, str]) -> ForwardConfig | None:
    """Return the destination of ``options.upstream``, with headers, TLS and time-outs of ``OTEL_EXPORTER_OTLP_*``.

    Raises:
        InputError: The destination cannot be used, or is this sidecar's own port.
    """
    if not options.upstream:
        return None
    general = {
        name: value
        for name, value in environ.items()
        if name.startswith("OTEL_EXPORTER_OTLP_") and not name.endswith(("_ENDPOINT", "_PROTOCOL"))
    }
    general |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": options.upstream,
        "OTEL_EXPORTER_OTLP_PROTOCOL": options.upstream_protocol,
    }
    traces = OtlpConfig.from_env(general, "traces")
    _refuse_loop(traces.target, options)
    return ForwardConfig(traces, OtlpConfig.from_env(general, "metrics"))


def _refuse_loop(target: str, options: SidecarOptions) -> None:
    parts = urlsplit(f"//{target}")
    local = parts.hostname in LOOPBACK or parts.hostname == options.host
    if local and parts.port in {options.otlp_grpc_port, options.otlp_http_port}:
        raise InputError(f"{target} is this sidecar's own port: spans would go round for ever", field="--upstream")
