import inspect
import threading

import pytest
import torch
import torch.profiler

from pasta_otel import semconv
from pasta_otel.errors import StateError
from pasta_otel.gpu.cupti.ops import (
    MARK,
    Frame,
    OpRecord,
    OpSites,
    OpWindow,
    TaggedRegions,
    parse_frame,
    records_of,
    rows_of,
    user_frame,
)
from pasta_otel.gpu.mapping import Regions


class Stack:
    def enter(self, external_id): ...
    def leave(self, external_id): ...
    def replace(self, external_id): ...


class Keeping:
    def __init__(self):
        self.rows = []

    def offer(self, row):
        self.rows.append(row)


@pytest.fixture
def tagged():
    return TaggedRegions(Regions(Stack(), lambda: 0))


def counter():
    number = iter(range(1, 10_000))
    return lambda: next(number)


def mark(trace, span, start, end, thread=1):
    return OpRecord(f"{MARK}{trace:032x}:{span:016x}", start, end, thread)


def test_the_outermost_op_of_a_region_is_its_child_and_gpu_work_is_the_ops():
    records = [
        mark(7, 70, 0, 100),
        mark(7, 71, 10, 60),
        OpRecord("aten::linear", 20, 40, 1, correlation=5, stack=(Frame("model.py", 3, "forward"),)),
        OpRecord("aten::addmm", 25, 35, 1, correlation=6),
        OpRecord("aten::relu", 70, 80, 1, correlation=7),
        OpRecord("sgemm", 200, 250, 0, correlation=6, device=1),
        OpRecord("Memcpy HtoD (Pinned -> Device)", 300, 310, 0, correlation=7, device=1),
        OpRecord("nobody", 300, 310, 0, correlation=99, device=0),
    ]
    rows = rows_of(records, OpSites(lambda device: f"GPU-{device}"), counter(), to_monotonic_ns=1000)
    linear, relu, gemm, copy = rows
    assert (linear.trace_id, linear.parent_span_id, linear.site.name) == (7, 71, "aten::linear")
    assert (linear.start_monotonic_ns, linear.end_monotonic_ns) == (1020, 1040)
    assert dict(linear.site.attributes)[semconv.CODE_LINE_NUMBER] == 3
    assert (relu.parent_span_id, relu.site.name) == (70, "aten::relu")
    assert (gemm.parent_span_id, gemm.trace_id, gemm.start_monotonic_ns) == (linear.span_id, 7, 1200)
    assert dict(gemm.site.attributes)[semconv.GPU_KERNEL_CLASS] == "gemm"
    assert dict(gemm.site.attributes)[semconv.HW_ID] == "GPU-1"
    assert dict(copy.site.attributes)[semconv.GPU_KERNEL_CLASS] == "memcpy"
    assert copy.parent_span_id == relu.span_id


def test_ops_of_other_threads_and_outside_regions_are_nobodys():
    records = [mark(7, 70, 0, 100), OpRecord("aten::add", 10, 20, 2), OpRecord("aten::mul", 150, 160, 1)]
    assert rows_of(records, OpSites(str), counter(), 0) == []


@pytest.mark.parametrize("version", ["before 2.5", "later"])
def test_annotations_are_no_gpu_work_and_torn_events_cost_nothing_else(version):
    class Event:
        def __init__(self, name, annotation):
            self._name = name
            if version == "later":
                self.is_user_annotation = lambda: annotation

        def name(self):
            return self._name

        def device_type(self):
            return "DeviceType.CUDA"

        def start_ns(self):
            return 1

        def end_ns(self):
            return 2

        def linked_correlation_id(self):
            return 3

        def device_index(self):
            return 0

    class Torn(Event):
        def name(self):
            return b"\x83".decode()

    found = list(records_of([Event(f"{MARK}0:0", True), Torn("", False), Event("sgemm", False)]))
    assert found == [OpRecord("sgemm", 1, 2, 0, 3, 0)]


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("model.py(12): forward", Frame("model.py", 12, "forward")),
        ("a (b)/m.py(3): <lambda>", Frame("a (b)/m.py", 3, "<lambda>")),
        ("<built-in function linear>", None),
        ("nn.Module: Linear_0", None),
    ],
)
def test_stack_lines_are_read(text, frame):
    assert parse_frame(text) == frame


def test_the_users_line_is_the_innermost_that_is_not_torchs():
    stack = [
        Frame("torch/nn/modules/linear.py", 130, "forward"),
        Frame("shop/model.py", 9, "forward"),
        Frame("x.py", 1, "f"),
    ]
    assert user_frame(stack) == stack[1]
    assert user_frame(stack[:1]) is None


def test_a_window_over_a_running_program_gives_ops_with_the_line_that_called_them(tagged):
    sink, stop = Keeping(), threading.Event()
    layer = torch.nn.Linear(4, 4)

    def program():
        while not stop.is_set():
            tagged.enter(0xABC, 0x10)
            tagged.enter(0xABC, 0x11, "layer")
            layer(torch.ones(2, 4))
            tagged.leave(0x11)
            tagged.leave(0x10)
            stop.wait(0.001)

    lines, first = inspect.getsourcelines(program)
    thread = threading.Thread(target=program)
    thread.start()
    window = OpWindow(tagged, sink, str)
    made = window.run(0.2)
    stop.set()
    thread.join()
    assert made == len(sink.rows) > 0
    linears = [row for row in sink.rows if row.site.name == "aten::linear"]
    assert linears
    assert {(row.trace_id, row.parent_span_id) for row in linears} == {(0xABC, 0x11)}
    where = dict(linears[0].site.attributes)
    assert where[semconv.CODE_FILE_PATH].endswith("test_capture_ops.py")
    assert first <= where[semconv.CODE_LINE_NUMBER] < first + len(lines)
    assert where[semconv.CODE_FUNCTION_NAME] == "program"
    assert not any("addmm" in row.site.name for row in sink.rows)
    assert tagged.tagging is False


def test_a_window_is_bounded_by_count(tagged):
    sink = Keeping()
    window = OpWindow(tagged, sink, str, limit=3)

    def run(_seconds):
        tagged.enter(1, 2)
        for _ in range(10):
            torch.ones(2).add(1)
        tagged.leave(2)

    assert window.run(0, run) == 3
    assert len(sink.rows) == 3
    assert window.dropped > 0


def test_marks_of_regions_that_ended_unseen_are_closed(tagged):
    tagged.tagging = True
    tagged.enter(1, 2)
    tagged.enter(1, 3)
    tagged.leave(2)
    assert tagged._local.marks == []
    tagged.leave(2)


def test_without_torch_profiler_the_error_says_so(tagged):
    with pytest.raises(StateError, match=r"torch\.profiler"):
        OpWindow(tagged, Keeping(), str, modules={}).run(0)


class OldEvent:
    """An event as torch 2.11 has it: nothing says whether it is a Python frame."""

    def __init__(self, name):
        self._name = name

    def name(self):
        return self._name

    def start_ns(self):
        return 1

    def end_ns(self):
        return 2

    def device_type(self):
        return "DeviceType.CPU"

    def start_thread_id(self):
        return 3

    def correlation_id(self):
        return 4

    def stack(self):
        return ["model.py(7): forward"]


def test_events_of_an_older_torch_are_read_and_its_python_frames_left_out():
    names = ["aten::add", "a::b.py(3): forward", "model.py(7): Scope::call", "cudaLaunchKernel"]
    (record,) = records_of([OldEvent(name) for name in names])
    assert (record.name, record.correlation, record.stack) == ("aten::add", 4, (Frame("model.py", 7, "forward"),))
