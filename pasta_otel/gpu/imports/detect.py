"""Which format a trace file is, from its first bytes; files that are something else are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pasta_otel.errors import InputError
from pasta_otel.gpu.kineto.source import TraceBytes

Format = Literal["kineto", "otlp-json", "jaeger"]
FORMATS: tuple[Format, ...] = ("kineto", "otlp-json", "jaeger")
HEAD_BYTES = 1 << 20
"""How far in a file's own key must appear. Kineto writes device and distributed properties first, a few kilobytes."""

_MEMORY_TIMELINE = re.compile(rb"\A\s*\[\s*\[")
_EVENT_ARRAY = re.compile(rb"\A\s*\[\s*(\{|\]|\Z)")
_OURS: tuple[tuple[re.Pattern[bytes], Format], ...] = (
    (re.compile(rb'"traceEvents"\s*:'), "kineto"),
    (re.compile(rb'"resource_?[sS]pans"\s*:'), "otlp-json"),
    (re.compile(rb'"traceID"\s*:'), "jaeger"),
    (re.compile(rb'"data"\s*:\s*\[.*"spans"\s*:', re.DOTALL), "jaeger"),
    (re.compile(rb'\A\s*\{\s*"data"\s*:\s*\[\s*\]'), "jaeger"),  # nothing was found
)
_OTHERS = (
    (re.compile(rb'\A\s*\{.*"schema"\s*:.*"nodes"\s*:\s*\[', re.DOTALL), "execution_trace",
     "a PyTorch execution trace (ExecutionTraceObserver): it has no times on the GPU; export a profiler trace instead"),
    (re.compile(rb'"resource_?[lL]ogs"\s*:'), "otlp_logs", "OTLP logs, not traces"),
    (re.compile(rb'"resource_?[mM]etrics"\s*:'), "otlp_metrics", "OTLP metrics, not traces"),
    (re.compile(rb'"resultType"\s*:'), "prometheus_answer", "an answer of a Prometheus server, not a trace"),
)  # fmt: skip


def detect(path: Path) -> Format:
    """Return the format of a trace file.

    Raises:
        InputError: It is none of ours; the kind is ``memory_timeline``, ``execution_trace``, ``otlp_logs``,
            ``otlp_metrics``, ``prometheus_answer`` or ``trace_format``.
    """
    head = _head(path)
    if _MEMORY_TIMELINE.match(head):
        message = "a memory timeline (export_memory_timeline), not a trace: it holds sizes, not events"
        raise InputError(message, file=str(path), kind="memory_timeline")
    for pattern, name in _OURS:
        if pattern.search(head):
            return name
    if _EVENT_ARRAY.match(head):
        return "kineto"
    for other, kind, message in _OTHERS:
        if other.search(head):
            raise InputError(message, file=str(path), kind=kind)
    what = "neither a Kineto, an OTLP JSON nor a Jaeger trace"
    raise InputError(what if head.strip() else "empty file", file=str(path), kind="trace_format")


def _head(path: Path) -> bytes:
    parts, length = [], 0
    source = TraceBytes(path)
    for piece in source:
        parts.append(piece)
        length += len(piece)
        if length >= HEAD_BYTES:
            break
    head = b"".join(parts)[:HEAD_BYTES].removeprefix(b"\xef\xbb\xbf")
    if not head.strip() and source.cut:
        raise InputError("the compressed data is damaged", file=str(path), kind="trace_format")
    return head
