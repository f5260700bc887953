"""Attribution: why an SLO burns, from spans, modules and host counters."""

from pasta_otel.slo.attribution.engine import AttributionEngine
from pasta_otel.slo.attribution.thresholds import Thresholds

__all__ = ["AttributionEngine", "Thresholds"]
