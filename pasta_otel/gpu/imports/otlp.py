"""OTLP JSON files: one ``ExportTraceServiceRequest`` as the whole file, or one a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pasta_otel.errors import InputError
from pasta_otel.gpu.imports.document import documents

MOST_SPANS = 2000
"""Spans in one request: about 1 MB, where gRPC servers refuse more than 4 MiB."""
LONGEST_NUMBER = 24
_SCOPE_KEYS = ("scopeSpans", "scope_spans")
SAFE_DIGITS = 19  # any number of so many digits is below 2^64
_PLAIN_IDS = re.compile(r"(?!0{32})[0-9a-fA-F]{32} (?!0{16})[0-9a-fA-F]{16} (?:[0-9a-fA-F]{16})?")
_HEX = re.compile(r"[0-9a-fA-F]+")
_IDS = (
    (("traceId", "trace_id"), 32, False),
    (("spanId", "span_id"), 16, False),
    (("parentSpanId", "parent_span_id"), 16, True),
)
START, END = ("startTimeUnixNano", "start_time_unix_nano"), ("endTimeUnixNano", "end_time_unix_nano")
_TIMES = (START, END)


def read_otlp(
    path: Path, progress: Callable[[int], None] | None = None, left_out: list[InputError] | None = None
) -> Iterator[bytes]:
    """Yield OTLP/JSON trace requests; lines with other signals are passed over.

    Args:
        path: The file.
        progress: Told how many bytes of the file were read since the last call.
        left_out: Takes the error of each span whose ids or times have a wrong form, which is then left out; without it
            the first one is raised.

    Raises:
        InputError: The file is not JSON, or holds no trace request, or a span has a wrong form; kind ``trace_format``.
    """
    found = False
    for line, value in documents(path, progress, strict=left_out is None):
        if not isinstance(value, dict):
            raise InputError("expected an object with resourceSpans", file=str(path), line=line, kind="trace_format")
        if "resourceSpans" in value or "resource_spans" in value:
            found = True
            yield from split_request(_Checked(str(path), line, left_out).request(value))
    if not found:
        raise InputError("no resourceSpans in it", file=str(path), kind="trace_format")


class _Checked:
    """A request without what cannot be a span; errors name the place."""

    def __init__(self, file: str, line: int, left_out: list[InputError] | None) -> None:
        self._file, self._line, self._left_out = file, line, left_out

    def request(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the request with the spans that are right."""
        parts = []
        for place, resource_spans in self._objects(value, "", "resourceSpans", "resource_spans"):
            scopes = []
            for inner, scope_spans in self._objects(resource_spans, f"{place}.", *_SCOPE_KEYS):
                spans = [span for where, span in self._objects(scope_spans, f"{inner}.", "spans")
                         if self._is_right(where, span)]  # fmt: skip
                scopes.append({**scope_spans, "spans": spans})
            rest = {key: entry for key, entry in resource_spans.items() if key not in _SCOPE_KEYS}
            parts.append({**rest, "scopeSpans": scopes})
        return {"resourceSpans": parts}

    def _objects(self, value: dict[str, Any], path: str, *keys: str) -> Iterator[tuple[str, dict[str, Any]]]:
        listed = field_of(value, *keys)
        if listed is not None and not isinstance(listed, list):
            self._leave_out("expected an array", f"{path}{keys[0]}")
            return
        for index, entry in enumerate(listed or ()):
            if isinstance(entry, dict):
                yield f"{path}{keys[0]}[{index}]", entry
            else:
                self._leave_out("expected an object", f"{path}{keys[0]}[{index}]")

    def _is_right(self, where: str, span: dict[str, Any]) -> bool:
        problem = problem_of(span)
        if problem is not None:
            self._leave_out(problem[1], f"{where}.{problem[0]}")
        return problem is None

    def _leave_out(self, message: str, field: str) -> None:
        error = InputError(message, file=self._file, line=self._line, field=field, kind="trace_format")
        if self._left_out is None:
            raise error
        self._left_out.append(error)


def problem_of(span: dict[str, Any]) -> tuple[str, str] | None:
    """Return the field of a span that the protocol does not allow, and why; None when ids and times are right.

    As receivers see it: an absent time is 0, a parent that is absent, empty or all zeros is none.
    """
    if _is_plain(span):
        return None
    for keys, digits, may_be_none in _IDS:
        value = field_of(span, *keys)
        if value is None or value == "":
            if may_be_none:
                continue
            return keys[0], "no id"
        if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
            return keys[0], f"expected {digits} hexadecimal digits, got {str(value)[:40]!r}"
        if not may_be_none and not value.strip("0"):
            return keys[0], "all zeros are no id"
    for keys in _TIMES:
        value = field_of(span, *keys)
        if value is not None and nanoseconds(value) is None:
            return keys[0], f"expected nanoseconds since 1970, got {str(value)[:40]!r}"
    return None


def _is_plain(span: dict[str, Any]) -> bool:
    """Return whether ids and times are right as nearly every exporter writes them: one look at most spans."""
    start, end = span.get(START[0]), span.get(END[0])
    return (
        type(start) is str
        and type(end) is str
        and len(start) <= SAFE_DIGITS >= len(end)
        and start.isdecimal()
        and end.isdecimal()
        and _PLAIN_IDS.fullmatch(f"{span.get('traceId')} {span.get('spanId')} {span.get('parentSpanId', '')}")
        is not None
        and "parent_span_id" not in span
    )


def field_of(value: dict[str, Any], *keys: str) -> Any:
    """Return the value of the first key that is there: OTLP/JSON is written in lower camel case, or as in the proto."""
    return next((value[key] for key in keys if key in value), None)


def nanoseconds(value: Any) -> int | None:
    """Return a time of 64 bits, written as number or text; None when it is none."""
    if isinstance(value, str) and len(value) <= LONGEST_NUMBER and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        return None
    return value


def split_request(request: dict[str, Any]) -> Iterator[bytes]:
    """Yield the request in parts that servers take: at most ``MOST_SPANS`` spans each, resource and scope repeated."""
    for resource_spans in _objects(request, "resourceSpans", "resource_spans"):
        for scope_spans in _objects(resource_spans, "scopeSpans", "scope_spans"):
            spans = scope_spans.get("spans")
            if not isinstance(spans, list):
                continue
            for at in range(0, len(spans), MOST_SPANS):
                scope = {key: value for key, value in scope_spans.items() if key != "spans"}
                part = {**scope, "spans": spans[at : at + MOST_SPANS]}
                resource = {key: value for key, value in resource_spans.items() if key not in _SCOPE_KEYS}
                yield msgspec.json.encode({"resourceSpans": [{**resource, "scopeSpans": [part]}]})


def _objects(value: dict[str, Any], *keys: str) -> list[dict[str, Any]]:
    found: Any = next((value[key] for key in keys if key in value), [])
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
