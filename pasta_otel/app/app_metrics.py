"""In the application: metrics for a program without MeterProvider, pushed by OTLP and, when asked, served."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics

from pasta_otel.app.at_end import at_exit
from pasta_otel.app.chosen import exporter_environment, exporters
from pasta_otel.config import load_settings
from pasta_otel.errors import InputError
from pasta_otel.model import Attributes

if TYPE_CHECKING:
    from pasta_otel.exporters.otlp.resource import ProcessIdentity

SHUTDOWN_MS = 2000  # a dead collector must not hold the program up
log = logging.getLogger(__name__)


def setup_app_metrics(
    *,
    push: bool,
    environ: Mapping[str, str] | None = None,
    identity: ProcessIdentity | None = None,
    service: Attributes | None = None,
) -> None:
    """Set a global MeterProvider where the program has none; what cannot be served or pushed is said in one log line.

    Args:
        push: Also send metrics by OTLP, unless ``OTEL_METRICS_EXPORTER`` says otherwise.
        environ: The environment.
        identity: That of the program's spans; by default this process's own.
        service: Resource of the program's spans: its ``service.*`` names our metrics too.
    """
    environ = os.environ if environ is None else environ
    address = str(load_settings(environ)["PASTA_METRICS_ADDR"])
    pushed = push and "otlp" in exporters("metrics", environ)
    if not address and not pushed:
        return
    if not _vacant():
        if address and not _ours():
            log.warning("PASTA_METRICS_ADDR: the program has its own MeterProvider, so /metrics is not served")
        return
    attributes = {key: value for key, value in (service or {}).items() if key.startswith("service.")}
    _set_up(address, environ if pushed else None, identity, attributes)


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


def _set_up(
    address: str, environ: Mapping[str, str] | None, identity: ProcessIdentity | None, attributes: Attributes
) -> None:
    from pasta_otel.exporters.metrics import build_meter_provider  # noqa: PLC0415 - the SDK, when it is needed
    from pasta_otel.exporters.otlp.config import OtlpConfig  # noqa: PLC0415 - as above
    from pasta_otel.exporters.prometheus import PrometheusReader  # noqa: PLC0415 - as above

    reader = PrometheusReader() if address else None
    provider = build_meter_provider(
        config=None if environ is None else OtlpConfig.from_env(exporter_environment("metrics", environ), "metrics"),
        readers=[reader] if reader else [],
        identity=identity,
        attributes=attributes,
    )
    metrics.set_meter_provider(provider)
    at_exit(lambda: provider.shutdown(SHUTDOWN_MS))
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
    at_exit(server.close)
