"""In the application: a provider for a program that has none, and where module rows go."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace

from pasta_otel import semconv
from pasta_otel.app.app_metrics import setup_app_metrics
from pasta_otel.app.at_end import at_exit
from pasta_otel.app.chosen import exporter_environment, exporters
from pasta_otel.model import Attributes

if TYPE_CHECKING:
    from pasta_otel.exporters.otlp.row_exporter import RowExporter

log = logging.getLogger(__name__)


def prepare_app_telemetry() -> None:
    """Import what ``setup_app_telemetry`` needs, so that the first request does not wait for it (about 0.15 s)."""
    import_module("pasta_otel.exporters.otlp.spans")
    import_module("pasta_otel.exporters.otlp.row_exporter")


def setup_app_telemetry() -> None:
    """Set global providers that export as ``OTEL_*`` say, for a program without TracerProvider; flushed when it ends.

    ``OTEL_TRACES_EXPORTER`` is ``otlp`` where it is not set; with ``none`` spans are made and go nowhere.
    """
    from pasta_otel.exporters.otlp.spans import build_tracer_provider  # noqa: PLC0415 - 135 ms of imports, when needed

    chosen = exporters("traces", os.environ)
    setup_app_metrics(push=True)
    provider = build_tracer_provider(
        _config() if "otlp" in chosen else None,
        export="otlp" in chosen,
        console="console" in chosen,
        meter=metrics.get_meter(semconv.SCOPE),
    )
    trace.set_tracer_provider(provider)
    if trace.get_tracer_provider() is not provider:  # another thread was first
        provider.shutdown()
        return
    at_exit(provider.shutdown)


def build_row_sink(provider: Any) -> RowExporter | None:
    """Return where module rows go: OTLP by ``OTEL_EXPORTER_OTLP_*``, with the resource of the provider's spans.

    Args:
        provider: The TracerProvider whose traces the rows belong to.

    Returns:
        The sink; None where ``OTEL_TRACES_EXPORTER`` names no OTLP.
    """
    from pasta_otel.exporters.otlp.resource import identity_of  # noqa: PLC0415 - as above
    from pasta_otel.exporters.otlp.row_exporter import RowExporter  # noqa: PLC0415 - as above

    def resource() -> Attributes:
        found = getattr(provider, "resource", None)
        return dict(found.attributes) if found is not None else {}

    identity = identity_of(resource)
    setup_app_metrics(push=False, identity=identity, service=resource())
    if "otlp" not in exporters("traces", os.environ):
        log.info("module and GPU spans are not exported: OTEL_TRACES_EXPORTER names no OTLP")
        return None
    meter = metrics.get_meter(semconv.SCOPE)
    exporter = RowExporter(_config(), resource=resource, identity=identity, meter=meter)
    at_exit(exporter.shutdown)
    return exporter


def _config() -> Any:
    from pasta_otel.exporters.otlp.config import OtlpConfig  # noqa: PLC0415 - as above

    return OtlpConfig.from_env(exporter_environment("traces", os.environ))
