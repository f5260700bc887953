"""GPU observability and SLO control, OpenTelemetry-native.

Importing this package does nothing but define names; parts load when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pasta_otel.gpu.torch.annotate import annotate
    from pasta_otel.instrumentation import instrument, name_model, uninstrument
    from pasta_otel.regions import analyze

__all__ = ["__version__", "analyze", "annotate", "instrument", "name_model", "uninstrument"]
__version__ = "0.1.0"

_LAZY = {
    "analyze": "pasta_otel.regions",
    "annotate": "pasta_otel.gpu.torch.annotate",
    "instrument": "pasta_otel.instrumentation",
    "name_model": "pasta_otel.instrumentation",
    "uninstrument": "pasta_otel.instrumentation",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
