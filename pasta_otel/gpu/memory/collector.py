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
from dataclasses import replace
from typing import Any, Protocol

from pasta_otel.errors import InputError, PastaError, StateError
from pasta_otel.gpu.memory.callers import Caller, caller
from pasta_otel.gpu.memory.locks import OwnedLock
from pasta_otel.gpu.memory.sanitizer import (
    KERNEL_NODE,
    Domain,
    Graphs,
    LaunchCallback,
    LaunchData,
    MemoryData,
    ModuleData,
    NodeData,
    Resource,
    StreamData,
    Synchronize,
)
from pasta_otel.gpu.memory.selection import Chooser, Selection
from pasta_otel.gpu.memory.slabs import Context, Device, Region, Slab, StreamRegions
from pasta_otel.gpu.memory.tool import LaunchInfo, Record, Tool, blame

MOST_SLOTS = 64
LEAST_SLABS = 4
"""Slabs that fit into the device memory allowed, so that several streams can be filled at once."""


class Allocations(Protocol):
    """Wants to know of device memory that the program allocates from the driver."""

    def segment_allocated(self, address: int, size: int, /) -> None:
        """Note a new allocation, bytes."""

    def segment_freed(self, address: int, /) -> None:
        """Note that one is gone."""


class Blocks(Protocol):
    """Parts of the program that want launches for themselves; every call comes under the collector's lock."""

    @property
    def asks_for_modules(self) -> bool:
        """Return whether the torch module of a launch decides."""

    def refusal(self, number: int, name: str, module: str = "", /) -> str:
        """Return why nobody wants this launch; empty = it is analysed."""

    def analysed(self, launch: LaunchInfo, result: Any, /) -> bool:
        """Take a launch that was wanted; True = it need not be kept for the process as a whole."""

    def lost(self, number: int, reason: str, /) -> None:
        """Note that a launch that was wanted will not come."""


class _NoBlocks:
    """The whole program is analysed."""

    asks_for_modules = False

    def refusal(self, _number: int, _name: str, _module: str = "", /) -> str:
        return ""

    def analysed(self, _launch: LaunchInfo, _result: Any, /) -> bool:
        return False

    def lost(self, _number: int, _reason: str, /) -> None:
        pass


class Collector:
    """The receiver of the Sanitizer's callbacks.

    Args:
        device: The Sanitizer API.
        patch: File of the compiled device functions.
        selection: What to analyse.
        tool: What to count.
        on_problem: Is told once for each thing that keeps a context, module or launch from being analysed.
        who: Says who is launching, in its thread.
        allocations: Is told of device memory.
        blocks: Parts of the program that want launches for themselves.

    Raises:
        InputError: One slot is larger than the device memory allowed.

    Attributes:
        active: Whether launches are analysed now.
        launches: Those that were, with the tool's record of each.
        seen: Launches of GPU kernels in all, also by CUDA graphs.
        waits: How often a launch had to wait for a slot.
        unpatched: Modules without a chosen GPU kernel.
        skipped: Launches and modules not analysed, by reason.
    """

    def __init__(  # noqa: PLR0913 - keyword-only from the fifth on: the parts are joined here
        self,
        device: Device,
        patch: str,
        selection: Selection,
        tool: Tool[Any],
        *,
        on_problem: Callable[[str], None] = lambda _: None,
        who: Callable[[], Caller] = caller,
        allocations: Allocations | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self._device, self._patch, self._selection, self._on_problem = device, patch, selection, on_problem
        self._blocks, self._chooser = blocks or _NoBlocks(), Chooser(selection)
        self._who, self._tool, self._allocations = who, tool, allocations
        if tool.slot_bytes > selection.device_bytes:
            allowed = f"the {selection.device_bytes:,} bytes of device memory allowed for results"
            raise InputError(f"slot_bytes is {tool.slot_bytes:,}, more than {allowed}", field=f"tool {tool.name}")
        self.slab_slots = min(MOST_SLOTS, max(1, selection.device_bytes // (LEAST_SLABS * tool.slot_bytes)))
        self.slab_bytes = self.slab_slots * tool.slot_bytes
        self._most_slabs = selection.device_bytes // self.slab_bytes
        self._contexts: dict[int, Context] = {}
        self._lock = OwnedLock()
        self._patching = threading.Lock()  # the API wants patching serialised; no launch waits for this one
        self._open: dict[int, list[Slab]] = {}
        self._in_graph: dict[int, dict[int, tuple[Slab, int] | str]] = {}
        self._of_function: dict[int, int] = {}
        self._problems: set[str] = set()
        self.active = True
        self.launches: list[tuple[LaunchInfo, Any]] = []
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
        memory = domain == Domain.RESOURCE and event in (Resource.DEVICE_MEMORY_ALLOC, Resource.DEVICE_MEMORY_FREE)
        if self._lock.mine and not memory:
            return  # a collection of garbage inside our own work destroyed a stream, say: its slots are read later
        if domain == Domain.LAUNCH:
            if event == LaunchCallback.BEGIN:
                self._begin(LaunchData.from_address(data))
            elif event == LaunchCallback.END and threading.get_ident() not in self._in_graph:
                with self._lock:
                    self._release()
        elif domain == Domain.GRAPHS:
            self._graph(event, data)
        elif domain == Domain.SYNCHRONIZE:
            if event in (Synchronize.STREAM, Synchronize.CONTEXT):
                where = StreamData.from_address(data)
                self._drain(where.context, where.handle, every_stream=event == Synchronize.CONTEXT)
        else:
            self._resource(event, data)

    def _resource(self, event: int, data: int) -> None:
        if event == Resource.MODULE_LOADED:
            self._patch_module(ModuleData.from_address(data))
        elif event in (Resource.DEVICE_MEMORY_ALLOC, Resource.DEVICE_MEMORY_FREE):
            self._memory(event, MemoryData.from_address(data))
        elif event in (Resource.STREAM_DESTROY_STARTING, Resource.CONTEXT_DESTROY_STARTING):
            # every stream: where the stream's handle stands in this record differs between versions
            context = ModuleData.from_address(data).context
            self._drain(context, None, every_stream=True)
            if event == Resource.CONTEXT_DESTROY_STARTING:
                self._contexts.pop(context, None)  # its memory goes with it

    def _memory(self, event: int, data: MemoryData) -> None:
        if self._allocations is None:
            return
        if event == Resource.DEVICE_MEMORY_ALLOC:
            self._allocations.segment_allocated(data.address, data.size)
        else:
            self._allocations.segment_freed(data.address)

    def _graph(self, event: int, data: int) -> None:
        """Give slots to the GPU kernels of a CUDA graph's launch; none is in its stream before all are.

        A slot given to a node's launch is that of the whole launch of the graph (Sanitizer 13.0 on an H200), one given
        to a function that of its nodes alone: the nodes of one GPU kernel share a slot.
        """
        thread = threading.get_ident()
        if event == Graphs.NODE_LAUNCH_BEGIN:
            node = NodeData.from_address(data)
            if node.type == KERNEL_NODE:
                self._node(node.launch, self._in_graph.setdefault(thread, {}))
        elif event == Graphs.LAUNCH_BEGIN:
            self._in_graph[thread] = {}
        elif event == Graphs.LAUNCH_END:
            self._in_graph.pop(thread, None)
            with self._lock:
                self._release()

    def _node(self, data: LaunchData, given: dict[int, tuple[Slab, int] | str]) -> None:
        held = given.get(data.function)
        if held is None:
            given[data.function] = self._begin(data, graph=True)
            return
        with self._lock:
            self.seen += 1
            if isinstance(held, str):  # a slot for this node would count the refused ones too
                self.skipped[held] += 1
                return
            slab, index = held
            launch = slab.pending[index]
            if launch is not None:
                slab.pending[index] = replace(launch, nodes=launch.nodes + 1)

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

    def _new_context(self, handle: int) -> Context:
        context = self._contexts[handle] = Context()
        try:
            self._device.add_patches(self._patch, handle)
        except PastaError as error:
            context.refused = True
            self._report(f"this GPU cannot be analysed: {error}")
        return context

    def _begin(self, data: LaunchData, *, graph: bool = False) -> tuple[Slab, int] | str:
        """Give a launch its slot and return it, or why it has none."""
        held = self._try(data, graph=graph)
        if isinstance(held, str):
            self._forget_function(data.function)
        return held

    def _forget_function(self, function: int) -> None:
        """Take the slot that an earlier graph's launch gave to a function: this launch would count there."""
        if any(isinstance(given.get(function), tuple) for given in list(self._in_graph.values())):
            return  # another thread's graph is about to count there
        with self._lock:
            given = self._of_function.pop(function, None)
        if given is not None:
            self._device.give_function_slot(function, 0)

    def _try(self, data: LaunchData, *, graph: bool) -> tuple[Slab, int] | str:
        context, name = self._contexts.get(data.context), _name(data)
        asks = self._chooser.asks_for_modules or self._blocks.asks_for_modules
        launcher = self._who() if asks and self.active else None
        with self._lock:
            self.seen += 1
            count = self.seen
            reason = self._refusal(context, count, name, launcher.module if launcher else "")
            if reason or context is None:
                self.skipped[reason] += 1
                return reason
        held = self._slab(context, data)
        if held is None:
            self._lose("device_memory", count)
            return "device_memory"
        slab, index = held
        launcher = launcher or self._who()
        with self._lock:
            number = context.streams.setdefault(data.stream_handle, len(context.streams))
            regions = context.regions.setdefault(data.stream_handle, {})
        try:
            self._fill(data, slab, slab.address + index * self._tool.slot_bytes, regions, graph=graph)
        except PastaError as error:
            reason = "header" if isinstance(error, InputError) else "slot"
            self._lose(reason, count)
            self._report(f"a launch cannot be analysed: {error}")
            return reason
        # only now: of a launch without its slot nothing would be counted, and that must not be read as zeros
        shape = (tuple(data.grid), tuple(data.block))
        with self._lock:
            slab.pending[index] = LaunchInfo(name, *shape, number, launcher, int(graph), count)
        return held

    def _fill(
        self, data: LaunchData, slab: Slab, slot: int, regions: dict[str, Region], *, graph: bool = False
    ) -> None:
        """Write the slot's header and give the slot to the launch."""
        memory = StreamRegions(self._device, data.context, data.stream_handle, regions, slab)
        header = self._header(memory)
        if header:
            memory.write(slot, header)
        if graph:
            self._device.give_function_slot(data.function, slot)
            with self._lock:
                self._of_function[data.function] = slot
        else:
            self._device.give_slot(data, slot)

    def _header(self, memory: StreamRegions) -> bytes:
        """Return what the tool wants at the beginning of a slot.

        Raises:
            InputError: The tool fails, or wants what does not fit.
            StateError: The Sanitizer refuses a table of the tool's.
        """
        try:
            header = self._tool.header(memory)
        except StateError:
            raise
        except (Exception, SystemExit) as error:  # a user's own code
            raise InputError(blame(self._tool.name, error, "header")) from error
        if not isinstance(header, bytes):
            raise InputError(f"{self._tool.name}: header() must return bytes, got {type(header).__name__}")
        if len(header) > self._tool.slot_bytes:
            size = f"{len(header):,} bytes, more than a slot's {self._tool.slot_bytes:,}"
            raise InputError(f"{self._tool.name}: header() returned {size}")
        return header

    def _refusal(self, context: Context | None, number: int, name: str, module: str) -> str:
        reason = self._blocks.refusal(number, name, module) if self.active else "inactive"
        if reason:
            return reason
        refused = context is None or context.refused
        reason = "context" if refused else self._chooser.refusal(name, module)
        if reason:
            self._blocks.lost(number, reason)
        return reason

    def _slab(self, context: Context, data: LaunchData) -> tuple[Slab, int] | None:
        """Return the stream's slab and a place in it, held open for this thread."""
        with self._lock:
            slab = context.filling.get(data.stream_handle)
            if slab is not None and len(slab.pending) < self.slab_slots:
                return self._hold(slab)
            if slab is not None:
                context.full.append(context.filling.pop(data.stream_handle))
        slab = self._unused(context, data.context)
        if slab is None:
            return None
        self._device.clear(slab.address, self.slab_bytes, data.stream_handle)
        with self._lock:
            slab.stream = data.stream_handle
            if data.stream_handle in context.filling:  # another thread was faster
                context.full.append(context.filling[data.stream_handle])
            context.filling[data.stream_handle] = slab
            return self._hold(slab)

    def _hold(self, slab: Slab) -> tuple[Slab, int]:
        thread = threading.get_ident()
        if thread not in self._in_graph:
            self._release()  # a launch that failed has no end
        slab.open += 1
        slab.pending.append(None)
        self._open.setdefault(thread, []).append(slab)
        return slab, len(slab.pending) - 1

    def _release(self) -> None:
        for slab in self._open.pop(threading.get_ident(), ()):
            slab.open -= 1

    def _unused(self, context: Context, handle: int) -> Slab | None:
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

    def _allocate(self, context: Context, handle: int) -> Slab | None:
        try:
            return Slab(self._device.allocate(handle, self.slab_bytes))
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

    def _read(self, slab: Slab) -> None:
        pending, slab.pending = slab.pending, []
        size = self._tool.slot_bytes
        if not any(pending):
            slab.sources.clear()
            return
        try:
            raw = self._device.read(slab.address, len(pending) * size, slab.stream)
        except PastaError as error:
            self._lose("unreadable", *(launch.number for launch in pending if launch is not None))
            self._report(f"results are lost: {error}")
            self._forget_functions(slab)
            return
        slab.sources.clear()
        self._forget_functions(slab)
        for at, launch in enumerate(pending):
            if launch is not None:
                self._decode(Record(launch, raw[at * size : (at + 1) * size]))

    def _forget_functions(self, slab: Slab) -> None:
        """Take a slab's slots from functions that have them: else launches that are not chosen would count there."""
        end = slab.address + self.slab_bytes
        with self._lock:
            gone = [function for function, slot in self._of_function.items() if slab.address <= slot < end]
            for function in gone:
                del self._of_function[function]
        for function in gone:
            self._device.give_function_slot(function, 0)

    def _decode(self, record: Record) -> None:
        try:
            result = self._tool.decode(record)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own tool: one launch is lost, not the rest
            self._lose("undecodable", record.launch.number)
            self._report(blame(self._tool.name, error, "decode"))
            return
        if result is None:
            self._lose("not_run", record.launch.number)
            return
        with self._lock:
            if not self._blocks.analysed(record.launch, result):
                self.launches.append((record.launch, result))

    def _lose(self, reason: str, *numbers: int) -> None:
        with self._lock:
            self.skipped[reason] += len(numbers)
            self._chooser.chosen -= len(numbers)
            for number in numbers:
                self._blocks.lost(number, reason)

    @property
    def chooser(self) -> Chooser:
        """Return what chooses launches of the process as a whole."""
        return self._chooser

    def finish(self) -> None:
        """Read all slots that are still on the devices; a launch still open then did not take place."""
        with self._lock:
            for slab in (slab for held in self._open.values() for slab in held):
                slab.open = 0
            self._open.clear()
        for handle in list(self._contexts):
            self._drain(handle, None, every_stream=True)

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            self._on_problem(problem)


def _name(data: LaunchData) -> str:
    return (data.name or b"?").decode(errors="replace")
