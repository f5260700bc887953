"""What analysis says, decoded: text, page, JSON, spans and metrics, of made-up results with hostile names."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pasta_otel import semconv
from pasta_otel.exporters.otlp.encoder import Scope, encode_spans
from pasta_otel.gpu.memory import plots, telemetry, words
from pasta_otel.gpu.memory.hot import COLUMNS, timeline
from pasta_otel.gpu.memory.page import as_html
from pasta_otel.gpu.memory.report import MOST_NAME, MemoryReport, labels
from pasta_otel.gpu.memory.results import device_clock, read_document, read_results
from pasta_otel.gpu.memory.spans import MemorySpans
from pasta_otel.gpu.memory.text import COLUMNS as TEXT_COLUMNS
from pasta_otel.gpu.memory.text import as_text
from tests.memory_slots import document, launch, tensor
from tests.memory_slots import words as slot

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "memory.schema.json").read_text())
HOSTILE = "k<script>alert('&\")</script>\n\x1b[31m"
STRIDED = slot(
    global_load=(200, 6400, 6400, 25600), strides_global=(0, 0, 0, 0, 0, 0, 200, 0), worst_global=(32, 4, 64)
)
PLAIN = slot(global_load=(200, 6400, 800, 25600), strides_global=(0, 200, 0, 0, 0, 0, 0, 0), other_hot_outside=100)
SPAN = f"{7:032x}-{9:016x}"


def report(*documents):
    return MemoryReport(read_document(100 + number, one) for number, one in enumerate(documents))


def tree(page):
    """Return a page as a tree: it is well-formed but for what is HTML's alone."""
    return ET.fromstring(page.replace('<meta charset="utf-8">', "").replace("<!doctype html>", ""))


@pytest.fixture
def two_processes():
    """Two processes with the same parameter, one of them with launches that have a span and a time."""
    first = document(
        [
            launch(
                "strided", STRIDED, module="net.0", source="/a b/train.py:7 step", result_tensors=[[1, 900], [2, 60]]
            )
            | {"time_unix_nano": 1_000},
            launch(HOSTILE, PLAIN, span=SPAN, time_unix_nano=5_000_000, stream=1),
        ],
        [
            tensor(1, name="net.0.weight", bytes=4096),
            tensor(2, module="net.1", source=f"{HOSTILE}:3 f"),
        ],
        skipped={"sample": 4},
        seen=6,
    )
    for one, begin in zip(first["launches"], (500, 6_000_000), strict=True):
        one["result"] |= {"begin_ns": begin, "end_ns": begin + 1_000, "working_set": 8192, "ranges": [[2 << 20, 960]]}
    second = document([launch("strided", STRIDED, result_tensors=[[1, 40]])], [tensor(1, name="net.0.weight")])
    return report(first, second)


def test_a_document_says_what_was_counted_and_where(two_processes):
    whole = two_processes.as_dict()
    jsonschema.validate(json.loads(json.dumps(whole)), SCHEMA)
    assert whole["schema"] == 2
    assert whole["launches"] == {"seen": 7, "analysed": 3, "skipped": {"sample": 4}}
    hottest = whole["tensors"][0]
    assert (hottest["label"], hottest["processes"], hottest["allocations"]) == ("net.0.weight", 2, 2)
    assert (hottest["accesses"], hottest["bytes"]) == (940, 1 << 20)
    assert hottest["share"] == pytest.approx(940 / (940 + 60 + 100))
    assert whole["ranges"] == [{"pid": 100, "address": 2 << 20, "accesses": 1920}]
    strided = next(one for one in whole["gpu_kernels"] if one["symbol"] == "strided")
    assert strided["modules"] == [{"module": "net.0", "launches": 1}]
    assert strided["working_set"] == 8192
    (finding,) = strided["findings"]
    assert (finding["module"], finding["source"], finding["tensor"]) == (
        "net.0",
        "/a b/train.py:7 step",
        "net.0.weight",
    )
    assert [event["hottest_tensor"] for event in whole["timeline"] if event["pid"] == 101] == [
        {"tensor": "net.0.weight", "share": 1.0}
    ]


def test_the_schema_refuses_what_the_report_does_not_say(two_processes):
    for change in ({"schema": 1}, {"more": 1}, {"tensors": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(json.dumps({**two_processes.as_dict(), **change})), SCHEMA)


def test_the_text_names_layer_line_tensor_stride_and_gain_in_lines_of_bounded_length(two_processes):
    text = as_text(two_processes)
    plain = " ".join(text.split())
    assert "1. strided: coalescing, 12,800 -> 1,600 sectors (88% fewer)" in plain
    assert "layer net.0, line /a b/train.py:7 step, tensor net.0.weight" in plain
    assert "lanes are 64 elements of 4 bytes apart" in plain
    assert "940 85% 1 MiB net.0.weight (2 allocations)" in plain
    assert "4 (sample)" in plain
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= TEXT_COLUMNS


def test_the_text_says_what_is_not_in_its_numbers():
    counts = {"tensor_map_copies": 7, "wgmma_instructions": 3, "wgmma_a_bytes": 2048, "hot_lost": 11, "hot_outside": 5}
    filled = slot(**{f"other_{name}": value for name, value in counts.items()})
    unknown = document([launch("k", filled, result_tensors=[[3, 9]])], not_counted=[43, 44])
    text = as_text(report(unknown))
    assert "7 copies by a tensor map (TMA), of unknown size" in text
    assert "wgmma: 3 instructions of a warp read 2 KiB of A and 0 B of B" in text
    assert "11  lane accesses for which a launch's tables had no room" in text
    assert "5  lane accesses to memory of no known tensor" in text
    assert "tensor 3 of process 100" in text
    assert "instructions 43, 44" in text


def test_the_page_holds_hostile_names_as_text_and_loads_nothing(two_processes):
    page = as_html(two_processes)
    root = tree(page)
    tags = {element.tag for element in root.iter()}
    assert tags.isdisjoint({"script", "link", "img", "iframe"})
    assert "http" not in page
    assert "\x1b" not in page
    text = "".join(root.itertext())
    assert "k<script>alert('&\")</script>" in text
    assert "net.0.weight (1 MiB, 2 allocations): 900 lane accesses" in text
    for unit in ("32-byte sectors", "lane accesses from", "2 MiB range", "Working set over time"):
        assert unit in text


def test_a_program_without_launches_has_every_output():
    nothing = report(document([], problems=["CUPTI is active"]))
    assert "0 of 0 launches" in as_text(nothing)
    assert "CUPTI is active" in "".join(tree(as_html(nothing)).itertext())
    jsonschema.validate(nothing.as_dict(), SCHEMA)
    assert list(MemorySpans().columns(nothing.results[0])) == []


def test_results_of_other_tools_and_of_processes_that_failed_are_told_apart(tmp_path):
    (tmp_path / "7.json").write_text(json.dumps(document([launch("k", PLAIN)])))
    (tmp_path / "8.json").write_text(json.dumps({**document([]), "tool": "mine", "launches": [{"result": 3}]}))
    failed = {"tool": "", "seen": 0, "skipped": {}, "waits": 0, "unpatched": 0, "launches": [], "problems": ["no GPU"]}
    (tmp_path / "9.json").write_text(json.dumps(failed))
    (tmp_path / "9.part").write_text("{")
    results = read_results(tmp_path)
    assert [(one.pid, len(one.launches), one.problems) for one in results] == [(7, 1, ()), (9, 0, ("no GPU",))]


@given(st.lists(st.tuples(st.integers(1, 1 << 62), st.integers(1, 1 << 62)), min_size=1, max_size=20))
def test_no_gpu_kernel_begins_before_its_launch_and_one_begins_with_it(times):
    clock = device_clock(times)
    waits = [begin + clock.offset_ns - launched for launched, begin in times]
    assert min(waits) == 0
    assert clock.launches == len(times)
    assert clock.slack_ns == (sorted(waits)[1] if len(times) > 1 else None)


@pytest.mark.parametrize("begin", [0, (1 << 64) - 1])
def test_a_launch_without_a_time_stays_unknown(begin):
    (result,) = report(document([launch("k", PLAIN, time_unix_nano=77, result_begin_ns=begin)])).results
    assert (result.clock, result.launches[0].begin_unix_nano, result.launches[0].end_unix_nano) == (None, 0, 0)
    assert timeline([result]).on_device is False


def spans_of(result, **options):
    made = MemorySpans(**options)
    spans, attributes = [], {}
    for columns in made.columns(result):
        request = ExportTraceServiceRequest.FromString(encode_spans(columns, {}, Scope("t")))
        for span in request.resource_spans[0].scope_spans[0].spans:
            spans.append(span)
            attributes[span.span_id] = {
                pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
            }
    return made.counts, spans, attributes


def test_spans_have_the_times_and_the_parent_that_the_launch_had(two_processes):
    counts, spans, attributes = spans_of(two_processes.results[0])
    assert (counts.ok, counts.capped, counts.roots) == (2, 0, 1)
    root, other, linked = sorted(spans, key=lambda span: (len(span.parent_span_id), span.start_time_unix_nano))
    assert root.name == "analyze memory"
    assert other.trace_id == root.trace_id
    assert (linked.trace_id.hex(), linked.parent_span_id.hex()) == tuple(SPAN.split("-"))
    # 1,000 - 500 binds the clock more than 5,000,000 - 6,000,000
    assert (other.start_time_unix_nano, other.end_time_unix_nano) == (1_000, 2_000)
    assert linked.start_time_unix_nano == 6_000_500
    found = attributes[other.span_id]
    assert found[semconv.GPU_HOT_TENSOR] == "net.0.weight"
    assert found[semconv.GPU_HOT_TENSOR_SHARE] == pytest.approx(900 / 960)
    assert (found[semconv.CODE_FILE_PATH], found[semconv.CODE_LINE_NUMBER]) == ("/a b/train.py", 7)
    assert found[semconv.MODULE_PATH] == "net.0"
    assert found[semconv.GPU_MEMORY_WORKING_SET] == 8192
    assert found[semconv.GPU_MEMORY_FINDINGS] == "coalescing"
    assert found[semconv.ANALYSIS_TIMES] == "device"
    assert found[semconv.GPU_GRID] == "1x1x1"
    missing = attributes[linked.span_id]
    assert missing[semconv.GPU_KERNEL_NAME] == HOSTILE
    assert semconv.GPU_HOT_TENSOR not in missing
    assert semconv.GPU_CONFLICT_RATIO not in missing
    assert semconv.GPU_STORE_SECTORS not in missing


def test_nodes_of_a_graph_are_launches_with_one_span_and_without_a_duration_of_their_own():
    shared = launch("k", PLAIN, nodes=5, source="a.py:1 f", result_begin_ns=10, result_end_ns=90, time_unix_nano=10)
    whole = report(document([shared, launch("k", PLAIN, result_begin_ns=100, result_end_ns=130, time_unix_nano=99)]))
    (kernel,) = whole.kernels
    assert (whole.analysed, kernel.launches, kernel.sources) == (6, 6, (("a.py:1 f", 5),))
    assert (kernel.device_ns, kernel.timed) == (30, 1)
    _, spans, attributes = spans_of(whole.results[0])
    nodes = {span.end_time_unix_nano: attributes[span.span_id].get(semconv.GPU_GRAPH_NODES) for span in spans[1:]}
    assert nodes == {90: 5, 130: None}


def test_a_trace_keeps_the_spans_that_touch_most_and_says_how_many_it_left_out():
    slots = [slot(global_load=(1, 32, sectors, 128)) for sectors in range(1, 31)]
    launches = [launch("k", one, time_unix_nano=10) for one in slots]
    launches += [launch("k", one, span=SPAN, time_unix_nano=10) for one in slots]
    (result,) = report(document(launches)).results
    counts, spans, attributes = spans_of(result, limit=10)
    assert (counts.ok, counts.capped, counts.roots) == (20, 40, 1)
    kept = defaultdict(list)
    for span in spans:
        kept[span.trace_id].append(attributes[span.span_id].get(semconv.GPU_MEMORY_SECTORS))
    root = next(span for span in spans if not span.parent_span_id)
    assert attributes[root.span_id][semconv.ANALYSIS_LEFT_OUT] == 20
    kept[root.trace_id].remove(None)
    assert [sorted(sectors) for sectors in kept.values()] == [list(range(21, 31))] * 2
    assert {attributes[span.span_id].get(semconv.ANALYSIS_TIMES) for span in spans} == {None, "launch"}
    assert {(span.start_time_unix_nano, span.end_time_unix_nano) for span in spans} == {(10, 10)}


def test_metrics_are_by_class_and_module_and_name_thirty_tensors_at_most():
    numbers = range(1, 42)  # the last has no name, only an address
    launches = [
        launch("softmax_warp", PLAIN, module=module, result_working_set=size, result_tensors=[[n, n] for n in numbers])
        for module, size in (("a", 4096), ("a", 12288), ("", 8192))
    ]
    whole = report(document(launches, [tensor(number, name=f"w{number}" if number < 41 else "") for number in numbers]))
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("t")
    telemetry.record(meter, whole.results, whole.tensors)
    found = {
        metric.name: {frozenset(point.attributes.items()): point.value for point in metric.data.data_points}
        for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    }
    alone = frozenset({(semconv.GPU_KERNEL_CLASS, "softmax")})
    module = alone | {(semconv.MODULE_PATH, "a")}
    load = {(semconv.GPU_MEMORY_ACCESS, "load")}
    assert found[semconv.GPU_MEMORY_SECTORS] == {module | load: 1600, alone | load: 800}
    assert found[semconv.GPU_MEMORY_WORKING_SET] == {module: 12288, alone: 8192}
    tensors = {dict(key)[semconv.TENSOR_LABEL]: value for key, value in found[semconv.GPU_TENSOR_ACCESSES].items()}
    assert tensors == {f"w{number}": 3 * number for number in range(11, 41)}


@given(st.lists(st.integers(0, 10**12), max_size=200))
def test_every_launch_stands_in_one_column_in_the_order_of_time(times):
    (result,) = report(document([launch("k", PLAIN, time_unix_nano=1 + at) for at in times])).results
    line = timeline([result])
    columns = [column for _, _, column in line.launches]
    assert columns == sorted(columns)
    assert len(columns) == len(times)
    assert all(0 <= column < line.columns <= COLUMNS for column in columns)
    assert all(0 <= at <= line.columns for at, _ in line.ticks)
    rows = line.rows(lambda _, one: [("all", 1)])
    assert sum(rows.get("all", {}).values()) == len(times)


@given(st.floats(1e-3, 1e15), st.integers(2, 10))
def test_steps_of_an_axis_are_round_and_few(most, about):
    found = words.steps(most, about)
    assert found[0] == 0
    assert found[-1] <= most * (1 + 1e-6)
    assert len(found) <= about + 1


@given(st.text(max_size=200), st.integers(10, 80))
def test_a_clipped_name_is_one_printable_line_of_bounded_length(text, length):
    clipped = words.clip(text, length)
    assert len(clipped) <= length
    assert clipped.isprintable()


def test_a_long_label_loses_its_directories_before_its_middle():
    label = "model.layers.10.attn (/srv/app/models/transformer/attention.py:64 Attention.forward)"
    assert words.clip(label, 60) == "model.layers.10.attn (attention.py:64 Attention.forward)"


def test_equal_findings_of_many_gpu_kernels_are_all_told_where_the_text_says_so():
    text = as_text(report(document([launch(f"k{number}", STRIDED) for number in range(8)])))
    assert "and 3 more below" in text
    assert text.count("-> see above") == 5
    assert text.count("-> lanes go down a column") == 3
    many = as_text(report(document([launch(f"k{number:02}", STRIDED) for number in range(30)])))
    assert "and 15 more below" in many
    assert "and 10 more in --json" in many


def test_where_nothing_was_analysed_nothing_is_judged():
    waiting = report(document([], seen=4))
    assert "nothing to change" not in as_text(waiting)
    assert "beyond a threshold" not in as_html(waiting)
    assert "No launch was analysed" in as_html(waiting)


@given(st.lists(st.text(min_size=1, max_size=120), unique=True, max_size=20))
def test_no_two_gpu_kernels_are_called_the_same_and_names_have_a_bound(names):
    found = labels(names)
    assert set(found) == set(names)
    assert len(set(found.values())) == len(names)
    assert all(len(label) <= MOST_NAME for label in found.values())


def test_long_names_that_differ_in_their_middle_alone_are_told_apart():
    names = [f"{'a' * 80}{number}{'b' * 80}" for number in range(3)] + ["_Z1fIfEvv", "_Z1fIdEvv"]
    found = labels(names)
    assert len(set(found.values())) == 5
    assert (found["_Z1fIfEvv"], found["_Z1fIdEvv"]) == ("f<float>", "f<double>")


def test_shared_accesses_say_how_many_lanes_were_active():
    text = as_text(report(document([launch("k", slot(shared_load_4=(1000, 19000, 1000, 1000)))])))
    assert "shared load_4: 1,000 requests, 19.0 lanes each, 1,000 wavefronts" in text


@given(st.lists(st.tuples(st.floats(0, 10), st.text("0123 (ms)", min_size=1, max_size=30)), max_size=12))
def test_no_label_of_an_axis_lies_on_its_neighbour(ticks):
    axis = plots.Axis(10, sorted(ticks), "time")
    page = ET.fromstring(plots.columns_over_time({0: 1}, axis, "x"))
    marks = [one for one in page.iter("text") if one.get("class") in {"start", "mid", "end"}]
    share = {"start": 0.0, "mid": 0.5, "end": 1.0}
    width = [plots.CHARACTER * len(one.text) for one in marks]
    begins = [float(one.get("x")) - share[one.get("class")] * wide for one, wide in zip(marks, width, strict=True)]
    for at in range(1, len(marks)):
        assert begins[at] >= begins[at - 1] + width[at - 1]


def test_labels_left_of_a_plot_have_room_and_long_names_in_the_table_may_break():
    assert plots.LABEL * plots.CHARACTER <= plots.LEFT
    page = as_html(report(document([launch("n" * 300, STRIDED)])))
    assert "b{overflow-wrap:anywhere}" in page


def test_nothing_to_change_is_not_said_of_gpu_kernels_with_too_few_requests_to_be_judged():
    few = slot(global_load=(99, 3168, 3168, 12672), worst_global=(32, 4, 64))
    told = report(document([launch("few", few), launch("plain", PLAIN)]))
    sentence = "no GPU kernel with at least 100 requests of a kind is beyond a threshold (1 with fewer is: too few to"
    assert f"nothing to change: {sentence}" in " ".join(as_text(told).split())
    assert "? coalescing: beyond the threshold, but with too few requests to be judged" in as_text(told)
    page = "".join(tree(as_html(told)).itertext())
    assert sentence[1:] in page
    assert "coalescing: beyond the threshold, but" in page
    plain = report(document([launch("plain", PLAIN)]))
    assert "nothing to change: no GPU kernel is beyond a threshold\n" in as_text(plain)
    assert "too few" not in as_text(plain)
    assert "too few" not in as_html(plain)


def test_where_no_pattern_fits_the_names_that_there_were_are_told():
    none = report(document([], seen=3, skipped={"name": 3}, refused=["_Z4normPf", "add"]))
    assert "there were add, norm" in as_text(none)
    assert "there were add, norm" in as_html(none)
    some = report(document([launch("plain", PLAIN)], refused=["add"]))
    assert "there were" not in as_text(some)


def test_a_page_without_launches_claims_nothing_about_memory():
    page = "".join(tree(as_html(report(document([])))).itertext())
    assert "No launch was analysed." in page
    assert "Hotness" not in page
    assert "global memory" not in page


def test_a_heat_map_of_equal_numbers_has_one_shade_in_its_legend():
    axis = plots.Axis(4, [(0, "0")], "time")
    same = plots.heat_map([plots.HeatRow("a", "a", {0: 12_800, 2: 12_800})], axis, "accesses")
    assert same.count('height="14"') == 1
    several = plots.heat_map([plots.HeatRow("a", "a", {0: 12_800, 2: 1})], axis, "accesses")
    assert several.count('height="14"') == len(plots.SHADES)
