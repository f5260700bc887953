"""Start GPU capture when the program begins to use CUDA, and not before: a process without a GPU never loads CUPTI."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opentelemetry.metrics import Meter

from pasta_otel._native import _cupti
from pasta_otel.errors import MissingError
from pasta_otel.gpu.cupti import library
from pasta_otel.gpu.cupti.capture import Capture
from pasta_otel.gpu.cupti.devices import device_count, device_uuid
from pasta_otel.gpu.cupti.graphs import CudaDriver, GraphRecorder
from pasta_otel.gpu.cupti.ops import OpWindow, RowSink, TaggedRegions
from pasta_otel.gpu.cupti.requests import RequestRegions
from pasta_otel.gpu.cupti.service import GPU_TIER, ColumnsSink, GpuCapture
from pasta_otel.gpu.cupti.spans import DEFAULT_TRACE_LIMIT
from pasta_otel.gpu.cupti.steps import StepRegions
from pasta_otel.gpu.cupti.torch_watch import TorchWatch
from pasta_otel.gpu.governor import Governor
from pasta_otel.gpu.mapping import Regions
from pasta_otel.gpu.torch.names import ModuleNames
from pasta_otel.model import HistogramPoint

_log = logging.getLogger(__name__)

DETACH_FROM = 24
"""CUPTI of CUDA 12.6: from there on detaching is known to work (Kineto tears down by default from that version)."""
LOOK_S = 2.0
"""How often a process that does not use CUDA yet is looked at: one read of /proc/self/maps."""


class SpanSink(ColumnsSink, RowSink, Protocol):
    """Takes batches of GPU spans and single op spans (``RowExporter``)."""


running: weakref.WeakSet[GpuCaptureStarter] = weakref.WeakSet()
"""Those that wait for CUDA or capture: where there is one, memory analysis cannot begin in this process."""
MEMORY_SESSION = "pasta_otel.gpu.memory.session"


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What a deployment decides.

    Attributes:
        budget: Share of time that capture may cost (``PASTA_OVERHEAD_BUDGET``).
        trace_limit: Most GPU spans a trace.
        sampled: Whether a trace's spans are exported.
        utilization: GPU utilisation 0..1, or None when unknown.
        tier: The capture tier now (``CaptureState.tier``).
        library: File of libcupti (``PASTA_CUPTI_LIBRARY``); empty = search.
    """

    budget: float = 0.01
    trace_limit: int = DEFAULT_TRACE_LIMIT
    sampled: Callable[[int], bool] = lambda _: True
    utilization: Callable[[], float | None] = lambda: None
    tier: Callable[[], int] = lambda: GPU_TIER
    library: str = ""


class GpuCaptureStarter:
    """Waits for CUDA, then runs the capture.

    Args:
        options: What a deployment decides.
        sink: Takes GPU spans, and op spans at tier 3; None = metrics only.
        meter: Exports the state of the capture.
        names: Qualified names of modules, for what CUDA graphs replay.
        uses_cuda: Whether the process has begun to use CUDA.

    Attributes:
        regions: Which span each thread is in.
        observer: For the module hooks (``ModuleSpans.observe``).
        requests: To be added to the TracerProvider.
        missing: Why there is no capture although CUDA is used, or None.
        on_started: Called once the capture runs.
    """

    def __init__(
        self,
        options: CaptureOptions,
        sink: SpanSink | None = None,
        meter: Meter | None = None,
        *,
        names: ModuleNames | None = None,
        uses_cuda: Callable[[], bool] | None = None,
    ) -> None:
        self._options, self._sink, self._meter = options, sink, meter
        self._names = names or ModuleNames()
        self._uses_cuda = uses_cuda or cuda_is_used
        self.on_started: Callable[[], object] = lambda: None
        self.regions = Regions(_cupti, time.time_ns)
        self.observer = TaggedRegions(self.regions)
        self.requests = RequestRegions(self.observer, self._request_ended)
        self.service: GpuCapture | None = None
        self.missing: str | None = None
        self._watch: TorchWatch | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if hasattr(os, "register_at_fork"):
            own = weakref.WeakMethod(self._after_fork)
            os.register_at_fork(after_in_child=lambda: (method := own()) and method())

    def start(self) -> None:
        """Begin to wait for CUDA."""
        self._stop.clear()
        running.add(self)
        self._thread = threading.Thread(target=self._wait_for_cuda, name="pasta-gpu-start", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop capturing; what was recorded is digested first."""
        running.discard(self)
        self._stop.set()
        if self._thread is not None:
            self._thread.join(LOOK_S)
        if self.service is not None:
            self.service.stop()
        if self._watch is not None:
            self._watch.uninstall()

    def points(self) -> list[HistogramPoint]:
        """Return ``gpu.cuda.kernel.duration`` so far; nothing before the first window."""
        return [] if self.service is None else self.service.points()

    def _request_ended(self, operation: str, start_unix_nano: int, end_unix_nano: int) -> None:
        if self.service is not None:
            self.service.request_ended(operation, start_unix_nano, end_unix_nano)

    def _wait_for_cuda(self) -> None:
        while not self._stop.wait(LOOK_S):
            if self.service is None and self._uses_cuda() and not self._begin():
                return
            if self.service is not None and (self._watch is None or self._watch.install()):
                return

    def _begin(self) -> bool:
        try:
            refuse_if_analysed()
            path = library.load([self._options.library] if self._options.library else None)
            self.service = self._build(detach=_cupti.load(path) >= DETACH_FROM)
        except (MissingError, OSError, RuntimeError) as error:
            self.missing = str(error)
            _log.warning("no GPU capture: %s", error)
            return False
        _log.info("GPU capture uses %s", path)
        self.service.start()
        self.on_started()
        return True

    def _build(self, *, detach: bool) -> GpuCapture:
        options = self._options
        capture = Capture(detach=detach)
        governor = Governor(options.budget, time.monotonic_ns, utilization=options.utilization)
        service = GpuCapture(
            capture,
            self.regions,
            governor,
            device_id=device_uuid,
            sampled=options.sampled,
            sink=self._sink,
            trace_limit=options.trace_limit,
            tier=options.tier,
            ops=None if self._sink is None else OpWindow(self.observer, self._sink, device_uuid).run,
            steps=StepRegions(self.regions),
        )
        if self._meter is not None:
            service.register(self._meter)
        self._watch = TorchWatch(capture, self.regions, self._graph_recorder())
        self._watch.install()
        return service

    def _graph_recorder(self) -> GraphRecorder | None:
        hooks, driver = sys.modules.get("torch.nn.modules.module"), CudaDriver.load()
        if hooks is None or driver is None:
            return None
        return GraphRecorder(driver, hooks, self._current_stream, self._names)

    def _current_stream(self) -> int:
        torch: Any = sys.modules["torch"]
        return int(torch.cuda.current_stream().cuda_stream)

    def _after_fork(self) -> None:
        """Wait for CUDA anew in a forked worker; a child of a process that used CUDA cannot use it."""
        if self.service is not None:
            self.service.note_regions(on=False)
            _cupti.window(False)
        elif self._thread is not None:
            self._stop = threading.Event()
            self.start()


def refuse_if_analysed() -> None:
    """Check that memory analysis does not have this process.

    Raises:
        MissingError: It has: CUPTI cannot.
    """
    session = sys.modules.get(MEMORY_SESSION)
    if session is not None and session.running() is not None:
        raise MissingError("this process' memory accesses are analysed, and a process has one profiler")


def cuda_is_used() -> bool:
    """Return whether this process has initialised CUDA and found a device.

    The loaded library alone is not enough: without a device CUPTI 13.2 crashes as early as in ``cuptiGetVersion``.
    """
    return cuda_is_loaded() and device_count() > 0


def cuda_is_loaded(maps: Path = Path("/proc/self/maps")) -> bool:
    """Return whether the CUDA driver library is mapped into this process."""
    try:
        return "/libcuda.so" in maps.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
