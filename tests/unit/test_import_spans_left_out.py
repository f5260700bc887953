"""Bad spans of OTLP and Jaeger files are left out, counted and named, whatever becomes of the rest; none is silent."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.cli import main
from pasta_otel.errors import InputError
from pasta_otel.exporters.receiver import wire
from pasta_otel.exporters.receiver.decode import TraceDecoder
from pasta_otel.exporters.receiver.otlpjson import to_protobuf
from pasta_otel.gpu.imports.jaeger import read_jaeger
from pasta_otel.gpu.imports.otlp import problem_of, read_otlp
from pasta_otel.gpu.imports.traces import TraceCollector

TRACE, SPAN, START, END = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1_700_000_000_000_000_000, 10**6
BAD = {
    "traceId": [None, "", "xyz", "0" * 32, TRACE[:-1], 12, ["a"]],
    "spanId": [None, "", "xyz", "0" * 16, SPAN + "0", 7, {}],
    "parentSpanId": ["xyz", SPAN[:-2], 5, 0, [], {}],
    "startTimeUnixNano": ["", "soon", -1, "9" * 23, 1 << 64, True, 1.5, [1]],
    "endTimeUnixNano": ["later", "-3", {"a": 1}],
}
FAULTS = [(key, value) for key, values in BAD.items() for value in values]


def span(**fields):
    whole = {"traceId": TRACE, "spanId": SPAN, "name": "a", "startTimeUnixNano": str(START),
             "endTimeUnixNano": str(START + END), **fields}  # fmt: skip
    return {key: value for key, value in whole.items() if value is not None}


def otlp(*spans, service="svc"):
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]}


def written(folder, document):
    (folder / "t.json").write_text(json.dumps(document))
    return folder / "t.json"


def report(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["import", *map(str, arguments)])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def collected(path, reader=read_otlp):
    left_out, collector = [], TraceCollector()
    for request in reader(path, None, left_out):
        collector.add(request)
    return collector.document(), left_out


@pytest.mark.parametrize(("key", "value"), FAULTS)
def test_a_span_with_a_bad_id_or_time_is_left_out_by_its_place_and_its_neighbours_stay(tmp_path, key, value):
    path = written(tmp_path, otlp(span(), span(**{key: value}), span(spanId="00000000000000ff")))
    document, (error,) = collected(path)
    assert error.field == f"resourceSpans[0].scopeSpans[0].spans[1].{key}"
    assert document["spans"] == sum(trace["spans"] for trace in document["traces"]) == 2
    with pytest.raises(InputError) as caught:
        list(read_otlp(path))
    assert (caught.value.field, caught.value.line) == (error.field, 1)


ODD = st.sampled_from([None, "", "xyz", "0" * 16, "0" * 32, TRACE, SPAN, SPAN.upper(), "f" * 31, 0, 5, -5, "0", "17",
                       "1 7", 1 << 64, (1 << 64) - 1, 2.0, 2.5, True, [], {}, START, str(START)])  # fmt: skip


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(BAD, ODD)))
@settings(max_examples=1000, deadline=None)
def test_what_is_left_out_is_what_receivers_refuse(fields):
    """Only a span without a time differs: a receiver keeps it, and the report counts it apart."""
    converted = to_protobuf(json.dumps(otlp(span(**fields))).encode(), wire.TRACE_REQUEST)
    decoded = TraceDecoder().decode(converted.body, time.time_ns())
    assert (problem_of(span(**fields)) is None) == (len(decoded.batch) == 1)


def test_every_span_is_in_a_trace_or_counted(tmp_path, capsys):
    """The file that a user lost three spans of: two ids that are none, and a time of 77 bits."""
    document = otlp(
        span(spanId="xyz"), span(spanId="0" * 16), span(startTimeUnixNano="9" * 23), span(), span(spanId="a" * 16)
    )
    path = written(tmp_path, document)
    code, out, _ = report(capsys, path)
    found = json.loads(out)
    assert code == 0
    assert found["left_out"][0]["spans"] == 3
    assert found["left_out"][0]["field"] == "resourceSpans[0].scopeSpans[0].spans[0].spanId"
    assert found["traces"]["spans"] == sum(trace["spans"] for trace in found["traces"]["traces"]) == 2
    code, out, _ = report(capsys, path, "--to", "store", "--store", tmp_path / "s.duckdb")
    assert code == 0
    assert "3 spans left out; the first: resourceSpans[0].scopeSpans[0].spans[0].spanId: " in out
    assert "2 of 2 spans imported" in out
    code, _, err = report(capsys, path, "--strict")
    assert code == 2
    assert f"{path}:1: resourceSpans[0].scopeSpans[0].spans[0].spanId" in err


def test_spans_without_a_time_and_those_beyond_the_limit_are_counted_apart():
    collector = TraceCollector(most_traces=2)
    spans = [span(traceId=f"{number:032x}") for number in (1, 2, 3, 3)] + [span(startTimeUnixNano=None)]
    collector.add(json.dumps(otlp(*spans)).encode())
    found = collector.document()
    assert (found["spans"], found["spans_without_time"], found["spans_beyond_limit"]) == (5, 1, 2)
    assert len(found["traces"]) == 2


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"resourceSpans": [5]}, "resourceSpans[0]"),
        ({"resourceSpans": {"a": 1}}, "resourceSpans"),
        ({"resourceSpans": [{"scopeSpans": ["x"]}]}, "resourceSpans[0].scopeSpans[0]"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": {"a": 1}}]}]}, "resourceSpans[0].scopeSpans[0].spans"),
        (otlp("a span"), "resourceSpans[0].scopeSpans[0].spans[0]"),
    ],
)
def test_what_is_no_object_is_named_and_not_passed_over(tmp_path, document, field):
    found, (error,) = collected(written(tmp_path, document))
    assert error.field == field
    assert found["spans"] == 0


def test_names_as_the_protocol_buffers_have_them_are_read_too(tmp_path):
    snake = {"trace_id": TRACE, "span_id": SPAN, "name": "a", "start_time_unix_nano": START,
             "end_time_unix_nano": START + END}  # fmt: skip
    resource = {"attributes": [{"key": "service.name", "value": {"string_value": "svc"}}]}
    path = written(tmp_path, {"resource_spans": [{"resource": resource, "scope_spans": [{"spans": [snake]}]}]})
    found, left_out = collected(path)
    assert not left_out
    assert found["traces"][0]["critical_path"] == [{"name": "svc: a", "own_ns": END}]


@pytest.mark.parametrize(
    "resource", [None, 5, [], {}, {"attributes": "x"}, {"attributes": [5, {"key": "service.name", "value": None}]}]
)
def test_a_resource_of_a_wrong_form_is_a_service_without_a_name(tmp_path, resource):
    document = otlp(span())
    document["resourceSpans"][0]["resource"] = resource
    found, _ = collected(written(tmp_path, document))
    assert found["traces"][0]["critical_path"] == [{"name": ": a", "own_ns": END}]


def jaeger(*spans):
    return {"data": [{"traceID": "a1", "processes": {"p": {"serviceName": "svc"}}, "spans": list(spans)}]}


@pytest.mark.parametrize(("key", "value"), [("spanID", "0000"), ("spanID", ""), ("traceID", "00")])
def test_a_jaeger_id_of_zeros_is_none_and_counted(tmp_path, key, value):
    good = {"traceID": "a1", "spanID": "b1", "processID": "p", "operationName": "a", "startTime": 1, "duration": 2}
    found, (error,) = collected(written(tmp_path, jaeger(good, {**good, key: value})), read_jaeger)
    assert error.field == f"data[0].spans[1].{key}"
    assert found["spans"] == 1


@pytest.mark.parametrize("parent", [{"parentSpanID": "0"}, {"references": [{"refType": "CHILD_OF", "spanID": "0"}]}])
def test_a_jaeger_parent_of_zeros_is_no_parent(tmp_path, parent):
    root = {"traceID": "a1", "spanID": "b1", "processID": "p", "operationName": "a", "startTime": 1, "duration": 2}
    found, left_out = collected(written(tmp_path, jaeger({**root, **parent})), read_jaeger)
    assert not left_out
    assert found["traces"][0]["critical_path"] == [{"name": "svc: a", "own_ns": 2000}]
