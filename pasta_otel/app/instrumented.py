"""In the application: a provider for a program that has none, and where module rows go."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from importlib import import_module
from typing import Any

from opentelemetry import metrics, trace

from pasta_otel import semconv
from pasta_otel.app.app_metrics import setup_app_metrics
from pasta_otel.pipeline import RowSink

UNHEARD_SECONDS = 2.0  # how long a program's end waits for a collector that never took anything


def hurry_unheard() -> None:
    """Before what is queued is sent for the last time: bound the wait for a collector that was never there."""
    from pasta_otel.exporters.otlp.sender import limit_unheard  # noqa: PLC0415 - as below

    limit_unheard(UNHEARD_SECONDS)


def at_exit(shutdown: Callable[[], object]) -> None:
    """Shut something down when the program ends; all of it together waits ``UNHEARD_SECONDS`` for who is not there."""

    def end() -> None:
        hurry_unheard()
        shutdown()

    atexit.register(end)


def prepare_app_telemetry() -> None:
    """Import what ``setup_app_telemetry`` needs, so that the first request does not wait for it (about 0.15 s)."""
    import_module("pasta_otel.exporters.otlp.spans")
    import_module("pasta_otel.exporters.otlp.row_exporter")


def setup_app_telemetry() -> None:
    """Set global providers that export by OTLP, for a program without TracerProvider; flushed when it ends."""
    from pasta_otel.exporters.otlp.spans import build_tracer_provider  # noqa: PLC0415 - 135 ms of imports, when needed

    setup_app_metrics(push=True)
    provider = build_tracer_provider(meter=metrics.get_meter(semconv.SCOPE))
    trace.set_tracer_provider(provider)
    if trace.get_tracer_provider() is not provider:  # another thread was first
        provider.shutdown()
        return
    at_exit(provider.shutdown)


def build_row_sink(provider: Any) -> RowSink:
    """Return where module rows go: OTLP by ``OTEL_EXPORTER_OTLP_*``, with the resource of the provider's spans.

    Args:
        provider: The TracerProvider whose traces the rows belong to.
    """
    from pasta_otel.exporters.otlp.config import OtlpConfig  # noqa: PLC0415 - as above
    from pasta_otel.exporters.otlp.row_exporter import RowExporter  # noqa: PLC0415 - as above

    setup_app_metrics(push=False)

    def resource() -> dict[str, Any]:
        found = getattr(provider, "resource", None)
        return dict(found.attributes) if found is not None else {}

    exporter = RowExporter(OtlpConfig.from_env(), resource=resource, meter=metrics.get_meter(semconv.SCOPE))
    at_exit(exporter.shutdown)
    return exporter
