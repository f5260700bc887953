"""The critical path of a profiler trace says what it knows: a queue is one only where the launch is in the trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.gpu.analysis.critical_path import critical_path
from pasta_otel.gpu.analysis.link import link
from pasta_otel.gpu.kineto import read_trace

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES, SAMPLES = FIXTURES / "cases", FIXTURES / "samples"
TRACES = sorted(
    {*(SAMPLES / "facebookresearch+HolisticTraceAnalysis").glob("*trace*.gz"), *SAMPLES.rglob("*part.json.gz"),
     *CASES.glob("K*/*.json"), FIXTURES / "h200" / "sync_batchnorm_rank0.json.gz"} - {CASES / "K12" / "empty.json"}
    - set(CASES.glob("*/expected.json")) - {path for path in SAMPLES.rglob("*trace*") if "_et" in path.name}
)  # fmt: skip


def totals_us(path: Path) -> dict[str, float]:
    found = critical_path(read_trace(path).timeline)
    return {kind: ns / 1000 for kind, ns in found.totals_ns().items()}


@pytest.mark.parametrize(
    ("case", "want"),
    [
        pytest.param("K01/trace.json", {"gpu": 5, "unknown": 10}, marks=pytest.mark.case("K01")),
        pytest.param("K04/trace.json", {"gpu": 1.599, "unknown": 51.901}, marks=pytest.mark.case("K04")),
        pytest.param("K08/trace.json", {"host": 5, "launch_delay": 35, "gpu": 100}, marks=pytest.mark.case("K08")),
        pytest.param("K10/trace.json", {"gpu": 10, "unknown": 90}, marks=pytest.mark.case("K10")),
        pytest.param("K12/array_no_end.json", {"gpu": 15, "unknown": 10}, marks=pytest.mark.case("K12")),
        pytest.param("K12/cut_object.json", {"gpu": 25, "unknown": 20}, marks=pytest.mark.case("K12")),
        pytest.param("K12/cut.json.gz", {"gpu": 25, "unknown": 20}, marks=pytest.mark.case("K12")),
    ],
)
def test_time_before_work_without_a_launch_is_unknown_and_no_queue(case, want):
    assert totals_us(CASES / case) == pytest.approx(want)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parent.name[:8]}-{path.name[:32]}")
def test_every_queue_delay_is_of_work_that_was_launched_before_the_work_ahead_had_ended(path):
    timeline = read_trace(path).timeline
    links = link(timeline)
    found = critical_path(timeline, links=links)
    for segment in found.segments:
        if segment.kind == "queue_delay":
            call = links.call[segment.work]
            assert call >= 0
            assert links.calls["start"][call] < segment.start_ns
        if segment.kind == "unknown":
            assert links.call[segment.work] < 0


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 40),
)
def test_a_stream_whose_launches_are_missing_in_part_is_still_filled_exactly(tmp_path_factory, pieces, ahead):
    """Work one after the other on one stream, each launched ``ahead`` us before it begins, or by nobody we know of."""
    events, at = [], 100
    for number, (gap, length, known) in enumerate(pieces, 1):
        at += gap
        if known:
            events.append(piece("cuda_runtime", "cudaLaunchKernel", at - ahead, 0.5, 1, correlation=number))
        events.append(piece("kernel", "k", at, length, 7, correlation=number, device=0, stream=7))
        at += length
    path = tmp_path_factory.mktemp("stream") / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    timeline = read_trace(path).timeline
    links = link(timeline)
    found = critical_path(timeline, links=links)
    assert sum(found.totals_ns().values()) == found.end_ns - found.start_ns
    for segment in found.segments:
        if segment.kind in {"queue_delay", "launch_delay", "unknown"}:
            assert bool(links.call[segment.work] >= 0) is (segment.kind != "unknown")


def piece(category, name, start, length, thread, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": length, "args": args}
