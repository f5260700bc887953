"""Give every selected launch a slot of device memory, and read slots in the order of their stream.

A slab is a row of slots that one stream fills. They are cleared and read by operations of that same stream, so that a
result is never read before its launch is done, and no launch waits. Slabs are read when the program launches or asks
for results after it has synchronised, when the device memory allowed is used up (the only time that we wait: ``waits``
counts it), and at the end.

All this happens at the beginning and the end of calls into the driver, where it holds no lock (``native``).
No call into the driver is made under the lock of our own data all the same: a thread that has it might be waited for.
Whoever reads slots has another lock meanwhile, which every launch waits for: who asks after synchronising then has the
results, whichever thread reads them, and a stream gets no new work that its reader would have to wait for.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

from pasta_otel.errors import InputError, PastaError, StateError
from pasta_otel.gpu.memory.callers import NOBODY, Caller, caller
from pasta_otel.gpu.memory.graphs import Graphs, Reserved
from pasta_otel.gpu.memory.locks import OwnedLock
from pasta_otel.gpu.memory.native import NO_MEMORY, NOT_BEGUN, SHARED, Call, CallData, Node, Note, NoteKind, Slot
from pasta_otel.gpu.memory.sanitizer import meaning
from pasta_otel.gpu.memory.selection import Chooser, Selection
from pasta_otel.gpu.memory.slabs import Context, Device, Slab, StreamRegions
from pasta_otel.gpu.memory.tool import LaunchInfo, Record, Tool, blame

MOST_SLOTS = 64
_REASONS = {NOT_BEGUN: "not_run", NO_MEMORY: "device_memory", SHARED: "shared"}
"""Why a launch has no result, by the code at its end."""
LEAST_READ = 8
"""Bytes."""
LEAST_SLABS = 4
"""Slabs that fit into the device memory allowed, so that several streams can be filled at once."""


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
    """Decides which launches are analysed, and brings in what was counted.

    Args:
        device: The Sanitizer API.
        selection: What to analyse.
        tool: What to count.
        on_problem: Is told once for each thing that keeps a context, module or launch from being analysed.
        who: Says who is launching, in its thread.
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
        selection: Selection,
        tool: Tool[Any],
        *,
        on_problem: Callable[[str], None] = lambda _: None,
        who: Callable[[], Caller] = caller,
        blocks: Blocks | None = None,
    ) -> None:
        self._device, self._on_problem = device, on_problem
        self._blocks, self._chooser = blocks or _NoBlocks(), Chooser(selection)
        self._who, self._tool = who, tool
        if tool.slot_bytes > selection.device_bytes:
            allowed = f"the {selection.device_bytes:,} bytes of device memory allowed for results"
            raise InputError(f"slot_bytes is {tool.slot_bytes:,}, more than {allowed}", field=f"tool {tool.name}")
        self.slab_slots = min(MOST_SLOTS, max(1, selection.device_bytes // (LEAST_SLABS * tool.slot_bytes)))
        self.slab_bytes = self.slab_slots * tool.slot_bytes
        self._most_slabs = selection.device_bytes // self.slab_bytes
        self._contexts: dict[int, Context] = {}
        self._lock = OwnedLock()
        self._settling = OwnedLock()
        """Taken before the other one, never after it."""
        self._notes: deque[Note] = deque()
        self._kept: list[list[bytes]] = []
        self._held: dict[int, tuple[Slab, int]] = {}
        self._graphs = Graphs()
        self._slab_count = 0
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

    def on_call(self, call: int, data: int) -> None:
        """Take part in a call of the program's into the driver; nothing that goes wrong here reaches the program.

        Args:
            call: A ``Call``.
            data: Address of its ``CallData``.
        """
        if self._lock.mine:
            return  # a collection of garbage inside our own work destroyed a stream, say: its slots are read later
        try:
            self._dispatch(call, data)
        except Exception as error:  # noqa: BLE001 - raised into a C caller it would be printed and lost
            self._report(f"{type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001 - Ctrl-C, or sys.exit() by a handler of a signal
            self._device.raise_later(error)

    def _dispatch(self, call: int, data: int) -> None:
        if call == Call.LAUNCH_LEAVE:
            self._leave(CallData.from_address(data))
        elif call == Call.GRAPH_LEAVE:
            self._leave_graph(CallData.from_address(data))
        else:
            self.settle()
            if call == Call.LAUNCH_ENTER:
                self._enter(CallData.from_address(data))
            elif call == Call.GRAPH_ENTER:
                self._enter_graph(CallData.from_address(data))
            else:  # every stream: which one goes stands in the parameters, and contexts have many
                for handle in list(self._contexts):
                    self._drain(handle, None, every_stream=True)

    def settle(self) -> None:
        """Read slots of streams that were synchronised since the last call, and hear what was patched.

        It waits for streams that were given more work since, and for another thread that does this.
        """
        if self._lock.mine or self._settling.mine:
            return  # inside our own work: a handler of a signal, or a collection of garbage
        with self._settling:
            self._notes.extend(self._device.notes())
            while self._notes:
                self._hear(self._notes.popleft())

    def _hear(self, note: Note) -> None:
        if note.kind == NoteKind.STREAM_SYNCHRONIZED:
            self._drain(note.context, note.value or None, every_stream=False)
        elif note.kind == NoteKind.CONTEXT_SYNCHRONIZED:
            self._drain(note.context, None, every_stream=True)
        elif note.kind == NoteKind.CONTEXT_GONE:
            self._contexts.pop(note.context, None)  # its memory goes with it
        else:
            self._patched(note)

    def _patched(self, note: Note) -> None:
        if note.kind == NoteKind.CONTEXT_REFUSED:
            self._contexts[note.context] = Context(refused=True)
            self._report(f"this GPU cannot be analysed: {note.call}: {meaning(note.value)}")
        elif note.kind == NoteKind.MODULE_REFUSED:
            self.skipped["module"] += 1
            self._report(f"a module cannot be analysed: {note.call}: {meaning(note.value)}")
        elif note.kind == NoteKind.MODULE_LEFT:
            self.unpatched += 1

    def _context(self, data: CallData) -> Context:
        return self._contexts.setdefault(data.context or 0, Context())

    def _enter(self, data: CallData) -> None:
        """Give a launch its slot, or count why it has none."""
        self._let_go()  # of a launch whose end we were not told
        context, name = self._context(data), data.kernel
        asks = self._chooser.asks_for_modules or self._blocks.asks_for_modules
        launcher = self._who() if asks and self.active else None
        with self._lock:
            self.seen += 1
            number = self.seen
            reason = self._refusal(context, number, name, launcher.module if launcher else "")
            if reason:
                self.skipped[reason] += 1
                return
        held = self._claim(context, data)
        if held is None:
            self._lose("device_memory", number)
            return
        with self._lock:
            self._held[threading.get_ident()] = held  # open, whatever comes: until this launch's end, or the next one
        try:
            launcher = launcher or self._who()
            self._device.give_slot(self._slot(context, data, held))
            # only now: of a launch without its slot nothing would be counted, and that must not be read as zeros
            slab, index = held
            shape = (tuple(data.grid), tuple(data.block))
            slab.pending[index] = LaunchInfo(data.kernel, *shape, context.number(data.stream), launcher, 0, number)
        except (PastaError, RuntimeError) as error:
            self._let_go(keep=False)
            self._lose("header" if isinstance(error, InputError) else "slot", number)
            self._report(f"a launch cannot be analysed: {error}")
        except BaseException:
            self._lose("slot", number)
            raise

    def _leave(self, data: CallData) -> None:
        """Note that a launch is in its stream, or that it will not be analysed after all."""
        held = self._let_go(keep=not data.code)
        if held is None or not data.code:
            return
        slab, launch = held
        if launch is not None:
            self._lose(_REASONS.get(data.code, "slot"), launch.number)
        self._refused(data, slab, data.code)

    def _refused(self, data: CallData, slab: Slab, code: int) -> None:
        """Say why a slot could not be given."""
        if code == NO_MEMORY:
            self._without(self._context(data), slab)
            self._report("no device memory for more results: sanitizerAlloc: out of memory")
        elif code > 0:
            self._report(f"a launch cannot be analysed: the Sanitizer says: {meaning(code)}")

    def _without(self, context: Context, slab: Slab) -> None:
        """Do with the slabs that there are; this one could not be allocated."""
        with self._lock:
            if slab.lost or self._device.slab(slab.number):
                return  # another thread's launch was luckier
            slab.lost = True
            context.most = context.slabs = context.slabs - 1
            if slab in context.free:
                context.free.remove(slab)
            if context.filling.get(slab.stream) is slab:
                context.full.append(context.filling.pop(slab.stream))

    def _let_go(self, *, keep: bool = True) -> tuple[Slab, LaunchInfo | None] | None:
        """Close this thread's slot, and return its slab and launch; from then on it may be read."""
        with self._lock:
            held = self._held.pop(threading.get_ident(), None)
            if held is None:
                return None
            slab, index = held
            launch = slab.pending[index]
            if not keep:
                slab.pending[index] = None
            slab.open -= 1
        return slab, launch

    def _enter_graph(self, data: CallData) -> None:
        """Reserve slots for the GPU kernels of a graph: which they are is told when the driver has its lock."""
        reserved = self._graphs.begin(data.function or 0)
        context = self._context(data)
        if context.refused or not self.active:
            reserved.reason = "inactive"
            return
        try:
            slots = list[Slot]()
            while len(slots) < reserved.wanted and (held := self._claim(context, data)) is not None:
                reserved.slots.append(held)
                slots.append(self._slot(context, data, held))
            self._device.reserve(slots)
            if len(reserved.slots) < reserved.wanted:
                reserved.reason = "device_memory"
        except PastaError as error:
            reserved.reason = "header" if isinstance(error, InputError) else "slot"
            self._report(f"a launch cannot be analysed: {error}")

    def _leave_graph(self, data: CallData) -> None:
        """Note what a graph launched: the nodes of one GPU kernel share a record."""
        nodes = self._device.nodes()
        reserved = self._graphs.end(nodes)
        context = self._context(data)
        try:
            launcher = self._who() if nodes and self.active else NOBODY
            for node in nodes:
                reason, number = self._choose(node, context, launcher.module)
                if not reason:
                    stream = context.number(data.stream)
                    launch = LaunchInfo(*node[1:4], stream, launcher, node.nodes, number)
                    self._place(data, node, reserved, launch)
        finally:
            with self._lock:
                for slab, _ in reserved.slots:
                    slab.open -= 1

    def _choose(self, node: Node, context: Context, module: str) -> tuple[str, int]:
        with self._lock:
            number = self.seen + 1
            self.seen += node.nodes
            reason = self._refusal(context, number, node.name, module)
            if reason:
                self.skipped[reason] += node.nodes
        return reason, number

    def _place(self, data: CallData, node: Node, reserved: Reserved, launch: LaunchInfo) -> None:
        """Have the slot of a GPU kernel read as its own."""
        if node.place < 0 or node.code:
            reason = _REASONS.get(node.code, "slot") if node.code else reserved.reason or "graph_size"
            self._lose(reason, launch.number)
            with self._lock:
                self.skipped[reason] += node.nodes - 1
            if node.code and node.place >= 0:
                self._refused(data, reserved.slots[node.place][0], node.code)
            return
        slab, index = reserved.slots[node.place]
        slab.pending[index] = launch

    def _slot(self, context: Context, data: CallData, held: tuple[Slab, int]) -> Slot:
        """Return a slot with the header that the tool wants."""
        with self._lock:
            regions = context.regions.setdefault(data.stream, {})
        memory = StreamRegions(self._device, data.context, data.stream, regions, held[0])
        header = self._header(memory)
        slab, index = held
        slab.sources.append(header)
        return Slot(slab.number, slab.turn, self.slab_bytes, index * self._tool.slot_bytes, header)

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

    def _refusal(self, context: Context, number: int, name: str, module: str) -> str:
        reason = self._blocks.refusal(number, name, module) if self.active else "inactive"
        if reason:
            return reason
        reason = "context" if context.refused else self._chooser.refusal(name, module)
        if reason:
            self._blocks.lost(number, reason)
        return reason

    def _claim(self, context: Context, data: CallData) -> tuple[Slab, int] | None:
        """Return the stream's slab and a place in it, held open; None = there is no device memory left."""
        stream = data.stream
        with self._lock:
            slab = context.filling.get(stream)
            if slab is not None and len(slab.pending) < self.slab_slots:
                return slab.claim()
            if slab is not None:
                context.full.append(context.filling.pop(stream))
        slab = self._unused(context)
        if slab is None:
            return None
        with self._lock:
            slab.stream, slab.turn = stream, slab.turn + 1
            if stream in context.filling:  # another thread was faster
                context.full.append(context.filling[stream])
            context.filling[stream] = slab
            return slab.claim()

    def _unused(self, context: Context) -> Slab | None:
        while True:
            with self._lock:
                if context.free:
                    return context.free.pop()
                fresh = context.slabs < (self._most_slabs if context.most is None else context.most)
                context.slabs += fresh
                number = self._slab_count = self._slab_count + fresh
                oldest = next((slab for slab in context.full if not slab.open), None)
                if not fresh and oldest is not None:
                    context.full.remove(oldest)
                    self.waits += 1
            if fresh:
                return Slab(number - 1)
            if oldest is None:
                return None  # every slab is being filled by a stream of its own
            self._bring_in(context, [oldest])

    def _drain(self, handle: int, stream: int | None, *, every_stream: bool) -> None:
        context = self._contexts.get(handle)
        if context is None:
            return
        with self._lock:
            slabs = context.take(stream, every_stream=every_stream)
        self._bring_in(context, slabs)

    def _bring_in(self, context: Context, slabs: list[Slab]) -> None:
        """Read slabs that were taken from their context, which gets them back to be used again."""
        try:
            while slabs:
                self._read(slabs[0])
                self._free(context, slabs.pop(0))
        finally:  # a handler of a signal may have raised: the rest is read some other time
            with self._lock:
                context.full.extend(slabs)

    def _free(self, context: Context, slab: Slab) -> None:
        with self._lock:
            if slab.lost and not self._device.slab(slab.number):
                self._kept.append(slab.sources)
                return  # there is nothing to be used again
            context.slabs += slab.lost
            slab.lost = False
            context.free.append(slab)

    def _read(self, slab: Slab) -> None:
        """Bring in a slab's results once its stream has passed; only then may another stream have it.

        Also where no launch in it is chosen: a graph's GPU kernels count before that is decided.
        """
        size = self._tool.slot_bytes
        chosen = [at for at, launch in enumerate(slab.pending) if launch is not None]
        address, length = self._device.slab(slab.number), size * (chosen[-1] + 1) if chosen else LEAST_READ
        try:
            raw = self._device.read(address, length, slab.stream) if address else b""
        except PastaError as error:
            self._lose("unreadable", *(launch.number for launch in slab.pending if launch is not None))
            self._report(f"results are lost: {error}")
            slab.pending = []
            return
        if raw:  # else no launch began, but tables may be on their way
            slab.sources.clear()
        for at in chosen:
            launch, slab.pending[at] = slab.pending[at], None
            if launch is not None:
                self._decode(Record(launch, raw[at * size : (at + 1) * size]))
        slab.pending = []

    def _decode(self, record: Record) -> None:
        try:
            result = self._tool.decode(record) if record.slot else None
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
        self.settle()
        with self._lock:
            for context in self._contexts.values():
                for slab in (*context.full, *context.filling.values()):
                    if slab.open:  # its thread may still be copying them to the device
                        self._kept.append(slab.sources)
                        slab.sources, slab.open = [], 0
            self._held.clear()
        for handle in list(self._contexts):
            self._drain(handle, None, every_stream=True)

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            self._on_problem(problem)
