"""Composition: the only package that names concrete classes of the parts."""

from pasta_otel.app.instrumented import build_row_sink, prepare_app_telemetry, setup_app_telemetry

__all__ = ["build_row_sink", "prepare_app_telemetry", "setup_app_telemetry"]
