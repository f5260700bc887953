"""Critical paths of imported request traces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pasta_otel import semconv
from pasta_otel.gpu.analysis.trace_path import PathSpan, own_times_ns, trace_path
from pasta_otel.gpu.imports.otlp import END, START, field_of, nanoseconds

MOST_TRACES = 1000
TOP = 10


class TraceCollector:
    """Collects the spans of OTLP/JSON requests by trace, up to a number of traces.

    Attributes:
        spans: Spans seen.
        without_time: Spans that do not say when they began: counted, not analysed.
        beyond_limit: Spans of traces beyond the limit: counted, not analysed.
    """

    def __init__(self, most_traces: int = MOST_TRACES) -> None:
        self._traces: dict[str, list[PathSpan]] = {}
        self._most = most_traces
        self.spans = self.without_time = self.beyond_limit = 0

    def add(self, request: bytes) -> None:
        """Add the spans of a request of ``read_otlp`` or ``read_jaeger``, which leave out what is no span."""
        for resource_spans in json.loads(request)["resourceSpans"]:
            service = _service(resource_spans.get("resource"))
            for scope_spans in resource_spans["scopeSpans"]:
                for span in scope_spans["spans"]:
                    self._add(span, service)

    def _add(self, span: dict[str, Any], service: str) -> None:
        self.spans += 1
        start = nanoseconds(field_of(span, *START))
        if start is None:
            self.without_time += 1
            return
        trace = str(field_of(span, "traceId", "trace_id")).lower()
        if trace not in self._traces and len(self._traces) >= self._most:
            self.beyond_limit += 1
            return
        span_id, parent = field_of(span, "spanId", "span_id"), field_of(span, "parentSpanId", "parent_span_id")
        end = nanoseconds(field_of(span, *END)) or 0
        label = f"{service}: {span.get('name', '')}"
        found = PathSpan(int(span_id, 16), int(parent or "0", 16), start, max(start, end), label)
        self._traces.setdefault(trace, []).append(found)

    def document(self) -> dict[str, Any]:
        """Return what the traces say, longest first."""
        traces = [_trace(trace_id, spans) for trace_id, spans in self._traces.items()]
        traces.sort(key=lambda entry: -entry["duration_ns"])
        return {
            "spans": self.spans,
            "spans_without_time": self.without_time,
            "spans_beyond_limit": self.beyond_limit,
            "traces": traces,
        }


def _trace(trace_id: str, spans: Iterable[PathSpan]) -> dict[str, Any]:
    listed = list(spans)
    parts = trace_path(listed)
    own = sorted(own_times_ns(parts).items(), key=lambda item: -item[1])
    return {
        "trace_id": trace_id,
        "spans": len(listed),
        "duration_ns": parts[0].span.end_ns - parts[0].span.start_ns if parts else 0,
        "critical_path": [{"name": name, "own_ns": ns} for name, ns in own[:TOP]],
    }


def _service(resource: Any) -> str:
    attributes = resource.get("attributes") if isinstance(resource, dict) else None
    for attribute in attributes if isinstance(attributes, list) else ():
        if isinstance(attribute, dict) and attribute.get("key") == semconv.SERVICE_NAME:
            value = attribute.get("value")
            return str(field_of(value, "stringValue", "string_value") or "") if isinstance(value, dict) else ""
    return ""
