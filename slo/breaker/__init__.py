"""A circuit breaker with resilience4j's states and rates, for sync and async callers."""

from pasta_otel.slo.breaker.breaker import CircuitBreaker, CircuitOpenError, Guard
from pasta_otel.slo.breaker.config import BreakerConfig, BreakerState, HalfOpenPolicy
from pasta_otel.slo.breaker.machine import StateChange
from pasta_otel.slo.breaker.telemetry import BreakerTelemetry

__all__ = [
    "BreakerConfig",
    "BreakerState",
    "BreakerTelemetry",
    "CircuitBreaker",
    "CircuitOpenError",
    "Guard",
    "HalfOpenPolicy",
    "StateChange",
]
