"""Slots and slabs, over a device whose streams run only when something waits for them."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.errors import InputError, StateError
from pasta_otel.gpu.memory.collector import SLAB_BYTES, SLAB_SLOTS, Collector
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
from pasta_otel.gpu.memory.slots import SLOT_BYTES, WAYS, WORDS, fold

CONTEXT = 0x100


class FakeDevice:
    """Host memory by address; work stands in its stream's queue until the stream is read."""

    def __init__(self):
        self.memory, self.next = {}, 1 << 20
        self.queues = defaultdict(list)
        self.given = threading.local()
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

    def allocate(self, context, size):
        del context
        with self.order:
            if self.limit is not None and len(self.memory) >= self.limit:
                raise StateError("sanitizerAlloc: out of memory")
            self.next += size
            self.memory[self.next] = np.full(size // 8, 7, dtype=np.uint64)
            return self.next

    def clear(self, address, size, stream):
        del size
        with self.order:
            self.queues[stream].append(lambda: self.memory[address].fill(0))

    def read(self, address, size, stream):
        with self.order:
            for work in self.queues.pop(stream, []):
                work()
            return self.memory[address][: size // 8].tobytes()

    def count(self, slot, value, stream):
        def work():
            base = max(address for address in list(self.memory) if address <= slot)
            self.memory[base][(slot - base) // 8 + WORDS * (value % WAYS)] += value

        with self.order:
            self.queues[stream].append(work)


class Program:
    """Makes the callbacks that CUDA would."""

    def __init__(self, selection=None):
        self.device, self.problems = FakeDevice(), []
        self.collector = Collector(self.device, "patch", selection or Selection(), self.problems.append)
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
        return all(launch.words[0] == launch.grid[0] for launch in self.collector.launches)


def test_ways_are_summed():
    raw = np.arange(2 * WAYS * WORDS, dtype=np.uint64)
    assert fold(raw.tobytes()).tolist() == raw.reshape(2, WAYS, WORDS).sum(axis=1).tolist()


def test_results_are_read_when_their_stream_is_synchronised_and_not_before():
    program = Program()
    program.launch(5, stream=1)
    program.launch(6, stream=2)
    assert program.collector.launches == []
    program.synchronize(stream=2)
    assert [launch.words[0] for launch in program.collector.launches] == [6]
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
    for value in range(1, 10 * SLAB_SLOTS + 1):
        program.launch(value)
    program.collector.finish()
    assert program.collector.waits == 6
    assert len(program.collector.launches) == 10 * SLAB_SLOTS
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
    assert sorted(launch.words[0] for launch in program.collector.launches) == [3, 4, 5]


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
    assert [launch.words[0] for launch in program.collector.launches] == [1, 4]
    assert program.collector.skipped == {"slot": 2}
    assert len(program.problems) == 1


def test_a_device_without_memory_for_more_uses_what_it_has():
    program = Program()
    program.device.limit = 1
    for value in range(1, 3 * SLAB_SLOTS):
        program.launch(value)
    program.collector.finish()
    assert program.exact
    analysed, skipped = len(program.collector.launches), program.collector.skipped["device_memory"]
    assert analysed + skipped == 3 * SLAB_SLOTS - 1
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
    assert [launch.words[0] for launch in program.collector.launches] == [9]
    program.launch(9)
    assert program.collector.skipped == {"context": 1}


@pytest.mark.parametrize("wrong", [{"every": 0}, {"count": 0}, {"device_bytes": 4096}])
def test_a_selection_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError):
        Selection(**wrong)


def test_a_slot_is_what_the_documentation_says():
    assert SLOT_BYTES == 4608
