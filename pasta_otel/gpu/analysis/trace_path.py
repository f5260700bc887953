"""The critical path of a distributed trace: which spans the root's end had to wait for, and how long each by itself.

After CRISP (Zhang et al., "CRISP: Critical Path Analysis of Large-Scale Microservice Architectures", USENIX ATC 2022):
from a span's end backwards, the child that finished last is on the path, then the last one that finished before that
child began, and so on; what lies between is the span's own time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pasta_otel.correlate import build_tree

OVERLAP_ALLOWED = 0.01
"""Share of the parent by which a child may begin before the one it follows ended: CRISP's allowance for clock skew."""


class PathSpan(NamedTuple):
    """A span, as far as its path matters.

    Attributes:
        span_id: Its id, not 0.
        parent_id: Its parent's, 0 = none; one that is not in the trace makes it a root.
        start_ns: Begin.
        end_ns: End.
        label: What its time is summed under.
    """

    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    label: str


_Child = tuple[int, int, int]  # index, start, end


class PathPart(NamedTuple):
    """A span on the critical path with its own time there, ns."""

    span: PathSpan
    own_ns: int


def trace_path(spans: Sequence[PathSpan]) -> list[PathPart]:
    """Return the critical path below the root that lasts longest; empty without spans.

    A child that reaches beyond its parent (clocks of two machines) counts only as far as it lies within it.
    """
    if not spans:
        return []
    tree = build_tree([s.span_id for s in spans], [s.parent_id for s in spans], [s.start_ns for s in spans])
    root = max(tree.roots, key=lambda index: spans[index].end_ns - spans[index].start_ns)
    parts: list[PathPart] = []
    pending = [(root, spans[root].start_ns, spans[root].end_ns)]
    while pending:
        index, low, high = pending.pop()
        children = [(child, spans[child].start_ns, spans[child].end_ns) for child in tree.children[index]]
        below = _on_path(children, low, high)
        own = max(high - low - sum(end - start for _, start, end in below), 0)
        parts.append(PathPart(spans[index], own))
        pending.extend(below)
    return parts


def own_times_ns(parts: Sequence[PathPart]) -> dict[str, int]:
    """Return the time on the path by label."""
    totals: Counter[str] = Counter()
    for part in parts:
        totals[part.span.label] += part.own_ns
    return dict(totals)


def _on_path(children: Sequence[_Child], low: int, high: int) -> list[_Child]:
    """Return the children on the path with their part of low..high, last first."""
    clipped = [(child, max(start, low), min(end, high)) for child, start, end in children]
    inside = [entry for entry in clipped if entry[2] > entry[1]]
    inside.sort(key=lambda entry: (-entry[2], entry[1]))
    allowed = (high - low) * OVERLAP_ALLOWED
    chosen: list[_Child] = []
    for entry in inside:
        if not chosen or entry[2] <= chosen[-1][1] or _skewed(inside, entry, chosen[-1], allowed):
            chosen.append(entry)
    return chosen


def _skewed(
    children: Sequence[_Child],
    before: _Child,
    later: _Child,
    allowed: float,
) -> bool:
    """Return whether two children overlap so little that only their clocks differ, and no third child is involved."""
    overlap = before[2] - later[1]
    if not (before[1] < later[1] and before[2] < later[2] and overlap < allowed):
        return False
    edges = sum((later[1] <= child[1] <= before[2]) + (later[1] <= child[2] <= before[2]) for child in children)
    return edges == 2
