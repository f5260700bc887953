"""What ``pasta-otel run`` does inside the program it starts, before the program's first line."""

from __future__ import annotations

import logging
import os
from typing import Any

from opentelemetry.instrumentation.auto_instrumentation import _load

_log = logging.getLogger(__name__)
_loader: Any = _load  # what opentelemetry-instrument itself calls; untyped and private, and there is no other way
ENTRY_POINT = "pasta_otel"


def start() -> str:
    """Instrument this process: a provider if nothing sets one, the installed instrumentations once, and our own.

    Returns:
        Why the process could not be instrumented, or an empty string.
    """
    try:
        _start()
    except Exception as error:  # noqa: BLE001 - the program must run, instrumented or not
        return f"{type(error).__name__}: {error}"
    return ""


def _start() -> None:
    # ruff: noqa: SLF001 - see _loader
    from pasta_otel.instrumentation import PastaInstrumentor, instrument  # noqa: PLC0415 - its errors are reported

    if not PastaInstrumentor().is_instrumented_by_opentelemetry:  # else opentelemetry-instrument was here before us
        try:
            distro = _loader._load_distro()
            distro.configure()
            _loader._load_configurators()
            _loader._load_instrumentors(distro)
        except Exception as error:  # noqa: BLE001 - somebody else's instrumentation: ours goes on
            _log.warning("another OpenTelemetry instrumentation failed: %s", error)
    if ENTRY_POINT not in _disabled():
        instrument(set_up=True)


def _disabled() -> set[str]:
    return {name.strip() for name in os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
