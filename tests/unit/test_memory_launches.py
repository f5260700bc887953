"""Native receiver, Sanitizer and collector together, over a fake of the Sanitizer API and the driver with their locks."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pasta_otel.gpu.memory.callers import NOBODY
from pasta_otel.gpu.memory.collector import Collector
from pasta_otel.gpu.memory.library import source
from pasta_otel.gpu.memory.sanitizer import Sanitizer
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.tool import Instruction, Tool
from tests.unit.fake_sanitizer import DEFAULT_STREAM, LAUNCHES, RESULT, How, Program, build

pytest.importorskip("pasta_otel._native._sanitizer", reason="built without a C compiler")
ROOT = Path(__file__).parents[2]
SLOT_BYTES = 4096
NOT_AN_INSTRUCTION = 60


class Sum(Tool):
    """Reads what the fake's launches add up; a launch that counted nothing has no result."""

    name, source = "sum", source()
    patches = {Instruction.BLOCK_ENTER: "Enter"}  # noqa: RUF012 - read only
    optional = {NOT_AN_INSTRUCTION: "Never"}  # noqa: RUF012 - read only
    slot_bytes = SLOT_BYTES
    content = (0xABC).to_bytes(8, "little")

    def header(self, memory):
        del memory
        return self.content

    def decode(self, record):
        words = np.frombuffer(record.slot, dtype=np.uint64)
        assert words[0] == 0xABC
        return (int(words[RESULT]), int(words[LAUNCHES])) if words[LAUNCHES] else None


class Analysed:
    """A program that uses the fake, under analysis."""

    def __init__(self, path: str, selection: Selection | None = None) -> None:
        self.program, self.tool, self.problems = Program(path), Sum(), []
        self.sanitizer = Sanitizer(path, self.tool.functions, self.tool.optional_functions, driver=path)
        selection = selection or Selection()
        self.collector = Collector(self.sanitizer, selection, self.tool, on_problem=self.problems.append)
        self.sanitizer.subscribe(self.collector.on_call, "patches.fatbin", selection.texts)

    @property
    def results(self) -> list[tuple[str, int, tuple[int, int]]]:
        """Return name, blocks, and what was counted, in the order of reading."""
        return [(launch.name, launch.grid[0], counted) for launch, counted in self.collector.launches]

    def end(self) -> None:
        self.collector.finish()
        self.sanitizer.stop()
        assert self.problems == []
        assert self.program.errors == 0, self.program.last_error


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    return build(tmp_path_factory.mktemp("fake") / "fake_sanitizer.so")


@pytest.fixture
def analysed(library):
    running = Analysed(library)
    yield running
    running.end()


@pytest.mark.parametrize("how", [How.KERNEL, How.KERNEL_EX, How.COOPERATIVE, How.PER_THREAD])
@pytest.mark.parametrize("lazily", [True, False])
def test_every_way_to_launch_is_counted_from_the_first_launch_on(analysed, how, lazily):
    program = analysed.program
    handle = program.kernel("add") if lazily else program.function("add")
    for value in (5, 6):
        program.launch(handle, program.stream(1), value=value, grid_x=value, how=how)
    assert analysed.results == []
    analysed.collector.finish()
    assert analysed.results == [("add", 5, (5, 1)), ("add", 6, (6, 1))]


def test_results_are_there_once_the_program_has_synchronised_and_somebody_asks(analysed):
    program = analysed.program
    one, other = program.stream(1), program.stream(2)
    handle = program.kernel("k")
    program.launch(handle, one, value=1)
    program.launch(handle, other, value=2)
    program.synchronize(other)
    analysed.collector.settle()
    assert [counted for _, _, counted in analysed.results] == [(2, 1)]
    program.synchronize()
    program.launch(handle, None, value=3)
    assert [counted for _, _, counted in analysed.results] == [(2, 1), (1, 1)]
    program.synchronize(DEFAULT_STREAM)
    analysed.collector.settle()
    assert analysed.results[-1][2] == (3, 1)


def test_launches_that_fail_or_are_captured_count_for_nobody(analysed):
    program, stream = analysed.program, analysed.program.stream(1)
    handle = program.kernel("k")
    program.launch(handle, stream, value=1, how=How.FAILS)
    program.launch(handle, stream, value=2, how=How.CAPTURED)
    program.launch(handle, stream, value=3)
    analysed.collector.finish()
    assert [counted for _, _, counted in analysed.results] == [(3, 1)]
    assert analysed.collector.skipped == {"not_run": 1}
    assert analysed.collector.seen == 2


def test_launches_by_calls_that_nobody_knows_are_said(analysed):
    program = analysed.program
    before = analysed.sanitizer.unknown_launches()
    program.launch(program.kernel("k"), None, how=How.UNKNOWN)
    analysed.collector.finish()
    assert analysed.results == []
    assert analysed.sanitizer.unknown_launches() == before + 1


def test_a_graphs_gpu_kernels_are_counted_each_time_it_is_launched_and_not_when_it_is_uploaded(analysed):
    program, stream = analysed.program, analysed.program.stream(1)
    neg, add = program.kernel("neg"), program.function("add")
    nodes = [(neg, 1, 4), (add, 10, 5), (neg, 2, 6)]
    program.graph(0x77, stream, nodes, upload=True)
    for _ in range(3):
        program.graph(0x77, stream, nodes)
    analysed.collector.finish()
    assert Counter(analysed.results) == {("neg", 4, (3, 2)): 3, ("add", 5, (10, 1)): 3}
    assert analysed.collector.seen == 9
    assert {launch.nodes for launch, _ in analysed.collector.launches} == {1, 2}


def test_a_launch_that_is_not_chosen_does_not_count_where_a_graph_did(library):
    analysed = Analysed(library, Selection(every=2))
    program = analysed.program
    handle = program.function("k")
    program.graph(0x77, None, [(handle, 5, 1)])
    program.launch(handle, None, value=100)
    program.graph(0x77, None, [(handle, 6, 1)])
    analysed.end()
    assert [counted for _, _, counted in analysed.results] == [(5, 1), (6, 1)]
    assert analysed.collector.skipped == {"sample": 1}


def test_only_modules_that_may_hold_a_chosen_gpu_kernel_are_patched(library):
    analysed = Analysed(library, Selection(names=("*softmax*",)))
    program = analysed.program
    chosen, other = program.kernel("row_softmax_kernel"), program.function("sum_kernel")
    program.launch(chosen, None, value=1)
    program.launch(other, None, value=2)
    analysed.end()
    assert (program.patched(chosen), program.patched(other)) == (True, False)
    assert [name for name, _, _ in analysed.results] == ["row_softmax_kernel"]
    assert analysed.collector.unpatched == 1
    assert analysed.collector.skipped == {"name": 1}


def test_an_instruction_that_the_library_does_not_know_is_remembered(analysed):
    analysed.program.launch(analysed.program.kernel("k"), None)
    analysed.collector.finish()
    assert analysed.sanitizer.unknown == {NOT_AN_INSTRUCTION}


def test_a_stream_that_is_destroyed_is_read_before(analysed):
    program, stream = analysed.program, analysed.program.stream(1)
    program.launch(program.kernel("k"), stream, value=9)
    program.destroy_stream(stream)
    assert [counted for _, _, counted in analysed.results] == [(9, 1)]


def test_a_context_that_is_destroyed_is_read_before_and_its_successor_is_analysed(analysed):
    program = analysed.program
    program.launch(program.kernel("k"), None, value=9)
    program.destroy_context()
    assert [counted for _, _, counted in analysed.results] == [(9, 1)]
    program.launch(program.kernel("k"), None, value=10)
    analysed.collector.finish()
    assert [counted for _, _, counted in analysed.results] == [(9, 1), (10, 1)]


def test_threads_that_share_a_stream_lose_nothing_with_little_device_memory(library):
    analysed = Analysed(library, Selection(device_bytes=1 << 20))
    program = analysed.program
    program.linger(5)
    handles = [program.kernel(f"k{number}") for number in range(4)]

    def work(number):
        for value in range(1, 301):
            program.launch(handles[number], None, value=value, grid_x=value, how=How(value % 3))
            if value % 50 == 0:
                program.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    analysed.end()
    assert len(analysed.results) == 1200
    assert all(counted == (grid, 1) for _, grid, counted in analysed.results)


def test_two_graphs_that_launch_one_gpu_kernel_at_the_same_time_lose_it_and_nobody_counts_for_another(analysed):
    program = analysed.program
    shared, own = program.function("shared"), program.function("own")
    one, other = program.stream(1), program.stream(2)
    program.in_the_next_graph(lambda: program.graph(0x88, other, [(shared, 100, 3)]))
    program.graph(0x77, one, [(shared, 5, 1), (own, 7, 2)])
    for value in (8, 9):
        program.graph(0x88, other, [(shared, value, value)])
    analysed.collector.finish()
    assert analysed.results == [("own", 2, (7, 1)), ("shared", 8, (8, 1)), ("shared", 9, (9, 1))]
    assert analysed.collector.skipped == {"shared": 2}


@pytest.mark.parametrize("upload", [True, False])
def test_a_graph_loses_a_gpu_kernel_that_is_launched_without_a_slot_while_the_graph_begins(analysed, upload):
    program = analysed.program
    shared = program.function("shared")

    def meanwhile():
        analysed.collector.active = False
        if upload:
            program.graph(0x88, None, [(shared, 100, 3)], upload=True)
        else:
            program.launch(shared, value=100)
        analysed.collector.active = True

    program.in_the_next_graph(meanwhile)
    program.graph(0x77, program.stream(1), [(shared, 5, 1)])
    program.graph(0x77, program.stream(1), [(shared, 6, 1)])
    analysed.collector.finish()
    assert analysed.results == [("shared", 1, (6, 1))]
    assert analysed.collector.skipped == ({"shared": 1} if upload else {"shared": 1, "inactive": 1})


def test_a_graph_without_slots_never_counts_in_those_of_one_that_begins_meanwhile(analysed):
    program = analysed.program
    program.late()
    shared = program.function("shared")

    def meanwhile():
        analysed.collector.active = True
        program.graph(0x88, program.stream(2), [(shared, 5, 5)])

    analysed.collector.active = False
    program.in_the_next_graph(meanwhile)
    program.graph(0x77, program.stream(1), [(shared, 100, 1)])
    program.graph(0x77, program.stream(1), [(shared, 6, 6)])
    analysed.collector.finish()
    assert analysed.results == [("shared", 6, (6, 1))]
    assert analysed.collector.skipped == {"inactive": 1, "shared": 1}


def test_of_three_graphs_that_launch_one_gpu_kernel_at_the_same_time_none_counts_for_another(analysed):
    program = analysed.program
    program.late()
    shared = program.function("shared")
    second_begun, first_ended = threading.Event(), threading.Event()
    second = threading.Thread(target=lambda: program.graph(0x88, program.stream(2), [(shared, 100, 1)]))

    def in_the_second():
        second_begun.set()
        first_ended.wait()

    def in_the_first():
        program.in_the_next_graph(in_the_second)
        second.start()
        second_begun.wait()

    def in_the_third():
        first_ended.set()
        second.join()

    program.in_the_next_graph(in_the_first)
    program.graph(0x77, program.stream(1), [(shared, 7, 7)])
    program.in_the_next_graph(in_the_third)
    program.graph(0x99, program.stream(3), [(shared, 5, 5)])
    program.graph(0x99, program.stream(3), [(shared, 6, 6)])
    analysed.collector.finish()
    assert analysed.results == [("shared", 6, (6, 1))]
    assert analysed.collector.skipped == {"shared": 3}


def test_a_launch_with_a_slot_leaves_a_graph_with_the_same_gpu_kernel_its_own(analysed):
    program = analysed.program
    shared, stream = program.function("shared"), program.stream(2)
    program.in_the_next_graph(lambda: program.launch(shared, stream, value=100, grid_x=3))
    program.graph(0x77, program.stream(1), [(shared, 5, 1)])
    analysed.collector.finish()
    assert Counter(analysed.results) == {("shared", 1, (5, 1)): 1, ("shared", 3, (100, 1)): 1}


def test_a_graphs_gpu_kernels_that_are_not_chosen_never_count_in_another_streams_slot(library):
    analysed = Analysed(library, Selection(names=("chosen*",), device_bytes=1 << 20))
    program = analysed.program
    other, chosen = program.function("other_chosen"), program.function("chosen")
    for value in range(1, 400):
        program.graph(value % 3, program.stream(value % 7), [(other, 1000, 1)])
        program.launch(chosen, program.stream(value % 5), value=value, grid_x=value)
        if value % 10 == 0:
            program.synchronize(program.stream(value % 7) or DEFAULT_STREAM)
    analysed.end()
    assert len(analysed.results) + analysed.collector.skipped["device_memory"] == 399
    assert len(analysed.results) > 200
    assert all(counted == (grid, 1) for _, grid, counted in analysed.results)


def test_a_graph_without_device_memory_for_all_its_gpu_kernels_counts_those_it_has_room_for(library):
    analysed = Analysed(library, Selection(device_bytes=1 << 20))
    program = analysed.program
    handles = [program.function(f"k{number}") for number in range(analysed.collector.slab_slots + 3)]
    program.launch(handles[0], program.stream(1), value=1)
    program.limit(2)
    for _ in range(4):  # the second finds out that there are no further slabs
        program.graph(0x77, program.stream(2), [(handle, at, at) for at, handle in enumerate(handles, 1)])
    analysed.collector.finish()
    analysed.sanitizer.stop()
    assert analysed.problems == ["no device memory for more results: sanitizerAlloc: out of memory"]
    assert program.errors == 0, program.last_error
    assert len(analysed.results) == 1 + 3 * analysed.collector.slab_slots
    assert all(counted == (grid, 1) for _, grid, counted in analysed.results)
    assert analysed.collector.skipped == {"graph_size": 3, "device_memory": len(handles) + 3 + 3}


def test_a_launch_without_its_configuration_fails_as_it_does_without_us(analysed):
    program = analysed.program
    assert program.launch(program.kernel("k"), None, how=How.NO_CONFIG) != 0
    assert program.launch(program.kernel("k"), None, value=2) == 0
    analysed.collector.finish()
    assert [counted for _, _, counted in analysed.results] == [(2, 1)]


def test_a_capture_by_another_thread_bears_the_analysis_of_this_one(analysed):
    program, stream = analysed.program, analysed.program.stream(1)
    handle = program.function("k")
    program.others_capture(True)
    for value in range(1, 200):
        program.launch(handle, stream, value=value, grid_x=value)
        program.graph(0x77, stream, [(handle, value, value)])
        if value % 20 == 0:
            program.synchronize(stream)
    program.destroy_stream(stream)
    program.others_capture(False)
    analysed.collector.finish()
    assert len(analysed.results) == 2 * 199


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_during_our_work_reaches_the_program_and_loses_no_other_launch(analysed, error):
    program = analysed.program
    handle = program.function("k")
    program.launch(handle, None, value=1, grid_x=1)

    def interrupted():
        raise error

    def launch_twice():
        for value in (2, 3):
            program.launch(handle, None, value=value, grid_x=value)

    analysed.collector._who = interrupted
    with pytest.raises(error):
        launch_twice()
    analysed.collector._who = lambda: NOBODY
    program.launch(handle, None, value=4, grid_x=4)
    analysed.collector.finish()
    assert [counted for _, _, counted in analysed.results] == [(1, 1), (4, 1)]
    assert analysed.collector.skipped["slot"] >= 1


def test_ctrl_c_while_the_program_is_in_the_driver_reaches_it_and_loses_nothing(analysed):
    program, stream = analysed.program, analysed.program.stream(1)
    handle = program.function("k")
    program.launch(handle, stream, value=1)
    program.linger(200_000)
    sent = threading.Event()

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        sent.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.05, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            graph_and_more(program, [(handle, 2, 2)], sent)
    finally:
        signal.signal(signal.SIGINT, before)
    program.synchronize()
    analysed.collector.settle()
    assert Counter(analysed.results) == {("k", 1, (1, 1)): 1, ("k", 2, (2, 1)): 1}


def graph_and_more(program, nodes, sent=None):
    program.graph(0x77, program.stream(1), nodes)
    if sent:
        sent.wait()
    program.linger(0)
    for _ in range(10_000):
        program.free(program.malloc(64))


@pytest.mark.parametrize("where", ["who", "header", "decode"])
@pytest.mark.parametrize("error", [TimeoutError, SystemExit])
def test_what_the_programs_handler_of_a_signal_raises_reaches_it_wherever_it_interrupts_us(analysed, error, where):
    program = analysed.program
    handle, raised = program.function("k"), []

    def handler(_number, _frame):
        raise error

    def interrupted(*arguments):
        if not raised:
            raised.append(1)
            signal.raise_signal(signal.SIGALRM)
        return former(*arguments)

    owner = analysed.collector if where == "who" else analysed.tool
    name = "_who" if where == "who" else where
    former = getattr(owner, name)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        program.launch(handle, None, value=1)
        setattr(owner, name, interrupted)
        program.synchronize()
        with pytest.raises(error):
            graph_and_more(program, [(handle, 2, 2)])
    finally:
        signal.signal(signal.SIGALRM, before)
    program.launch(handle, None, value=3)
    analysed.collector.finish()
    assert {(1, 1), (3, 1)} <= {counted for _, _, counted in analysed.results}
    assert analysed.collector.seen == len(analysed.results) + sum(analysed.collector.skipped.values())


def test_the_end_never_takes_an_earlier_launchs_counts_for_those_of_one_that_has_not_begun(analysed):
    program, stream = analysed.program, analysed.program.stream(1)
    handle, given, go = program.function("k"), threading.Event(), threading.Event()
    program.launch(handle, stream, value=5, grid_x=5)
    program.synchronize(stream)
    analysed.collector.settle()
    enter = analysed.collector._enter

    def stopped(data):
        enter(data)
        given.set()
        go.wait()

    analysed.collector._enter = stopped
    other = threading.Thread(target=program.launch, args=(handle, stream), kwargs={"value": 100, "grid_x": 100})
    other.start()
    given.wait()
    analysed.collector.finish()
    go.set()
    other.join()
    assert analysed.results == [("k", 5, (5, 1))]
    assert analysed.collector.skipped == {"not_run": 1}


def test_a_stream_that_a_tool_destroys_while_it_decodes_is_read_before(analysed):
    program = analysed.program
    handle, decode, streams = program.function("k"), analysed.tool.decode, [program.stream(2), program.stream(3)]

    def destroys(record):
        if streams:
            program.destroy_stream(streams.pop())
        return decode(record)

    for number in (1, 2, 3):
        program.launch(handle, program.stream(number), value=number)
    analysed.tool.decode = destroys
    program.synchronize()
    analysed.collector.settle()
    analysed.collector.finish()
    assert sorted(counted for _, _, counted in analysed.results) == [(1, 1), (2, 1), (3, 1)]


def test_a_stream_that_is_destroyed_unheard_in_our_own_work_is_never_read_again(analysed):
    program, stream = analysed.program, analysed.program.stream(1)
    handle, refusal = program.function("k"), analysed.collector._refusal

    def destroys(*arguments):
        analysed.collector._refusal = refusal
        program.destroy_stream(stream)
        return refusal(*arguments)

    program.launch(handle, stream, value=1)
    analysed.collector._refusal = destroys
    program.launch(handle, program.stream(2), value=2)
    analysed.collector.finish()
    assert [counted for _, _, counted in analysed.results] == [(2, 1)]
    assert analysed.collector.skipped == {"unreadable": 1}


def test_who_asks_while_another_thread_captures_does_not_break_the_capture(analysed):
    program = analysed.program
    program.launch(program.function("k"), program.stream(1), value=1)
    program.synchronize()
    program.others_capture(True)
    analysed.collector.settle()
    assert [counted for _, _, counted in analysed.results] == [(1, 1)]
    program.others_capture(False)


def test_an_exception_that_is_meant_for_a_thread_is_raised_in_that_thread(analysed):
    class Limit(BaseException):
        pass

    program, got = analysed.program, []
    handle = program.function("k")

    def limited():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Limit))
        return NOBODY

    def work():
        try:
            program.launch(handle)
            for _ in range(10_000):
                program.free(program.malloc(64))
        except Limit:
            got.append("here")

    analysed.collector._who = limited
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    analysed.collector._who = lambda: NOBODY
    assert got == ["here"]


FORKED = """
import os, sys, threading
from tests.unit.test_memory_launches import Analysed
analysed = Analysed(sys.argv[1])
os.register_at_fork(after_in_child=analysed.sanitizer.deafen)
program = analysed.program
handle = program.function("k")
taken, done = threading.Event(), threading.Event()
def hold():
    with analysed.collector._lock:
        taken.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
taken.wait()
child = os.fork()
if not child:
    program.launch(handle, None)
    program.graph(0x77, None, [(handle, 1, 1)])
    program.synchronize()
    os._exit(analysed.collector.seen)
done.set()
holder.join()
assert os.waitpid(child, 0)[1] == 0
program.launch(handle, None, value=3)
analysed.end()
print([counted for _, _, counted in analysed.results])
"""


def test_a_forked_child_launches_unheard_whatever_lock_another_thread_had(library):
    command = [sys.executable, "-c", FORKED, library]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[(3, 1)]"), done.stderr


MEETING = """
import sys, threading
from tests.unit.test_memory_launches import Analysed, How
analysed = Analysed(sys.argv[1])
program = analysed.program
program.linger(20)
handles = [program.kernel(f"k{number}") for number in range(4)]
sys.setswitchinterval(1e-5)

def launch(number):
    for value in range(1, 401):
        if value % 5:
            program.launch(handles[number], program.stream(number), value=value, grid_x=value, how=How(value % 3))
        else:
            program.graph(number + 1, program.stream(number), [(handles[number], value, value)])
        if value % 40 == 0:
            program.synchronize(program.stream(number))

def allocate():
    for turn in range(300):
        program.free(program.malloc(1 << 20))
        if turn % 50 == 0:
            program.empty_cache()
            program.first_malloc(2)

def drop():
    for _ in range(4000):
        program.drop_a_tensor()

works = [(launch, number) for number in range(4)] + [(allocate,), (allocate,), (drop,), (drop,)]
threads = [threading.Thread(target=work, args=arguments) for work, *arguments in works]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
analysed.end()
assert all(counted == (grid, 1) for _, grid, counted in analysed.results), analysed.results
print(len(analysed.results))
"""


def test_threads_that_launch_allocate_and_drop_tensors_at_once_never_wait_for_each_other_for_ever(library):
    command = [sys.executable, "-X", "faulthandler", "-c", MEETING, library]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "1600"
