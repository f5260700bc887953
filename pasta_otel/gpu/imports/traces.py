"""Critical paths of imported request traces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pasta_otel import semconv
from pasta_otel.gpu.analysis.trace_path import PathSpan, own_times_ns, trace_path

MOST_TRACES = 1000
TOP = 10


class TraceCollector:
    """Collects the spans of OTLP/JSON requests by trace, up to a number of traces.

    Attributes:
        spans: Spans seen.
        left_out: Spans of traces beyond the limit: counted, not analysed.
    """

    def __init__(self, most_traces: int = MOST_TRACES) -> None:
        self._traces: dict[str, list[PathSpan]] = {}
        self._most = most_traces
        self.spans = self.left_out = 0

    def add(self, request: bytes) -> None:
        """Add the spans of a request; those without usable ids or times are left to the receiver to refuse."""
        for resource_spans in json.loads(request).get("resourceSpans", ()):
            service = _service(resource_spans.get("resource"))
            for scope_spans in resource_spans.get("scopeSpans", ()):
                for span in scope_spans.get("spans", ()):
                    self._add(span, service)

    def _add(self, span: Any, service: str) -> None:
        self.spans += 1
        try:
            trace = str(span["traceId"]).lower()
            start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
            path_span = PathSpan(
                int(span["spanId"], 16), int(span.get("parentSpanId") or "0", 16), start, max(start, end),
                f"{service}: {span.get('name', '')}",
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            return
        if trace not in self._traces and len(self._traces) >= self._most:
            self.left_out += 1
            return
        self._traces.setdefault(trace, []).append(path_span)

    def document(self) -> dict[str, Any]:
        """Return what the traces say, longest first."""
        traces = [_trace(trace_id, spans) for trace_id, spans in self._traces.items()]
        traces.sort(key=lambda entry: -entry["duration_ns"])
        return {"spans": self.spans, "traces": traces, "spans_left_out": self.left_out}


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
    for attribute in (resource or {}).get("attributes", ()):
        if attribute.get("key") == semconv.SERVICE_NAME:
            return str(attribute.get("value", {}).get("stringValue", ""))
    return ""
