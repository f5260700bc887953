"""Unions of intervals: time is counted once, however many streams were busy at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def union(start: Times, end: Times) -> tuple[Times, Times]:
    """Return the disjoint intervals, in order, that together cover the same time (empty ones vanish)."""
    real = end > start
    start, end = start[real].astype(np.int64), end[real].astype(np.int64)
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.append(True, start[1:] > end[:-1])
    last = np.append(first[1:], True)
    return start[first], end[last]


def length(start: Times, end: Times) -> int:
    """Return the length of the union, ns."""
    start, end = union(start, end)
    return int((end - start).sum())


def gaps(start: Times, end: Times) -> tuple[Times, Times]:
    """Return the intervals between those of the union."""
    start, end = union(start, end)
    return end[:-1], start[1:]


def intersection(a: tuple[Times, Times], b: tuple[Times, Times]) -> int:
    """Return for how long both unions cover the time, ns: |A| + |B| - |A or B|."""
    both = length(np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]))
    return length(*a) + length(*b) - both


def clip(start: Times, end: Times, low: int, high: int) -> tuple[Times, Times]:
    """Return the intervals cut to ``low``..``high``."""
    return np.clip(start, low, high), np.clip(end, low, high)
