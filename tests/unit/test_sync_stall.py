"""A wait for the GPU is one only while GPU work is queued or runs; a memory call in front of an idle GPU is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.gpu.analysis.calls import frees_memory, is_synchronizing, outermost, takes_memory
from pasta_otel.gpu.analysis.intervals import covered
from pasta_otel.gpu.analysis.launches import launches, outstanding
from pasta_otel.gpu.analysis.link import link
from pasta_otel.gpu.findings import find
from pasta_otel.gpu.kineto import read_trace

SAMPLES = Path(__file__).parents[1] / "fixtures" / "samples"
HTA, TRACELENS = SAMPLES / "facebookresearch+HolisticTraceAnalysis", SAMPLES / "AMD-AGI+TraceLens"
ALEXNETS = [HTA / f"benchmark_result_{name}_trace.json.gz" for name in ("2869224_1695835535", "493459_1694039959")]

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def arrays(intervals):
    start = np.array([begin for begin, _ in intervals], np.int64)
    return start, start + np.array([size for _, size in intervals], np.int64)


@given(pairs, pairs)
def test_each_interval_is_covered_as_long_as_the_others_cover_it(asked, others):
    points = {point for begin, size in others for point in range(begin, begin + size)}
    wanted = [len(points & set(range(begin, begin + size))) for begin, size in asked]
    assert covered(arrays(asked), *arrays(others)).tolist() == wanted


def found(path: Path) -> dict:
    return {finding.kind: finding for finding in find([read_trace(path).timeline])}


class Step:
    """A trace with one thread and one stream; times in ms."""

    def __init__(self) -> None:
        self.events: list[dict] = []

    def call(self, name, start, end, number=0, thread=1, driver=False):
        category = "cuda_driver" if driver else "cuda_runtime"
        self._add(category, name, thread, start, end, correlation=number or 1000 + len(self.events))
        return self

    def work(self, start, end, number, launched):
        self.call("cudaLaunchKernel", launched, launched + 0.01, number)
        self._add("kernel", "k", 7, start, end, correlation=number, device=0, stream=7)
        return self

    def _add(self, category, name, thread, start, end, **args):
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start * 1000,
             "dur": (end - start) * 1000, "args": args}
        )  # fmt: skip

    def findings(self, folder: Path) -> dict:
        (folder / "t.json").write_text(json.dumps({"traceEvents": self.events}))
        return found(folder / "t.json")


def memory_calls(name: str, *, busy: bool) -> Step:
    """Four calls of 9 ms each, every one with the GPU at work, or each after its work has ended."""
    step = Step()
    for number, at in enumerate(range(0, 40, 10), 1):
        step.work(at + 0.1, at + (9.5 if busy else 0.4), number, launched=at)
        step.call(name, at + 0.5, at + 9.5)
    return step.work(40.1, 40.2, 5, launched=40)


@pytest.mark.parametrize("path", ALEXNETS, ids=lambda path: path.name[:32])
def test_memory_calls_of_a_programs_begin_are_no_waits_but_say_why_the_gpu_is_idle(path):
    """HTA's AlexNet: 6.5 s in cudaFree, within which no GPU work ran or was queued."""
    findings = found(path)
    assert "sync_stall" not in findings
    gap = findings["idle_gap"]
    assert gap.evidence[1].detail == "host in cudaFree in aten::cudnn_convolution"
    assert "warm-up" in gap.suggestion


@pytest.mark.parametrize("name", ["cudaFree", "cudaDeviceSynchronize", "hipFree", "cuMemFree_v2"])
def test_a_call_counts_as_far_as_the_gpu_worked_within_it(tmp_path, name):
    stall = memory_calls(name, busy=True).findings(tmp_path)["sync_stall"]
    (wait,) = stall.evidence
    assert (wait.detail, wait.value) == (f"{name} (4 times)", pytest.approx(0.036))
    assert stall.share == pytest.approx(36 / 40.1)
    assert "sync_stall" not in memory_calls(name, busy=False).findings(tmp_path)


@pytest.mark.parametrize(("name", "words"), [("cudaFree", "empty_cache"), ("cudaStreamSynchronize", ".item()")])
def test_where_memory_is_given_back_the_suggestion_is_to_keep_it(tmp_path, name, words):
    stall = memory_calls(name, busy=True).findings(tmp_path)["sync_stall"]
    assert words in stall.suggestion
    assert ("gives memory back" in stall.title) is (name == "cudaFree")


def test_the_drivers_call_within_the_runtimes_is_the_same_wait(tmp_path):
    step = memory_calls("cudaDeviceSynchronize", busy=True)
    for at in range(0, 40, 10):
        step.call("cuCtxSynchronize", at + 0.6, at + 9.4, driver=True)
    stall = step.findings(tmp_path)["sync_stall"]
    assert [wait.detail for wait in stall.evidence] == ["cudaDeviceSynchronize (4 times)"]
    assert stall.share == pytest.approx(36 / 40.1)


def test_two_threads_that_wait_at_once_wait_once(tmp_path):
    step = memory_calls("cudaDeviceSynchronize", busy=True)
    for at in range(0, 40, 10):
        step.call("cudaDeviceSynchronize", at + 0.5, at + 9.5, thread=2)
    stall = step.findings(tmp_path)["sync_stall"]
    assert stall.title.startswith("the host waits for the GPU in 8 calls, 90%")


def test_waiting_for_work_that_is_queued_and_does_not_begin_is_a_wait():
    findings = found(TRACELENS / "mi300-sglang-prefill-decode-part.json.gz")
    assert findings["sync_stall"].share == pytest.approx(0.5, abs=0.01)
    gap = findings["idle_gap"]
    assert gap.evidence[1].detail == "host in hipMemcpyWithStream in aten::copy_; 1 launched and not begun"
    assert "queued" in gap.suggestion


def test_work_is_outstanding_from_its_launch_on_and_at_least_while_it_runs():
    for path in (ALEXNETS[0], TRACELENS / "mi300-vllm-decode-graph.json.gz"):
        links = link(read_trace(path).timeline)
        start, end = outstanding(links)
        assert (start <= links.work["start"]).all()
        assert (end == links.work["end"]).all()
        pairs_of = launches(links)
        waited = (links.work["start"].astype(np.int64) - start)[pairs_of.work]
        assert waited.tolist() == pairs_of.delay_ns.tolist()


def test_only_calls_that_lie_within_others_of_their_thread_are_left_out():
    links = link(read_trace(ALEXNETS[0]).timeline)
    kept = outermost(links.calls)
    assert 0 < len(kept) <= len(links.calls)
    for thread in np.unique(kept["thread"]):
        mine = kept[kept["thread"] == thread]
        ends = mine["end"][np.argsort(mine["start"], kind="stable")]
        assert (np.diff(ends.astype(np.int64)) > 0).all()
    assert len(outermost(links.calls[:0])) == 0


@pytest.mark.parametrize(
    ("name", "takes", "frees"),
    [
        ("cudaMalloc", True, False), ("cudaMallocAsync_ptsz", True, False), ("cudaFree", True, True),
        ("hipFree", True, True), ("cuMemFree_v2", True, True), ("cudaHostAlloc", True, False),
        ("cudaFreeHost", True, False), ("cuMemAlloc_v2", True, False), ("cudaMemcpy", False, False),
        ("cuMemcpyHtoD_v2", False, False), ("cudaMemsetAsync", False, False), ("cudaLaunchKernel", False, False),
    ],
)  # fmt: skip
def test_memory_calls_are_told_by_their_names(name, takes, frees):
    assert takes_memory(name) is takes
    assert frees_memory(name) is frees
    assert is_synchronizing(name) or not frees
