"""One request as a waterfall: its service spans, and the module spans that matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from pasta_otel import semconv

ROWS_MOST = 40
SHARE_LEAST = 0.02  # of the request: shorter module spans are counted, not drawn
SERVICES = ("order-api", "model", "payment", "recommendations")
Span = Mapping[str, Any]


def render(spans: Sequence[Span]) -> str:
    """Return the waterfall as HTML; empty without spans."""
    if not spans:
        return ""
    start = min(span["start_time_unix_nano"] for span in spans)
    total = max(span["end_time_unix_nano"] for span in spans) - start or 1
    drawn = [(span, depth) for span, depth in walk(spans) if not _is_module(span) or _share(span, total) >= SHARE_LEAST]
    rows = "".join(_row(span, depth, start, total) for span, depth in drawn[:ROWS_MOST])
    hidden = len(spans) - len(drawn[:ROWS_MOST])
    note = f'<p class="note">{hidden} shorter module spans are not drawn.</p>' if hidden else ""
    return f'<div class="waterfall">{rows}</div>{note}'


def walk(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yield spans parents first, children by start time, with their depth."""
    known = {span["span_id"] for span in spans}
    children: dict[str | None, list[Span]] = {}
    for span in sorted(spans, key=lambda s: s["start_time_unix_nano"]):
        parent = span["parent_span_id"]
        children.setdefault(parent if parent in known else None, []).append(span)
    stack = [(span, 0) for span in reversed(children.get(None, []))]
    while stack:
        span, depth = stack.pop()
        yield span, depth
        stack += [(child, depth + 1) for child in reversed(children.get(span["span_id"], []))]


def _row(span: Span, depth: int, start: int, total: int) -> str:
    left = 100 * (span["start_time_unix_nano"] - start) / total
    width = max(100 * _share(span, total), 0.3)
    milliseconds = span["duration_ns"] / 1e6
    name = str(span["attributes"].get(semconv.MODULE_PATH) or span["name"])
    error = " error" if span["status"] == "error" else ""
    side = "right" if left + width > 75 else "left"
    at = f"right:{100 - left:.2f}%" if side == "right" else f"left:{left + width:.2f}%"
    own = span.get("self_time_ns")
    title = f"{span['service']}: {span['name']}, {milliseconds:.2f} ms" + (f", own {own / 1e6:.2f} ms" if own else "")
    return (
        f'<div class="row {_css(span)}{error}" title="{escape(title, quote=True)}">'
        f'<div class="name" style="padding-left:{min(depth, 9) * 0.7:.1f}em">{escape(name)}</div>'
        f'<div class="track"><span class="bar" style="left:{left:.2f}%;width:{min(width, 100 - left):.2f}%"></span>'
        f'<span class="ms {side}" style="{at}">{milliseconds:.1f} ms</span></div></div>'
    )


def _css(span: Span) -> str:
    service = span["service"]
    kind = " module" if _is_module(span) else " client" if span["kind"] == 3 else ""
    return (service if service in SERVICES else "other") + kind


def _is_module(span: Span) -> bool:
    return semconv.MODULE_PATH in span["attributes"]


def _share(span: Span, total: int) -> float:
    return float(span["duration_ns"]) / total
