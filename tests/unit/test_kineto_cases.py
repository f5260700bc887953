"""Handed cases K*: the faults of real Kineto traces, each with its right answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pasta_otel.errors import InputError
from pasta_otel.gpu.analysis.link import coverage, link, record_coverage
from pasta_otel.gpu.analysis.utilization import StreamKey, utilization
from pasta_otel.gpu.kineto import ReadOptions, read_job, read_trace

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
DEFAULTS, STRICT = ReadOptions(), ReadOptions(strict=True)


def expected(case: str) -> dict:
    return json.loads((CASES / case / "expected.json").read_text())


def durations(rows) -> list[int]:
    return (rows["end"] - rows["start"]).astype(np.int64).tolist()


def refusal(path: Path, options: ReadOptions = DEFAULTS) -> InputError:
    with pytest.raises(InputError) as caught:
        read_trace(path, options)
    return caught.value


@pytest.mark.case("K01")
def test_bare_inf_and_nan_are_absent_and_counted():
    trace, want = read_trace(CASES / "K01" / "trace.json"), expected("K01")
    assert trace.total == want["events"] == len(trace.timeline.rows)
    assert trace.non_finite == want["non_finite"]
    assert sum(durations(trace.timeline.kernels)) == want["kernel_us"] * 1000
    copy = trace.timeline.work[trace.timeline.work["value"] > 0]
    assert copy["value"].tolist() == [200]


@pytest.mark.case("K01")
@pytest.mark.parametrize("name", ["inf", "NaN", "a: inf, b", '-Infinity\\"x: NaN,'])
def test_a_kernel_named_like_a_non_finite_number_keeps_its_name(tmp_path, name):
    text = (CASES / "K01" / "trace.json").read_text().replace('"name":"k"', f'"name":"{name}"')
    (tmp_path / "t.json").write_text(text)
    trace = read_trace(tmp_path / "t.json")
    assert trace.timeline.row_name(trace.timeline.kernels[0]) == json.loads(f'"{name}"')
    assert trace.non_finite == 3


@pytest.mark.case("K02")
@pytest.mark.parametrize("part", ["a", "b", "c"])
def test_broken_strings_cost_one_event_at_most(part):
    (path,) = (CASES / "K02").glob(f"{part}_*.json")
    trace, want = read_trace(path), expected("K02")
    assert trace.total == want["lenient_events"][part]
    assert trace.skipped == want["skipped"][part]
    assert sum(durations(trace.timeline.kernels)) == want["kernel_us"] * 1000
    name = trace.timeline.row_name(trace.timeline.kernels[0])
    name.encode()
    assert name.startswith("k")
    assert part != "c" or name.endswith("_fwd")


@pytest.mark.case("K02")
@pytest.mark.parametrize(("part", "line"), [("a", 3), ("b", 1), ("c", 2)])
def test_strict_reading_names_file_and_line(part, line):
    (path,) = (CASES / "K02").glob(f"{part}_*.json")
    error = refusal(path, STRICT)
    assert (error.kind, error.file, error.line) == ("trace_format", str(path), line)


@pytest.mark.case("K04")
def test_fractions_of_microseconds_are_whole_nanoseconds():
    trace, want = read_trace(CASES / "K04" / "trace.json"), expected("K04")
    kernels = trace.timeline.kernels
    assert durations(kernels) == want["dur_ns"]
    assert sum(want["dur_ns"]) // 3 == want["mean_ns"]
    assert (int(kernels["start"][0]), int(kernels["end"][0])) == (want["first_start"], want["first_end"])


@pytest.mark.case("K04")
def test_an_unfinished_event_is_flagged_and_never_ends_before_it_starts():
    trace = read_trace(CASES / "K04" / "trace.json")
    assert trace.unfinished == expected("K04")["unfinished"]
    (op,) = trace.timeline.ops
    assert op["unfinished"]
    assert op["end"] >= op["start"]


@pytest.mark.case("K06")
def test_a_single_trace_without_a_rank_is_rank_0_with_a_warning():
    job = read_job([CASES / "K06" / "single" / "trace.json"])
    assert [trace.timeline.rank for trace in job.traces] == [expected("K06")["single"]]
    assert len(job.warnings) == 1


@pytest.mark.case("K06")
def test_ranks_come_from_the_file_names_with_warnings():
    job = read_job(sorted((CASES / "K06" / "dir").glob("*.json")))
    assert [trace.timeline.rank for trace in job.traces] == expected("K06")["dir"]
    assert len(job.warnings) == 2


@pytest.mark.case("K06")
@pytest.mark.parametrize(
    ("folder", "kind", "names"), [("clash", "duplicate_rank", "ab"), ("ambiguous", "rank_unknown", "xy")]
)
def test_uncertain_ranks_are_refused_naming_both_files(folder, kind, names):
    with pytest.raises(InputError) as caught:
        read_job(sorted((CASES / "K06" / folder).glob("*.json")))
    assert caught.value.kind == kind
    assert all(f"{folder}/{name}.json" in str(caught.value) for name in names)
    assert kind != "rank_unknown" or "distributedInfo.rank" in str(caught.value)


@pytest.mark.case("K08")
def test_every_kernel_of_a_graph_belongs_to_the_op_that_replayed_it():
    timeline, want = read_trace(CASES / "K08" / "trace.json").timeline, expected("K08")
    links = link(timeline)
    assert len(links.work) == 4
    named = {timeline.row_name(row): int(op) for row, op in zip(links.work, links.op, strict=True)}
    assert named.pop("orphan") == -1
    assert {timeline.names[timeline.ops[op]["name"]] for op in named.values()} == {"graph_replay"}
    found = coverage(links)
    assert found.by_count == pytest.approx(want["coverage_count"])
    assert found.by_duration == pytest.approx(want["coverage_time"])
    assert found.attributed_ns == want["attributed"]["graph_replay"] * 1000
    assert found.time_ns - found.attributed_ns == want["unattributed_us"] * 1000
    assert (found.no_launch, found.incomplete) == (1, True)


@pytest.mark.case("K08")
def test_coverage_is_exported_as_a_gauge():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    found = coverage(link(read_trace(CASES / "K08" / "trace.json").timeline))
    record_coverage(provider.get_meter("t"), 0, found)
    (metric,) = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    values = {point.attributes["by"]: point.value for point in metric.data.data_points}
    assert metric.name == "pasta.gpu.link.coverage"
    assert values == pytest.approx({"count": 0.75, "duration": 0.6})
    provider.shutdown()


@pytest.mark.case("K10")
def test_streams_of_several_devices_are_not_added_together():
    timeline, want = read_trace(CASES / "K10" / "trace.json").timeline, expected("K10")
    found = utilization(timeline, (0, 100_000))
    assert {f"{key.device}/{key.stream}": share for key, share in found.streams.items()} == pytest.approx(
        want["streams"]
    )
    assert {str(device): share for device, share in found.devices.items()} == pytest.approx(want["devices"])
    assert found.mean == pytest.approx(want["node_mean"])
    assert StreamKey(1, 7) in found.streams
    assert (timeline.kernels["correlation"] == 5).sum() == 3


@pytest.mark.case("K12")
def test_a_cut_file_keeps_its_whole_events_and_says_that_it_is_cut():
    trace = read_trace(CASES / "K12" / "cut_object.json")
    assert (trace.total, trace.truncated, trace.partial) == (expected("K12")["cut_object"], True, 1)
    assert not trace.timeline.complete


@pytest.mark.case("K12")
def test_an_array_without_its_end_is_legal():
    trace = read_trace(CASES / "K12" / "array_no_end.json")
    assert (trace.total, trace.truncated, trace.partial) == (expected("K12")["array_no_end"], False, 0)


@pytest.mark.case("K12")
def test_cut_gzip_keeps_what_decompresses():
    trace = read_trace(CASES / "K12" / "cut.json.gz")
    assert trace.truncated
    assert trace.total == len(trace.timeline.rows) + len(trace.timeline.ops)


@pytest.mark.case("K12")
def test_an_empty_file_is_refused_in_words():
    error = refusal(CASES / "K12" / "empty.json")
    assert error.kind == "trace_format"
    assert "empty file" in str(error)


@pytest.mark.case("K12")
def test_a_cut_trace_claims_nothing_about_the_time_after_its_last_event():
    timeline = read_trace(CASES / "K12" / "cut_object.json").timeline
    last = int(timeline.work["end"].max())
    assert utilization(timeline, (0, last * 100)).window_ns == (0, last)


@pytest.mark.case("K12")
def test_strict_reading_refuses_a_cut_file():
    for name in ("cut_object.json", "cut.json.gz"):
        assert refusal(CASES / "K12" / name, STRICT).kind == "trace_format"
