"""pasta-otel's own telemetry: metrics on /metrics and, where there is an upstream, metrics and spans to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.metrics import Meter
from opentelemetry.trace import NoOpTracer, Tracer

from pasta_otel import semconv
from pasta_otel.exporters.forward import ForwardConfig
from pasta_otel.exporters.metrics import build_meter_provider
from pasta_otel.exporters.otlp.spans import build_tracer_provider
from pasta_otel.exporters.prometheus import PrometheusReader

SERVICE = "pasta-otel"


class Renderer(Protocol):
    """Render a process's metrics."""

    def __call__(self, accept: str) -> tuple[str, bytes]:
        """Return (content type, body) for an Accept header."""


@dataclass(frozen=True, slots=True)
class SelfTelemetry:
    """A process's own meter and tracer, and what they need.

    Attributes:
        meter: For every part of the process.
        tracer: For changes of verdict and attributions.
        render: ``/metrics``.
        close: Flush and stop.
    """

    meter: Meter
    tracer: Tracer
    render: Renderer
    close: Callable[[], None]


def build_self_telemetry(upstream: ForwardConfig | None) -> SelfTelemetry:
    """Return a process's own telemetry; nothing global is set.

    Args:
        upstream: Where our own spans and metrics go besides; None keeps the metrics for ``/metrics`` and no spans.
    """
    reader = PrometheusReader()
    own = {semconv.SERVICE_NAME: SERVICE}
    meters = build_meter_provider(readers=[reader], attributes=own, config=upstream.metrics if upstream else None)
    meter = meters.get_meter(semconv.SCOPE)
    if upstream is None:
        return SelfTelemetry(meter, NoOpTracer(), reader.render, meters.shutdown)
    spans = build_tracer_provider(upstream.traces, attributes=own)

    def close() -> None:
        """Flush both at once: with an upstream that is down each takes its whole time."""
        flush = threading.Thread(target=meters.shutdown, name="own-metrics", daemon=True)
        flush.start()
        spans.shutdown()
        flush.join()

    return SelfTelemetry(meter, spans.get_tracer(semconv.SCOPE), reader.render, close)
