"""In the application: a burning SLO looks more closely here, through the flag ``pasta.capture``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from pasta_otel import semconv, slo
from pasta_otel.errors import InputError
from pasta_otel.pipeline import CaptureState

log = logging.getLogger(__name__)


def follow_capture_flag(capture: CaptureState, environ: Mapping[str, str] | None = None) -> bool:
    """Let the controller raise the capture tier, where ``PASTA_CONTROLLER_URL`` names one; return whether it may.

    The flag is read as every other (``slo.handler``): polled in the background, and gone when the controller is.
    """
    environ = os.environ if environ is None else environ
    if not environ.get("PASTA_CONTROLLER_URL"):
        return False

    def changed(value: Any) -> None:
        try:
            capture.apply(value if isinstance(value, Mapping) else None)
        except InputError as error:
            log.warning("%s", error)

    slo.handler(semconv.FLAG_CAPTURE, default={})(changed)
    return True
