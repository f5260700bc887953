"""GPU capture in the application: from settings, provider and sink to what waits for CUDA."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import Meter

from pasta_otel.context import selected
from pasta_otel.pipeline import CaptureState

if TYPE_CHECKING:
    from pasta_otel.gpu.cupti.start import GpuCaptureStarter, SpanSink
    from pasta_otel.gpu.torch.names import ModuleNames

_log = logging.getLogger(__name__)


def build_gpu_capture(
    settings: Mapping[str, Any],
    sink: SpanSink | None,
    meter: Meter,
    capture: CaptureState,
    names: ModuleNames | None = None,
) -> GpuCaptureStarter | None:
    """Return what captures GPU work once the program uses CUDA, not started; None where it is off or not installed.

    The caller adds ``starter.requests`` to the TracerProvider, hands ``starter.observer`` to ``ModuleSpans.observe``,
    exports ``starter.points`` as ``gpu.cuda.kernel.duration`` (``exporters.precomputed``), and starts and stops it.

    Args:
        settings: Resolved settings (``load_settings``).
        sink: Takes GPU spans and op spans.
        meter: For the state of the capture.
        capture: The capture tier.
        names: Qualified names of modules.
    """
    if not settings["PASTA_GPU_CAPTURE"] or settings["PASTA_OVERHEAD_BUDGET"] <= 0:
        return None
    try:
        from pasta_otel.gpu.cupti.start import CaptureOptions, GpuCaptureStarter  # noqa: PLC0415 - numpy and the extension
    except ImportError as error:
        _log.info("no GPU capture: %s", error)
        return None
    rate = settings["PASTA_SAMPLING_RATE"]
    options = CaptureOptions(
        budget=settings["PASTA_OVERHEAD_BUDGET"],
        sampled=lambda trace_id: selected(trace_id, rate),
        tier=capture.tier,
        library=settings["PASTA_CUPTI_LIBRARY"],
    )
    return GpuCaptureStarter(options, sink, meter, names=names)
