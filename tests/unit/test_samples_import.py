"""Every Kineto, OTLP and Jaeger sample imports or is refused for the reason in ``tests/fixtures/imports.tsv``."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from pasta_otel.errors import InputError
from pasta_otel.gpu.cupti.rows import Kind
from pasta_otel.gpu.imports.detect import detect
from pasta_otel.gpu.imports.jaeger import read_jaeger
from pasta_otel.gpu.imports.otlp import read_otlp
from pasta_otel.gpu.kineto import read_trace

FIXTURES = Path(__file__).parents[1] / "fixtures"
LINES = [line for line in (FIXTURES / "imports.tsv").read_text().splitlines() if not line.startswith("#")]
TABLE = list(csv.DictReader(LINES, delimiter="\t"))
KINDS = {
    "kernel": Kind.CONCURRENT_KERNEL, "Kernel": Kind.CONCURRENT_KERNEL, "gpu_memcpy": Kind.MEMCPY, "Memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET, "cuda_runtime": Kind.RUNTIME, "Runtime": Kind.RUNTIME, "cuda_driver": Kind.DRIVER,
}  # fmt: skip


def rows(verdict, *formats):
    return [row for row in TABLE if row["verdict"] == verdict and (not formats or row["format_or_kind"] in formats)]


def named(row):
    return row["file"].replace("/", "-")[-60:]


def requests(path, kind):
    return [json.loads(body) for body in (read_jaeger if kind == "jaeger" else read_otlp)(path)]


def spans_of(request):
    return [span for part in request["resourceSpans"] for scope in part["scopeSpans"] for span in scope["spans"]]


def raw(path: Path):
    """The document as the standard library reads it, with exact decimals."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data, parse_float=Decimal)


def read_any(path: Path):
    kind = detect(path)
    return read_trace(path) if kind == "kineto" else requests(path, kind)


def check(path: Path, row) -> None:
    if row["verdict"] == "refused":
        with pytest.raises(InputError) as caught:
            read_any(path)
        assert caught.value.kind == row["format_or_kind"]
        assert caught.value.message == row["reason"]
        return
    assert detect(path) == row["format_or_kind"]
    if row["format_or_kind"] == "kineto":
        assert read_trace(path).total == int(row["count"])
    else:
        assert sum(len(spans_of(request)) for request in requests(path, row["format_or_kind"])) == int(row["count"])


def test_the_table_names_every_sample_file():
    folders = {row["file"].split("/")[0] for row in TABLE}
    files = {
        str(path.relative_to(FIXTURES / "samples"))
        for folder in folders
        for path in (FIXTURES / "samples" / folder).rglob("*")
        if path.is_file() and path.name not in {"LICENSE", "NOTICE"}
    }
    assert files == {row["file"] for row in TABLE}


@pytest.mark.parametrize("row", TABLE, ids=named)
def test_each_sample_imports_or_is_refused_as_the_table_says(row):
    check(FIXTURES / "samples" / row["file"], row)


@pytest.mark.parametrize("row", rows("imports", "kineto"), ids=named)
def test_totals_agree_with_an_independent_count_of_the_raw_json(row):
    path = FIXTURES / "samples" / row["file"]
    counts, times = Counter(), Counter()
    for event in raw(path)["traceEvents"]:
        if event.get("ph") == "X":
            category = event.get("cat")
            counts[category] += 1
            times[KINDS.get(category)] += int(Decimal(event["dur"]) * 1000)
    trace = read_trace(path)
    assert trace.categories == {str(category): count for category, count in counts.items()}
    found = trace.timeline.rows
    for kind in set(KINDS.values()):
        chosen = found[found["kind"] == kind]
        assert len(chosen) == sum(count for category, count in counts.items() if KINDS.get(category) == kind)
        assert int((chosen["end"] - chosen["start"]).sum()) == times[kind]


@pytest.mark.parametrize("row", rows("imports", "kineto"), ids=named)
def test_every_start_is_the_raw_one_to_the_nanosecond(row):
    path = FIXTURES / "samples" / row["file"]
    document = raw(path)
    base = document.get("baseTimeNanoseconds", 0)
    wanted = Counter(
        (event["name"], base + int(Decimal(event["ts"]) * 1000))
        for event in document["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in KINDS
    )
    timeline = read_trace(path).timeline
    kept = [event for event in timeline.rows if event["kind"] in set(KINDS.values())]
    assert Counter((timeline.row_name(event), int(event["start"])) for event in kept) == wanted


@pytest.mark.parametrize("row", rows("imports", "otlp-json", "jaeger"), ids=named)
def test_spans_keep_their_names_and_durations(row):
    path = FIXTURES / "samples" / row["file"]
    document = raw(path)
    if row["format_or_kind"] == "jaeger":
        wanted = Counter(
            (s["operationName"], s["duration"] * 1000) for trace in document["data"] for s in trace["spans"]
        )
    else:
        wanted = Counter(
            (s["name"], int(s["endTimeUnixNano"]) - int(s["startTimeUnixNano"])) for s in spans_of(document)
        )
    found = [span for request in requests(path, row["format_or_kind"]) for span in spans_of(request)]
    assert Counter((s["name"], int(s["endTimeUnixNano"]) - int(s["startTimeUnixNano"])) for s in found) == wanted


@pytest.mark.slow
def test_the_whole_collection_of_samples_is_in_the_table():
    folder = os.environ.get("PASTA_SAMPLES")
    if not folder:
        pytest.skip("PASTA_SAMPLES names no folder with the sample collection")
    origins = {row["sample"].split("/")[0] for row in TABLE if row["sample"] != "-"}
    known = {row["sample"]: row for row in TABLE}
    files = [
        path
        for origin in sorted(origins)
        for path in sorted((Path(folder) / origin).rglob("*"))
        if path.is_file() and path.name not in {"LICENSE", "NOTICE"}
    ]
    assert files
    for path in files:
        check(path, known[str(path.relative_to(folder))])
