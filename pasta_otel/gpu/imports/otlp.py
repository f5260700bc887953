"""OTLP JSON files: one ``ExportTraceServiceRequest`` as the whole file, or one a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pasta_otel.errors import InputError
from pasta_otel.gpu.imports.document import documents

MOST_SPANS = 2000
"""Spans in one request: about 1 MB, where gRPC servers refuse more than 4 MiB."""
_SCOPE_KEYS = ("scopeSpans", "scope_spans")


def read_otlp(path: Path, progress: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield OTLP/JSON trace requests; lines with other signals are passed over.

    Raises:
        InputError: The file is not JSON, or holds no trace request; kind ``trace_format``.
    """
    found = False
    for line, value in documents(path, progress):
        if not isinstance(value, dict):
            raise InputError("expected an object with resourceSpans", file=str(path), line=line, kind="trace_format")
        if "resourceSpans" in value or "resource_spans" in value:
            found = True
            yield from split_request(value)
    if not found:
        raise InputError("no resourceSpans in it", file=str(path), kind="trace_format")


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
