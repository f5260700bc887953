"""Blocks of a program that are analysed for themselves; and what a collection of garbage may do in the middle of it."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pasta_otel.gpu.memory import counters
from pasta_otel.gpu.memory.blocks import OpenBlocks, Part
from pasta_otel.gpu.memory.locks import OwnedLock
from pasta_otel.gpu.memory.native import Call, CallData, NoteKind
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.tensors import Tensors
from pasta_otel.gpu.memory.tool import LaunchInfo
from tests.unit.test_memory_collector import Program


def info(number, name="k"):
    return LaunchInfo(name, (1, 1, 1), (32, 1, 1), 0, number=number)


def test_outside_every_block_nothing_is_wanted_where_blocks_are_required():
    blocks = OpenBlocks(required=True, keep=False)
    assert not blocks.active
    assert blocks.refusal(1, "k") == "inactive"
    part = Part(Selection())
    blocks.open(part)
    assert blocks.active
    assert blocks.refusal(2, "k") == ""
    blocks.close(part)
    assert blocks.refusal(3, "k") == "inactive"


def test_without_required_blocks_all_is_wanted_and_kept():
    blocks = OpenBlocks(required=False, keep=True)
    part = Part(Selection(("a",)))
    blocks.open(part)
    assert blocks.refusal(1, "b") == ""
    assert not blocks.analysed(info(1, "b"), "result")
    assert (part.launches, part.skipped) == ([], Counter(name=1))


def test_a_launch_comes_to_its_block_after_the_block_has_ended():
    blocks = OpenBlocks(required=True, keep=False)
    part = Part(Selection())
    blocks.open(part)
    blocks.refusal(1, "k")
    blocks.close(part)
    assert part.pending == 1
    assert blocks.analysed(info(1), "result")
    assert (part.pending, [result for _, result in part.launches]) == (0, ["result"])


def test_a_lost_launch_makes_room_for_another():
    part = Part(Selection(count=1))
    assert part.wants(1, "k") == ""
    assert part.wants(2, "k") == "count"
    part.lose(1, "slot")
    assert part.wants(3, "k") == ""
    assert part.skipped == Counter(count=1, slot=1)


class Blocks(RuleBasedStateMachine):
    """Blocks that open, close, and get launches late, against what each must have in the end."""

    def __init__(self):
        super().__init__()
        self.blocks = OpenBlocks(required=True, keep=False)
        self.open, self.number = [], 0
        self.parts, self.expected, self.waiting = [], [], []

    @rule(name=st.sampled_from(["*", "a", "b"]))
    def enter(self, name):
        self.parts.append(Part(Selection((name,))))
        self.expected.append(([], []))
        self.open.append(len(self.parts) - 1)
        self.blocks.open(self.parts[-1])

    @rule(data=st.data())
    def leave(self, data):
        if self.open:
            at = data.draw(st.sampled_from(self.open))
            self.open.remove(at)
            self.blocks.close(self.parts[at])

    @rule(name=st.sampled_from("ab"))
    def launch(self, name):
        self.number += 1
        wanting = [at for at in self.open if self.parts[at]._chooser._selection.matches(name)]
        refused = self.blocks.refusal(self.number, name)
        assert bool(refused) == (not wanting)
        if wanting:
            self.waiting.append((self.number, name, wanting))

    @rule(lost=st.booleans(), data=st.data())
    def arrive(self, lost, data):
        if not self.waiting:
            return
        one = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(one)
        number, name, wanting = one
        if lost:
            self.blocks.lost(number, "slot")
        else:
            self.blocks.analysed(info(number, name), number)
        for at in wanting:
            self.expected[at][lost].append(number)

    @invariant()
    def each_block_has_its_own(self):
        for at, (part, (arrived, lost)) in enumerate(zip(self.parts, self.expected, strict=True)):
            assert [result for _, result in part.launches] == arrived
            assert part.skipped["slot"] == len(lost)
            assert part.pending == sum(at in wanting for _, _, wanting in self.waiting)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_blocks_that_open_and_close_in_any_order_get_each_their_own = Blocks.TestCase


def test_a_block_counts_the_nodes_of_a_graph_as_the_process_does():
    blocks, part = OpenBlocks(required=True, keep=False), Part(Selection(names=("neg", "k")))
    blocks.open(part)
    program = Program(blocks=blocks)
    program.graph([1, 2, 3, 4, 5], names=("neg", "add"))
    program.launch(5)
    program.collector.finish()
    assert (program.collector.seen, part.seen) == (6, 6)
    assert part.skipped == {"name": 2}
    assert part.pending == 0
    blocks.close(part)


def test_a_block_does_not_wait_for_launches_that_are_lost():
    blocks, part = OpenBlocks(required=True, keep=False), Part(Selection())
    blocks.open(part)
    program = Program(blocks=blocks)
    program.launch(1)
    program.note(NoteKind.CONTEXT_GONE)
    program.launch(2)
    program.collector.finish()
    assert (part.seen, len(part.launches), part.skipped, part.pending) == (2, 1, {"unreadable": 1}, 0)
    blocks.close(part)


def test_a_lock_knows_its_owner():
    lock = OwnedLock()
    assert not lock.mine
    with lock:
        assert lock.mine
        seen = []
        thread = threading.Thread(target=lambda: seen.append(lock.mine))
        thread.start()
        thread.join()
        assert seen == [False]
    assert not lock.mine
    with pytest.raises(ZeroDivisionError), lock:
        _ = 1 / 0
    assert not lock.mine


def test_a_stream_that_garbage_collection_destroys_inside_our_own_work_stops_nothing():
    class Garbage(OpenBlocks):
        def refusal(self, number, name, module="", nodes=0, /):
            program.call(Call.CONTEXT_GOES, CallData())
            return super().refusal(number, name, module, nodes)

    program = Program(blocks=Garbage(required=False, keep=True))
    thread = threading.Thread(target=program.launch, args=(5,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    program.synchronize()
    assert program.values == [5]
    assert program.problems == []


def test_a_tool_forgets_tensors_that_nothing_is_remembered_of(monkeypatch):
    monkeypatch.setattr(counters, "LEAST_TOUCHED", 10)
    tensors = Tensors(most_freed=5)
    tool = counters.MemoryTool(tensors=tensors)
    weight = 1 << 30
    tensors.allocated(weight, 512)
    monkeypatch.setattr("pasta_otel.gpu.memory.tensors.MOST_TOUCHED", 5)
    for number in range(2, 200):
        tensors.allocated(number << 12, 512)
        tool._touch([1, number])
        tensors.freed(number << 12)
    assert len(tool._touched) <= 20
    assert {tensor["number"] for tensor in tool.tables()["tensors"]} >= {1, 199}
