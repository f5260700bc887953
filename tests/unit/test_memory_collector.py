"""Slots and slabs, over a device whose streams run only when something waits for them."""

from __future__ import annotations

import ctypes
import random
import re
import threading
from collections import defaultdict, deque
from glob import escape

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.errors import InputError, StateError
from pasta_otel.gpu.classes import spellings
from pasta_otel.gpu.memory.callers import Caller
from pasta_otel.gpu.memory.collector import LEAST_SLABS, MOST_SLOTS, Collector
from pasta_otel.gpu.memory.counters import MemoryTool
from pasta_otel.gpu.memory.graphs import MOST_KERNELS
from pasta_otel.gpu.memory.library import source
from pasta_otel.gpu.memory.native import NO_MEMORY, NOT_BEGUN, Call, CallData, Node, Note, NoteKind
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.slots import COUNTER_BYTES, HEADER, SLOT_BYTES, WAYS, WORDS, fold
from pasta_otel.gpu.memory.tool import Tool

CONTEXT = 0x100
SLAB_BYTES = MOST_SLOTS * 4096


class Sum(Tool):
    """Its slot holds the sum of what was counted, in any word; the header is what the test wants."""

    name, source, patches = "sum", source(), {}
    slot_bytes = 4096

    def __init__(self):
        self.content = b""
        self.version = 0

    def decode(self, record):
        words = np.frombuffer(record.slot, dtype=np.uint64)[HEADER:]
        if record.launch.name == "broken":
            raise ValueError("cannot read this")
        return int(words.sum()) or None

    def header(self, memory):
        if not self.content:
            return b""
        return memory.put("table", self.version, lambda: self.content).to_bytes(8, "little")


class FakeDevice:
    """Host memory by address; work stands in its stream's queue until the stream is read."""

    def __init__(self):
        self.memory, self.next = {}, 1 << 20
        self.queues = defaultdict(list)
        self.given, self.of_function = threading.local(), {}
        self.happened = deque()
        self.slabs, self.turns = {}, {}
        self.order = threading.RLock()  # a stream takes one piece of work after the other, whoever brings it
        self.limit = None
        self.raised = []
        self.begun, self.last = 0, {}

    def inside(self, work):
        self.given.depth = self.depth() + 1
        try:
            work()
        finally:
            self.given.depth -= 1

    def depth(self):
        return getattr(self.given, "depth", 0)

    def noted(self):
        return bool(self.happened)

    def notes(self):
        return [self.happened.popleft() for _ in range(len(self.happened))]

    def give_slot(self, slot):
        self.given.slot = slot

    def reserve(self, slots):
        self.given.reserved = list(slots)

    def nodes(self):
        return self.given.nodes

    def allocate(self, context, size):
        del context
        with self.order:
            address, self.next = self.next, self.next + size
            self.memory[address] = np.full(size // 8, 7, dtype=np.uint64)
            return address

    def slab(self, number, turn):
        return self.slabs.get(number, 0) if self.turns.get(number) == turn else 0

    def idle(self, stream, entered):
        return self.last.get(stream, 0) <= entered

    def prepare(self, slot, stream):
        """Return a slot's address, ready, as the native part does where the driver tells of the launch; 0 = no memory."""
        with self.order:
            if slot.slab not in self.slabs:
                if self.limit is not None and len(self.memory) >= self.limit:
                    return 0
                self.slabs[slot.slab] = self.allocate(CONTEXT, slot.slab_bytes)
            self.begins(stream)
            base = self.slabs[slot.slab]
            if self.turns.get(slot.slab) != slot.turn:
                self.turns[slot.slab] = slot.turn
                self.queues[stream].append(lambda: self.memory[base].fill(0))
            self.write(base + slot.offset, slot.header, stream)
            return base + slot.offset

    def begins(self, stream):
        with self.order:
            self.begun += 1
            self.last[stream] = self.begun

    def write(self, address, content, stream):
        base = max(start for start in list(self.memory) if start <= address)

        def work():
            at = (address - base) // 8
            self.memory[base][at : at + len(content) // 8] = np.frombuffer(content, dtype=np.uint64)

        with self.order:
            self.queues[stream].append(work)

    def run(self, stream):
        with self.order:
            for work in self.queues.pop(stream, []):
                work()

    def raise_later(self, error):
        self.raised.append(error)

    def read(self, address, size, stream):
        with self.order:
            self.run(stream)
            return self.memory[address][: size // 8].tobytes()

    def count(self, slot, value, stream):
        def work():
            base = max(address for address in list(self.memory) if address <= slot)
            self.memory[base][(slot - base) // 8 + HEADER + 32 * (value % 8)] += value

        with self.order:
            self.queues[stream].append(work)


class Program:
    """Makes the calls that the native receiver would."""

    def __init__(self, selection=None, **options):
        self.device, self.problems, self.tool = FakeDevice(), [], Sum()
        self.collector = Collector(
            self.device, selection or Selection(), self.tool, on_problem=self.problems.append, **options
        )
        self.refuses_slots = False

    def note(self, kind, value=0, call=None, *, entered=None):
        entered = self.device.begun if entered is None else entered
        self.device.happened.append(Note(kind, CONTEXT, value, entered, call))

    def call(self, call, data):
        self.device.inside(lambda: self.collector.on_call(call, ctypes.addressof(data)))

    def launch(self, value, stream=1, name="k", *, ends=True, runs=True, between=lambda: None):
        """Launch a GPU kernel that adds a value to its slot's first word."""
        data = CallData(context=CONTEXT, stream=stream, name=name.encode(), function=1)
        data.grid[:], data.block[:] = (value, 1, 1), (32, 1, 1)
        self.device.given.slot = None
        self.call(Call.LAUNCH_ENTER, data)
        slot = self.device.given.slot
        if slot is None:
            return
        data.code = 1 if self.refuses_slots else 0 if runs else NOT_BEGUN
        if not data.code:
            address = self.device.prepare(slot, stream)
            if address:
                self.device.count(address, value, stream)
            else:
                data.code = NO_MEMORY
        between()
        if ends:
            self.call(Call.LAUNCH_LEAVE, data)

    def synchronize(self, stream=None, *, settle=True):
        kind = NoteKind.CONTEXT_SYNCHRONIZED if stream is None else NoteKind.STREAM_SYNCHRONIZED
        self.note(kind, stream or 0)
        if settle:
            self.collector.settle()

    @property
    def exact(self):
        """Tell whether every result is its own launch's: the launch put its value into the grid."""
        return all(value == launch.grid[0] for launch, value in self.collector.launches)

    @property
    def values(self):
        return [value for _, value in self.collector.launches]

    def graph(self, values, stream=1, *, runs=True, between=lambda: None, names=("node",), executable=7):
        """Launch a graph: its nodes are told of before any of them is in the stream, and count into their function's slot."""
        self.device.given.reserved = []
        data = CallData(context=CONTEXT, stream=stream, function=executable)
        self.call(Call.GRAPH_ENTER, data)
        reserved, nodes = self.device.given.reserved, []
        for function, name in enumerate(names[: len(values)], 1):
            its = values[function - 1 :: len(names)]
            place = len(nodes) if len(nodes) < len(reserved) else -1
            slot = self.device.prepare(reserved[place], stream) if place >= 0 else 0
            self.device.of_function[function] = slot
            code = NO_MEMORY if place >= 0 and not slot else 0
            nodes.append(Node(function, name, (sum(its), 1, 1), (32, 1, 1), len(its), code, slot, place))
            between()
            if slot and runs:
                self.device.count(slot, sum(its), stream)
        self.device.given.nodes = nodes
        self.call(Call.GRAPH_LEAVE, data)


def test_ways_are_summed_and_what_is_raised_is_the_greatest():
    raw = np.arange(2 * COUNTER_BYTES // 8, dtype=np.uint64)
    ways = raw.reshape(2, -1)[:, HEADER:].reshape(2, WAYS, WORDS)
    folded = fold(raw.tobytes())
    assert folded[:, :92].tolist() == ways.sum(axis=1)[:, :92].tolist()
    assert folded[:, 92:].tolist() == ways.max(axis=1)[:, 92:].tolist()


def test_results_are_read_when_their_stream_is_synchronised_and_not_before():
    program = Program()
    program.launch(5, stream=1)
    program.launch(6, stream=2)
    assert program.collector.launches == []
    program.synchronize(stream=2)
    assert program.values == [6]
    program.synchronize()
    assert program.exact
    assert len(program.collector.launches) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.tuples(st.integers(1, 9), st.integers(1, 3)), st.sampled_from([None, 1, 2])), max_size=400),
    st.integers(4, 6),
)
def test_every_launch_gets_its_own_result_in_any_order_of_events(events, slabs):
    program = Program(Selection(device_bytes=slabs * SLAB_BYTES))
    launched = 0
    for event in events:
        if isinstance(event, tuple):
            program.launch(event[0], stream=event[1])
            launched += 1
        else:
            program.synchronize(event)
    program.collector.finish()
    assert len(program.device.memory) <= slabs
    assert len(program.collector.launches) == launched == program.collector.seen
    assert program.exact
    assert not program.problems


def test_a_full_pool_waits_for_the_oldest_slots_and_says_how_often():
    program = Program(Selection(device_bytes=4 * SLAB_BYTES))
    for value in range(1, 10 * MOST_SLOTS + 1):
        program.launch(value)
    program.collector.finish()
    assert program.collector.waits == 6
    assert len(program.collector.launches) == 10 * MOST_SLOTS
    assert program.exact


def test_more_streams_than_slabs_leave_launches_out_and_count_them():
    program = Program(Selection(device_bytes=4 * SLAB_BYTES))
    for stream in range(6):
        program.launch(1, stream=stream + 1)
    program.collector.finish()
    assert len(program.collector.launches) == 4
    assert program.collector.skipped == {"device_memory": 2}


def test_an_open_launch_keeps_its_slot_while_another_thread_synchronises():
    program = Program()
    program.launch(3)
    program.launch(4, ends=False)
    other = threading.Thread(target=program.synchronize)
    other.start()
    other.join()
    assert program.collector.launches == []
    program.launch(5)
    program.collector.finish()
    assert sorted(program.values) == [3, 4, 5]


def test_a_launch_that_never_ends_does_not_block_the_rest():
    program = Program()
    program.launch(3, ends=False)
    program.launch(4)
    program.synchronize()
    assert program.exact
    assert len(program.collector.launches) == 2


def test_a_refused_slot_loses_one_launch_and_is_reported_once():
    program = Program()
    program.launch(1)
    program.refuses_slots = True
    program.launch(2)
    program.launch(3)
    program.refuses_slots = False
    program.launch(4)
    program.collector.finish()
    assert program.values == [1, 4]
    assert program.collector.skipped == {"slot": 2}
    (problem,) = program.problems
    assert problem == "a launch cannot be analysed: the Sanitizer says: invalid parameter"


def test_a_launch_that_fails_is_not_read_as_zeros():
    program = Program()
    program.tool.decode = lambda record: 0
    program.launch(1, runs=False)
    program.launch(2)
    program.collector.finish()
    assert [launch.number for launch, _ in program.collector.launches] == [2]
    assert program.collector.skipped == {"not_run": 1}


def test_slots_of_a_synchronised_stream_are_read_at_the_next_launch():
    program = Program()
    program.launch(5)
    program.synchronize(stream=1, settle=False)
    assert program.values == []
    program.launch(6, stream=2)
    assert program.values == [5]


def test_a_device_without_memory_for_more_uses_what_it_has():
    program = Program()
    program.device.limit = 1
    for value in range(1, 3 * MOST_SLOTS):
        program.launch(value)
    program.collector.finish()
    assert program.exact
    analysed, skipped = len(program.collector.launches), program.collector.skipped["device_memory"]
    assert analysed + skipped == 3 * MOST_SLOTS - 1
    assert len(program.problems) == 1


def test_threads_launch_and_synchronise_at_once():
    program = Program(Selection(device_bytes=8 * SLAB_BYTES))

    def work(stream):
        shuffled = random.Random(stream)
        for value in range(1, 301):
            program.launch(value, stream=stream)
            if shuffled.random() < 0.05:
                program.synchronize(stream)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    program.collector.finish()
    assert len(program.collector.launches) == 1200
    assert program.exact
    assert not program.problems


def test_the_destruction_of_a_context_reads_its_slots_first():
    program = Program()
    program.launch(9)
    program.call(Call.CONTEXT_GOES, CallData())
    assert program.values == [9]
    before = len(program.device.memory)
    program.note(NoteKind.CONTEXT_GONE)
    program.launch(9)
    assert len(program.device.memory) == before + 1  # the old slab's memory is gone with the context


def test_what_could_not_be_patched_is_said_and_counted():
    program = Program()
    program.note(NoteKind.MODULE_LEFT)
    program.note(NoteKind.MODULE_REFUSED, 12, "sanitizerPatchModule")
    program.launch(1)
    program.note(NoteKind.CONTEXT_REFUSED, 1, "sanitizerAddPatchesFromFile")
    program.launch(2)
    program.graph([3, 4])
    program.collector.finish()
    assert program.collector.unpatched == 1
    assert program.collector.skipped == {"module": 1, "context": 3}
    assert program.problems == [
        "a module cannot be analysed: sanitizerPatchModule: not compatible",
        "this GPU cannot be analysed: sanitizerAddPatchesFromFile: invalid parameter",
    ]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"count": 0}, {"device_bytes": 4096}])
def test_a_selection_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError):
        Selection(**wrong)


def test_a_slot_is_what_the_documentation_says():
    assert (COUNTER_BYTES, SLOT_BYTES) == (98368, 213056)
    assert MemoryTool().slot_bytes == SLOT_BYTES
    assert MemoryTool(hotness=False).slot_bytes == COUNTER_BYTES


def test_the_slot_of_a_graph_is_not_read_before_the_graph_is_in_its_stream():
    program = Program()
    program.graph(range(1, 200), between=program.synchronize)
    assert program.values == []
    program.synchronize()
    assert program.values == [sum(range(1, 200))]


def test_the_nodes_of_one_gpu_kernel_in_a_graph_share_a_record():
    program = Program()
    program.graph([1, 2, 3, 4, 5], names=("neg", "add"))
    program.launch(7)
    program.graph([5])
    program.collector.finish()
    assert [(launch.name, launch.nodes, value) for launch, value in program.collector.launches] == [
        ("neg", 3, 9),
        ("add", 2, 6),
        ("k", 0, 7),
        ("node", 1, 5),
    ]
    assert program.exact
    assert program.collector.seen == 7


def test_a_slab_whose_launches_are_not_chosen_is_read_before_another_stream_has_it():
    program = Program(Selection(names=("add",), device_bytes=4 * SLAB_BYTES))
    program.graph([100], names=("neg",))
    program.synchronize(stream=1)
    program.launch(7, stream=2, name="add")
    program.device.run(2)
    program.device.run(1)
    program.collector.finish()
    assert program.values == [7]


def test_a_graph_that_failed_does_not_count_as_one_without_gpu_kernels():
    program = Program()
    program.graph([1, 2], names=("neg", "add"))
    program.graph([])
    program.graph([3, 4], names=("neg", "add"))
    program.collector.finish()
    assert program.values == [1, 2, 3, 4]
    assert not program.collector.skipped


def in_a_thread(work):
    other = threading.Thread(target=work)
    other.start()
    other.join()


def test_who_asks_after_synchronising_has_the_results_though_another_thread_reads_them():
    program, got = Program(), []
    reading, go = threading.Event(), threading.Event()
    read = program.device.read

    def slow(*place):
        reading.set()
        go.wait()
        return read(*place)

    program.launch(5)
    program.device.read = slow
    one = threading.Thread(target=program.synchronize)
    one.start()
    reading.wait()
    other = threading.Thread(target=lambda: (program.collector.settle(), got.extend(program.values)))
    other.start()
    other.join(0.2)  # one that does not wait has nothing by then
    go.set()
    one.join()
    other.join()
    assert got == [5]


def test_a_launch_does_not_read_a_stream_that_was_given_more_work_since_it_was_synchronised():
    program = Program()
    program.launch(5, stream=1)
    before = program.device.begun
    program.launch(6, stream=1)  # while the program waits for the first one
    program.note(NoteKind.STREAM_SYNCHRONIZED, 1, entered=before)
    program.launch(7, stream=2)
    assert program.values == []  # the second may wait for this very launch
    program.collector.settle()  # who asks waits for it
    assert program.values == [5, 6]


def test_nobody_has_a_lock_while_a_tool_decodes():
    program, users = Program(), threading.Lock()
    decoding, launching = threading.Event(), threading.Event()
    decode = program.tool.decode

    def locked(record):
        decoding.set()
        launching.wait()
        with users:
            return decode(record)

    def launches():
        decoding.wait()
        with users:
            launching.set()
            program.launch(6, stream=2)

    program.tool.decode = locked
    program.launch(5)
    threads = [threading.Thread(target=work, daemon=True) for work in (program.synchronize, launches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    program.collector.finish()
    assert program.values == [5, 6]


def test_what_goes_with_its_context_is_counted():
    program = Program()
    program.launch(9)
    program.call(Call.CONTEXT_GOES, CallData())
    program.launch(8)
    program.note(NoteKind.CONTEXT_GONE)
    program.launch(7)
    program.collector.finish()
    assert program.values == [9, 7]
    assert program.collector.skipped == {"unreadable": 1}


def test_of_two_threads_that_launch_into_one_stream_the_later_table_is_written_last():
    program = Program()
    versions = {"older": 6, "newer": 7}
    content = threading.Event()

    def header(memory):
        version = versions.get(threading.current_thread().name, versions["newer"])

        def table():
            if version == versions["older"]:
                content.set()
                other.join(0.2)  # one that does not wait for us has written by then
            return version.to_bytes(8, "little")

        return memory.put("table", version, table).to_bytes(8, "little")

    program.tool.header = header
    program.tool.decode = lambda record: int.from_bytes(record.slot[:8], "little")
    older = threading.Thread(target=program.launch, args=(1,), name="older")
    other = threading.Thread(target=program.launch, args=(2,), name="newer")
    older.start()
    content.wait()
    other.start()
    older.join()
    other.join()
    program.launch(3)
    program.collector.finish()
    (address,) = set(program.values)
    assert int(program.device.memory[address][0]) == versions["newer"]


def test_what_another_thread_has_not_read_at_the_end_is_counted_as_late(monkeypatch):
    monkeypatch.setattr("pasta_otel.gpu.memory.collector.FINISH_S", 0.05)
    program = Program(Selection(device_bytes=4 * SLAB_BYTES))
    for _ in range(4 * MOST_SLOTS):
        program.launch(1)
    reading, go, read = threading.Event(), threading.Event(), program.device.read

    def slow(*place):
        if threading.current_thread().name == "slow":
            reading.set()
            go.wait()
        return read(*place)

    program.device.read = slow
    thread = threading.Thread(target=program.launch, args=(2,), kwargs={"stream": 2}, name="slow")
    thread.start()
    reading.wait()
    program.collector.finish()
    assert program.collector.skipped == {"late": MOST_SLOTS}
    assert len(program.values) == 3 * MOST_SLOTS
    go.set()
    thread.join()


def test_ctrl_c_while_a_graph_is_left_keeps_no_slot_and_loses_no_gpu_kernel():
    program = Program(Selection(device_bytes=4 * SLAB_BYTES))
    who = program.collector._who
    program.collector._who = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    for executable in range(4):
        program.graph([1, 2], executable=executable)
    program.collector._who = who
    for value in range(1, 11):
        program.launch(value)
    program.synchronize()
    assert program.values == [3] * 4 + list(range(1, 11))
    assert len(program.device.raised) == 4


@pytest.mark.parametrize("where", ["taken", "delivered"])
def test_a_signal_while_a_result_is_taken_or_delivered_keeps_nobody_waiting(where):
    program = Program()
    for value in (5, 6, 7):
        program.launch(value, stream=value)
    reader, deliver, signals = program.collector._reader, program.collector._deliver, [KeyboardInterrupt()]

    def interrupted(*arguments):
        if signals:
            raise signals.pop()
        return deliver(*arguments)

    if where == "delivered":
        program.collector._deliver = interrupted
    else:
        program.collector._tool.decode = lambda record, decode=program.tool.decode: (
            interrupted() if signals else decode(record)
        )
    program.note(NoteKind.CONTEXT_SYNCHRONIZED)
    with pytest.raises(KeyboardInterrupt):
        program.collector.settle()
    assert not reader.mine
    in_a_thread(program.collector.settle)
    assert sorted(program.values) == [5, 6, 7]
    assert not program.collector.skipped


def test_what_a_thread_left_when_a_signal_came_is_taken_up_at_its_next_call():
    program = Program()
    program.launch(5, stream=1)
    program.launch(6, stream=2)
    reader, end = program.collector._reader, program.collector._reader._end

    def interrupted(*_):
        reader._end = end
        raise KeyboardInterrupt

    reader._end = interrupted
    program.note(NoteKind.CONTEXT_SYNCHRONIZED)
    with pytest.raises(KeyboardInterrupt):
        program.collector.settle()
    assert reader.mine
    program.launch(7, stream=3)
    assert not reader.mine
    program.collector.finish()
    assert sorted(program.values) == [5, 6, 7]


def test_a_slab_that_could_not_be_read_is_never_used_again():
    program, read = Program(Selection(device_bytes=4 * SLAB_BYTES)), None

    def fails(*_):
        raise StateError("sanitizerMemcpyDeviceToHost: invalid parameter")

    read, program.device.read = program.device.read, fails
    program.launch(5, stream=1)
    program.synchronize()
    program.device.read = read
    program.launch(7, stream=2)
    program.device.run(2)
    program.device.run(1)  # counts into its slab now
    program.collector.finish()
    assert program.values == [7]
    assert program.collector.skipped == {"unreadable": 1}


def test_a_context_that_turns_out_to_be_refused_while_a_launch_is_open_keeps_that_launch():
    program = Program()
    program.launch(
        5,
        between=lambda: in_a_thread(
            lambda: (program.note(NoteKind.CONTEXT_REFUSED, 1, "sanitizerAddPatchesFromFile"), program.launch(6))
        ),
    )
    program.collector.finish()
    assert program.values == [5]
    assert program.collector.skipped == {"context": 1}


def test_a_stream_is_destroyed_without_waiting_for_a_thread_that_has_yet_to_read_it():
    program = Program()
    reading, go, read, places = threading.Event(), threading.Event(), program.device.read, []

    def slow(*place):
        places.append(place[2])
        if place[2] == 1:
            reading.set()
            go.wait()
        return read(*place)

    program.device.read = slow
    program.launch(5, stream=1)
    program.launch(6, stream=2)
    program.note(NoteKind.CONTEXT_SYNCHRONIZED)
    asker = threading.Thread(target=program.collector.settle)
    asker.start()
    reading.wait()
    program.call(Call.STREAM_GOES, CallData(context=CONTEXT, stream=2))
    assert places == [1, 2]
    go.set()
    asker.join()
    assert places == [1, 2]
    assert sorted(program.values) == [5, 6]


def test_a_signal_while_results_are_read_loses_none_and_reaches_the_program():
    program = Program()
    read, signals, places = program.device.read, [KeyboardInterrupt(), SystemExit(3)], []

    def interrupted(*place):
        places.append(place)
        if signals and len(places) % 3 == 0:
            raise signals.pop()
        return read(*place)

    for value in range(1, 6):
        program.launch(value, stream=value)
    program.device.read = interrupted
    program.note(NoteKind.CONTEXT_SYNCHRONIZED)
    program.launch(6)
    program.note(NoteKind.CONTEXT_SYNCHRONIZED)
    program.launch(7)
    assert [type(error) for error in program.device.raised] == [SystemExit, KeyboardInterrupt]
    program.launch(8)
    program.collector.finish()
    assert sorted(program.values) == [1, 2, 3, 4, 5, 8]
    assert program.exact


def test_a_slab_that_another_thread_could_allocate_in_the_end_is_kept():
    program = Program()

    def luckier():
        program.device.limit = None
        program.launch(2)

    program.device.limit = 0
    program.launch(1, between=lambda: in_a_thread(luckier))
    for stream in range(1, 2 * LEAST_SLABS):
        program.launch(3, stream=stream)
    program.collector.finish()
    assert sorted(program.values) == [2, *[3] * (2 * LEAST_SLABS - 1)]
    assert program.exact
    assert program.collector.skipped == {"device_memory": 1}


def test_a_slab_that_was_read_before_its_loss_was_known_is_not_used_again():
    program = Program(Selection(device_bytes=4 * SLAB_BYTES))
    refused = program.collector._refused

    def late(*of):
        in_a_thread(program.synchronize)
        refused(*of)

    program.collector._refused = late
    program.launch(1, stream=1)
    program.device.limit = 1
    program.launch(2, stream=2)
    for value in range(3, 3 + 2 * MOST_SLOTS):
        program.launch(value, stream=2)
    program.collector.finish()
    assert program.exact
    assert program.collector.skipped == {"device_memory": 1}


def test_gpus_have_limits_of_their_own():
    program = Program(Selection(device_bytes=4 * SLAB_BYTES))
    program.launch(1)
    first = program.collector._contexts[CONTEXT]
    program.collector._contexts[CONTEXT + 1] = first
    program.collector._contexts.pop(CONTEXT)
    program.device.limit = 1
    program.launch(2)
    program.device.limit = None
    assert (first.most, program.collector._contexts[CONTEXT].most) == (None, 0)


def test_the_nodes_of_other_gpu_kernels_than_the_chosen_are_left_alone():
    program = Program(Selection(names=("add",)))
    program.graph([1, 2, 3, 4], names=("neg", "add"))
    program.collector.finish()
    assert [(launch.name, launch.nodes, value) for launch, value in program.collector.launches] == [("add", 2, 6)]
    assert program.collector.skipped == {"name": 2}


def test_a_graph_that_fails_launched_nothing():
    program = Program()
    program.graph([1, 2, 3], runs=False)
    program.graph([4])
    program.collector.finish()
    assert program.values == [4]
    assert program.collector.skipped == {"not_run": 3}


def test_a_graph_has_a_slot_for_each_gpu_kernel_from_its_second_launch_on_however_many_they_are():
    program = Program()
    names = tuple(f"k{number}" for number in range(MOST_KERNELS + 6))
    for _ in range(2):
        program.graph([1] * len(names), names=names)
    program.collector.finish()
    assert program.collector.skipped == {"graph_size": 6}
    assert len(program.values) == 2 * len(names) - 6
    assert program.exact


def test_a_graph_takes_no_more_slots_than_its_last_launch_had_gpu_kernels():
    program = Program(Selection(device_bytes=4 * SLAB_BYTES))
    for _ in range(1 + 3 * MOST_SLOTS // 2):
        program.graph([1, 2], names=("neg", "add"))
    assert len(program.device.memory) == 4
    assert program.collector.waits == 0
    program.collector.finish()
    assert len(program.values) == 2 + 3 * MOST_SLOTS
    assert program.exact


def test_a_graph_that_finds_no_slots_is_left_out_whole():
    program = Program(Selection(device_bytes=4 * SLAB_BYTES))
    for stream in range(1, 5):
        program.launch(1, stream=stream)
    program.graph([1, 2, 3], stream=9, names=("neg", "add"))
    program.collector.finish()
    assert program.collector.skipped == {"device_memory": 3}
    assert program.collector.seen == 7


def test_a_graph_launched_by_another_thread_leaves_an_open_launch_alone():
    program = Program()
    program.launch(3, ends=False)
    other = threading.Thread(target=program.graph, args=([4, 5],))
    other.start()
    other.join()
    program.synchronize()
    assert program.values == []
    program.collector.finish()
    assert sorted(program.values) == [3, 9]


def test_a_table_is_copied_again_only_when_it_changed_and_grows_elsewhere():
    program = Program()
    program.tool.content = bytes(64)
    before = len(program.device.memory)
    for _ in range(3):
        program.launch(1)
    assert len(program.device.memory) == before + 2  # a slab, and the table
    program.tool.content, program.tool.version = bytes(1024), 1
    program.launch(1)
    assert len(program.device.memory) == before + 3
    program.launch(1, stream=2)
    assert len(program.device.memory) == before + 5
    program.collector.finish()
    assert len(program.values) == 5


def test_a_launch_sees_the_table_of_its_time():
    program, seen = Program(), []
    program.tool.decode = lambda record: seen.append(int.from_bytes(record.slot[:8], "little")) or 1
    for version in range(5):
        program.tool.content, program.tool.version = (version + 7).to_bytes(8, "little"), version
        program.launch(1)
        program.synchronize()
        (table,) = set(seen)
        assert program.device.memory[table][0] == version + 7


def test_a_tool_that_cannot_read_one_launch_loses_that_one():
    program = Program()
    program.launch(1)
    program.launch(2, name="broken")
    program.launch(3)
    program.collector.finish()
    assert program.values == [1, 3]
    assert program.collector.skipped == {"undecodable": 1}
    (problem,) = program.problems
    assert problem.startswith(f"sum: ValueError: cannot read this in decode() ({__file__}:")


def test_launches_outside_a_region_are_left_out():
    program = Program()
    program.collector.active = False
    program.launch(1)
    program.collector.active = True
    program.launch(2)
    program.collector.finish()
    assert program.values == [2]
    assert program.collector.skipped == {"inactive": 1}


@pytest.mark.parametrize("mib", [1, 2, 64])
def test_several_slabs_always_fit(mib):
    collector = Collector(FakeDevice(), Selection(device_bytes=mib << 20), MemoryTool())
    assert 4 * collector.slab_bytes <= mib << 20


def test_launches_are_chosen_by_the_torch_module_that_launches():
    modules = iter(["", "net.first", "net.second", "net.first"])
    program = Program(Selection(modules=("*.first",)), who=lambda: Caller(1, module=next(modules)))
    for value in (1, 2, 3, 4):
        program.launch(value)
    program.collector.finish()
    assert program.values == [2, 4]
    assert program.collector.skipped == {"module": 2}


def test_a_selection_survives_its_way_to_the_program():
    selection = Selection(("k*",), 3, 7, 2 << 20, ("net.*", "other"))
    assert Selection.from_json(selection.to_json()) == selection


@pytest.mark.parametrize(
    ("patterns", "texts"),
    [
        (("*softmax*", "_Z3addPf"), ("softmax", "_Z3addPf")),
        (("at::native::vectorized_elementwise_kernel<4, *>*",), ("vectorized_elementwise_kernel",)),
        (("*[Ss]oftmax_[!f]orward*",), ("oftmax_",)),
        (("*reduce*", "*<float>"), ()),
        (("*loat*",), ()),
        (("*",), ()),
        (("*namespace*",), ()),
        ((), ()),
    ],
)
def test_modules_are_told_apart_by_text_that_every_mangled_name_of_a_chosen_gpu_kernel_has(patterns, texts):
    assert Selection(patterns).texts == texts


@pytest.mark.parametrize(
    "name",
    [
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
        "_ZN43_GLOBAL__N__b6de9c8c_10_SoftMax_cu_9f978f6320softmax_warp_forwardIfffLi10ELb0ELb0EEEvPT0_PKT_iiiPKbib",
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute",
        "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_14func_wrapper_tIfNS0_11sum_functorIfffEEEEjfLi4EEEEEvT1_",
    ],
)
def test_every_part_of_every_spelling_of_a_name_leaves_its_module_in(name):
    for form in spellings(name):
        for begin in range(0, len(form), 3):
            for end in range(begin + 1, len(form) + 1, 7):
                pattern = f"*{escape(form[begin:end])}*"
                selection = Selection((pattern,))
                assert selection.matches(name)
                assert all(text in name for text in selection.texts), (pattern, selection.texts)


def bad_header(kind):
    def header(_memory):
        if kind == "raises":
            raise ZeroDivisionError("division by zero")
        if kind == "exits":
            raise SystemExit(9)
        return {"text": "abc", "nothing": None, "number": 5, "long": bytes(Sum.slot_bytes + 8)}[kind]

    return header


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raises", rf"sum: ZeroDivisionError: division by zero in header\(\) \({__file__}:\d+\)"),
        ("exits", r"sum: SystemExit: 9 in header\(\)"),
        ("text", r"sum: header\(\) must return bytes, got str"),
        ("nothing", r"sum: header\(\) must return bytes, got NoneType"),
        ("number", r"sum: header\(\) must return bytes, got int"),
        ("long", r"sum: header\(\) returned 4,104 bytes, more than a slot's 4,096"),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_a_launch_whose_header_is_none_is_lost_with_the_reason_and_not_decoded_as_zeros(kind, message, graph):
    program = Program()
    program.tool.decode = lambda record: 0  # zeros would pass for a result
    program.launch(1)
    program.tool.header = bad_header(kind)
    program.graph([2]) if graph else program.launch(2)
    del program.tool.header
    program.launch(3)
    program.collector.finish()
    assert [launch.number for launch, _ in program.collector.launches] == [1, 3]
    assert program.collector.skipped == {"header": 1}
    (problem,) = program.problems
    assert re.fullmatch(f"a launch cannot be analysed: {message}.*", problem)


def test_a_header_never_touches_the_slot_beside_it():
    program = Program()
    program.launch(1)
    program.tool.header = lambda memory: b"\xff" * Sum.slot_bytes * 2
    program.launch(2)
    del program.tool.header
    program.launch(3)
    program.collector.finish()
    assert program.values == [1, 3]


@pytest.mark.parametrize("content", ["text", None, 7])
def test_a_table_that_is_no_bytes_is_the_tools_fault(content):
    program = Program()
    program.tool.header = lambda memory: memory.put("table", 1, lambda: content).to_bytes(8, "little")
    program.launch(1)
    program.collector.finish()
    assert program.collector.skipped == {"header": 1}
    assert f"sum: TypeError: memory.put() wants bytes, got {type(content).__name__} in header()" in program.problems[0]


def test_a_tool_that_exits_while_it_decodes_loses_that_launch():
    program = Program()
    program.tool.decode = bad_header("exits")
    program.launch(1)
    program.collector.finish()
    assert program.collector.skipped == {"undecodable": 1}


@pytest.mark.parametrize("slot_bytes", [(1 << 20) + 8, 16 << 20, 1 << 40, 1 << 70])
def test_a_slot_larger_than_the_device_memory_allowed_is_refused(slot_bytes):
    tool = Sum()
    tool.slot_bytes = slot_bytes
    with pytest.raises(InputError, match=rf"tool sum: slot_bytes is {slot_bytes:,}, more than the 1,048,576 bytes"):
        Collector(FakeDevice(), Selection(device_bytes=1 << 20), tool)


@given(st.integers(1, 1 << 17), st.integers(1 << 20, 1 << 24))
def test_slabs_never_take_more_than_the_device_memory_allowed(words, allowed):
    tool = Sum()
    tool.slot_bytes = 8 * words
    collector = Collector(FakeDevice(), Selection(device_bytes=allowed), tool)
    assert collector.slab_slots >= 1
    assert 1 <= collector._most_slabs <= allowed // collector.slab_bytes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.none()), max_size=30),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_nodes_that_are_not_chosen_count_nowhere_whatever_an_earlier_graph_had(graphs, every, count):
    program = Program(Selection(every=every, count=count))
    nodes = 0
    for values in graphs:
        if values is None:
            program.synchronize()
        else:
            program.graph(values, names=("neg", "add"))
            nodes += len(values)
    program.collector.finish()
    assert program.exact
    analysed = sum(launch.nodes for launch, _ in program.collector.launches)
    assert analysed + program.collector.skipped.total() == program.collector.seen == nodes


def test_a_graph_whose_header_fails_counts_nowhere():
    program = Program()
    program.graph([1, 2])
    program.tool.header = bad_header("raises")
    program.graph([3, 4, 5])
    program.collector.finish()
    assert program.values == [3]
    assert program.exact
    assert program.collector.skipped == {"header": 3}
