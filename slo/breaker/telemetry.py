"""A breaker's transitions and calls, in OpenTelemetry's terms, through the API alone."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, Tracer, get_current_span

from pasta_otel import semconv
from pasta_otel.slo.breaker.machine import StateChange


class BreakerTelemetry:
    """Report to a tracer and a meter that the caller chose.

    A transition is a root span that links to the request that caused it: as a child it would be lost whenever that
    request is not sampled.
    """

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self._tracer = tracer
        spec = semconv.METRICS[semconv.BREAKER_TRANSITIONS]
        self._transitions = meter.create_counter(spec.name, spec.unit, spec.description)
        spec = semconv.METRICS[semconv.BREAKER_CALLS]
        self._calls = meter.create_counter(spec.name, spec.unit, spec.description)

    def transition(self, name: str, change: StateChange) -> None:
        """Export one transition, as one span and one count."""
        attributes = {
            semconv.BREAKER_NAME: name,
            semconv.BREAKER_FROM: change.before.value,
            semconv.BREAKER_TO: change.after.value,
        }
        self._transitions.add(1, attributes)
        current = get_current_span().get_span_context()
        span = self._tracer.start_span(
            semconv.BREAKER_SPAN,
            context=Context(),
            links=[Link(current)] if current.is_valid else None,
            attributes={
                **attributes,
                semconv.BREAKER_REASON: change.reason,
                semconv.BREAKER_SEQUENCE: change.sequence,
            },
        )
        span.end()

    def call(self, name: str, outcome: str) -> None:
        """Count one call: ``ok``, ``failed``, ``slow``, ``refused`` or ``abandoned``."""
        self._calls.add(1, {semconv.BREAKER_NAME: name, "outcome": outcome})
