"""pasta-otel's own telemetry: metrics on /metrics, spans to upstream when there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.trace import NoOpTracer, Tracer

from pasta_otel import semconv
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.spans import build_tracer_provider

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


def build_self_telemetry(upstream: OtlpConfig | None) -> SelfTelemetry:
    """Return a process's own telemetry; nothing global is set.

    Args:
        upstream: Where our own spans go; None keeps none.
    """
    meter = NoOpMeter(semconv.SCOPE)
    if upstream is None:
        return SelfTelemetry(meter, NoOpTracer(), _nothing, lambda: None)
    spans = build_tracer_provider(upstream, attributes={semconv.SERVICE_NAME: SERVICE})
    return SelfTelemetry(meter, spans.get_tracer(semconv.SCOPE), _nothing, spans.shutdown)


def _nothing(accept: str) -> tuple[str, bytes]:
    del accept
    return "text/plain; version=0.0.4; charset=utf-8", b""
