"""The columnar encoder says what the SDK's encoder says, for whatever is in the columns."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as sdk_encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from pasta_otel.clock import ClockOffset
from pasta_otel.exporters.otlp import wire
from pasta_otel.exporters.otlp.encoder import Scope, encode_spans, slice_columns, string_column
from pasta_otel.exporters.otlp.rows import columns_from_rows
from pasta_otel.model import OpSpan, SpanColumns, SpanSite, StringColumn

KINDS = {1: SpanKind.INTERNAL, 2: SpanKind.SERVER, 3: SpanKind.CLIENT, 4: SpanKind.PRODUCER, 5: SpanKind.CONSUMER}
INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, 127, 128, 16383, 16384, 2**56, 2**63 - 1, -1])
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
KEY = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
CONSTANT = st.one_of(
    TEXT, INT64, st.booleans(), st.floats(allow_nan=False), st.lists(INT64, max_size=3), st.lists(TEXT, max_size=3)
)
SITE = st.builds(
    SpanSite,
    name=st.one_of(TEXT, st.just("x" * 20000)),
    kind=st.sampled_from(list(KINDS)),
    attributes=st.dictionaries(KEY, CONSTANT, max_size=3).map(
        lambda d: tuple((f"site.{k}", tuple(v) if isinstance(v, list) else v) for k, v in d.items())
    ),
)


@st.composite
def batches(draw):
    count = draw(st.integers(0, 12))
    sites = draw(st.lists(SITE, min_size=1, max_size=4))
    rows = st.lists

    def column(element):
        return draw(rows(element, min_size=count, max_size=count))

    ids = st.integers(1, 2**128 - 1)
    span_ids = st.integers(1, 2**64 - 1)
    attributes = {}
    for key in draw(st.lists(KEY, max_size=4, unique=True)):
        kind = draw(st.sampled_from(["int", "float", "bool", "str"]))
        element = {
            "int": INT64,
            "float": st.floats(allow_nan=False),
            "bool": st.booleans(),
            "str": st.one_of(st.none(), TEXT),
        }[kind]
        attributes[key] = (kind, column(element))
    return {
        "trace": column(ids), "span": column(span_ids), "parent": column(st.one_of(st.just(0), span_ids)),
        "start": column(st.integers(0, 2**63)), "end": column(st.integers(0, 2**63)),
        "site": column(st.integers(0, len(sites) - 1)), "sites": sites, "attributes": attributes,
        "error": draw(st.one_of(st.none(), rows(st.booleans(), min_size=count, max_size=count))),
        "message": draw(st.one_of(st.none(), rows(st.one_of(st.none(), TEXT), min_size=count, max_size=count))),
    }  # fmt: skip


DTYPES = {"int": np.int64, "float": np.float64, "bool": np.bool_}


def columns_of(batch):
    def ids(values, width):
        return np.frombuffer(b"".join(v.to_bytes(width, "big") for v in values), np.uint8).reshape(-1, width)

    return SpanColumns(
        trace_id=ids(batch["trace"], 16),
        span_id=ids(batch["span"], 8),
        parent_span_id=ids(batch["parent"], 8),
        start_time_unix_nano=np.array(batch["start"], np.uint64),
        end_time_unix_nano=np.array(batch["end"], np.uint64),
        site=np.array(batch["site"], np.int32),
        sites=batch["sites"],
        attributes={
            k: v if kind == "str" else np.array(v, DTYPES[kind]) for k, (kind, v) in batch["attributes"].items()
        },
        error=None if batch["error"] is None else np.array(batch["error"], np.bool_),
        status_message=batch["message"],
    )


def sdk_span(batch, row, resource, scope):
    site = batch["sites"][batch["site"][row]]
    varying = {key: values[row] for key, (_, values) in batch["attributes"].items() if values[row] is not None}
    trace, parent = batch["trace"][row], batch["parent"][row]
    failed = batch["error"] is not None and batch["error"][row]
    message = batch["message"][row] if failed and batch["message"] else None
    return ReadableSpan(
        name=site.name,
        context=SpanContext(trace, batch["span"][row], False, TraceFlags(1)),
        parent=SpanContext(trace, parent, False, TraceFlags(1)) if parent else None,
        resource=resource,
        attributes={**dict(site.attributes), **varying},
        kind=KINDS[site.kind],
        status=Status(StatusCode.ERROR, message) if failed else Status(),
        start_time=batch["start"][row],
        end_time=batch["end"][row],
        instrumentation_scope=scope,
    )


def normal(request):
    """Fill what protobuf leaves open: an empty status message object equals none."""
    spans = [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]
    for span in spans:
        if not span.status.ByteSize():
            span.ClearField("status")
    return request


@settings(max_examples=150, deadline=None)
@given(batches())
def test_decoded_batches_equal_those_of_the_sdk_encoder(batch):
    resource = Resource({"service.name": "svc", "process.pid": 7})
    scope = InstrumentationScope("pasta_otel", "1.2")
    ours = ExportTraceServiceRequest.FromString(
        encode_spans(columns_of(batch), {"service.name": "svc", "process.pid": 7}, Scope("pasta_otel", "1.2"))
    )
    count = len(batch["trace"])
    theirs = sdk_encode_spans([sdk_span(batch, row, resource, scope) for row in range(count)])
    if count == 0:
        assert [list(scope.spans) for group in ours.resource_spans for scope in group.scope_spans] == [[]]
    else:
        assert normal(ours) == normal(theirs)


@given(batches(), st.integers(0, 12), st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_a_slice_encodes_the_rows_of_the_slice(batch, start, stop):
    columns = columns_of(batch)
    whole = ExportTraceServiceRequest.FromString(encode_spans(columns, b"", b""))
    part = ExportTraceServiceRequest.FromString(encode_spans(slice_columns(columns, start, stop), b"", b""))
    expected = list(whole.resource_spans[0].scope_spans[0].spans)[start:stop]
    assert list(part.resource_spans[0].scope_spans[0].spans) == expected


@given(st.lists(st.one_of(st.none(), TEXT)))
def test_string_columns_keep_every_value_and_absence(values):
    codes, distinct = string_column(values)
    assert [None if code < 0 else distinct[code] for code in codes] == values
    assert len(set(distinct)) == len(distinct)


@given(INT64)
def test_varints_are_protobufs(number):
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    assert wire.any_value(number) == AnyValue(int_value=number).SerializeToString() or number == 0
    assert AnyValue.FromString(wire.any_value(number)).int_value == number


def one_span(**changes):
    batch = {"trace": [1], "span": [2], "parent": [0], "start": [3], "end": [4], "site": [0], "sites": [SpanSite("s")],
             "attributes": {}, "error": None, "message": None}  # fmt: skip
    return columns_of(batch | changes)


def test_ready_string_columns_are_taken_with_minus_one_as_absent():
    columns = one_span()
    codes = StringColumn(np.array([-1], np.int32), ["never"])
    columns = SpanColumns(**{f: getattr(columns, f) for f in columns.__slots__} | {"attributes": {"k": codes}})
    span = (
        ExportTraceServiceRequest.FromString(encode_spans(columns, b"", b"")).resource_spans[0].scope_spans[0].spans[0]
    )
    assert list(span.attributes) == []


def test_a_column_of_the_wrong_length_is_named():
    with pytest.raises(ValueError, match="'cells' has 2 rows, the batch has 1"):
        encode_spans(one_span(attributes={"cells": ("int", [1, 2])}), b"", b"")


def test_a_column_without_an_otlp_type_is_named():
    columns = one_span()
    columns = SpanColumns(**{f: getattr(columns, f) for f in columns.__slots__} | {"attributes": {"z": np.array([1j])}})
    with pytest.raises(TypeError, match="'z'"):
        encode_spans(columns, b"", b"")


def test_lone_surrogates_in_columns_become_replacement_characters():
    body = encode_spans(one_span(attributes={"comm": ("str", ["comm\udcff"])}), b"", b"")
    span = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans[0]
    assert span.attributes[0].value.string_value == "comm\N{REPLACEMENT CHARACTER}"


def test_rows_become_columns_with_one_offset_for_the_batch():
    site, other = SpanSite("a"), SpanSite("b")
    rows = [OpSpan(2**127, 5, 0, 10, 20, 99, site), OpSpan(1, 6, 5, 11, 19, 98, other, "ValueError")]
    columns = columns_from_rows(rows, ClockOffset(1000, 0, 0))
    assert columns.start_time_unix_nano.tolist() == [1010, 1011]
    assert columns.end_time_unix_nano.tolist() == [1020, 1019]
    assert [columns.sites[code].name for code in columns.site] == ["a", "b"]
    assert columns.error.tolist() == [False, True]
    span = (
        ExportTraceServiceRequest.FromString(encode_spans(columns, b"", b"")).resource_spans[0].scope_spans[0].spans[1]
    )
    assert (span.status.code, span.status.message, span.parent_span_id) == (2, "ValueError", (5).to_bytes(8, "big"))
