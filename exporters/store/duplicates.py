"""Spans that are here already: a batch sent again after its acknowledgement was lost, a file imported twice.

A span is the same when its ids, its operation (service, name, kind), start and end are. Ids alone do not tell: client
and server share one in Zipkin's model. Because the end belongs to it, only rows that ended in a batch's own span of
time are looked at, and the table is ordered by that well enough to leave all others unread.

To look for every span would still cost a busy sidecar half as much again as storing it does. So only those are looked
for that may be here: of a request whose bytes came before, and what ended long before it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pasta_otel.exporters.receiver.batch import SpanBatch
from pasta_otel.exporters.store.columns import MAX_INT64, Columns

KEY = ("end_unix_nano", "trace_hi", "trace_lo", "span_id", "op_id", "raw_start_unix_nano")
MOST_RANGES = 4
REMEMBERED_NS = 60_000_000_000  # for at least so long the bytes of a request are known; spans older than that suspect
_ON = " and ".join(f"s.{name} = p.{name}" for name in KEY)
_QUERY = f"select distinct p.row from spans s join probe p on {_ON} where s.end_unix_nano between ? and ?"  # noqa: S608
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Suspects:
    """Tell which spans may have come before.

    Args:
        now_unix_nano: When the store was opened: a sender may send again what an earlier process took.
        everything: Suspect all, as is right for imports.
    """

    def __init__(self, now_unix_nano: int, *, everything: bool) -> None:
        self._opened_unix_nano, self._everything = now_unix_nano, everything
        self._since_unix_nano = 0
        self._recent: set[int] = set()
        self._before: set[int] = set()

    def among(self, batches: Sequence[SpanBatch], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows of the batches, which ended at these times, may be here; remembers the batches."""
        if self._everything:
            return np.ones(len(ends), dtype=bool)
        suspected, arrived = [], []
        for batch in batches:
            now = batch.arrived_unix_nano
            if abs(now - self._since_unix_nano) > REMEMBERED_NS:
                self._before, self._recent, self._since_unix_nano = self._recent, set(), now
            digest = hash(batch.body)
            suspected.append(digest in self._recent or digest in self._before)
            arrived.append(now)
            self._recent.add(digest)
        rows = [len(batch) for batch in batches]
        old = np.minimum(np.array(arrived) - REMEMBERED_NS, MAX_INT64)
        limit = np.maximum(np.repeat(old, rows), self._opened_unix_nano)
        found: NDArray[np.bool_] = np.repeat(np.array(suspected, dtype=bool), rows) | (ends < limit)
        return found


def repeated(columns: Columns) -> NDArray[np.bool_]:
    """Say of each row whether an earlier one of the same batch is the same span."""
    mixed = columns["span_id"] * _ODD ^ columns["trace_lo"] ^ columns["end_unix_nano"].astype(np.uint64)
    mask: NDArray[np.bool_] = np.zeros(len(mixed), dtype=bool)
    if len(np.unique(mixed)) == len(mixed):
        return mask
    order = np.lexsort([columns[name] for name in KEY])  # stable: of equal rows the first stays first
    same = np.ones(len(order) - 1, dtype=bool)
    for name in KEY:
        ordered = columns[name][order]
        same &= ordered[1:] == ordered[:-1]
    mask[order[1:][same]] = True
    mask &= columns["end_unix_nano"] != 0
    return mask


def stored(connection: Any, columns: Columns, suspects: NDArray[np.bool_], newest_unix_nano: int) -> NDArray[np.bool_]:
    """Say of each row whether the table holds its span.

    Args:
        connection: The store's.
        columns: A batch, in the columns of ``spans``; unfinished spans, which nothing counts, are not looked for.
        suspects: Which rows to look for.
        newest_unix_nano: No row of the table ended later.
    """
    end = columns["end_unix_nano"]
    mask = np.zeros(len(end), dtype=bool)
    asked = np.flatnonzero(suspects & (end != 0) & (end <= newest_unix_nano))
    if not len(asked):
        return mask
    connection.register("probe", {"row": asked} | {name: columns[name][asked] for name in KEY})
    try:
        for first, last in _ranges(np.sort(end[asked])):
            rows = connection.execute(_QUERY, [first, last]).fetchnumpy()["row"]
            mask[np.asarray(rows, dtype=np.int64)] = True
    finally:
        connection.unregister("probe")
    return mask


def _ranges(ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield few ranges that hold all of the sorted times, without the widest gaps between them."""
    widest = np.argsort(np.diff(ends))[-(MOST_RANGES - 1) :]
    for part in np.split(ends, np.sort(widest) + 1):
        yield int(part[0]), int(part[-1])
