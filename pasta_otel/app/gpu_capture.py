"""GPU capture in the application: from settings, provider and sink to what waits for CUDA; its histograms by OTLP."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import Meter

from pasta_otel import semconv
from pasta_otel.context import selected
from pasta_otel.gpu.torch.provider import remove_processor
from pasta_otel.model import HistogramPoint
from pasta_otel.pipeline import CaptureState

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter

    from pasta_otel.gpu.cupti.start import GpuCaptureStarter, SpanSink
    from pasta_otel.gpu.torch.modules import ModuleSpans
    from pasta_otel.gpu.torch.names import ModuleNames

_log = logging.getLogger(__name__)

DEFAULT_INTERVAL_S = 60.0
"""``OTEL_METRIC_EXPORT_INTERVAL``'s default."""


class HistogramPush:
    """Sends histograms that the program's own MeterProvider cannot carry, every minute and at the end.

    Args:
        source: The cumulative points.
        provider: The TracerProvider; its resource goes with them.
        exporter: Makes what sends.
        interval_s: Time between pushes.
    """

    def __init__(
        self,
        source: Callable[[], Sequence[HistogramPoint]],
        provider: Any,
        exporter: Callable[[], MetricExporter],
        interval_s: float,
    ) -> None:
        self._source, self._provider, self._make, self._interval = source, provider, exporter, interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to push."""
        self._thread = threading.Thread(target=self._run, name="pasta-gpu-metrics", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Push once more, and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        exporter = self._make()
        while not self._stop.wait(self._interval):
            self._push(exporter)
        self._push(exporter)
        exporter.shutdown()

    def _push(self, exporter: MetricExporter) -> None:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics  # noqa: PLC0415 - only with a GPU

        from pasta_otel.exporters.precomputed import with_histograms  # noqa: PLC0415 - as above

        try:
            empty = MetricsData([ResourceMetrics(self._provider.resource, [], "")])
            data = with_histograms(empty, semconv.GPU_KERNEL_DURATION, self._source())
            if data is not None and data is not empty:
                exporter.export(data)
        except Exception:  # noqa: BLE001 - telemetry never breaks the service
            _log.debug("GPU histograms could not be sent", exc_info=True)


class GpuInstrumentation:
    """The capture of one instrumented program.

    Attributes:
        starter: Waits for CUDA and runs the capture.
    """

    def __init__(self, starter: GpuCaptureStarter, push: HistogramPush, provider: Any) -> None:
        self.starter, self._push, self._provider = starter, push, provider
        self._modules: ModuleSpans | None = None
        starter.on_started = self._follow

    def start(self, modules: ModuleSpans) -> None:
        """Wait for CUDA; until then the program runs as without us."""
        self._modules = modules
        self.starter.start()

    def stop(self) -> None:
        """Stop capturing, send what was counted, and put everything back."""
        if self._modules is not None:
            self._modules.observe(None)
        self.starter.stop()
        remove_processor(self._provider, self.starter.requests)
        self._push.stop()

    def _follow(self) -> None:
        """Follow the provider's requests and the recorded modules: the capture runs."""
        self._provider.add_span_processor(self.starter.requests)
        if self._modules is not None:
            self._modules.observe(self.starter.observer)
        self._push.start()


def build_gpu_capture(  # noqa: PLR0913 - keyword-only: the parts are joined here
    *,
    settings: Mapping[str, Any],
    provider: Any,
    sink: SpanSink | None,
    meter: Meter,
    capture: CaptureState,
    names: ModuleNames | None = None,
    exporter: Callable[[], MetricExporter] | None = None,
    uses_cuda: Callable[[], bool] | None = None,
) -> GpuInstrumentation | None:
    """Return the GPU capture of a program, not started; None where it is off or not installed.

    Args:
        settings: Resolved settings (``load_settings``).
        provider: The TracerProvider of the program.
        sink: Takes GPU spans and op spans; None = metrics only.
        meter: For the state of the capture.
        capture: The capture tier.
        names: Qualified names of modules.
        exporter: Makes what sends the histograms; by default OTLP by ``OTEL_EXPORTER_OTLP_*``.
        uses_cuda: Whether the process uses CUDA.
    """
    if not settings["PASTA_GPU_CAPTURE"] or settings["PASTA_OVERHEAD_BUDGET"] <= 0:
        return None
    try:
        from pasta_otel.gpu.cupti.start import CaptureOptions, GpuCaptureStarter  # noqa: PLC0415 - numpy, extension
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
    starter = GpuCaptureStarter(options, sink, meter, names=names, uses_cuda=uses_cuda)
    push = HistogramPush(starter.points, provider, exporter or _otlp_exporter, _interval_s())
    return GpuInstrumentation(starter, push, provider)


def _otlp_exporter() -> MetricExporter:
    from pasta_otel.exporters.metrics import PastaMetricExporter  # noqa: PLC0415 - only with a GPU
    from pasta_otel.exporters.otlp.config import OtlpConfig  # noqa: PLC0415 - as above

    return PastaMetricExporter(OtlpConfig.from_env(signal="metrics"))


def _interval_s() -> float:
    try:
        return max(1.0, float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1000)
    except ValueError:
        return DEFAULT_INTERVAL_S
