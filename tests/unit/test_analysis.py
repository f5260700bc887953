"""The analysis: arithmetic by brute force, HTA's own figures, CRISP's expected critical paths, and live CUPTI rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.gpu.analysis.breakdown import by_class, by_name, temporal_breakdown
from pasta_otel.gpu.analysis.calls import is_synchronizing
from pasta_otel.gpu.analysis.critical_path import critical_path
from pasta_otel.gpu.analysis.intervals import gaps, intersection, length, union
from pasta_otel.gpu.analysis.launches import launches, queue_lengths
from pasta_otel.gpu.analysis.link import coverage, link
from pasta_otel.gpu.analysis.modules import by_module, by_op
from pasta_otel.gpu.analysis.report import analyze
from pasta_otel.gpu.analysis.timeline import from_capture
from pasta_otel.gpu.analysis.trace_path import PathSpan, own_times_ns, trace_path
from pasta_otel.gpu.analysis.utilization import StreamKey
from pasta_otel.gpu.cupti.recording import read_recording
from pasta_otel.gpu.cupti.rows import views
from pasta_otel.gpu.imports.jaeger import parent_of
from pasta_otel.gpu.kineto import read_job, read_trace

FIXTURES = Path(__file__).parents[1] / "fixtures"
SAMPLES = FIXTURES / "samples"
HTA = SAMPLES / "facebookresearch+HolisticTraceAnalysis"
TRACELENS = SAMPLES / "AMD-AGI+TraceLens"
CRISP = sorted((SAMPLES / "uber-research+CRISP" / "test_cases").rglob("*.json"))
FIGURES = json.loads((FIXTURES / "hta" / "figures.json").read_text())

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def arrays(pairs):
    start = np.array([begin for begin, _ in pairs], np.int64)
    return start, start + np.array([size for _, size in pairs], np.int64)


def points(pairs) -> set[int]:
    return {point for begin, size in pairs for point in range(begin, begin + size)}


# ---- intervals


@given(spans)
def test_a_union_covers_each_moment_once(pairs):
    start, end = union(*arrays(pairs))
    assert length(*arrays(pairs)) == len(points(pairs)) == int((end - start).sum())
    assert (start[1:] > end[:-1]).all()


@given(spans, spans)
def test_an_intersection_is_what_both_cover(one, other):
    assert intersection(arrays(one), arrays(other)) == len(points(one) & points(other))


@given(spans)
def test_gaps_and_union_fill_the_window(pairs):
    covered = points(pairs)
    if covered:
        start, end = gaps(*arrays(pairs))
        assert int((end - start).sum()) == max(covered) + 1 - min(covered) - len(covered)


# ---- HTA's figures


def job(name):
    return [trace.timeline for trace in read_job([HTA / file for file in FIGURES[name]["files"]]).traces]


@pytest.mark.parametrize("name", ["sampled", "nccl", "amd"])
def test_temporal_breakdown_agrees_with_hta(name):
    for timeline, want in zip(job(name), FIGURES[name]["temporal"], strict=True):
        (found,) = temporal_breakdown(timeline)
        window = want["kernel_time(us)"]
        # HTA cuts times to whole microseconds: up to 1 us for each start and end, 0.6 % of the window in these traces
        near = {"rel": 1e-9} if name == "sampled" else {"abs": 0.006 * window}
        assert found.window_ns / 1000 == pytest.approx(window, abs=2)
        assert found.idle_ns / 1000 == pytest.approx(want["idle_time(us)"], **near)
        assert found.compute_ns / 1000 == pytest.approx(want["compute_time(us)"], **near)
        assert found.non_compute_ns / 1000 == pytest.approx(want["non_compute_time(us)"], **near)


@pytest.mark.parametrize(("name", "points_off"), [("sampled", 0.01), ("nccl", 1.0)])
def test_communication_overlap_agrees_with_hta(name, points_off):
    for timeline, want in zip(job(name), FIGURES[name]["overlap"], strict=True):
        (found,) = temporal_breakdown(timeline)
        assert 100 * found.overlap_ratio == pytest.approx(want["comp_comm_overlap_pctg"], abs=points_off)


@pytest.mark.parametrize("name", ["sampled", "simple_add", "alexnet"])
def test_launch_statistics_agree_with_hta_exactly(name):
    for rank, timeline in enumerate(job(name)):
        want, found = FIGURES[name]["launches"][str(rank)], launches(link(timeline))
        assert len(found) == want["pairs"]
        assert found.call_ns.sum() == want["cpu_duration"] * 1000
        assert found.gpu_ns.sum() == want["gpu_duration"] * 1000
        assert found.delay_ns.sum() == want["launch_delay"] * 1000


def test_queue_lengths_agree_with_hta():
    (timeline,) = job("sampled")[:1]
    found = queue_lengths(link(timeline))
    wanted = [entry for entry in FIGURES["sampled"]["queue"] if entry["rank"] == 0]
    assert {key.stream for key in found} == {entry["stream"] for entry in wanted}
    for entry in wanted:
        queue = found[StreamKey(0, entry["stream"])]
        assert len(queue.length) == entry["count"]
        assert queue.length.mean() == pytest.approx(entry["mean"])
        assert queue.most == entry["max"]


def test_the_critical_path_is_bound_as_hta_says():
    """HTA finds 35,834 us for the second forward pass of its AlexNet trace, 89.4 % of it on the CPU, 10.4 % on the GPU."""
    (timeline,) = job("alexnet")
    names = np.array([name == "[param|pytorch.model.alex_net|0|0|0|measure|forward]" for name in timeline.names])
    second = timeline.ops[names[timeline.ops["name"]]][1]
    path = critical_path(timeline, (int(second["start"]), int(second["end"])))
    totals = path.totals_ns()
    whole = path.end_ns - path.start_ns
    assert whole / 1000 == pytest.approx(FIGURES["alexnet"]["critical_path_us"], rel=0.02)
    assert totals["host"] / whole == pytest.approx(0.894, abs=0.02)
    assert totals["gpu"] / whole == pytest.approx(0.104, abs=0.02)


# ---- properties on real traces

TRACES = sorted({*HTA.glob("*trace*.json.gz"), *HTA.glob("sampled*"), *TRACELENS.glob("*.gz"), HTA / "base.json.gz"})


@pytest.fixture(params=TRACES, ids=lambda path: path.name[:40])
def timeline(request):
    return read_trace(request.param).timeline


def test_critical_paths_fill_their_window_without_gap_or_overlap(timeline):
    path = critical_path(timeline)
    edge = path.start_ns
    for segment in path.segments:
        assert segment.start_ns == edge < segment.end_ns
        edge = segment.end_ns
    assert edge == path.end_ns
    assert sum(path.totals_ns().values()) == path.end_ns - path.start_ns


def test_no_queue_is_ever_negative_and_all_end_empty(timeline):
    for queue in queue_lengths(link(timeline)).values():
        assert queue.length.min() >= 0
        assert queue.length[-1] == 0


def test_every_sum_of_gpu_time_is_the_same(timeline):
    links = link(timeline)
    total = int((links.work["end"] - links.work["start"]).sum())
    found = coverage(links)
    assert found.time_ns == total
    assert sum(entry.total_ns for entry in by_class(timeline)) == total
    assert sum(entry.total_ns for entry in by_name(timeline, 10**9)) == total
    assert sum(entry.total_ns for entry in by_op(timeline, links)) == total
    assert sum(entry.total_ns for entry in by_module(timeline, links)) == total
    assert found.by_id + found.by_time + found.no_launch + found.no_op == found.work


def test_parts_never_exceed_the_busy_time(timeline):
    for found in temporal_breakdown(timeline):
        assert found.idle_ns + found.busy_ns == found.window_ns
        assert max(found.compute_ns, found.communication_ns, found.memory_ns) <= found.busy_ns
        assert found.busy_ns <= found.compute_ns + found.communication_ns + found.memory_ns
        assert found.overlap_ns <= min(found.compute_ns, found.communication_ns)


def test_the_report_is_plain_json(timeline):
    assert json.loads(json.dumps(analyze([timeline]), allow_nan=False))["ranks"][0]["rank"] == 0


# ---- modules, calls


def test_gpu_time_by_module_names_the_frames_around_the_launch():
    timeline = read_trace(TRACELENS / "h100-bert-small.json.gz").timeline
    found = by_module(timeline, link(timeline))
    assert any(entry.name.startswith("Linear") for entry in found)
    assert not any(entry.name.startswith("nn.Module") for entry in found)
    known = sum(entry.total_ns for entry in found if entry.name)
    assert known / sum(entry.total_ns for entry in found) > 0.9


def test_backward_work_belongs_to_the_module_of_its_forward_op(tmp_path):
    """As torch.profiler writes it: the backward op has the forward op's sequence number and names its thread."""

    def event(cat, name, tid, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}

    forward, backward = {"Sequence number": 7, "Fwd thread id": 0}, {"Sequence number": 7, "Fwd thread id": 1}
    events = [
        event("python_function", "nn.Module: Linear_0", 1, 0, 50),
        event("cpu_op", "aten::addmm", 1, 10, 20, **{"External id": 1, **forward}),
        event("cpu_op", "AddmmBackward0", 2, 100, 50, **{"External id": 2, **backward}),
        event("cpu_op", "aten::mm", 2, 110, 20, **{"External id": 3}),
        event("cuda_runtime", "cudaLaunchKernel", 2, 115, 5, correlation=9),
        event("kernel", "gemm", 7, 130, 40, correlation=9, device=0, stream=7, **{"External id": 3}),
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    timeline = read_trace(tmp_path / "t.json").timeline
    links = link(timeline)
    assert [(entry.name, entry.total_ns) for entry in by_module(timeline, links)] == [("Linear_0", 40_000)]
    assert [entry.name for entry in by_op(timeline, links)] == ["aten::mm"]


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaDeviceSynchronize", True), ("cudaStreamSynchronize", True), ("cudaStreamSynchronize_ptsz", True),
        ("hipEventSynchronize", True), ("cuCtxSynchronize", True), ("cudaMemcpy", True), ("hipMemcpyWithStream", True),
        ("cuMemcpyDtoH_v2", True), ("cudaFree", True), ("cudaMemcpyAsync", False), ("cuMemcpyDtoHAsync_v2", False),
        ("cudaLaunchKernel", False), ("cudaEventQuery", False), ("cudaStreamWaitEvent", False), ("cudaFreeHost", False),
    ],
)  # fmt: skip
def test_only_calls_that_block_the_host_are_waits(name, waits):
    assert is_synchronizing(name) is waits


# ---- live capture


def test_live_cupti_rows_are_analysed_like_imported_ones():
    extension = pytest.importorskip("pasta_otel._native._cupti", reason="installed without a C compiler")
    ring = extension.Ring(block_rows=8192, max_blocks=4096)
    read_recording(FIXTURES / "cupti" / "h200-cuda13.0.cupti.gz").decode_into(ring)
    batches = views(ring.take())
    timeline = from_capture(batches, ring.names(0))
    links = link(timeline)
    assert len(links.work) > 0
    assert (links.call >= 0).mean() > 0.5
    (device,) = temporal_breakdown(timeline)
    assert 0 < device.busy_ns <= device.window_ns
    assert {entry.name for entry in by_class(timeline)} & {"gemm", "elementwise"}
    assert any("Launch" in timeline.row_name(row) for row in links.calls[:2000])
    path = critical_path(timeline, (int(links.work["start"].min()), int(links.work["end"].max())))
    assert sum(path.totals_ns().values()) == path.end_ns - path.start_ns
    assert path.totals_ns()["gpu"] > 0


# ---- request traces


def crisp_spans(document):
    trace = document["data"][0]
    services = {key: process["serviceName"] for key, process in trace["processes"].items()}
    ids = {span["spanID"]: number for number, span in enumerate(trace["spans"], 1)}
    return [
        PathSpan(
            ids[span["spanID"]],
            ids.get(parent_of(span, trace["traceID"]), 0),
            span["startTime"],
            span["startTime"] + span["duration"],
            f"[{services[span['processID']]}] {span['operationName']}",
        )
        for span in trace["spans"]
    ]


@pytest.mark.parametrize("path", CRISP, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_critical_paths_are_those_that_crisp_expects(path):
    document = json.loads(path.read_text())
    expected = document["testing"]
    expected = expected[0] if isinstance(expected, list) else expected
    spans = crisp_spans(document)
    found = own_times_ns(trace_path(spans))
    wanted = expected.get("opTimeExclusive", expected)
    assert {name: ns for name, ns in found.items() if ns} == {name: ns for name, ns in wanted.items() if ns}
    if "totalWork" in expected:
        assert sum(span.end_ns - span.start_ns for span in spans) == expected["totalWork"]


def test_all_of_crisps_cases_are_tested():
    assert len(CRISP) == 16


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 50), st.integers(0, 50)), max_size=9))
def test_any_forest_has_a_finite_path(rows):
    spans = [PathSpan(span, parent, start, start + size, str(span)) for span, parent, start, size in rows]
    parts = trace_path(spans)
    assert all(part.own_ns >= 0 for part in parts)
    assert len(parts) <= len(spans)
