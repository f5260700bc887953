"""OTLP trace requests to columns: each span is checked by itself, each distinct attribute is decoded once."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from pasta_otel import semconv
from pasta_otel.errors import InputError
from pasta_otel.exporters.receiver import wire
from pasta_otel.exporters.receiver.batch import Group, ResourceInfo, SpanBatch

CACHE_ENTRIES = 100_000  # of each memo; about 30 MB with typical attributes
NO_PARENT = bytes(8)
_NO_TRACE = bytes(16)
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
REPLACEMENT = "\ufffd"
_NOT_FINITE = {"inf": "Infinity", "-inf": "-Infinity"}


class Memo(dict[bytes, Any]):
    """Decode each distinct value once; emptied when full, because values may be unbounded."""

    def __init__(self, decode: Callable[[bytes], Any], entries: int = CACHE_ENTRIES) -> None:
        super().__init__()
        self._decode, self._entries = decode, entries

    def __missing__(self, raw: bytes) -> Any:
        """Decode, keep and return."""
        if len(self) >= self._entries:
            self.clear()
        value = self[raw] = self._decode(raw)
        return value


@dataclass(slots=True)
class Decoded:
    """What became of one request.

    Attributes:
        received: Spans in the request.
        rejected: Spans refused, by reason.
        batch: The rest; may be empty.
        message: Why spans were refused, for the client; empty when none were.
    """

    received: int
    batch: SpanBatch
    rejected: Counter[str] = field(default_factory=Counter)
    message: str = ""


def any_value(value: Any) -> Any:
    """Return an AnyValue (strings as bytes) as a JSON-compatible value."""
    which = value.WhichOneof("value")
    if which is None:
        return None
    inner = getattr(value, which)
    convert = _CONVERT.get(which)
    return convert(inner) if convert else inner


def attribute_dict(pairs: Iterable[Any]) -> dict[str, Any]:
    """Return KeyValues (strings as bytes) as a dict."""
    return {pair.key.decode("utf-8", "replace"): any_value(pair.value) for pair in pairs}


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "string_value": lambda raw: raw.decode("utf-8", "replace"),
    "bytes_value": lambda raw: b64encode(raw).decode("ascii"),
    "array_value": lambda array: [any_value(item) for item in array.values],
    "kvlist_value": lambda pairs: attribute_dict(pairs.values),
    # JSON has no NaN; OTLP/JSON writes these three as text
    "double_value": lambda number: number if math.isfinite(number) else _NOT_FINITE.get(str(number), "NaN"),
}


class TraceDecoder:
    """Turn request bodies into batches; keeps memos, so one decoder serves one thread."""

    def __init__(self) -> None:
        lenient = wire.lenient()
        self._request = wire.lazy()(wire.TRACE_REQUEST)
        self._key_value, self._event, self._link = (lenient(name) for name in (wire.KEY_VALUE, wire.EVENT, wire.LINK))
        self._status_class, self._resource_class = lenient(wire.STATUS), lenient(wire.RESOURCE)
        self._scope_class = lenient(wire.SCOPE)
        self._fragments = Memo(self._decode_attribute)
        self._text = Memo(lambda raw: raw.decode("utf-8", "replace"))
        self._status = Memo(self._decode_status)
        self._resources = Memo(self._decode_resource, 10_000)
        self._scopes = Memo(lambda raw: self._scope_class.FromString(raw).name.decode("utf-8", "replace"), 10_000)

    def decode(self, body: bytes, arrived_unix_nano: int) -> Decoded:
        """Decode a protobuf request.

        Raises:
            InputError: The body, or a named part of it, is not well-formed protobuf.
        """
        try:
            request = self._request.FromString(body)
        except DecodeError as error:
            raise InputError(f"not a well-formed protobuf {wire.TRACE_REQUEST} ({error})", field="body") from error
        result = Decoded(0, SpanBatch(body, arrived_unix_nano))
        altered = False
        for number, resource_spans in enumerate(request.resource_spans):
            altered |= self._resource_spans(f"resourceSpans[{number}]", resource_spans, result)
        if altered:
            result.batch.body = request.SerializeToString()
        if self._has_replacement(result.batch):
            result.batch.body = wire.sanitize(result.batch.body, wire.TRACE_REQUEST)
        return result

    def _resource_spans(self, place: str, resource_spans: Any, result: Decoded) -> bool:
        resource = _at(f"{place}.resource", self._resources, resource_spans.resource)
        altered = False
        for number, scope_spans in enumerate(resource_spans.scope_spans):
            here = f"{place}.scopeSpans[{number}]"
            scope = _at(f"{here}.scope", self._scopes, scope_spans.scope)
            spans = scope_spans.spans
            result.received += len(spans)
            bad = _bad_ids(spans)
            if bad:
                altered = True
                _reject(here, bad, result)
                for index in reversed(bad):
                    del spans[index]
            self._append(here, spans, result.batch)
            result.batch.groups.append(Group(resource, scope, len(spans)))
        return altered

    def _append(self, place: str, spans: Any, batch: SpanBatch) -> None:
        """Add the columns of one scope's spans: one list comprehension a field, the cheapest way over upb objects."""
        text, fragments, status = self._text, self._fragments, self._status
        try:
            batch.attributes += ["{" + ",".join([fragments[raw] for raw in span.attributes]) + "}" for span in spans]
            states = [status[span.status] for span in spans]
            batch.events += [self._list(self._event_record, span.events) for span in spans]
            batch.links += [self._list(self._link_record, span.links) for span in spans]
        except DecodeError as error:
            raise InputError(f"not well-formed protobuf ({error})", field=f"{place}.spans{self._bad(spans)}") from error
        batch.status += [code for code, _ in states]
        batch.status_message += [message for _, message in states]
        batch.trace_id += [span.trace_id for span in spans]
        batch.span_id += [span.span_id for span in spans]
        batch.parent_span_id += [span.parent_span_id or NO_PARENT for span in spans]
        batch.name += [text[span.name] for span in spans]
        batch.kind += [span.kind or 1 for span in spans]
        batch.start_time_unix_nano += [span.start_time_unix_nano for span in spans]
        batch.end_time_unix_nano += [span.end_time_unix_nano for span in spans]
        batch.trace_state += [text[span.trace_state] for span in spans]

    def _bad(self, spans: Any) -> str:
        """Return index and field of the span that cannot be decoded, for the error's text."""
        for index, span in enumerate(spans):
            parts = (
                ("attributes", self._key_value, span.attributes),
                ("events", self._event, span.events),
                ("links", self._link, span.links),
                ("status", self._status_class, [span.status]),
            )
            for name, message, values in parts:
                try:
                    for raw in values:
                        message.FromString(raw)
                except DecodeError:
                    return f"[{index}].{name}"
        return ""

    def _has_replacement(self, batch: SpanBatch) -> bool:
        columns = (batch.attributes, batch.name, batch.status_message, batch.trace_state)
        if any(REPLACEMENT in text for column in columns for text in column):
            return True
        if any(text is not None and REPLACEMENT in text for column in (batch.events, batch.links) for text in column):
            return True
        return any(
            REPLACEMENT in group.scope or REPLACEMENT in _ENCODE(group.resource.attributes) for group in batch.groups
        )

    def _decode_attribute(self, raw: bytes) -> str:
        pair = self._key_value.FromString(raw)
        return f"{_ENCODE(pair.key.decode('utf-8', 'replace'))}:{_ENCODE(any_value(pair.value))}"

    def _decode_status(self, raw: bytes) -> tuple[int, str]:
        status = self._status_class.FromString(raw)
        return status.code, status.message.decode("utf-8", "replace")

    def _decode_resource(self, raw: bytes) -> ResourceInfo:
        attributes = attribute_dict(self._resource_class.FromString(raw).attributes)
        return ResourceInfo(raw, str(attributes.get(semconv.SERVICE_NAME) or "unknown_service"), attributes)

    @staticmethod
    def _list(record: Callable[[bytes], dict[str, Any]], values: Any) -> str | None:
        return _ENCODE([record(raw) for raw in values]) if values else None

    def _event_record(self, raw: bytes) -> dict[str, Any]:
        event = self._event.FromString(raw)
        return {
            "name": event.name.decode("utf-8", "replace"),
            "time_unix_nano": event.time_unix_nano,
            "attributes": attribute_dict(event.attributes),
        }

    def _link_record(self, raw: bytes) -> dict[str, Any]:
        link = self._link.FromString(raw)
        return {
            "trace_id": link.trace_id.hex(),
            "span_id": link.span_id.hex(),
            "attributes": attribute_dict(link.attributes),
        }


def _at(place: str, memo: Memo, raw: bytes) -> Any:
    try:
        return memo[raw]
    except DecodeError as error:
        raise InputError(f"not well-formed protobuf ({error})", field=place) from error


def _bad_ids(spans: Any) -> dict[int, str]:
    """Return the reason for each span whose ids the protocol does not allow; an empty or zero parent is a root."""
    bad: dict[int, str] = {}
    for index, span in enumerate(spans):
        trace_id, span_id, parent = span.trace_id, span.span_id, span.parent_span_id
        if len(trace_id) != 16 or trace_id == _NO_TRACE:
            bad[index] = "invalid_trace_id"
        elif len(span_id) != 8 or span_id == NO_PARENT:
            bad[index] = "invalid_span_id"
        elif parent and len(parent) != 8:
            bad[index] = "invalid_parent_span_id"
    return bad


def _reject(place: str, bad: dict[int, str], result: Decoded) -> None:
    result.rejected.update(bad.values())
    if not result.message:
        index, reason = next(iter(bad.items()))
        result.message = f"{place}.spans[{index}]: {reason.replace('_', ' ')}"
