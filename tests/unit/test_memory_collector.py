"""Slots and slabs, over a device whose streams run only when something waits for them."""

from __future__ import annotations

import ctypes
import random
import re
import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.errors import InputError, StateError
from pasta_otel.gpu.memory.callers import Caller
from pasta_otel.gpu.memory.collector import MOST_SLOTS, Collector
from pasta_otel.gpu.memory.counters import MemoryTool
from pasta_otel.gpu.memory.library import source
from pasta_otel.gpu.memory.sanitizer import (
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
        self.order = threading.RLock()  # a stream takes one piece of work after the other, whoever brings it
        self.refuses_slots = False
        self.limit = None

    def add_patches(self, file, context):
        del file, context

    def patch(self, module):
        del module

    def give_slot(self, launch, slot):
        del launch
        if self.refuses_slots:
            raise StateError("sanitizerSetLaunchCallbackData: invalid parameter")
        self.given.slot = slot

    def give_function_slot(self, function, slot):
        self.of_function[function] = slot

    def allocate(self, context, size):
        del context
        with self.order:
            if self.limit is not None and len(self.memory) >= self.limit:
                raise StateError("sanitizerAlloc: out of memory")
            address, self.next = self.next, self.next + size
            self.memory[address] = np.full(size // 8, 7, dtype=np.uint64)
            return address

    def clear(self, address, size, stream):
        del size
        with self.order:
            self.queues[stream].append(lambda: self.memory[address].fill(0))

    def write(self, address, content, stream):
        base = max(start for start in list(self.memory) if start <= address)

        def work():
            at = (address - base) // 8
            self.memory[base][at : at + len(content) // 8] = np.frombuffer(content, dtype=np.uint64)

        with self.order:
            self.queues[stream].append(work)

    def read(self, address, size, stream):
        with self.order:
            for work in self.queues.pop(stream, []):
                work()
            return self.memory[address][: size // 8].tobytes()

    def count(self, slot, value, stream):
        def work():
            base = max(address for address in list(self.memory) if address <= slot)
            self.memory[base][(slot - base) // 8 + HEADER + 32 * (value % 8)] += value

        with self.order:
            self.queues[stream].append(work)


class Program:
    """Makes the callbacks that CUDA would."""

    def __init__(self, selection=None, **options):
        self.device, self.problems, self.tool = FakeDevice(), [], Sum()
        self.collector = Collector(
            self.device, "patch", selection or Selection(), self.tool, on_problem=self.problems.append, **options
        )
        self.tell(Domain.RESOURCE, Resource.MODULE_LOADED, ModuleData(CONTEXT, 1))

    def tell(self, domain, event, data):
        self.collector.on_event(domain, event, ctypes.addressof(data))

    def launch(self, value, stream=1, name="k", *, ends=True):
        """Launch a GPU kernel that adds a value to its slot's first word."""
        data = LaunchData(context=CONTEXT, stream_handle=stream, name=name.encode(), launch=1)
        data.grid[:], data.block[:] = (value, 1, 1), (32, 1, 1)
        self.device.given.slot = None
        self.tell(Domain.LAUNCH, LaunchCallback.BEGIN, data)
        if self.device.given.slot is not None:
            self.device.count(self.device.given.slot, value, stream)
        if ends:
            self.tell(Domain.LAUNCH, LaunchCallback.END, data)

    def synchronize(self, stream=None):
        event = Synchronize.CONTEXT if stream is None else Synchronize.STREAM
        self.tell(Domain.SYNCHRONIZE, event, StreamData(CONTEXT, 0, stream))

    @property
    def exact(self):
        """Tell whether every result is its own launch's: the launch put its value into the grid."""
        return all(value == launch.grid[0] for launch, value in self.collector.launches)

    @property
    def values(self):
        return [value for _, value in self.collector.launches]

    def graph(self, values, stream=1, *, upload=False, between=lambda: None, names=("node",)):
        """Launch a graph: its nodes are told of before any of them is in the stream, and count into their function's slot."""
        sums = {}
        self.tell(Domain.GRAPHS, Graphs.LAUNCH_BEGIN, StreamData(CONTEXT, 0, stream))
        for at, value in enumerate(values):
            node, function = NodeData(type=0), 1 + at % len(names)
            node.launch.context, node.launch.stream_handle, node.launch.function = CONTEXT, stream, function
            node.launch.name = names[function - 1].encode()
            node.launch.grid[:], node.launch.block[:] = (sum(values[function - 1 :: len(names)]), 1, 1), (32, 1, 1)
            self.tell(Domain.GRAPHS, Graphs.NODE_LAUNCH_BEGIN, node)
            sums[function] = sums.get(function, 0) + value
            between()
        for function, value in sums.items():
            if self.device.of_function.get(function) and not upload:
                self.device.count(self.device.of_function[function], value, stream)
        self.tell(Domain.GRAPHS, Graphs.LAUNCH_END, StreamData(CONTEXT, 0, stream))


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
    program.device.refuses_slots = True
    program.launch(2)
    program.launch(3)
    program.device.refuses_slots = False
    program.launch(4)
    program.collector.finish()
    assert program.values == [1, 4]
    assert program.collector.skipped == {"slot": 2}
    assert len(program.problems) == 1


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
    program.tell(Domain.RESOURCE, Resource.CONTEXT_DESTROY_STARTING, ModuleData(CONTEXT, 0))
    assert program.values == [9]
    program.launch(9)
    assert program.collector.skipped == {"context": 1}


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


def test_functions_lose_their_slots_when_these_are_read():
    program = Program()
    program.graph([1, 2], names=("neg", "add"))
    program.graph([3], names=("neg",), stream=2)
    later = program.device.of_function[1]
    program.synchronize(stream=1)
    assert program.device.of_function == {1: later, 2: 0}
    program.synchronize(stream=2)
    assert program.device.of_function == {1: 0, 2: 0}
    assert sorted(program.values) == [1, 2, 3]


def test_the_nodes_of_other_gpu_kernels_than_the_chosen_are_left_alone():
    program = Program(Selection(names=("add",)))
    program.graph([1, 2, 3, 4], names=("neg", "add"))
    program.collector.finish()
    assert [(launch.name, launch.nodes, value) for launch, value in program.collector.launches] == [("add", 2, 6)]
    assert program.collector.skipped == {"name": 2}


def test_a_graph_that_is_only_uploaded_launched_nothing():
    program = Program()
    program.graph([1, 2, 3], upload=True)
    program.graph([4])
    program.collector.finish()
    assert program.values == [4]
    assert program.collector.skipped == {"not_run": 1}


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


def test_device_memory_is_told_of():
    told = []

    class Allocations:
        def segment_allocated(self, address, size):
            told.append((address, size))

        def segment_freed(self, address):
            told.append((address, 0))

    program = Program(allocations=Allocations())
    program.tell(Domain.RESOURCE, Resource.DEVICE_MEMORY_ALLOC, MemoryData(0x1000, 512, CONTEXT))
    program.tell(Domain.RESOURCE, Resource.DEVICE_MEMORY_FREE, MemoryData(0x1000, 512, CONTEXT))
    assert told == [(0x1000, 512), (0x1000, 0)]


@pytest.mark.parametrize("mib", [1, 2, 64])
def test_several_slabs_always_fit(mib):
    collector = Collector(FakeDevice(), "patch", Selection(device_bytes=mib << 20), MemoryTool())
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
        Collector(FakeDevice(), "patch", Selection(device_bytes=1 << 20), tool)


@given(st.integers(1, 1 << 17), st.integers(1 << 20, 1 << 24))
def test_slabs_never_take_more_than_the_device_memory_allowed(words, allowed):
    tool = Sum()
    tool.slot_bytes = 8 * words
    collector = Collector(FakeDevice(), "patch", Selection(device_bytes=allowed), tool)
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


def test_a_plain_launch_that_is_not_chosen_takes_the_slot_of_a_graph_from_its_function():
    program = Program(Selection(every=2))
    program.graph([1])
    launch = LaunchData(context=CONTEXT, stream_handle=1, name=b"node", function=1)
    program.tell(Domain.LAUNCH, LaunchCallback.BEGIN, launch)
    assert program.device.of_function == {1: 0}
    program.collector.finish()
    assert program.values == [1]


def test_a_graph_whose_header_fails_counts_nowhere():
    program = Program()
    program.graph([1, 2])
    program.tool.header = bad_header("raises")
    program.graph([3, 4, 5])
    program.collector.finish()
    assert program.values == [3]
    assert program.exact
    assert program.collector.skipped == {"header": 3}


def test_a_launch_that_is_not_chosen_leaves_a_graph_that_another_thread_launches_alone():
    program = Program(Selection(every=2))
    launch = LaunchData(context=CONTEXT, stream_handle=2, name=b"node", function=1)

    def between():
        other = threading.Thread(target=program.tell, args=(Domain.LAUNCH, LaunchCallback.BEGIN, launch))
        other.start()
        other.join()

    program.graph([5], between=between)
    program.collector.finish()
    assert program.values == [5]
