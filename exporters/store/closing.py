"""Self time and edge gap of many traces at once: ``pasta_otel.correlate`` in numpy, for the writer's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pasta_otel.correlate import SpanFlag, build_tree

Ints = NDArray[np.int64]
_ROOT = -1
_MAX_TOTAL = 2**62  # nanoseconds over one call; beyond, the running offsets would overflow


@dataclass(frozen=True, slots=True)
class Forest:
    """N spans of many traces.

    Attributes:
        parent: Row of each span's parent, or -1.
        flags: ``SpanFlag`` of structure.
        self_ns: Duration minus the union of the children's intervals.
    """

    parent: Ints
    flags: Ints
    self_ns: Ints


def resolve(
    trace: Ints, span_id: NDArray[np.uint64], parent_span_id: NDArray[np.uint64], start: Ints, end: Ints
) -> Forest:
    """Return the forest of spans given by column.

    Args:
        trace: A small number per span that says which trace it belongs to.
        span_id: Ids, not 0.
        parent_span_id: Parents, 0 = none.
        start: Start times, ns.
        end: End times, ns; one before the start counts as the start.
    """
    end = np.maximum(start, end)
    parent, flags = _parents(trace, span_id, parent_span_id)
    _cut_cycles(trace, span_id, parent_span_id, start, parent, flags)
    return Forest(parent, flags, (end - start) - _covered(parent, start, end))


def _parents(trace: Ints, span_id: NDArray[np.uint64], parent_span_id: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Look every parent up among the spans of the same trace; of two spans with one id the first counts."""
    rows = len(span_id)
    _, number = np.unique(np.concatenate([span_id, parent_span_id]), return_inverse=True)
    traces = int(trace.max(initial=0)) + 1
    own, wanted = (number[part].astype(np.int64) * traces + trace for part in (slice(0, rows), slice(rows, None)))
    order = np.argsort(own, kind="stable")
    place = np.minimum(np.searchsorted(own[order], wanted, side="left"), rows - 1)
    match = order[place]
    named = parent_span_id != 0
    itself = named & (parent_span_id == span_id)
    found = named & ~itself & (own[match] == wanted)
    flags = itself * int(SpanFlag.SELF_PARENT) + (named & ~itself & ~found) * int(SpanFlag.ORPHAN)
    return np.where(found, match, _ROOT).astype(np.int64), flags.astype(np.int64)


def _cut_cycles(  # noqa: PLR0913, PLR0917 - columns
    trace: Ints,
    span_id: NDArray[np.uint64],
    parent_span_id: NDArray[np.uint64],
    start: Ints,
    parent: Ints,
    flags: Ints,
) -> None:
    """Find spans that never reach a root by doubling the step; their traces are rebuilt one by one."""
    jump, steps = parent.copy(), 1
    while steps <= len(parent) and (jump >= 0).any():
        jump = np.where(jump >= 0, jump[jump], _ROOT)
        steps *= 2
    for number in np.unique(trace[jump >= 0]):
        rows = np.flatnonzero(trace == number)
        tree = build_tree(span_id[rows].tolist(), parent_span_id[rows].tolist(), start[rows].tolist())
        local = np.array(tree.parent)
        parent[rows] = np.where(local >= 0, rows[local], _ROOT)
        flags[rows] = [int(flag) for flag in tree.flags]


def _covered(parent: Ints, start: Ints, end: Ints) -> Ints:
    """Return, per span, how much of it its children cover together.

    Children are sorted by (parent, start) and shifted so that each parent's interval follows the one before it: then
    one running maximum over all of them tells what each child adds to the union.
    """
    covered = np.zeros(len(parent), dtype=np.int64)
    child = np.flatnonzero(parent >= 0)
    if not len(child):
        return covered
    up = parent[child]
    base, length = start[up], end[up] - start[up]
    begin = np.clip(start[child], base, end[up]) - base
    stop = np.clip(end[child], base, end[up]) - base
    order = np.lexsort((begin, up))
    up, begin, stop, length = up[order], begin[order], stop[order], length[order]
    first = np.flatnonzero(np.diff(up, prepend=-1))
    widths = length[first].astype(object) if _overflows(length[first]) else length[first]
    shift: Any = np.repeat(np.concatenate([[0], np.cumsum(widths + 1)[:-1]]), np.diff(first, append=len(up)))
    begin, stop = begin + shift, stop + shift
    reached = np.concatenate([[0], np.maximum.accumulate(stop)[:-1]])
    covered[up[first]] = np.add.reduceat(np.maximum(0, stop - np.maximum(begin, reached)), first)
    return covered


def _overflows(lengths: Ints) -> bool:
    return float(lengths.astype(np.float64).sum()) + len(lengths) >= _MAX_TOTAL
