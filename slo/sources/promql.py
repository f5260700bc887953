"""Queries for a window: placeholders filled, several expressions in one request, answers told apart by a label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pasta_otel.slo.spec.model import PrometheusSLI

NS_PER_SECOND = 1_000_000_000
NUMBER_LABEL = "pasta_query"
WINDOW = re.compile(r"\{\{\s*\.[Ww]indow\s*\}\}")
_TEXT_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`|#[^\n]*')
THRESHOLD_STEPS = 30
COVERAGE_STEPS = 20
OPERATORS = {"lte": "<=", "gte": ">=", "lt": "<", "gt": ">"}
Part = Literal["total", "good", "bad", "raw", "coverage"]


@dataclass(frozen=True, slots=True)
class Expression:
    """One PromQL expression and which part of an SLI it is."""

    part: Part
    text: str


def expressions(sli: PrometheusSLI, window_ns: int, text: str | None = None) -> tuple[Expression, ...]:
    """Return what has to be asked for one window of an SLI; ``text`` is how the window is written."""
    window = text or prometheus_duration(window_ns)
    if sli.raw is not None:
        return (Expression("raw", fill(sli.raw, window)),)
    if sli.threshold is not None:
        return _threshold(sli, window_ns, window)
    if sli.bad is not None:
        return (Expression("total", fill(sli.total, window)), Expression("bad", fill(sli.bad, window)))
    return (Expression("total", fill(sli.total, window)), Expression("good", fill(sli.good or "", window)))


def _threshold(sli: PrometheusSLI, window_ns: int, window: str) -> tuple[Expression, ...]:
    """A threshold metric is looked at 30 times a window; every look is an event."""
    step_ns = max(NS_PER_SECOND, window_ns // THRESHOLD_STEPS)
    step = prometheus_duration(step_ns)
    query = fill(sli.threshold or "", step)
    return (
        Expression("total", f"count_over_time(({query})[{window}:{step}])"),
        Expression("good", f"sum_over_time((({query}) {OPERATORS[sli.op]} bool {sli.bound})[{window}:{step}])"),
    )


def coverage_expression(sli: PrometheusSLI, window_ns: int) -> Expression:
    """Return how many twentieths of a window have data: retention may be shorter than the window."""
    step_ns = max(NS_PER_SECOND, window_ns // COVERAGE_STEPS)
    step = prometheus_duration(step_ns)
    first = expressions(sli, step_ns, step)[0].text
    return Expression("coverage", f"count_over_time((\n{first}\n)[{prometheus_duration(window_ns)}:{step}])")


def fill(query: str, window: str) -> str:
    """Return a query with its window placeholder replaced and without comments: more follows on its last line."""
    bare = _TEXT_OR_COMMENT.sub(lambda match: "" if match[0].startswith("#") else match[0], query)
    return WINDOW.sub(window, bare).strip()


def events_factor(query: str, window_ns: int) -> float:
    """Return by what a query's value is multiplied to be events of the window: ``rate`` is per second."""
    per_second = re.search(r"\bi?rate\s*\(", query) and not re.search(r"\bincrease\s*\(", query)
    return window_ns / NS_PER_SECOND if per_second else 1.0


def prometheus_duration(duration_ns: int) -> str:
    """Return a duration in whole seconds, milliseconds below ten seconds: what every Prometheus reads."""
    if duration_ns < 10 * NS_PER_SECOND and duration_ns % NS_PER_SECOND:
        return f"{max(1, duration_ns // 1_000_000)}ms"
    return f"{max(1, duration_ns // NS_PER_SECOND)}s"


def join(texts: Sequence[str]) -> str:
    """Return one query for several expressions, each answer marked with its number; one expression stays as it is."""
    if len(texts) == 1:
        return texts[0]
    return "\nor\n".join(
        f'label_replace((\n{text}\n), "{NUMBER_LABEL}", "{number}", "", "")' for number, text in enumerate(texts)
    )
