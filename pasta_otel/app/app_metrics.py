"""In the application: metrics for a program without MeterProvider, pushed by OTLP and, when asked, served."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from typing import Any

from opentelemetry import metrics

from pasta_otel.config import load_settings
from pasta_otel.errors import InputError

SHUTDOWN_MS = 2000  # a dead collector must not hold the program up
log = logging.getLogger(__name__)


def setup_app_metrics(*, push: bool, environ: Mapping[str, str] | None = None) -> None:
    """Set a global MeterProvider where the program has none; what cannot be served or pushed is said in one log line.

    Args:
        push: Also send metrics by OTLP, unless ``OTEL_METRICS_EXPORTER`` says otherwise.
        environ: The environment.
    """
    environ = os.environ if environ is None else environ
    address = str(load_settings(environ)["PASTA_METRICS_ADDR"])
    pushed = push and environ.get("OTEL_METRICS_EXPORTER", "otlp") == "otlp"
    if not address and not pushed:
        return
    if not _vacant():
        if address and not _ours():
            log.warning("PASTA_METRICS_ADDR: the program has its own MeterProvider, so /metrics is not served")
        return
    _set_up(address, environ if pushed else None)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[v6]:port``.

    Raises:
        InputError: It has another form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"expected host:port, got {address!r}", field="PASTA_METRICS_ADDR")
    return host.strip("[]"), int(port)


def _vacant() -> bool:
    provider = metrics.get_meter_provider()
    return type(provider).__module__.startswith("opentelemetry.metrics")  # the API's own proxy or no-op


def _ours() -> bool:
    return type(metrics.get_meter_provider()).__module__.startswith("pasta_otel.")


def _set_up(address: str, environ: Mapping[str, str] | None) -> None:
    from pasta_otel.exporters.metrics import build_meter_provider  # noqa: PLC0415 - the SDK, when it is needed
    from pasta_otel.exporters.otlp.config import OtlpConfig  # noqa: PLC0415 - as above
    from pasta_otel.exporters.prometheus import PrometheusReader  # noqa: PLC0415 - as above

    reader = PrometheusReader() if address else None
    provider = build_meter_provider(
        config=None if environ is None else OtlpConfig.from_env(environ, "metrics"),
        readers=[reader] if reader else [],
    )
    metrics.set_meter_provider(provider)
    atexit.register(lambda: provider.shutdown(SHUTDOWN_MS))
    if reader is not None:
        _serve(reader, address)


def _serve(reader: Any, address: str) -> None:
    from pasta_otel.exporters.prometheus import MetricsServer  # noqa: PLC0415 - as above

    try:
        host, port = split_address(address)
        server = MetricsServer(reader.render, host, port)
    except (InputError, OSError) as error:  # e.g. the second of several workers: telemetry never breaks the service
        log.warning("PASTA_METRICS_ADDR: /metrics is not served on %s: %s", address, error)
        return
    log.info("/metrics on %s:%s", host, server.port)
    atexit.register(server.close)
