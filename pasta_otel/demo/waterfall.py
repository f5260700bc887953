"""One request as a waterfall: its service spans, and the module spans that matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from pasta_otel import semconv

ROWS_MOST = 40
SHARE_LEAST = 0.02  # of the request: inner module spans that are shorter are counted, not drawn
OUTER_DEPTH = 2  # dots in the path of a module that is always drawn, e.g. encoder.layers.3
SERVICES = ("order-api", "model", "payment", "recommendations")
Span = Mapping[str, Any]


def render(spans: Sequence[Span]) -> str:
    """Return the waterfall as HTML; empty without spans."""
    if not spans:
        return ""
    start = min(span["start_time_unix_nano"] for span in spans)
    total = max(span["end_time_unix_nano"] for span in spans) - start or 1
    drawn = [(span, depth) for span, depth in walk(spans) if _is_drawn(span, total)]
    callees = _callees(spans)
    rows = "".join(_row(span, _name(span, callees), depth, (start, total)) for span, depth in drawn[:ROWS_MOST])
    hidden = len(spans) - len(drawn[:ROWS_MOST])
    note = f'<p class="note">{hidden} shorter module spans inside those are not drawn.</p>' if hidden else ""
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


def legend(spans: Sequence[Span]) -> str:
    """Return which colour is which service."""
    present = [service for service in SERVICES if any(span["service"] == service for span in spans)]
    entries = "".join(f'<span class="row {service}"><i></i>{escape(service)}</span>' for service in present)
    return f'<p class="legend services">{entries}</p>' if entries else ""


def _callees(spans: Sequence[Span]) -> dict[str, str]:
    """Return, by client span id, the service that its child ran in."""
    return {span["parent_span_id"]: span["service"] for span in spans if span["parent_span_id"] and span["kind"] == 2}


def _name(span: Span, callees: Mapping[str, str]) -> str:
    name = str(span["attributes"].get(semconv.MODULE_PATH) or span["name"])
    callee = callees.get(span["span_id"])
    return f"{name} to {callee}" if span["kind"] == 3 and callee else name


def _row(span: Span, name: str, depth: int, frame: tuple[int, int]) -> str:
    start, total = frame
    left = 100 * (span["start_time_unix_nano"] - start) / total
    width = min(max(100 * _share(span, total), 0.3), 100 - left)
    milliseconds = span["duration_ns"] / 1e6
    error = " error" if span["status"] == "error" else ""
    own = span.get("self_time_ns")
    title = f"{span['service']}: {span['name']}, {milliseconds:.2f} ms" + (f", own {own / 1e6:.2f} ms" if own else "")
    return (
        f'<div class="row {_css(span)}{error}" title="{escape(title, quote=True)}">'
        f'<div class="name" style="--depth:{min(depth, 9)}"><bdi>{escape(name)}</bdi></div>'
        f'<div class="track"><span class="bar" style="left:{left:.2f}%;width:{width:.2f}%"></span></div>'
        f'<div class="ms">{milliseconds:.1f} ms</div></div>'
    )


def _css(span: Span) -> str:
    service = span["service"]
    kind = " module" if _is_module(span) else " client" if span["kind"] == 3 else ""
    return (service if service in SERVICES else "other") + kind


def _is_module(span: Span) -> bool:
    return semconv.MODULE_PATH in span["attributes"]


def _is_drawn(span: Span, total: int) -> bool:
    path = str(span["attributes"].get(semconv.MODULE_PATH, ""))
    return not _is_module(span) or path.count(".") <= OUTER_DEPTH or _share(span, total) >= SHARE_LEAST


def _share(span: Span, total: int) -> float:
    return float(span["duration_ns"]) / total
