"""A trace without GPU work says so, and where the host's time went: as torch's own profiler counts it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.gpu.analysis.host import host_times
from pasta_otel.gpu.analysis.nesting import parents_by_nesting, self_times_ns
from pasta_otel.gpu.analysis.report import analyze
from pasta_otel.gpu.analysis.timeline import OP, OpKind, Timeline
from pasta_otel.gpu.cupti.rows import ROW
from pasta_otel.gpu.kineto import read_trace

HTA = Path(__file__).parents[1] / "fixtures" / "samples" / "facebookresearch+HolisticTraceAnalysis"
CPU_ONLY = {
    "rank_not_found.json.gz": "no GPU work in this trace;",
    "rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz": "no GPU work in this trace;",
    "benchmark_result_924719_1679055439_trace.json.gz": "no GPU work in this trace, though 1862 API calls:",
}


def by_name(entries) -> dict[str, tuple[int, int]]:
    return {entry.name: (entry.count, entry.self_ns) for entry in entries}


@pytest.mark.parametrize("name", CPU_ONLY)
def test_a_trace_without_gpu_work_says_so_in_one_line_and_reports_the_host(name):
    trace = read_trace(HTA / name)
    (line,) = trace.remarks
    assert line.startswith(CPU_ONLY[name])
    (rank,) = analyze([trace.timeline])["ranks"]
    assert 0 < sum(entry["self_ns"] for entry in rank["host"]["ops"]) <= rank["host"]["busy_ns"]
    assert rank["host"]["ops"][0]["self_ns"] == max(entry["self_ns"] for entry in rank["host"]["ops"])
    assert rank["host"]["modules"]


@pytest.mark.parametrize("name", ["base.json.gz", "sampled_rank-0.json.gz"])
def test_a_trace_with_gpu_work_gets_neither(name):
    trace = read_trace(HTA / name)
    assert trace.remarks == ()
    assert "host" not in analyze([trace.timeline])["ranks"][0]


def test_a_trace_without_any_event_says_that_it_has_no_gpu_work(tmp_path):
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    trace = read_trace(tmp_path / "t.json")
    assert len(trace.remarks) == 1
    assert "host" not in analyze([trace.timeline])["ranks"][0]


# ---- against torch.profiler itself


@pytest.fixture(scope="module", params=[False, True], ids=["ops", "stacks"])
def profiled(request, tmp_path_factory):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    batch = torch.randn(64, 32)
    model(batch).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=request.param) as profile:
        for _ in range(3):
            model(batch).sum().backward()
    path = tmp_path_factory.mktemp("profile") / "t.json"
    profile.export_chrome_trace(str(path))
    wanted = {entry.key: (entry.count, round(entry.self_cpu_time_total * 1000)) for entry in profile.key_averages()}
    return request.param, wanted, host_times(read_trace(path).timeline)


def test_self_times_by_op_are_those_of_torchs_key_averages(profiled):
    stacks, wanted, found = profiled
    ops = by_name(found.ops)
    compared = {name for name in ops if name.startswith("aten::")}
    assert {"aten::addmm", "aten::mm", "aten::sum", "aten::transpose"} <= compared
    for name in compared:
        assert ops[name][0] >= wanted[name][0]  # torch makes one of an op and its only part of the same name
        assert ops[name][1] == pytest.approx(wanted[name][1], abs=ops[name][0])  # a nanosecond for rounding each
    assert stacks or ops.keys() <= wanted.keys()


def test_modules_have_their_ops_forward_and_backward(profiled):
    stacks, _, found = profiled
    modules = by_name(found.modules)
    assert sum(self_ns for _, self_ns in modules.values()) == found.busy_ns
    if not stacks:
        assert modules.keys() == {""}
        return
    linear = [name for name in modules if name.startswith("Linear")]
    assert len(linear) == 2
    assert {name.rpartition("_")[0] for name in modules if name} == {"Sequential", "Linear", "ReLU"}
    # a forward call of a module is a frame and at least an op; its backward has at least two: 3 times
    assert all(modules[name][0] >= 12 for name in linear)


# ---- arithmetic


def timeline_of(regions, names=("", "a", "b", "ProfilerStep#1", "ProfilerStep#2", "nn.Module: M_0")) -> Timeline:
    ops = np.zeros(len(regions), OP)
    ops["sequence"] = -1
    for row, (name, thread, start, length, kind) in enumerate(regions):
        ops["name"][row], ops["thread"][row], ops["kind"][row] = name, thread, kind
        ops["start"][row], ops["end"][row] = start, start + length
    return Timeline(0, np.zeros(0, ROW), np.zeros(0, np.int64), list(names), ops, [(1, 1), (1, 2)])


@st.composite
def nested(draw):
    """Regions that nest, as those of one thread do."""
    found = []

    def below(thread: int, start: int, end: int, depth: int) -> None:
        at = start
        while depth and at < end and draw(st.booleans()):
            begin = draw(st.integers(at, end - 1))
            stop = draw(st.integers(begin + 1, end))
            found.append((draw(st.integers(1, 2)), thread, begin, stop - begin, OpKind.OP))
            below(thread, begin, stop, depth - 1)
            at = stop

    for thread in (0, 1):
        below(thread, 0, 40, 4)
    return found


@given(nested())
def test_each_moment_of_a_thread_belongs_to_the_innermost_region(regions):
    timeline = timeline_of(regions)
    own = self_times_ns(timeline.ops, parents_by_nesting(timeline.ops))
    wanted = Counter()
    for thread in (0, 1):
        for moment in range(40):
            around = [(length, -start, -row) for row, (_, on, start, length, _) in enumerate(regions)
                      if on == thread and start <= moment < start + length]  # fmt: skip
            if around:
                wanted[min(around)] += 1
    assert sorted(wanted.values()) == sorted(ns for ns in own.tolist() if ns)
    found = host_times(timeline)
    assert found.busy_ns == sum(wanted.values()) == sum(entry.self_ns for entry in found.ops)


def test_steps_are_one_entry_and_plain_python_frames_none():
    found = host_times(
        timeline_of([(3, 0, 0, 10, OpKind.ANNOTATION), (4, 0, 20, 10, OpKind.ANNOTATION), (1, 0, 2, 3, OpKind.OP),
                     (2, 0, 0, 9, OpKind.PYTHON), (5, 0, 21, 8, OpKind.PYTHON), (1, 0, 22, 2, OpKind.OP)])
    )  # fmt: skip
    assert by_name(found.ops) == {"ProfilerStep": (2, 9), "a": (2, 5)}
    assert by_name(found.modules) == {"": (3, 12), "M_0": (2, 8)}
