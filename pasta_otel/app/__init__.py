"""Composition: the only package that names concrete classes of the parts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pasta_otel.app.instrumented import build_row_sink, prepare_app_telemetry, setup_app_telemetry

__all__ = ["build_row_sink", "prepare_app_telemetry", "setup_app_telemetry"]


def __getattr__(name: str) -> Any:
    """Load when used: the agent attaches its probes before it has imported anything of this."""
    if name in __all__:
        return getattr(import_module("pasta_otel.app.instrumented"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
