"""Our own metric source, ``type: spans``: which spans are the events, and which of them are good."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from pasta_otel.model import SpanSLI
from pasta_otel.slo.spec.document import Cursor

SOURCE_TYPE = "spans"
KINDS = ("server", "client", "internal", "producer", "consumer")
NS_PER_MS = 1_000_000
LONGEST_MS = 86_400_000
STATUS_CONDITION = "status != error"
ANY_STATUS = "any"
_SELECTOR = ("service", "operation", "kind", "where")
_FIELDS = frozenset({*_SELECTOR, "good", "threshold_ms"})


def read_spans(spec: Cursor, *, inherits: bool = False) -> SpanSLI:
    """Return the spans that a ``spec`` selects.

    Args:
        spec: The metric source's ``spec``.
        inherits: True for the ``good`` half of a ratio, which may leave the selector to ``total``.
    """
    spec.mapping(_FIELDS)
    threshold = spec.number("threshold_ms")
    if threshold is not None and not 0 < threshold <= LONGEST_MS:
        where = f"must be above 0 and at most {LONGEST_MS} ms (a day), got {threshold}"
        spec.document.report(f"{spec.path}.threshold_ms", where, kind="range")
    good = "".join(spec.text("good", default=STATUS_CONDITION).split())
    if good not in {"".join(STATUS_CONDITION.split()), ANY_STATUS}:
        spec.document.report(
            f"{spec.path}.good", f"expected {STATUS_CONDITION!r} or {ANY_STATUS!r}, got {good!r}", kind="choice"
        )
    return SpanSLI(
        service=spec.text("service", required=not inherits),
        operation=spec.text("operation") or None,
        kind=spec.choice("kind", KINDS) or "server",
        where=_where(spec),
        good_status=good != ANY_STATUS,
        threshold_ns=None if threshold is None else int(threshold * NS_PER_MS),
    )


def _where(spec: Cursor) -> tuple[tuple[str, str | int | float | bool], ...]:
    where = spec.get("where")
    if where is None:
        return ()
    pairs: list[tuple[str, str | int | float | bool]] = []
    for key, value in where.mapping().items():
        if isinstance(value, (str, bool, int)):
            pairs.append((key, value))
        elif isinstance(value, Decimal):
            pairs.append((key, float(value)))
        else:
            where.problem(f"{key}: expected text, a number or a boolean", kind="type")
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


def combine(good: Cursor, good_sli: SpanSLI, total_sli: SpanSLI) -> SpanSLI:
    """Return one SLI from the two halves of a ratio: what ``total`` selects, good as ``good`` says.

    A span ratio is one pass over one set of spans, so ``good`` may repeat the selector but not narrow it.
    """
    for key in _SELECTOR:
        if good.has(key) and getattr(good_sli, key) != getattr(total_sli, key):
            good.document.report(
                f"{good.path}.{key}",
                "must equal total's: good is a condition on the spans total selects",
                kind="selector",
            )
    return replace(total_sli, good_status=good_sli.good_status, threshold_ns=good_sli.threshold_ns)
