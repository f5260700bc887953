"""The controller's HTTP face on port 4320: OFREP, state, attribution, pins, metrics and health."""

from pasta_otel.exporters.api.app import ApiProviders, create_app
from pasta_otel.exporters.api.providers import FlagProvider, MetricsRenderer
from pasta_otel.exporters.api.server import ApiServer

__all__ = ["ApiProviders", "ApiServer", "FlagProvider", "MetricsRenderer", "create_app"]
