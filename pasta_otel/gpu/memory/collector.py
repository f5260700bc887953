"""Give every selected launch a slot of device memory, and read slots in the order of their stream.

A slab is a row of slots that one stream fills. They are cleared and read by operations of that same stream, so that a
result is never read before its launch is done, and no launch waits. Slabs are read when the program launches after it
has synchronised, if their stream was given no launch since; when somebody asks for results; when the device memory
allowed is used up (the only time that a launch waits: ``waits`` counts it); when a stream is destroyed; and at the end.

All this happens at the beginning and the end of calls into the driver, where it holds no lock (``native``).
No call into the driver is made under our lock all the same: a thread that has it might be waited for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

from pasta_otel.errors import InputError, PastaError, StateError
from pasta_otel.gpu.memory.callers import NOBODY, Caller, caller
from pasta_otel.gpu.memory.graphs import Graphs, Reserved
from pasta_otel.gpu.memory.handlers import from_a_handler
from pasta_otel.gpu.memory.locks import OwnedLock
from pasta_otel.gpu.memory.native import NO_MEMORY, NOT_BEGUN, SHARED, Call, CallData, Node, Note, NoteKind, Slot
from pasta_otel.gpu.memory.reading import EVERY_STREAM, Batch, Reader
from pasta_otel.gpu.memory.sanitizer import meaning
from pasta_otel.gpu.memory.selection import Chooser, Selection
from pasta_otel.gpu.memory.slabs import Context, Device, Regions, Slab, StreamRegions
from pasta_otel.gpu.memory.tool import LaunchInfo, Record, Tool, blame

MOST_SLOTS = 64
_REASONS = {NOT_BEGUN: "not_run", NO_MEMORY: "device_memory", SHARED: "shared"}
"""Why a launch has no result, by the code at its end."""
ASKED_S, DESTROYED_S, FINISH_S = 60.0, 30.0, 2.0
"""The longest that somebody waits for another thread which reads: who asks, a stream's end, ours."""
LEAST_SLABS = 4
"""Slabs that fit into the device memory allowed, so that several streams can be filled at once."""


class Blocks(Protocol):
    """Parts of the program that want launches for themselves; every call comes under the collector's lock."""

    @property
    def asks_for_modules(self) -> bool:
        """Return whether the torch module of a launch decides."""

    def refusal(self, number: int, name: str, module: str = "", nodes: int = 0, /) -> str:
        """Return why nobody wants this launch (nodes of a graph); empty = it is analysed."""

    def analysed(self, launch: LaunchInfo, result: Any, /) -> bool:
        """Take a launch that was wanted; True = it need not be kept for the process as a whole."""

    def lost(self, number: int, reason: str, nodes: int = 0, /) -> None:
        """Note that a launch that was wanted will not come."""


class _NoBlocks:
    """The whole program is analysed."""

    asks_for_modules = False

    def refusal(self, _number: int, _name: str, _module: str = "", _nodes: int = 0, /) -> str:
        return ""

    def analysed(self, _launch: LaunchInfo, _result: Any, /) -> bool:
        return False

    def lost(self, _number: int, _reason: str, _nodes: int = 0, /) -> None:
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
        self._reader = Reader(device, self._lock, tool.slot_bytes, self._decode, self._unreadable)
        self._synchronized: dict[tuple[int, int | None], int] = {}
        """Streams that were synchronised and not read since; when that was (``Note.entered``)."""
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
        if self._lock.mine:  # a collection of garbage between two lines of ours
            if call == Call.STREAM_GOES:
                self._bury(CallData.from_address(data).stream)
            return
        try:
            self._dispatch(call, data)
        except BaseException as error:  # noqa: BLE001 - raised into a C caller it would be printed and lost
            if not isinstance(error, Exception) or from_a_handler(error):  # Ctrl-C, or a limit of time
                self._device.raise_later(error)
            else:
                self._report(f"{type(error).__name__}: {error}")

    @property
    def working(self) -> bool:
        """Return whether the calling thread is in the middle of our work (a handler of a signal asks)."""
        return self._device.depth() > 0

    def _dispatch(self, call: int, data: int) -> None:
        outermost = self._device.depth() == 1
        if outermost and self._reader.mine:
            self._reader.recover()
        if call == Call.LAUNCH_LEAVE:
            self._leave(CallData.from_address(data))
        elif call == Call.GRAPH_LEAVE:
            self._leave_graph(CallData.from_address(data))
        else:
            if outermost and self._device.noted():
                self._reader.read(partial(self._choose_settled, asked=False))
            if call == Call.LAUNCH_ENTER:
                self._enter(CallData.from_address(data))
            elif call == Call.GRAPH_ENTER:
                self._enter_graph(CallData.from_address(data))
            else:
                self._goes({CallData.from_address(data).stream} if call == Call.STREAM_GOES else EVERY_STREAM)

    def settle(self, timeout_s: float = ASKED_S) -> None:
        """Read slots of streams that were synchronised, and hear what was patched.

        It waits for streams that were given more work since, and for other threads that read (so long at most).
        """
        if not self.working:  # else a tool asks, or a handler of a signal
            self._device.inside(partial(self._settle, timeout_s))

    def _settle(self, timeout_s: float) -> None:
        self._reader.recover()
        self._reader.read(partial(self._choose_settled, asked=True))
        self._reader.wait(timeout_s)

    def _choose_settled(self, batch: Batch, *, asked: bool) -> None:
        """Choose the slabs of synchronised streams; unless somebody asks, those that we need not wait for."""
        for note in self._device.notes():
            self._hear(note)
        for (handle, stream), entered in list(self._synchronized.items()):
            if asked or self._device.idle(stream, entered):
                del self._synchronized[handle, stream]
                self._choose(batch, {handle}, {stream})

    def _choose(self, batch: Batch, handles: Collection[int], streams: Any) -> None:
        for handle in handles:
            if context := self._contexts.get(handle):
                for slab in context.readable(streams):
                    self._reader.take(context, slab, batch)

    def _hear(self, note: Note) -> None:
        if note.kind == NoteKind.STREAM_SYNCHRONIZED:
            self._synchronized[note.context, note.value or None] = note.entered
        elif note.kind == NoteKind.CONTEXT_SYNCHRONIZED:
            context = self._contexts.get(note.context, Context())
            for slab in context.unread:
                self._synchronized[note.context, slab.stream] = note.entered
        elif note.kind == NoteKind.STREAM_GONE:
            self._bury(note.value)
        elif note.kind == NoteKind.CONTEXT_GONE:
            self._gone(note.context)
        else:
            self._patched(note)

    def _goes(self, streams: Any) -> None:
        """Read what streams hold that are about to be destroyed, also where another thread is at it."""

        def choose(batch: Batch) -> None:
            batch += self._reader.take_back(streams)
            self._choose(batch, list(self._contexts), streams)

        self._reader.read(choose)
        self._reader.wait_until_read(streams, DESTROYED_S)

    def _gone(self, handle: int) -> None:
        context = self._contexts.pop(handle, Context())  # its memory goes with it
        for slab in context.unread:
            self._forget(slab)

    def _bury(self, stream: int | None) -> None:
        """Give up slabs whose stream is gone unread: they can neither be read nor used again; under the lock."""
        for context, slab in self._reader.take_back({stream}):
            context.reading.remove(slab)
            self._forget(slab)
        for context in list(self._contexts.values()):
            for slab in [slab for slab in context.unread if slab.stream == stream]:
                context.drop(slab)
                self._forget(slab)

    def _forget(self, slab: Slab) -> None:
        self._reader.kept.append(slab.sources)
        self._lose_results(slab)

    def _lose_results(self, slab: Slab) -> None:
        for launch in slab.pending:
            if launch is not None:
                self._lose("unreadable", launch.number, nodes=launch.nodes)

    def _patched(self, note: Note) -> None:
        if note.kind == NoteKind.CONTEXT_REFUSED:
            self._contexts.setdefault(note.context, Context()).refused = True
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
        number = 0
        try:
            with self._lock:
                self.seen += 1
                number = self.seen
                reason = self._refusal(context, number, name, launcher.module if launcher else "")
                if reason:
                    self.skipped[reason] += 1
                    return
            if self._claim(context, data, self._hold) is None:
                self._lose("device_memory", number)
                return
            slab, index = held = self._held[threading.get_ident()]
            launcher = launcher or self._who()
            self._device.give_slot(self._slot(context, data, held))
            # only now: of a launch without its slot nothing would be counted, and that must not be read as zeros
            shape = (tuple(data.grid), tuple(data.block))
            slab.pending[index] = LaunchInfo(name, *shape, self._number(context, data), launcher, 0, number)
        except (PastaError, RuntimeError) as error:
            if from_a_handler(error):
                self._lose("slot", number)
                raise
            self._let_go(keep=False)
            self._lose("header" if isinstance(error, InputError) else "slot", number)
            self._report(f"a launch cannot be analysed: {error}")
        except BaseException:
            if number:
                self._lose("slot", number)  # the slot stays open until this launch's end, or the thread's next one
            raise

    def _hold(self, held: tuple[Slab, int]) -> None:
        self._held[threading.get_ident()] = held

    def _number(self, context: Context, data: CallData) -> int:
        with self._lock:
            return context.number(data.stream)

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
            if slab.lost or self._device.slab(slab.number, slab.turn):
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
            while len(slots) < reserved.wanted:
                held = self._claim(context, data, reserved.slots.append)
                if held is None:
                    break
                slots.append(self._slot(context, data, held))
            self._device.reserve(slots)
            if len(reserved.slots) < reserved.wanted:
                reserved.reason = "device_memory"
        except PastaError as error:
            if from_a_handler(error):
                raise
            reserved.reason = "header" if isinstance(error, InputError) else "slot"
            self._report(f"a launch cannot be analysed: {error}")

    def _leave_graph(self, data: CallData) -> None:
        """Note what a graph launched: the nodes of one GPU kernel share a record."""
        reserved = self._graphs.here
        if reserved is None:
            return
        raised: BaseException | None = None
        try:
            nodes, launcher = self._device.nodes(), NOBODY
            self._graphs.end(nodes)
            try:
                launcher = self._who() if nodes and self.active else NOBODY
            except BaseException as error:  # noqa: BLE001 - a handler of a signal: the nodes are told of all the same
                raised = error
            for node in nodes:
                try:
                    self._leave_node(data, node, reserved, launcher)
                except BaseException as error:  # noqa: BLE001 - as above
                    raised = raised or error
        finally:
            with self._lock:
                while reserved.slots:
                    reserved.slots.pop()[0].open -= 1
        if raised is not None:
            raise raised

    def _leave_node(self, data: CallData, node: Node, reserved: Reserved, launcher: Caller) -> None:
        context = self._context(data)
        reason, number = self._choose_node(node, context, launcher.module)
        if not reason:
            stream = self._number(context, data)
            self._place(data, node, reserved, LaunchInfo(*node[1:4], stream, launcher, node.nodes, number))

    def _choose_node(self, node: Node, context: Context, module: str) -> tuple[str, int]:
        with self._lock:
            number = self.seen + 1
            self.seen += node.nodes
            reason = self._refusal(context, number, node.name, module, node.nodes)
            if reason:
                self.skipped[reason] += node.nodes
        return reason, number

    def _place(self, data: CallData, node: Node, reserved: Reserved, launch: LaunchInfo) -> None:
        """Have the slot of a GPU kernel read as its own."""
        if node.place < 0 or node.code:
            reason = _REASONS.get(node.code, "slot") if node.code else reserved.reason or "graph_size"
            self._lose(reason, launch.number, nodes=node.nodes)
            if node.code and node.place >= 0:
                self._refused(data, reserved.slots[node.place][0], node.code)
            return
        slab, index = reserved.slots[node.place]
        slab.pending[index] = launch

    def _slot(self, context: Context, data: CallData, held: tuple[Slab, int]) -> Slot:
        """Return a slot with the header that the tool wants."""
        with self._lock:
            regions = context.regions.setdefault(data.stream, Regions())
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
            if from_a_handler(error):
                raise
            raise InputError(blame(self._tool.name, error, "header")) from error
        if not isinstance(header, bytes):
            raise InputError(f"{self._tool.name}: header() must return bytes, got {type(header).__name__}")
        if len(header) > self._tool.slot_bytes:
            size = f"{len(header):,} bytes, more than a slot's {self._tool.slot_bytes:,}"
            raise InputError(f"{self._tool.name}: header() returned {size}")
        return header

    def _refusal(self, context: Context, number: int, name: str, module: str, nodes: int = 0) -> str:
        reason = self._blocks.refusal(number, name, module, nodes) if self.active else "inactive"
        if reason in ("sample", "count"):
            self._chooser.of_name[name] += 1  # a block's patterns fit, as ours do
        if reason:
            return reason
        reason = "context" if context.refused else self._chooser.refusal(name, module)
        if reason:
            self._blocks.lost(number, reason, nodes)
        return reason

    def _claim(
        self, context: Context, data: CallData, hold: Callable[[tuple[Slab, int]], None]
    ) -> tuple[Slab, int] | None:
        """Return the stream's slab and a place in it, held open; None = there is no device memory left.

        Args:
            context: The launch's.
            data: The launch.
            hold: Is told of the place before anything else can happen: it must be closed again.
        """
        stream = data.stream
        while True:
            with self._lock:
                slab = context.filling.get(stream)
                if slab is not None and len(slab.pending) < self.slab_slots:
                    held = slab.claim()
                    hold(held)
                    return held
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

    def _unused(self, context: Context) -> Slab | None:
        while True:
            with self._lock:
                if context.free:
                    return context.free.pop()
                if context.slabs < (self._most_slabs if context.most is None else context.most):
                    context.slabs += 1
                    self._slab_count += 1
                    return Slab(self._slab_count - 1)
            if not self._reader.read(partial(self._choose_oldest, context)) and not context.free:
                return None  # each is being filled, or has a launch that is not yet in its stream

    def _choose_oldest(self, context: Context, batch: Batch) -> None:
        oldest = next((slab for slab in context.full if not slab.open), None)
        if oldest is not None and not context.free:
            self.waits += 1
            self._reader.take(context, oldest, batch)

    def _unreadable(self, slab: Slab, error: PastaError) -> None:
        self._lose_results(slab)
        self._report(f"results are lost: {error}")

    def _decode(self, record: Record) -> Callable[[], None]:
        launch = record.launch
        try:
            result = self._tool.decode(record) if record.slot else None
        except (Exception, SystemExit) as error:  # a user's own tool: one launch is lost, not the rest
            if from_a_handler(error):
                raise
            self._report(blame(self._tool.name, error, "decode"))
            return partial(self._lose, "undecodable", launch.number, nodes=launch.nodes)
        if result is None:
            return partial(self._lose, "not_run", launch.number, nodes=launch.nodes)
        return partial(self._deliver, launch, result)

    def _deliver(self, launch: LaunchInfo, result: Any) -> None:
        if not self._blocks.analysed(launch, result):
            self.launches.append((launch, result))

    def _lose(self, reason: str, number: int, *, nodes: int = 0) -> None:
        with self._lock:
            self.skipped[reason] += max(1, nodes)
            self._chooser.chosen -= 1
            self._blocks.lost(number, reason, nodes)

    @property
    def chooser(self) -> Chooser:
        """Return what chooses launches of the process as a whole."""
        return self._chooser

    def finish(self) -> None:
        """Read all slots that are still on the devices; a launch still open then did not take place.

        What other threads have still not read after ``FINISH_S`` is counted as ``late``.
        """
        self._device.inside(self._finish)

    def _finish(self) -> None:
        self._reader.recover()
        self._reader.read(partial(self._choose_settled, asked=True))
        with self._lock:
            for context in list(self._contexts.values()):
                for slab in context.unread:
                    if slab.open:  # its thread may still be copying them to the device
                        self._reader.kept.append(slab.sources)
                        slab.sources, slab.open = [], 0
            self._held.clear()
        self._reader.read(lambda batch: self._choose(batch, list(self._contexts), EVERY_STREAM))
        self._reader.wait(FINISH_S)
        late = sum(max(1, launch.nodes) for launch in self._reader.late())
        if late:
            self.skipped["late"] = late

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            self._on_problem(problem)
