"""Trace trees from spans as they come: any order, lost parents, self-parents, cycles; and what a tree says about time.

Pure functions over integers. A trace tree is given by index: span ``i`` has ``span_id[i]`` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag

NO_PARENT = 0
ROOT = -1


class SpanFlag(IntFlag):
    """What is odd about a span; stored with it."""

    CLOCK_ANOMALY = 1  # it ends before it starts: its duration counts as 0
    UNFINISHED = 2  # it has no end: it is in no latency figure
    SAMPLED = 4  # a sampler is visible, its probability is not
    ORPHAN = 8  # its parent never arrived
    SELF_PARENT = 16  # it names itself as its parent
    CYCLE = 32  # it was the earliest span of a cycle of parents


_NAMES = {
    SpanFlag.CLOCK_ANOMALY: "clock_anomaly",
    SpanFlag.UNFINISHED: "unfinished",
    SpanFlag.SAMPLED: "sampled",
    SpanFlag.ORPHAN: "orphan",
    SpanFlag.SELF_PARENT: "self_parent",
    SpanFlag.CYCLE: "cycle",
}


def flag_names(flags: int) -> list[str]:
    """Return the words for a flag set, in the order of their bits."""
    return [name for flag, name in _NAMES.items() if flags & flag]


@dataclass(frozen=True, slots=True)
class TraceTree:
    """A forest in which every span stands exactly once.

    Attributes:
        parent: Index of each span's parent, or ``ROOT``.
        children: Indices of each span's children, in the order in which they were given.
        roots: Indices of the roots.
        flags: ``SpanFlag`` per span: why a span that named a parent is a root.
    """

    parent: Sequence[int]
    children: Sequence[Sequence[int]]
    roots: Sequence[int]
    flags: Sequence[int]

    def path_to_root(self, index: int) -> list[int]:
        """Return the span and its ancestors up to the root; always ends."""
        path = [index]
        while self.parent[path[-1]] != ROOT:
            path.append(self.parent[path[-1]])
        return path


def build_tree(span_id: Sequence[int], parent_span_id: Sequence[int], start: Sequence[int]) -> TraceTree:
    """Build the tree of one trace in linear time (case O06).

    A span whose parent is missing becomes a root with the flag ``orphan``, one that names itself ``self_parent``; of a
    cycle the earliest span becomes the root, with the flag ``cycle``. Of two spans with one id the first has the
    children.

    Args:
        span_id: Ids, not 0.
        parent_span_id: Parent ids, 0 = none.
        start: Start times, on one clock.
    """
    index_of: dict[int, int] = {}
    for index, identifier in enumerate(span_id):
        index_of.setdefault(identifier, index)
    parent, flags = [ROOT] * len(span_id), [0] * len(span_id)
    for index, wanted in enumerate(parent_span_id):
        if wanted == NO_PARENT:
            continue
        if wanted == span_id[index]:
            flags[index] |= SpanFlag.SELF_PARENT
        elif wanted in index_of:
            parent[index] = index_of[wanted]
        else:
            flags[index] |= SpanFlag.ORPHAN
    for root in _cycle_roots(parent, start):
        parent[root] = ROOT
        flags[root] |= SpanFlag.CYCLE
    children: list[list[int]] = [[] for _ in span_id]
    roots: list[int] = []
    for index, up in enumerate(parent):
        (roots if up == ROOT else children[up]).append(index)
    return TraceTree(parent, children, roots, flags)


def _cycle_roots(parent: Sequence[int], start: Sequence[int]) -> list[int]:
    """Return the earliest span of each cycle; each span is walked over once."""
    walk_of = [0] * len(parent)
    found = []
    for first in range(len(parent)):
        index, walk = first, first + 1
        while index != ROOT and not walk_of[index]:
            walk_of[index] = walk
            index = parent[index]
        if index != ROOT and walk_of[index] == walk:
            found.append(min(_cycle(parent, index), key=lambda member: (start[member], member)))
    return found


def _cycle(parent: Sequence[int], member: int) -> Iterable[int]:
    yield member
    index = parent[member]
    while index != member:
        yield index
        index = parent[index]


def union_length(intervals: Iterable[tuple[int, int]], low: int, high: int) -> int:
    """Return how much of [low, high] the intervals cover together."""
    covered, reached = 0, low
    for start, end in sorted(intervals):
        begin, stop = max(start, reached), min(end, high)
        if stop > begin:
            covered += stop - begin
            reached = stop
    return covered


def self_times(tree: TraceTree, start: Sequence[int], end: Sequence[int]) -> list[int]:
    """Return each span's duration minus the union of its children's intervals.

    An end before the start counts as the start; what a child does outside its parent's interval does not count.
    """
    return [
        max(0, end[index] - start[index])
        - union_length(((start[child], end[child]) for child in tree.children[index]), start[index], end[index])
        for index in range(len(start))
    ]


def edge_gap(client_duration: int, server_durations: Iterable[int]) -> int:
    """Return the part of a client span that its server spans do not explain: network, queues, connection set-up.

    Durations, not intervals: the two sides' clocks need not agree. Without a server span it is the whole duration.
    """
    return max(0, client_duration - sum(server_durations))
