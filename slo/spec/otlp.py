"""Our own metric source, ``type: otlp``: which OTLP metric points count which events."""

from __future__ import annotations

from decimal import Decimal

from pasta_otel.slo.spec.document import Cursor
from pasta_otel.slo.spec.model import PointSelector

SOURCE_TYPE = "otlp"
_FIELDS = frozenset({"metric", "where", "threshold"})


def read_selector(spec: Cursor) -> PointSelector:
    """Return the points that a ``spec`` selects: a sum's values, or a histogram's counts up to a threshold."""
    spec.mapping(_FIELDS)
    return PointSelector(metric=spec.text("metric", required=True), where=_where(spec), threshold=_threshold(spec))


def _threshold(spec: Cursor) -> float | None:
    number = spec.number("threshold")
    if number is not None and number <= 0:
        spec.document.report(f"{spec.path}.threshold", f"must be above 0, got {number}", kind="range")
    return None if number is None else float(number)


def _where(spec: Cursor) -> tuple[tuple[str, str], ...]:
    """Return attributes as text: 200 equals "200", as people write it in YAML."""
    where = spec.get("where")
    if where is None:
        return ()
    pairs = []
    for key, value in where.mapping().items():
        if not isinstance(value, (str, bool, int, Decimal)):
            where.problem(f"{key}: expected text, a number or a boolean", kind="type")
            continue
        pairs.append((key, attribute_text(float(value) if isinstance(value, Decimal) else value)))
    return tuple(sorted(pairs))


def attribute_text(value: object) -> str:
    """Return an attribute's value as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
