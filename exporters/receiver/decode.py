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
CACHED_BYTES = 512  # a longer value is decoded each time: it hardly repeats, and memos must stay small
NO_PARENT = bytes(8)
_NO_TRACE = bytes(16)
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
REPLACEMENT = "\ufffd"
_NOT_FINITE = {"inf": "Infinity", "-inf": "-Infinity"}


class Memo(dict[bytes, Any]):
    """Decode each distinct value once; emptied when full, because values may be unbounded."""

    def __init__(
        self, decode: Callable[[bytes], Any], entries: int = CACHE_ENTRIES, longest: int = CACHED_BYTES
    ) -> None:
        super().__init__()
        self._decode, self._entries, self._longest = decode, entries, longest

    def __missing__(self, raw: bytes) -> Any:
        """Decode, keep if it is short, and return."""
        value = self._decode(raw)
        if len(raw) <= self._longest:
            if len(self) >= self._entries:
                self.clear()
            self[raw] = value
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
        self._resources = Memo(self._decode_resource, 1000, 64 * 1024)
        self._scopes = Memo(lambda raw: self._scope_class.FromString(raw).name.decode("utf-8", "replace"))

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
            event, link = self._event_record, self._link_record
            batch.events += [_ENCODE([*map(event, span.events)]) if span.events else None for span in spans]
            batch.links += [_ENCODE([*map(link, span.links)]) if span.links else None for span in spans]
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

    @staticmethod
    def _has_replacement(batch: SpanBatch) -> bool:
        """Say whether any text was repaired (or held U+FFFD before, which costs nothing but time)."""
        columns = (batch.attributes, batch.name, batch.status_message, batch.trace_state)
        if any(REPLACEMENT in "".join(column) for column in columns):
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
    trace_ids, span_ids = [span.trace_id for span in spans], [span.span_id for span in spans]
    parents = [span.parent_span_id for span in spans]
    lengths_right = (
        _all_of_length(trace_ids, 16) and _all_of_length(span_ids, 8) and _all_of_length([*filter(None, parents)], 8)
    )
    if lengths_right and _NO_TRACE not in trace_ids and NO_PARENT not in span_ids:
        return {}
    reasons = enumerate(map(_bad_id, trace_ids, span_ids, parents))
    return {index: reason for index, reason in reasons if reason is not None}


def _all_of_length(values: list[bytes], length: int) -> bool:
    return set(map(len, values)) <= {length}


def _bad_id(trace_id: bytes, span_id: bytes, parent: bytes) -> str | None:
    if len(trace_id) != 16 or trace_id == _NO_TRACE:
        return "invalid_trace_id"
    if len(span_id) != 8 or span_id == NO_PARENT:
        return "invalid_span_id"
    return "invalid_parent_span_id" if parent and len(parent) != 8 else None


def _reject(place: str, bad: dict[int, str], result: Decoded) -> None:
    result.rejected.update(bad.values())
    if not result.message:
        index, reason = next(iter(bad.items()))
        result.message = f"{place}.spans[{index}]: {reason.replace('_', ' ')}"
