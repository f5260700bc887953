"""GPU capture as a service of the process: windows under the governor, and what comes out of them on its way."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pasta_otel import semconv
from pasta_otel._native import _cupti
from pasta_otel.clock import ClockOffset, measure_offset
from pasta_otel.errors import StateError
from pasta_otel.gpu.classes import KernelClasses
from pasta_otel.gpu.cupti.aggregate import KernelHistograms
from pasta_otel.gpu.cupti.capture import T2_WINDOW, T3_WINDOW, Capture, WindowKinds
from pasta_otel.gpu.cupti.rows import Rows
from pasta_otel.gpu.cupti.spans import DEFAULT_TRACE_LIMIT, GpuSpans
from pasta_otel.gpu.cupti.steps import StepRegions
from pasta_otel.gpu.governor import Governor, WindowCost
from pasta_otel.gpu.mapping import Edge, JoinCounts, Joined, Joiner, Regions
from pasta_otel.model import HistogramPoint, SpanColumns

_log = logging.getLogger(__name__)

RETRY_S = 1.0
"""How long to wait after another CUPTI client kept us back, or an error of our own."""
ARM_S = 0.1
"""How long before a window regions are noted: longer than most modules and backward passes last."""
T3_WINDOW_NS = 1_000_000_000
"""Length of a T3 window: long enough for whole requests, short enough for the ring."""
MAX_T3_WINDOWS = 60
"""Most T3 windows in a row: deep capture is bounded by count as well as by time."""
OPS_EVERY = 10
"""Every tenth T3 window is an op window: torch.profiler costs far more than CUPTI alone."""
OPS_WINDOW_S = 1.0
GPU_TIER, DEEP_TIER = 2, 3


class ColumnsSink(Protocol):
    """Takes ready batches of spans (``RowExporter.offer_columns``)."""

    def offer_columns(self, columns: SpanColumns) -> bool:
        """Queue a batch; False when it was dropped."""


@dataclass(frozen=True, slots=True)
class WindowReport:
    """What one window brought.

    Attributes:
        cost: What it cost, as booked.
        weight: How many times its work counts.
        joined: Its work.
        offset: CUPTI's clock to wall time.
    """

    cost: WindowCost
    weight: float
    joined: Joined
    offset: ClockOffset


class GpuCapture:
    """Opens windows when the governor says so, joins, aggregates and hands spans on; one thread of its own.

    Args:
        capture: The process's CUPTI.
        regions: Which span each thread is in; the module hooks' observer.
        governor: Says when and how long.
        device_id: ``hw.id`` by CUDA device.
        sampled: Whether a trace's spans are exported.
        sink: Takes GPU spans; None = metrics only.
        trace_limit: Most GPU spans a trace.
        tier: The capture tier now: below 2 no window opens, from 3 on windows are deep and outside the budget.
        ops: Runs an op window of some seconds (``OpWindow.run``), at tier 3.
        steps: Follows event loops and worker threads; None = they are inside modules only.
        now_unix_nano: Wall time.
        cupti_timestamp: CUPTI's clock.
    """

    def __init__(  # noqa: PLR0913 - the parts are joined here
        self,
        capture: Capture,
        regions: Regions,
        governor: Governor,
        *,
        device_id: Callable[[int], str],
        sampled: Callable[[int], bool] = lambda _: True,
        sink: ColumnsSink | None = None,
        trace_limit: int = DEFAULT_TRACE_LIMIT,
        tier: Callable[[], int] = lambda: GPU_TIER,
        ops: Callable[[float], object] | None = None,
        steps: StepRegions | None = None,
        now_unix_nano: Callable[[], int] = time.time_ns,
        cupti_timestamp: Callable[[], int] = _cupti.timestamp,
    ) -> None:
        self.capture, self.regions, self.governor, self.sink, self.steps = capture, regions, governor, sink, steps
        self.histograms = KernelHistograms(KernelClasses(), device_id, now_unix_nano)
        self._spans = GpuSpans(self.histograms.codes, device_id, sampled, trace_limit)
        self._joiner = Joiner(regions)
        self._now, self._timestamp, self._tier, self._ops = now_unix_nano, cupti_timestamp, tier, ops
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._deep_until, self._deep_windows = 0, 0
        self.counts = JoinCounts()
        self.spans: Counter[str] = Counter()
        self.windows: Counter[str] = Counter()
        self.offset: ClockOffset | None = None
        self._window_times: tuple[int, int | None] = (0, 0)  # the last window's begin and end; None = it is open

    # -- one window ----------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Have modules and backward passes noted for a while, so that the next window knows what it opens in."""
        self.note_regions(on=True)
        self._wake.wait(ARM_S)

    def note_regions(self, *, on: bool) -> None:
        """Have regions of modules, backward passes, event loops and worker threads noted, or no longer."""
        self.regions.recording = on
        if self.steps is not None:
            if on:
                self.steps.install()
            else:
                self.steps.remove()

    def window(self, length_ns: int, what: WindowKinds = T2_WINDOW) -> WindowReport | None:
        """Record for a while and digest what came; None when another client has CUPTI."""
        began = time.perf_counter_ns()
        self.note_regions(on=True)
        try:
            return self._window(length_ns, what, began)
        finally:
            self.note_regions(on=False)

    def _window(self, length_ns: int, what: WindowKinds, began: int) -> WindowReport | None:
        if not self.capture.open(what):
            self.windows["held"] += 1
            return None
        recording = time.perf_counter_ns()
        opened = self._now()
        self._window_times = (opened, None)
        self._wake.wait(length_ns / 1e9)
        recorded = time.perf_counter_ns() - recording
        offset = measure_offset(self._timestamp, self._now)
        self.capture.close()
        self._window_times = (opened, self._now())
        cpu = time.thread_time_ns()
        joined = self.digest(self.capture.drain(), self.capture.edges())
        cpu_ns = time.thread_time_ns() - cpu
        nodes = int((joined.work["graph"] != 0).sum())
        switch = self.capture.last_switch_ns
        cost = WindowCost(began, recorded, joined.launches, switch, cpu_ns, nodes, self.capture.attached)
        weight = self.governor.book(cost, charged=what is not T3_WINDOW)
        self.deliver(joined, weight, offset)
        self.windows["ok"] += 1
        return WindowReport(cost, weight, joined, offset)

    def request_ended(self, operation: str, start_unix_nano: int, end_unix_nano: int) -> None:
        """Compare a request that was wholly inside or wholly outside a window with its kind (``Calibration``)."""
        opened, closed = self._window_times
        if closed is None and start_unix_nano >= opened:
            self.governor.calibration.observe(operation, end_unix_nano - start_unix_nano, inside=True)
        elif closed is not None and start_unix_nano >= closed:
            self.governor.calibration.observe(operation, end_unix_nano - start_unix_nano, inside=False)

    def digest(self, batches: Iterable[Rows], edges: Sequence[Edge] = ()) -> Joined:
        """Join a window's rows to the regions."""
        joined = self._joiner.join(batches, edges)
        self.regions.turn()
        self.counts += joined.counts
        return joined

    def deliver(self, joined: Joined, weight: float, offset: ClockOffset) -> None:
        """Count the work in the histograms, and hand on its spans."""
        self.offset = offset
        names = self.capture.names()
        self.histograms.add(joined, names, weight, offset.offset_ns)
        groups, counts = self._spans.columns(joined, names, offset.offset_ns)
        self.spans.update(capped=counts.capped, unsampled=counts.unsampled)
        for columns in groups:
            taken = self.sink is not None and self.sink.offer_columns(columns)
            self.spans["ok" if taken else "dropped"] += len(columns)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to capture."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="pasta-gpu-capture", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the window, digest it, detach, and end the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        self.capture.close()
        self.note_regions(on=False)
        self._wake.clear()

    def deepen(self, seconds: float) -> None:
        """Capture at tier 3, outside the budget, for a bounded time; 0 ends it."""
        self._deep_until = time.monotonic_ns() + int(seconds * 1e9)
        self._deep_windows = 0

    def points(self) -> list[HistogramPoint]:
        """Return ``gpu.cuda.kernel.duration`` so far."""
        return self.histograms.points()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                pause = self._turn()
            except Exception:  # noqa: BLE001 - telemetry never breaks the service
                self.windows["failed"] += 1
                _log.warning("a GPU capture window failed", exc_info=True)
                pause = RETRY_S
            self._stop.wait(pause)

    def _turn(self) -> float:
        """Run a window if one is due; returns how long to wait before the next look, seconds."""
        tier = DEEP_TIER if time.monotonic_ns() < self._deep_until else self._tier()
        if tier >= DEEP_TIER and self._deep_windows < MAX_T3_WINDOWS:
            return self._deep_window()
        if tier < DEEP_TIER:
            self._deep_windows = 0
        wait = self.governor.wait_ns()
        if wait > 0 or tier < GPU_TIER:
            self.capture.detach()
            return min(wait / 1e9, RETRY_S) if tier >= GPU_TIER else RETRY_S
        self.arm()
        return 0.0 if self.window(self.governor.window_ns()) else RETRY_S

    def _deep_window(self) -> float:
        self._deep_windows += 1
        if self._ops is not None and self._deep_windows % OPS_EVERY == 1:
            try:
                self._ops(OPS_WINDOW_S)
            except StateError as error:
                _log.info("no op window: %s", error)
        return 0.0 if self.window(T3_WINDOW_NS, T3_WINDOW) else RETRY_S

    # -- metrics -------------------------------------------------------------------------------------------------------

    def register(self, meter: Meter) -> None:
        """Export the state of the capture; the histograms themselves go out by ``points``."""
        _gauge(meter, semconv.GPU_CAPTURE_BUDGET, lambda: [Observation(self.governor.budget)])
        _gauge(meter, semconv.GPU_CAPTURE_COST, lambda: [Observation(self.governor.cost)])
        _gauge(meter, semconv.GPU_CAPTURE_DUTY, lambda: [Observation(self.governor.duty)])
        _gauge(meter, semconv.GPU_CAPTURE_HELD, self._held)
        _gauge(meter, semconv.GPU_CLOCK_RESIDUAL, self._residual)
        _counter(meter, semconv.GPU_WORK, self._work)
        _counter(meter, semconv.GPU_WORK_DROPPED, self._dropped)
        _counter(meter, semconv.GPU_SPANS, lambda: _by("outcome", self.spans))
        _counter(meter, semconv.GPU_CAPTURE_WINDOWS, lambda: _by("outcome", self.windows))
        _counter(meter, semconv.GPU_CLOCK_VIOLATIONS, lambda: [Observation(self.counts.early)])

    def _held(self) -> list[Observation]:
        holder = self.capture.holder
        return [Observation(1, {"holder": holder})] if holder else [Observation(0)]

    def _residual(self) -> list[Observation]:
        return [] if self.offset is None else [Observation(self.offset.residual_ns / 1e9)]

    def _work(self) -> list[Observation]:
        counts = self.counts
        kinds = {"id": counts.linked, "unlinked": counts.unlinked, "stale": counts.stale}
        return _by("link", {**kinds, "incomplete": counts.incomplete})

    def _dropped(self) -> list[Observation]:
        stats = self.capture.stats()
        return _by("reason", {"cupti": stats["dropped"], "ring_full": stats["ring_full"]})


def _by(label: str, values: dict[str, int] | Counter[str]) -> list[Observation]:
    return [Observation(value, {label: name}) for name, value in values.items()]


def _gauge(meter: Meter, name: str, read: Callable[[], list[Observation]]) -> None:
    spec = semconv.METRICS[name]
    meter.create_observable_gauge(name, [_callback(read)], spec.unit, spec.description)


def _counter(meter: Meter, name: str, read: Callable[[], list[Observation]]) -> None:
    spec = semconv.METRICS[name]
    meter.create_observable_counter(name, [_callback(read)], spec.unit, spec.description)


def _callback(read: Callable[[], list[Observation]]) -> Callable[[CallbackOptions], Any]:
    return lambda _: read()
