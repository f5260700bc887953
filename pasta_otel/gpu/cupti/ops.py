"""Tier 3: torch ops as spans, with the user's function that called them, by a bounded window of torch.profiler.

While such a window is open, each region is also a ``record_function`` whose name holds the span's ids. The profiler's
own records then say which op ran inside which span, on whichever thread; an op's GPU kernels follow by the profiler's
correlation ids. Nothing is joined by time between clocks.

``code.line.number`` is what torch's Python tracer notes of a frame: the function's first line, or, for a function that
was running when the window opened, the line it stood at.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from pasta_otel import semconv
from pasta_otel.clock import measure_offset
from pasta_otel.context import SpanIds
from pasta_otel.errors import StateError
from pasta_otel.gpu.classes import KernelClasses, short_name
from pasta_otel.gpu.mapping import Regions
from pasta_otel.model import AttributeValue, OpSpan, SpanSite

_log = logging.getLogger(__name__)

MARK = "pasta.region:"
MAX_OPS = 5_000
"""Most op spans a window: a window is for looking closely, not for recording everything."""


class RowSink(Protocol):
    """Takes finished rows (``pipeline.RowSink``)."""

    def offer(self, row: OpSpan, /) -> object:
        """Take one row."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a Python stack, innermost first."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class OpRecord:
    """What an op window saw of one op or one piece of GPU work.

    Attributes:
        name: ``aten::linear``, or a GPU kernel's name.
        start_unix_nano: Begin.
        end_unix_nano: End.
        thread: The profiler's thread number; ops and region marks of one thread share it.
        correlation: The profiler's id that joins GPU work to its op; 0 = none.
        device: CUDA device of GPU work, None for an op.
        stack: The Python stack of an op.
    """

    name: str
    start_unix_nano: int
    end_unix_nano: int
    thread: int
    correlation: int = 0
    device: int | None = None
    stack: tuple[Frame, ...] = ()


class TaggedRegions:
    """The regions, which are also marks for torch.profiler while an op window is open.

    Args:
        regions: Told everything as well.
        modules: ``sys.modules``.
    """

    def __init__(self, regions: Regions, modules: Mapping[str, ModuleType] = sys.modules) -> None:
        self._regions, self._modules = regions, modules
        self._local = threading.local()
        self.tagging = self._ever = False

    def enter(self, trace_id: int, span_id: int, module: str | None = None) -> None:
        """Begin a module's region on this thread."""
        self._regions.enter(trace_id, span_id, module)
        if self.tagging:
            self._mark(trace_id, span_id)

    def enter_request(self, trace_id: int, span_id: int) -> None:
        """Begin a request's region on this thread."""
        self._regions.enter_request(trace_id, span_id)
        if self.tagging:
            self._mark(trace_id, span_id)

    def leave(self, span_id: int) -> None:
        """End a region on this thread, and the marks of regions inside it that ended unseen."""
        self._regions.leave(span_id)
        if self._ever:
            self._unmark(span_id)

    def _unmark(self, span_id: int) -> None:
        marks: list[tuple[int, Any]] | None = getattr(self._local, "marks", None)
        if marks and any(known == span_id for known, _ in marks):
            while marks:
                known, mark = marks.pop()
                mark.__exit__(None, None, None)
                if known == span_id:
                    return

    def end(self, external_id: int) -> None:
        """Note that nothing belongs to the region from now on."""
        self._regions.end(external_id)

    def _mark(self, trace_id: int, span_id: int) -> None:
        self._ever = True
        profiler: Any = self._modules["torch.autograd.profiler"]
        mark = profiler.record_function(f"{MARK}{trace_id:032x}:{span_id:016x}")
        mark.__enter__()
        marks: list[tuple[int, Any]] | None = getattr(self._local, "marks", None)
        if marks is None:
            marks = self._local.marks = []
        marks.append((span_id, mark))


class OpWindow:
    """Runs torch.profiler for a while, and turns what it saw into rows.

    Args:
        regions: Marks the regions while the window is open.
        sink: Takes the rows.
        device_id: ``hw.id`` by CUDA device.
        modules: ``sys.modules``.
        limit: Most rows a window.
    """

    def __init__(
        self,
        regions: TaggedRegions,
        sink: RowSink,
        device_id: Callable[[int], str],
        modules: Mapping[str, ModuleType] = sys.modules,
        limit: int = MAX_OPS,
    ) -> None:
        self._regions, self._sink, self._modules = regions, sink, modules
        self._sites, self._limit = OpSites(device_id), limit
        self.dropped = 0

    def run(self, seconds: float, wait: Callable[[float], object] = time.sleep) -> int:
        """Record for a while; returns how many rows were made.

        Raises:
            StateError: The program has not imported torch, or its own torch.profiler is running.
        """
        profiler: Any = self._modules.get("torch.profiler")
        if profiler is None:
            msg = "op spans need torch.profiler, which the program has not imported"
            raise StateError(msg)
        session = _session(profiler, self._modules)
        try:
            session.start()
        except RuntimeError as error:
            msg = f"torch.profiler is in use: {error}"
            raise StateError(msg) from error
        self._regions.tagging = True
        try:
            wait(seconds)
        finally:
            self._regions.tagging = False
            session.stop()
        return self._offer(records_of(session.profiler.kineto_results.events()))

    def _offer(self, records: Iterable[OpRecord]) -> int:
        rows = rows_of(list(records), self._sites, SpanIds(), monotonic_offset_ns())
        self.dropped += max(0, len(rows) - self._limit)
        for row in rows[: self._limit]:
            self._sink.offer(row)
        return min(len(rows), self._limit)


class OpSites:
    """What rows of one op and place share, made once."""

    def __init__(self, device_id: Callable[[int], str]) -> None:
        self._device_id, self._classes = device_id, KernelClasses()
        self._known: dict[tuple[str, int | None, Frame | None], SpanSite] = {}

    def of(self, record: OpRecord) -> SpanSite:
        """Return the site of a record."""
        frame = user_frame(record.stack)
        key = (record.name, record.device, frame)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._make(record, frame)
        return found

    def _make(self, record: OpRecord, frame: Frame | None) -> SpanSite:
        attributes: list[tuple[str, AttributeValue]] = []
        if record.device is not None:
            attributes += [
                (semconv.GPU_KERNEL_CLASS, self._class_of(record.name)),
                (semconv.GPU_KERNEL_NAME, record.name),
                (semconv.HW_ID, self._device_id(record.device)),
            ]
        if frame is not None:
            attributes += [
                (semconv.CODE_FILE_PATH, full_path(frame.file)),
                (semconv.CODE_LINE_NUMBER, frame.line),
                (semconv.CODE_FUNCTION_NAME, frame.function),
            ]
        attributes.append((semconv.LINK_METHOD, "id"))
        name = record.name if record.device is None else short_name(record.name)
        return SpanSite(name, attributes=tuple(attributes))

    def _class_of(self, name: str) -> str:
        word = name.split(" ", 1)[0].lower()
        return word if word in {"memcpy", "memset"} else self._classes(name)


def rows_of(
    records: Sequence[OpRecord], sites: OpSites, new_id: Callable[[], int], to_monotonic_ns: int
) -> list[OpSpan]:
    """Return the outermost op of each moment inside a region, as that region's child, and the GPU work of each op.

    Args:
        records: Ops, region marks and GPU work of one window.
        sites: Names and constant attributes.
        new_id: Makes span ids.
        to_monotonic_ns: CLOCK_MONOTONIC minus wall time.
    """
    threads: dict[int, list[OpRecord]] = {}
    for record in records:
        if record.device is None:
            threads.setdefault(record.thread, []).append(record)
    rows: list[OpSpan] = []
    owner: dict[int, OpSpan] = {}
    for thread in threads.values():
        _ops_of_thread(thread, sites, new_id, to_monotonic_ns, rows, owner)
    for record in records:
        op = owner.get(record.correlation) if record.device is not None else None
        if op is not None:
            times = record.start_unix_nano + to_monotonic_ns, record.end_unix_nano + to_monotonic_ns
            rows.append(OpSpan(op.trace_id, new_id(), op.span_id, *times, op.thread_id, sites.of(record)))
    return rows


def _ops_of_thread(  # noqa: PLR0913, PLR0917 - one walk over sorted records that fills two results
    records: list[OpRecord],
    sites: OpSites,
    new_id: Callable[[], int],
    to_monotonic_ns: int,
    rows: list[OpSpan],
    owner: dict[int, OpSpan],
) -> None:
    records.sort(key=lambda record: (record.start_unix_nano, -record.end_unix_nano))
    regions: list[tuple[int, int, int]] = []  # end, trace id, span id
    outer: OpRecord | None = None
    span: OpSpan | None = None
    for record in records:
        while regions and regions[-1][0] <= record.start_unix_nano:
            regions.pop()
        if record.name.startswith(MARK):
            trace, _, own = record.name[len(MARK) :].partition(":")
            regions.append((record.end_unix_nano, int(trace, 16), int(own, 16)))
            outer = None
            continue
        if outer is None or record.start_unix_nano >= outer.end_unix_nano:
            outer, span = record, None
            if regions:
                times = record.start_unix_nano + to_monotonic_ns, record.end_unix_nano + to_monotonic_ns
                span = OpSpan(regions[-1][1], new_id(), regions[-1][2], *times, record.thread, sites.of(record))
                rows.append(span)
        if span is not None and record.correlation:
            owner[record.correlation] = span


def records_of(events: Iterable[Any]) -> Iterable[OpRecord]:
    """Read the profiler's events: ops, our marks, and GPU work; everything else is left out."""
    for event in events:
        try:
            record = _read(event)
        except (
            UnicodeDecodeError
        ):  # seen once in some hundred windows: a text of an op under way as the profiler stopped
            _log.debug("an event of torch.profiler could not be read", exc_info=True)
            continue
        if record is not None:
            yield record


def _read(event: Any) -> OpRecord | None:
    name, times = event.name(), (event.start_ns(), event.end_ns())
    if str(event.device_type()).rpartition(".")[2] == "CUDA":
        if _is_annotation(event):  # the time on the GPU of a record_function, ours too: its GPU kernels come themselves
            return None
        return OpRecord(name, *times, 0, event.linked_correlation_id(), event.device_index())
    if name.startswith(MARK) or ("::" in name and not _is_python(event, name)):
        stack = tuple(filter(None, map(parse_frame, event.stack())))
        return OpRecord(name, *times, event.start_thread_id(), event.correlation_id(), None, stack)
    return None


def _is_python(event: Any, name: str) -> bool:
    """Tell whether an event is a Python frame (``with_stack``), which may have ``::`` in its file or function too."""
    asked = getattr(event, "is_python_function", None)  # not in torch 2.11
    return parse_frame(name) is not None if asked is None else bool(asked())


def _is_annotation(event: Any) -> bool:
    asked = getattr(event, "is_user_annotation", None)  # torch 2.5
    return event.name().startswith(MARK) if asked is None else bool(asked())


def parse_frame(text: str) -> Frame | None:
    """Read ``file.py(12): function``; None for frames without a line."""
    place, separator, function = text.partition("): ")
    file, _, line = place.rpartition("(")
    if not separator or not line.isdigit():
        return None
    return Frame(file, int(line), function)


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost line that is neither torch's nor Python's own nor ours."""
    for frame in stack:
        file = frame.file.replace("\\", "/")
        if not file.startswith(("torch/", "threading.py", "pasta_otel/", "<")) and "/site-packages/" not in file:
            return frame
    return None


def full_path(file: str) -> str:
    """Return the file below the entry of ``sys.path`` that torch cut off, if it is there."""
    if file.startswith("/"):
        return file
    for entry in sys.path:
        candidate = Path(entry or ".") / file
        if candidate.is_file():
            return str(candidate.resolve())
    return file


def monotonic_offset_ns() -> int:
    """Return CLOCK_MONOTONIC minus wall time, ns."""
    return measure_offset(time.time_ns, time.monotonic_ns).offset_ns


def _session(profiler: Any, modules: Mapping[str, ModuleType]) -> Any:
    torch: Any = modules["torch"]
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    options: dict[str, Any] = {"verbose": True}
    config: Any = torch._C._profiler._ExperimentalConfig  # noqa: SLF001 - torch has no public name for it
    try:
        experimental = config(**options, profile_all_threads=True)
    except TypeError:  # before torch 2.6: the threads that the window's own thread starts
        experimental = config(**options)
    return profiler.profile(activities=activities, with_stack=True, experimental_config=experimental)
