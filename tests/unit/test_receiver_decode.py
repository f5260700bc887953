"""What the receiver makes of request bodies, without a network."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from pasta_otel.errors import InputError
from pasta_otel.exporters.ledger import POINTS, Ledger
from pasta_otel.exporters.receiver import Intake, Refused, TraceDecoder
from pasta_otel.exporters.receiver.compression import decompress
from pasta_otel.exporters.receiver.points import decode_points, histogram_quantile
from tests.support import CASES, case
from tests.telemetry import KeepingSink, request, span, spans_of


def intake() -> tuple[Intake, KeepingSink, Ledger]:
    ledger = Ledger(["keep"])
    sink = KeepingSink(ledger)
    return Intake([sink], ledger), sink, ledger


def status_after(take, body: bytes, **options) -> int:
    """Return the HTTP status of a request; any other exception fails the test."""
    try:
        take(body, **options)
    except Refused as refused:
        return refused.http_status
    return 200


@pytest.mark.case("O03")
def test_a_bad_id_rejects_its_span_and_no_other():
    take, sink, ledger = intake()
    reply = take.traces((CASES / "O03" / "batch.json").read_bytes(), is_json=True)
    expected = case("O03", "expected.json")
    assert sink.names == expected["accepted"]
    assert [parent for batch in sink.batches for parent in batch.parent_span_id] == [bytes(8)] * 3
    assert reply.json()["partialSuccess"]["rejectedSpans"] == str(expected["rejected"])
    assert "spans[1]: invalid trace id" in reply.json()["partialSuccess"]["errorMessage"]
    partial = ExportTraceServiceResponse.FromString(reply.protobuf()).partial_success
    assert partial.rejected_spans == expected["rejected"]
    assert partial.error_message
    snapshot = ledger.snapshot()
    assert (snapshot.received, dict(snapshot.rejected)) == (7, {"invalid_trace_id": 2, "invalid_span_id": 2})
    assert [found.name for found in spans_of([sink.batches[0].body])] == expected["accepted"]


def test_a_good_batch_keeps_its_bytes_and_has_an_empty_answer():
    take, sink, _ = intake()
    body = request(span("a"), span("b", identifier=2)).SerializeToString()
    assert take.traces(body).protobuf() == b""
    assert sink.batches[0].body is body


def test_a_span_name_of_invalid_utf8_is_repaired_not_rejected():
    take, sink, _ = intake()
    good = span("good", identifier=2, attributes={"note": "CUT_IN_HALF"})
    body = request(span("PLACEHOLDER"), good).SerializeToString()
    body = body.replace(b"PLACEHOLDER", b"\xe4\xbd\xff abc1234").replace(
        b"CUT_IN_HALF", b"12345678\xe4\xbd\xa0"[:-1] + b"!"
    )
    assert take.traces(body).rejected == 0
    assert sink.names[0].endswith("\ufffd abc1234")
    assert sink.names[1] == "good"
    forwarded = spans_of([sink.batches[0].body])  # the strict classes read it
    assert forwarded[0].name == sink.names[0]
    assert forwarded[1].attributes[0].value.string_value == "12345678\ufffd!"
    assert json.loads(sink.batches[0].attributes[1]) == {"note": "12345678\ufffd!"}


def test_invalid_utf8_in_a_resource_and_an_event_is_repaired_for_upstream_too():
    take, sink, _ = intake()
    event = {"name": "EVENTNAME!", "time_unix_nano": 1}
    body = request(span(events=[event]), service="SERVICE!!").SerializeToString()
    body = body.replace(b"SERVICE!!", b"\xc3\x28SERVICE").replace(b"EVENTNAME!", b"\x80EVENTNAME")
    assert take.traces(body).rejected == 0
    assert sink.batches[0].groups[0].resource.service == "\ufffd(SERVICE"
    assert spans_of([sink.batches[0].body])[0].events[0].name == "\ufffdEVENTNAME"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (request(span()).SerializeToString()[:-3], "body: not a well-formed protobuf"),
        (b"\x0a\xff\xff\xff\xff\x0f", "body: not a well-formed protobuf"),  # a length of 4 GiB
        (b"\xff" * 40, "body: not a well-formed protobuf"),
        (b"not protobuf at all", "body: not a well-formed protobuf"),
        # attributes = bytes that are no KeyValue: field 9, length 2, then a key that claims 100 bytes
        (
            bytes.fromhex("0a21121f121d0a10") + bytes(15) + b"\x01" + bytes.fromhex("1208") + b"\x01" * 8,
            "body",
        ),
    ],
)
def test_a_malformed_body_is_one_error_that_names_the_place(body, place):
    take, sink, ledger = intake()
    with pytest.raises(Refused) as refused:
        take.traces(body)
    assert refused.value.http_status == 400
    assert str(refused.value).startswith(place)
    assert not sink.batches
    assert ledger.snapshot().received == 0


def test_a_malformed_attribute_is_named_by_its_span():
    message = request(span("a"), span("b", identifier=2, attributes={"key": "0123456789"}))
    raw = message.resource_spans[0].scope_spans[0].spans[1].attributes[0].SerializeToString()
    body = message.SerializeToString().replace(raw, b"\x0a\x7f" + raw[2:])  # the key now claims 127 bytes
    with pytest.raises(InputError) as error:
        TraceDecoder().decode(body, 0)
    assert error.value.field == "resourceSpans[0].scopeSpans[0].spans[1].attributes"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"startTimeUnixNano": "soon"}, "spans[1].startTimeUnixNano: expected an integer"),
        ({"startTimeUnixNano": -1}, "spans[1].startTimeUnixNano"),
        ({"kind": "SERVER"}, "spans[1].kind: expected an integer"),
        ({"name": 7}, "spans[1].name: expected text"),
        ({"attributes": {}}, "spans[1].attributes: expected an array"),
        ({"attributes": [{"key": "a", "value": {"boolValue": 1}}]}, "spans[1].attributes[0].value.boolValue"),
        ({"status": []}, "spans[1].status: expected an object"),
    ],
)
def test_a_bad_json_field_costs_its_span_and_is_named(change, place):
    take, sink, ledger = intake()
    document = json.loads((CASES / "O04" / "trace.json").read_text())
    document["resourceSpans"][0]["scopeSpans"][0]["spans"][1].update(change)
    reply = take.traces(json.dumps(document).encode(), is_json=True)
    assert reply.rejected == 1
    assert place in reply.message
    assert len(sink.names) == 3
    assert dict(ledger.snapshot().rejected) == {"invalid_field": 1}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"{", "body: not valid JSON"),
        (b"[]", "body: expected an object"),
        (b'{"resourceSpans": 3}', "resourceSpans: expected an array"),
        (
            b'{"resourceSpans": [{"resource": {"attributes": [{"key": 1}]}}]}',
            "resourceSpans[0].resource.attributes[0].key",
        ),
        (b'{"resourceSpans": ' + b"[" * 100_000, "body: not valid JSON"),
        (b"\xff\xfe\x00", "body: not valid JSON"),
    ],
)
def test_bad_json_outside_a_span_is_one_error_that_names_the_field(body, place):
    take, _, _ = intake()
    with pytest.raises(Refused) as refused:
        take.traces(body, is_json=True)
    assert str(refused.value).startswith(place)
    assert len(str(refused.value)) < 300


def test_json_nested_without_end_rejects_the_span():
    take, _, _ = intake()
    value = '{"arrayValue":{"values":[' * 200 + '{"intValue":1}' + "]}}" * 200
    before, after = '{"resourceSpans":[{"scopeSpans":[{"spans":[{"attributes":[{"key":"a","value":', "}]}]}]}]}"
    body = before + value + after
    assert "nested deeper" in take.traces(body.encode(), is_json=True).message


def test_a_batch_that_finds_no_room_is_refused_and_not_counted():
    ledger = Ledger(["keep"])
    take = Intake([KeepingSink(ledger, room=False)], ledger)
    with pytest.raises(Refused) as refused:
        take.traces(request(span()).SerializeToString())
    assert (refused.value.http_status, refused.value.grpc_code, refused.value.retry_after_s) == (503, 14, 1)
    assert ledger.snapshot().received == 0


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
VALUE = st.recursive(
    st.one_of(
        TEXT.map(lambda text: {"stringValue": text}),
        st.booleans().map(lambda flag: {"boolValue": flag}),
        st.integers(-(2**63), 2**63 - 1).map(lambda number: {"intValue": str(number)}),
        st.floats().map(
            lambda number: {
                "doubleValue": number
                if abs(number) < 1e308
                else str(number).replace("inf", "Infinity").replace("nan", "NaN")
            }
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda values: {"arrayValue": {"values": values}}),
        st.lists(st.tuples(TEXT, inner), max_size=3).map(
            lambda pairs: {"kvlistValue": {"values": [{"key": key, "value": value} for key, value in pairs]}}
        ),
    ),
    max_leaves=5,
)
ATTRIBUTES = st.lists(st.tuples(TEXT, VALUE).map(lambda pair: {"key": pair[0], "value": pair[1]}), max_size=4)
JSON_SPAN = st.fixed_dictionaries(
    {
        "traceId": st.one_of(st.binary(min_size=16, max_size=16), st.binary(max_size=18)).map(bytes.hex),
        "spanId": st.binary(min_size=8, max_size=8).map(bytes.hex),
        "parentSpanId": st.sampled_from(["", "00" * 8, "0102030405060708", "01"]),
        "name": TEXT,
        "kind": st.integers(0, 6),
        "startTimeUnixNano": st.integers(0, 2**64 - 1).map(str),
        "endTimeUnixNano": st.integers(0, 2**63).map(str),
        "attributes": ATTRIBUTES,
        "status": st.fixed_dictionaries({"code": st.integers(0, 2), "message": TEXT}),
        "events": st.lists(
            st.fixed_dictionaries({"name": TEXT, "timeUnixNano": st.just("5"), "attributes": ATTRIBUTES}), max_size=2
        ),
        "traceState": st.sampled_from(["", "ot=th:8", "a=b"]),
        "someFieldOfTheFuture": st.just({"x": 1}),
    }
)
COLUMNS = [
    "trace_id", "span_id", "parent_span_id", "name", "kind", "start_time_unix_nano", "end_time_unix_nano", "status",
    "status_message", "trace_state", "attributes", "events", "links",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON_SPAN, max_size=4), ATTRIBUTES)
def test_json_and_protobuf_decode_to_the_same_columns(spans, resource):
    from google.protobuf import json_format

    document = {
        "resourceSpans": [
            {"resource": {"attributes": resource}, "scopeSpans": [{"scope": {"name": "s"}, "spans": spans}]}
        ]
    }
    from_json, json_sink, json_ledger = intake()
    from_json.traces(json.dumps(document).encode(), is_json=True)
    # the independent way: google's own JSON reader, which wants base64 ids
    import base64

    for item in spans:
        for key in ("traceId", "spanId", "parentSpanId"):
            item[key] = base64.b64encode(bytes.fromhex(item[key])).decode()
    message = json_format.ParseDict(document, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    from_protobuf, protobuf_sink, protobuf_ledger = intake()
    from_protobuf.traces(message.SerializeToString())
    assert json_ledger.snapshot() == protobuf_ledger.snapshot()
    assert len(json_sink.batches) == len(protobuf_sink.batches)
    for mine, other in zip(json_sink.batches, protobuf_sink.batches, strict=True):
        assert [getattr(mine, name) for name in COLUMNS] == [getattr(other, name) for name in COLUMNS]
        assert [group.resource.service for group in mine.groups] == [group.resource.service for group in other.groups]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_decoder(body):
    take, _, ledger = intake()
    for is_json in (False, True):
        for signal in (take.traces, take.metrics):
            assert status_after(signal, body, is_json=is_json) in {200, 400}
    assert ledger.snapshot().balanced


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_no_changed_byte_crashes_the_decoder(position, value):
    body = bytearray(request(span("name", attributes={"a": "text", "b": 1.5}), service="svc").SerializeToString())
    body[position % len(body)] = value
    take, _, ledger = intake()
    assert status_after(take.traces, bytes(body)) in {200, 400}
    assert ledger.snapshot().balanced


@pytest.mark.case("O11")
def test_histogram_points_that_contradict_themselves_are_rejected_with_reasons():
    ledger = Ledger([], names=POINTS)
    take = Intake([], Ledger([]), point_ledger=ledger)
    reply = take.metrics((CASES / "O11" / "metrics.json").read_bytes(), is_json=True)
    expected = case("O11", "expected.json")
    assert reply.json()["partialSuccess"]["rejectedDataPoints"] == str(expected["rejected"])
    assert "dataPoints[1]: bucket length" in reply.message
    assert dict(ledger.snapshot().rejected) == {
        "bucket_length": 1,
        "count_mismatch": 1,
        "bound_not_finite": 1,
        "bounds_not_increasing": 1,
    }
    first = case("O11", "metrics.json")["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["histogram"][
        "dataPoints"
    ][0]
    counts = [int(count) for count in first["bucketCounts"]]
    assert histogram_quantile(0.5, counts, first["explicitBounds"]) == pytest.approx(expected["p50"])
    assert histogram_quantile(0.5, [], []) is None


def test_the_accepted_points_are_what_is_forwarded():
    from google.protobuf import json_format

    message = json_format.Parse((CASES / "O11" / "metrics.json").read_text(), ExportMetricsServiceRequest())
    decoded = decode_points(message.SerializeToString())
    kept = ExportMetricsServiceRequest.FromString(decoded.batch.body)
    points = kept.resource_metrics[0].scope_metrics[0].metrics[0].histogram.data_points
    assert [point.count for point in points] == [6, 5]
    assert (decoded.received, len(decoded.batch)) == (6, 2)


def test_compression_is_undone_within_a_bound():
    body = b"x" * 10_000
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": gzip.compress(body),
        "x-gzip": gzip.compress(body[:5000]) + gzip.compress(body[5000:]),
        "deflate": zlib.compress(body),
        "Deflate": raw.compress(body) + raw.flush(),
        "identity": body,
        "": body,
    }
    for encoding, data in packed.items():
        assert decompress(data, encoding, 10_000) == body
        if len(data) < len(body):
            with pytest.raises(Refused) as refused:
                decompress(data, encoding, 9_999)
            assert refused.value.http_status == 413


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (b"plain", "gzip", 400),
        # the time in a gzip header would be in the names of the tests, which all processes must give alike
        (gzip.compress(b"x" * 100, mtime=0)[:-5], "gzip", 400),
        (gzip.compress(b"x", mtime=0) + b"garbage", "gzip", 400),
        (b"", "gzip", 400),
        (zlib.compress(b"x" * 100)[:-5], "deflate", 400),
        (b"x", "br", 415),
    ],
)
def test_a_wrong_encoding_is_an_error_not_a_crash(data, encoding, status):
    with pytest.raises(Refused) as refused:
        decompress(data, encoding, 1000)
    assert refused.value.http_status == status
