"""Numbers that a trace may hold and nothing can be made of: never a made-up value, always counted or said."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pasta_otel import semconv
from pasta_otel.errors import InputError
from pasta_otel.gpu.analysis.link import link
from pasta_otel.gpu.analysis.report import analyze
from pasta_otel.gpu.findings import find
from pasta_otel.gpu.imports.spans import timeline_spans
from pasta_otel.gpu.kineto import ReadOptions, read_job, read_trace

HUGE = 10**30


def event(category="kernel", start=1000, duration=2, /, **more):
    whole = {"ph": "X", "cat": category, "name": "k", "pid": 0, "tid": 7, "ts": start, "dur": duration,
             "args": {"device": 0, "stream": 7, "correlation": 5}, **more}  # fmt: skip
    return {key: value for key, value in whole.items() if value is not None}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.json"


def read(path, *events, strict=False, **header):
    path.write_text(json.dumps({"distributedInfo": {"rank": 0}, "traceEvents": [*events], **header}))
    return read_trace(path, ReadOptions(strict=strict))


def site_attributes(timeline) -> list[dict]:
    return [dict(site.attributes) for columns in timeline_spans(timeline) for site in columns.sites]


# ---- durations


@pytest.mark.parametrize("start", [1000, 1_700_000_000_000_000.5], ids=["small", "exact"])
@pytest.mark.parametrize("duration", [1e18, 9.2e15, 1e30, -1, -5, "long", None, "nan", "sNaN", "-inf"])
@pytest.mark.parametrize("category", ["kernel", "gpu_memcpy", "cuda_runtime", "cuda_driver"])
def test_work_whose_duration_is_none_is_counted_and_no_work_of_0_ns(path, category, duration, start):
    trace = read(path, event(category, start, duration), event("kernel", start + 10))
    assert trace.unfinished == 1
    assert [int(row["end"] - row["start"]) for row in trace.timeline.rows] == [2000]
    assert trace.total == 2


@pytest.mark.parametrize("duration", [1e18, 9.2e15, "long", None])
def test_a_host_region_whose_duration_is_none_is_unfinished(path, duration):
    trace = read(path, event("cpu_op", 1000, duration))
    assert trace.unfinished == 1
    assert trace.timeline.ops["unfinished"].tolist() == [True]


def test_strict_reading_counts_them_too(path):
    trace = read(path, event("kernel", 1000, 1e18), event(), strict=True)
    assert (trace.unfinished, len(trace.timeline.work)) == (1, 1)


def test_a_duration_of_0_is_a_duration(path):
    trace = read(path, event("kernel", 1000, 0))
    assert (trace.unfinished, len(trace.timeline.work)) == (0, 1)


def test_work_that_has_no_end_takes_no_launch_from_others(path):
    launch, unfinished = event("cuda_runtime", 990), event("kernel", 1000, -1, args={"correlation": 6, "device": 0})
    timeline = read(path, launch, unfinished, event()).timeline
    assert link(timeline).call.tolist() == [0]


# ---- devices and streams

NO_DEVICE = [{"device": "zero"}, {"device": -1}, {"device": 2**32}, {"device": HUGE}, {}]


@pytest.mark.parametrize("args", NO_DEVICE)
def test_a_device_or_stream_that_is_not_known_is_absent_from_report_and_spans(path, args):
    timeline = read(path, event(pid=None, args=args), event("kernel", 5000, pid=None, args=args)).timeline
    (rank,) = analyze([timeline])["ranks"]
    assert all("device" not in entry for entry in (*rank["devices"], *rank["streams"]))
    assert all("stream" not in entry for entry in rank["streams"])
    assert "4294967295" not in json.dumps(rank)
    assert not any(semconv.HW_ID in attributes for attributes in site_attributes(timeline))
    columns = [columns for columns in timeline_spans(timeline) if semconv.GPU_CORRELATION_ID in columns.attributes]
    assert columns
    assert not any(semconv.GPU_STREAM_ID in entry.attributes for entry in columns)
    (gap,) = [finding for finding in find([timeline]) if finding.kind == "idle_gap"]
    assert gap.title.startswith("a GPU that is not named is idle for 100%")


def test_known_streams_keep_theirs_beside_unknown_ones(path):
    timeline = read(path, event(), event(args={"device": 0, "stream": "x"})).timeline
    streams = [entry.attributes.get(semconv.GPU_STREAM_ID) for entry in timeline_spans(timeline)]
    assert [values.tolist() for values in streams if values is not None] == [[7]]
    assert sum(len(entry) for entry in timeline_spans(timeline)) == 3


@pytest.mark.parametrize("device", [0, 1, 126, 127, 128, 300, 70_000, 2**32 - 2])
def test_every_device_number_is_itself(path, device):
    timeline = read(path, event(args={"device": device, "stream": 7}), event(args={"device": 3, "stream": 7})).timeline
    ids = {attributes[semconv.HW_ID] for attributes in site_attributes(timeline) if semconv.HW_ID in attributes}
    assert ids == {str(device), "3"}


def test_many_devices_are_not_taken_for_each_other(path):
    events = [event(args={"device": number * 7, "stream": 1}) for number in range(1000)]
    timeline = read(path, *events).timeline
    found = []
    for columns in timeline_spans(timeline):
        if semconv.GPU_STREAM_ID in columns.attributes:
            found += [dict(columns.sites[site].attributes)[semconv.HW_ID] for site in columns.site.tolist()]
    assert found == [str(device) for device in np.asarray(timeline.work["device"]).tolist()]
    assert len(set(found)) == 1000


# ---- ranks


@pytest.mark.parametrize("rank", [HUGE, 1 << 31, -1, "zwei", 1.5, True, [], {"a": 1}])
def test_a_rank_that_is_none_is_said_and_never_sent(path, rank):
    path.write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": [event()]}))
    job = read_job([path])
    assert job.traces[0].timeline.rank == 0
    (warning,) = job.warnings
    assert "distributedInfo.rank is " in warning
    assert warning.endswith(", no rank; taken as rank 0")


@pytest.mark.parametrize("rank", [0, 5, (1 << 31) - 1, "3"])
def test_a_rank_is_read_as_number_or_text(path, rank):
    path.write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": [event()]}))
    job = read_job([path])
    assert (job.traces[0].timeline.rank, job.warnings) == (int(rank), ())


def test_a_rank_that_is_none_does_not_hide_the_file_names(tmp_path):
    for number in (3, 5):
        document = {"distributedInfo": {"rank": HUGE}, "traceEvents": [event()]}
        (tmp_path / f"rank-{number}.json").write_text(json.dumps(document))
    job = read_job(sorted(tmp_path.iterdir()))
    assert [trace.timeline.rank for trace in job.traces] == [3, 5]


# ---- the file's base of time


@pytest.mark.parametrize("base", ["abc", -HUGE, HUGE, -1, 1.5, True, [], {}])
def test_a_base_of_time_that_is_none_is_said_and_strictly_refused(path, base):
    trace = read(path, event(), baseTimeNanoseconds=base)
    (remark,) = trace.remarks
    assert remark.startswith("baseTimeNanoseconds: expected nanoseconds since 1970, got ")
    assert int(trace.timeline.rows["start"][0]) == 1_000_000
    with pytest.raises(InputError) as caught:
        read(path, event(), baseTimeNanoseconds=base, strict=True)
    assert (caught.value.kind, caught.value.field) == ("trace_format", "baseTimeNanoseconds")


@pytest.mark.parametrize("base", [0, 17, "17", 17.0, None])
def test_a_base_of_time_is_read_as_number_or_text(path, base):
    trace = read(path, event(), baseTimeNanoseconds=base, strict=True)
    assert trace.remarks == ()
    assert int(trace.timeline.rows["start"][0]) == 1_000_000 + int(base or 0)
