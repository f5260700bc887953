"""Unions of intervals: time is counted once, however many streams were busy at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.cupti.rows import Rows

Times = NDArray[np.int64]


def times(rows: Rows) -> tuple[Times, Times]:
    """Return starts and ends of rows."""
    return rows["start"].astype(np.int64), rows["end"].astype(np.int64)


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


def covered(asked: tuple[Times, Times], start: Times, end: Times) -> Times:
    """Return for each interval asked about how long the union of the others covers it, ns."""
    start, end = union(start, end)
    before = np.concatenate([[0], np.cumsum(end - start)])  # covered until the begin of each disjoint interval

    def until(time: Times) -> Times:
        at = np.searchsorted(start, time, side="right") - 1
        within = np.minimum(time, np.append(end, 0)[at]) - np.append(start, 0)[at]
        return np.where(at < 0, 0, before[at] + within)

    return until(asked[1].astype(np.int64)) - until(asked[0].astype(np.int64))


def clip(start: Times, end: Times, low: int, high: int) -> tuple[Times, Times]:
    """Return the intervals cut to ``low``..``high``."""
    return np.clip(start, low, high), np.clip(end, low, high)
