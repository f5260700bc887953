"""Give every selected launch a slot of device memory, and read slots in the order of their stream.

A slab is a row of slots that one stream fills. It is cleared and read by operations of that same stream, so that a
result is never read before its launch is done, and no launch waits. Slabs are read when the program itself
synchronises, when the device memory allowed is used up (the only time that we wait: ``waits`` counts it), and at the
end.

No call into the driver is made under our lock: another thread's callback may hold the driver's lock and wait for ours.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pasta_otel.errors import PastaError
from pasta_otel.gpu.memory.callers import Caller, caller
from pasta_otel.gpu.memory.model import Launch
from pasta_otel.gpu.memory.sanitizer import (
    Domain,
    LaunchCallback,
    LaunchData,
    ModuleData,
    Resource,
    StreamData,
    Synchronize,
)
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.slots import SLOT_BYTES, fold

SLAB_SLOTS = 64
SLAB_BYTES = SLAB_SLOTS * SLOT_BYTES


class Device(Protocol):
    """What the collector asks of the Sanitizer API."""

    def add_patches(self, file: str, context: int, /) -> None:
        """Load the device functions into a context."""

    def patch(self, module: int, /) -> None:
        """Patch a module."""

    def give_slot(self, launch: LaunchData, slot: int, /) -> None:
        """Have a launch count into a slot."""

    def allocate(self, context: int, size: int, /) -> int:
        """Return new device memory."""

    def clear(self, address: int, size: int, stream: int | None, /) -> None:
        """Zero memory in a stream's order."""

    def read(self, address: int, size: int, stream: int | None, /) -> bytes:
        """Copy memory to the host in a stream's order."""


_Pending = tuple[str, tuple[int, int, int], tuple[int, int, int], int, Caller]


@dataclass(slots=True)
class _Slab:
    """A row of slots. ``open`` counts launches whose slot is given but which are not yet in their stream."""

    address: int
    stream: int | None = None
    open: int = 0
    pending: list[_Pending | None] = field(default_factory=list)


@dataclass(slots=True)
class _Context:
    """One CUDA context's slabs; ``refused`` if it cannot be patched."""

    slabs: int = 0
    free: list[_Slab] = field(default_factory=list)
    filling: dict[int | None, _Slab] = field(default_factory=dict)
    full: list[_Slab] = field(default_factory=list)
    streams: dict[int | None, int] = field(default_factory=dict)
    refused: bool = False

    def take(self, stream: int | None, *, every_stream: bool) -> list[_Slab]:
        """Remove and return the slabs that can be read; one with an open launch stays."""
        ready = [slab for slab in self.full if not slab.open and (every_stream or slab.stream == stream)]
        for slab in ready:
            self.full.remove(slab)
        keys = [key for key, slab in self.filling.items() if not slab.open and (every_stream or key == stream)]
        return ready + [self.filling.pop(key) for key in keys]


class Collector:
    """The receiver of the Sanitizer's callbacks.

    Args:
        device: The Sanitizer API.
        patch: File of the compiled device functions.
        selection: What to analyse.
        on_problem: Is told once for each thing that keeps a context, module or launch from being analysed.
        who: Says who is launching, in its thread.
    """

    def __init__(
        self,
        device: Device,
        patch: str,
        selection: Selection,
        on_problem: Callable[[str], None] = lambda _: None,
        who: Callable[[], Caller] = caller,
    ) -> None:
        self._device, self._patch, self._selection, self._on_problem = device, patch, selection, on_problem
        self._who = who
        self._most_slabs = max(1, selection.device_bytes // SLAB_BYTES)
        self._contexts: dict[int, _Context] = {}
        self._lock = threading.Lock()
        self._patching = threading.Lock()  # the API wants patching serialised; no launch waits for this one
        self._open: dict[int, _Slab] = {}
        self._of_name: Counter[str] = Counter()
        self._chosen = 0
        self._problems: set[str] = set()
        self.launches: list[Launch] = []
        self.seen = 0
        self.waits = 0
        self.unpatched = 0
        self.skipped: Counter[str] = Counter()

    @property
    def problems(self) -> list[str]:
        """Return what went wrong, each once."""
        return sorted(self._problems)

    def on_event(self, domain: int, event: int, data: int) -> None:
        """Handle one callback; nothing that goes wrong here reaches the program."""
        try:
            self._dispatch(domain, event, data)
        except Exception as error:  # noqa: BLE001 - raised into a C caller it would be printed and lost
            self._report(f"{type(error).__name__}: {error}")

    def _dispatch(self, domain: int, event: int, data: int) -> None:
        if domain == Domain.LAUNCH:
            if event == LaunchCallback.BEGIN:
                self._begin(LaunchData.from_address(data))
            elif event == LaunchCallback.END:
                with self._lock:
                    self._release()
        elif domain == Domain.SYNCHRONIZE:
            if event in (Synchronize.STREAM, Synchronize.CONTEXT):
                where = StreamData.from_address(data)
                self._drain(where.context, where.handle, every_stream=event == Synchronize.CONTEXT)
        elif event == Resource.MODULE_LOADED:
            self._patch_module(ModuleData.from_address(data))
        elif event in (Resource.STREAM_DESTROY_STARTING, Resource.CONTEXT_DESTROY_STARTING):
            # every stream: where the stream's handle stands in this record differs between versions
            context = ModuleData.from_address(data).context
            self._drain(context, None, every_stream=True)
            if event == Resource.CONTEXT_DESTROY_STARTING:
                self._contexts.pop(context, None)  # its memory goes with it

    def _patch_module(self, data: ModuleData) -> None:
        with self._patching:
            context = self._contexts.get(data.context) or self._new_context(data.context)
            if context.refused or not self._concerns_us(data):
                return
            try:
                self._device.patch(data.module)
            except PastaError as error:
                self.skipped["module"] += 1
                self._report(f"a module cannot be analysed: {error}")

    def _concerns_us(self, data: ModuleData) -> bool:
        """Tell whether a module may hold a chosen GPU kernel; others keep their own machine code."""
        names = data.functions() if self._selection.names else None
        if names is None or any(map(self._selection.matches, names)):
            return True
        self.unpatched += 1
        return False

    def _new_context(self, handle: int) -> _Context:
        context = self._contexts[handle] = _Context()
        try:
            self._device.add_patches(self._patch, handle)
        except PastaError as error:
            context.refused = True
            self._report(f"this GPU cannot be analysed: {error}")
        return context

    def _begin(self, data: LaunchData) -> None:
        context = self._contexts.get(data.context)
        name = (data.name or b"?").decode(errors="replace")
        with self._lock:
            self.seen += 1
            reason = self._refusal(context, name)
            if reason or context is None:
                self.skipped[reason] += 1
                return
        slab = self._slab(context, data)
        if slab is None:
            return
        launcher = self._who()
        with self._lock:
            number, index = context.streams.setdefault(data.stream_handle, len(context.streams)), len(slab.pending)
            slab.pending.append((name, tuple(data.grid), tuple(data.block), number, launcher))
        try:
            self._device.give_slot(data, slab.address + index * SLOT_BYTES)
        except PastaError as error:
            slab.pending[index] = None
            self._lose("slot")
            self._report(f"a launch cannot be analysed: {error}")

    def _refusal(self, context: _Context | None, name: str) -> str:
        if context is None or context.refused:
            return "context"
        if not self._selection.matches(name):
            return "name"
        self._of_name[name] += 1
        if (self._of_name[name] - 1) % self._selection.every:
            return "sample"
        if self._chosen >= self._selection.count:
            return "count"
        self._chosen += 1
        return ""

    def _slab(self, context: _Context, data: LaunchData) -> _Slab | None:
        """Return the stream's slab with room for one more launch, held open for this thread."""
        with self._lock:
            slab = context.filling.get(data.stream_handle)
            if slab is not None and len(slab.pending) + slab.open < SLAB_SLOTS:
                return self._hold(slab)
            if slab is not None:
                context.full.append(context.filling.pop(data.stream_handle))
        slab = self._unused(context, data.context)
        if slab is None:
            self._lose("device_memory")
            return None
        self._device.clear(slab.address, SLAB_BYTES, data.stream_handle)
        with self._lock:
            slab.stream = data.stream_handle
            if data.stream_handle in context.filling:  # another thread was faster
                context.full.append(context.filling[data.stream_handle])
            context.filling[data.stream_handle] = slab
            return self._hold(slab)

    def _hold(self, slab: _Slab) -> _Slab:
        self._release()  # a launch that failed has no end
        slab.open += 1
        self._open[threading.get_ident()] = slab
        return slab

    def _release(self) -> None:
        slab = self._open.pop(threading.get_ident(), None)
        if slab is not None:
            slab.open -= 1

    def _unused(self, context: _Context, handle: int) -> _Slab | None:
        with self._lock:
            if context.free:
                return context.free.pop()
            fresh = context.slabs < self._most_slabs
            context.slabs += fresh
            oldest = next((slab for slab in context.full if not slab.open), None)
            if not fresh and oldest is not None:
                context.full.remove(oldest)
                self.waits += 1
        if fresh:
            return self._allocate(context, handle)
        if oldest is None:
            return None  # every slab is being filled by a stream of its own
        self._read(oldest)
        return oldest

    def _allocate(self, context: _Context, handle: int) -> _Slab | None:
        try:
            return _Slab(self._device.allocate(handle, SLAB_BYTES))
        except PastaError as error:
            self._most_slabs = context.slabs = context.slabs - 1
            self._report(f"no device memory for more results: {error}")
            return None

    def _drain(self, handle: int, stream: int | None, *, every_stream: bool) -> None:
        context = self._contexts.get(handle)
        if context is None:
            return
        with self._lock:
            slabs = context.take(stream, every_stream=every_stream)
        for slab in slabs:
            try:
                self._read(slab)
            finally:
                with self._lock:
                    context.free.append(slab)

    def _read(self, slab: _Slab) -> None:
        pending, slab.pending = slab.pending, []
        if not pending:
            return
        try:
            raw = self._device.read(slab.address, len(pending) * SLOT_BYTES, slab.stream)
        except PastaError as error:
            self._lose("unreadable", len(pending))
            self._report(f"results are lost: {error}")
            return
        rows = fold(raw).tolist()
        with self._lock:
            for what, row in zip(pending, rows, strict=True):
                if what is not None:
                    self.launches.append(Launch(*what[:4], tuple(row), what[4]))

    def _lose(self, reason: str, launches: int = 1) -> None:
        with self._lock:
            self.skipped[reason] += launches
            self._chosen -= launches

    def finish(self) -> None:
        """Read all slots that are still on the devices; a launch still open then did not take place."""
        with self._lock:
            for slab in self._open.values():
                slab.open = 0
            self._open.clear()
        for handle in list(self._contexts):
            self._drain(handle, None, every_stream=True)

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            self._on_problem(problem)
