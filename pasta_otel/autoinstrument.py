"""What ``pasta-otel run`` does inside the program it starts, before the program's first line."""

from __future__ import annotations

import logging
import os
from typing import Any

from opentelemetry.instrumentation.auto_instrumentation import _load

from pasta_otel.termination import at_sigterm

_log = logging.getLogger(__name__)
_loader: Any = _load  # what opentelemetry-instrument itself calls; untyped and private, and there is no other way
ENTRY_POINT = "pasta_otel"
DISABLED = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
DRAIN_TIMEOUT_S = 5.0
"""Half of the shortest time between SIGTERM and SIGKILL that is usual (docker stop: 10 s)."""


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

    disabled = os.environ.get(DISABLED, "")
    ours_disabled = ENTRY_POINT in {name.strip() for name in disabled.split(",")}
    if not PastaInstrumentor().is_instrumented_by_opentelemetry:  # else opentelemetry-instrument was here before us
        _load_others(disabled)
    if not ours_disabled:
        drain = instrument(set_up=True).drain  # its time counts twice: for the provider's spans, and for ours
        at_sigterm(lambda seconds: drain(seconds / 2), DRAIN_TIMEOUT_S)


def _load_others(disabled: str) -> None:
    """Load what ``opentelemetry-instrument`` would, except ourselves: our errors are reported in one line."""
    os.environ[DISABLED] = ",".join(name for name in (disabled, ENTRY_POINT) if name)
    try:
        distro = _loader._load_distro()
        distro.configure()
        _loader._load_configurators()
        _loader._load_instrumentors(distro)
    except Exception as error:  # noqa: BLE001 - somebody else's instrumentation: ours goes on
        _log.warning("another OpenTelemetry instrumentation failed: %s", error)
    finally:
        if disabled:
            os.environ[DISABLED] = disabled
        else:
            del os.environ[DISABLED]
