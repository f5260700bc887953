"""Jaeger's JSON (its UI's download and query API) as OTLP/JSON.

The mapping is that of the OpenTelemetry specification, "OpenTelemetry to Jaeger Transformation", read backwards.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pasta_otel import semconv
from pasta_otel.errors import InputError
from pasta_otel.gpu.imports.document import documents
from pasta_otel.gpu.imports.otlp import split_request

_KINDS: Final = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
_STATUS: Final = {"OK": 1, "ERROR": 2}
_HEX = re.compile(r"[0-9a-fA-F]+")
_REF_TYPES: Final = {"CHILD_OF": "child_of", "FOLLOWS_FROM": "follows_from"}
_OWN_TAGS: Final = frozenset(
    {"span.kind", "otel.status_code", "otel.status_description", "otel.scope.name", "otel.scope.version",
     "otel.library.name", "otel.library.version", "w3c.tracestate", "error"}
)  # fmt: skip
_LARGEST_US = 1 << 54  # 18014398509481984 us, nanoseconds of which fit into 64 bits


def read_jaeger(
    path: Path, progress: Callable[[int], None] | None = None, left_out: list[InputError] | None = None
) -> Iterator[bytes]:
    """Yield one OTLP/JSON request a trace.

    Args:
        path: The file.
        progress: Told how many bytes of the file were read since the last call.
        left_out: Takes the error of each span that has a wrong form, which is then left out; without it the first one
            is raised.

    Raises:
        InputError: It is not a Jaeger trace, or a span has a wrong form; names the field. Kind ``trace_format``.
    """
    found = False
    for line, value in documents(path, progress, strict=left_out is None):
        found = found or (isinstance(value, dict) and value.get("data") == [])  # the answer to a search without a hit
        for place, trace in traces_of(value, str(path), line):
            found = True
            yield from split_request(_Converter(str(path), line, place, trace, left_out).request())
    if not found:
        raise InputError("no trace in it: expected data[].spans", file=str(path), kind="trace_format")


def traces_of(value: Any, file: str, line: int | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield place and content of each trace of a document: ``{"data": [trace]}``, or one trace.

    Raises:
        InputError: It holds none.
    """
    candidates = value.get("data", [value]) if isinstance(value, dict) else None
    if not isinstance(candidates, list):
        raise InputError("expected an object with data[].spans", file=file, line=line, kind="trace_format")
    for index, trace in enumerate(candidates):
        if not isinstance(trace, dict) or not isinstance(trace.get("spans"), list):
            message = "not a Jaeger trace: it has no spans"
            raise InputError(message, file=file, line=line, field=f"data[{index}]", kind="trace_format")
        yield f"data[{index}]", trace


def parent_of(span: Mapping[str, Any], trace_id: str) -> str:
    """Return the id of a span's parent within its trace: its first CHILD_OF reference; "" = none."""
    for reference in _list(span.get("references")):
        if reference.get("refType", "CHILD_OF") == "CHILD_OF" and reference.get("traceID", trace_id) == trace_id:
            return _parent(reference.get("spanID"))
    return _parent(span.get("parentSpanID"))


def _parent(text: Any) -> str:
    """Return a parent's id; Jaeger's clients of old write 0 for none."""
    found = str(text or "")
    return found if found.strip("0") else ""


class _Converter:
    """One trace; errors name the place."""

    def __init__(
        self, file: str, line: int, place: str, trace: Mapping[str, Any], left_out: list[InputError] | None
    ) -> None:
        self._file, self._line, self._place, self._trace = file, line, place, trace
        self._left_out = left_out

    def request(self) -> dict[str, Any]:
        """Return the OTLP/JSON request, spans grouped by process and scope."""
        processes = self._trace.get("processes")
        processes = processes if isinstance(processes, dict) else {}
        groups: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
        for index, span in enumerate(self._trace["spans"]):
            where = f"{self._place}.spans[{index}]"
            if not isinstance(span, dict):
                raise self._error("expected an object", where)
            tags = _tags(span.get("tags"))
            scope = (
                _text(tags, "otel.scope.name", "otel.library.name"),
                _text(tags, "otel.scope.version", "otel.library.version"),
            )
            try:
                converted = self._span(span, tags, where)
            except InputError as error:
                if self._left_out is None:
                    raise
                self._left_out.append(error)
                continue
            by_scope = groups.setdefault(str(span.get("processID", "")), {})
            by_scope.setdefault(scope, []).append(converted)
        return {"resourceSpans": [_resource_spans(processes.get(key), scopes) for key, scopes in groups.items()]}

    def _span(self, span: Mapping[str, Any], tags: Mapping[str, Any], where: str) -> dict[str, Any]:
        trace_id = str(span.get("traceID") or self._trace.get("traceID") or "")
        start, duration = self._micros(span, "startTime", where), self._micros(span, "duration", where)
        parent = parent_of(span, trace_id)
        return {
            "traceId": self._id(trace_id, 32, f"{where}.traceID"),
            "spanId": self._id(str(span.get("spanID", "")), 16, f"{where}.spanID"),
            **({"parentSpanId": self._id(parent, 16, f"{where}.references")} if parent else {}),
            "name": str(span.get("operationName", "")),
            "kind": _KINDS.get(str(tags.get("span.kind", "")).lower(), 1),
            "startTimeUnixNano": str(start * 1000),
            "endTimeUnixNano": str((start + duration) * 1000),
            "traceState": str(tags.get("w3c.tracestate", "")),
            "attributes": [_attribute(key, value) for key, value in tags.items() if key not in _OWN_TAGS],
            "events": [_event(log) for log in _list(span.get("logs"))],
            "links": list(self._links(span, trace_id, parent, where)),
            "status": _status(tags),
        }

    def _links(self, span: Mapping[str, Any], trace_id: str, parent: str, where: str) -> Iterator[dict[str, Any]]:
        for reference in _list(span.get("references")):
            to_trace, to_span = str(reference.get("traceID", trace_id)), str(reference.get("spanID", ""))
            if (to_trace, to_span) == (trace_id, parent) or not to_span.strip("0"):  # zeros: a reference to nothing
                continue
            kind = _REF_TYPES.get(str(reference.get("refType")), "child_of")
            yield {
                "traceId": self._id(to_trace, 32, f"{where}.references"),
                "spanId": self._id(to_span, 16, f"{where}.references"),
                "attributes": [_attribute("opentracing.ref_type", kind)],
            }

    def _id(self, text: str, width: int, where: str) -> str:
        if not text:
            raise self._error("no id", where)
        if not _HEX.fullmatch(text) or len(text) > width:  # an id of another making keeps its identity by its hash
            return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=width // 2).hexdigest()
        if not text.strip("0"):
            raise self._error("all zeros are no id", where)
        return text.lower().rjust(width, "0")

    def _micros(self, span: Mapping[str, Any], key: str, where: str) -> int:
        value = span.get(key)
        if isinstance(value, str) and value.isdecimal() and len(value) <= 20:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST_US:
            raise self._error(f"expected microseconds, got {str(value)[:40]!r}", f"{where}.{key}")
        return int(value)

    def _error(self, message: str, field: str) -> InputError:
        return InputError(message, file=self._file, line=self._line, field=field, kind="trace_format")


def _resource_spans(process: Any, scopes: Mapping[tuple[str, str], Sequence[Any]]) -> dict[str, Any]:
    process = process if isinstance(process, dict) else {}
    service = str(process.get("serviceName") or "unknown_service")
    attributes = [
        _attribute(key, value) for key, value in _tags(process.get("tags")).items() if key != semconv.SERVICE_NAME
    ]
    return {
        "resource": {"attributes": [_attribute(semconv.SERVICE_NAME, service), *attributes]},
        "scopeSpans": [
            {"scope": {"name": name, "version": version}, "spans": spans} for (name, version), spans in scopes.items()
        ],
    }


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _tags(value: Any) -> dict[str, Any]:
    """Return tags by key, of the type that they say they have."""
    return {str(tag["key"]): _typed(tag) for tag in _list(value) if "key" in tag}


def _typed(tag: Mapping[str, Any]) -> Any:
    value: Any = tag.get("value")
    kind = str(tag.get("type", "")).lower()
    try:
        if kind in {"int64", "int"}:
            return int(value)
        if kind in {"float64", "double"}:
            return float(value)
        if kind == "bool" and isinstance(value, str):
            return value.lower() == "true"
    except (TypeError, ValueError):
        return str(value)
    return value if isinstance(value, str | bool | int | float) else str(value)


def _text(tags: Mapping[str, Any], *keys: str) -> str:
    return str(next((tags[key] for key in keys if key in tags), ""))


def _attribute(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"key": key, "value": {"boolValue": value}}
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return {"key": key, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    return {"key": key, "value": {"stringValue": str(value)}}


def _event(log: Mapping[str, Any]) -> dict[str, Any]:
    fields = _tags(log.get("fields"))
    name = _text(fields, "event", "message")
    time = log.get("timestamp", 0)
    micros = int(time) if isinstance(time, int | float) and 0 <= time < _LARGEST_US else 0
    attributes = [_attribute(key, value) for key, value in fields.items() if key != "event"]
    return {"timeUnixNano": str(micros * 1000), "name": name, "attributes": attributes}


def _status(tags: Mapping[str, Any]) -> dict[str, Any]:
    code = _STATUS.get(str(tags.get("otel.status_code", "")).upper(), 0)
    if tags.get("error") is True or str(tags.get("error", "")).lower() == "true":
        code = 2
    description = str(tags.get("otel.status_description", ""))
    return {"code": code, "message": description} if description else {"code": code}
