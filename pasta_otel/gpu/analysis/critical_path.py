"""What the end of a stretch of time had to wait for, step by step backwards: host code, launches, queues, GPU work.

From the last event back: GPU work waited for the work before it on its stream if that ended after the launch began,
else for its launch. Where the launch is not in the trace, nobody can say which of both it was: the time between is
``unknown``, and the path goes on along the stream, whose order holds in any case. The host waited for the GPU where a
synchronising call ended with GPU work. Several host threads are taken as one. The segments follow each other without
gap or overlap, so that their lengths add up to the stretch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from pasta_otel.gpu.analysis.calls import synchronizing
from pasta_otel.gpu.analysis.link import Links, link
from pasta_otel.gpu.analysis.timeline import Timeline

SegmentKind = Literal["host", "gpu", "launch_delay", "queue_delay", "unknown"]


class Segment(NamedTuple):
    """A part of the critical path.

    Attributes:
        kind: ``host``: host code ran; ``gpu``: GPU work ran; ``launch_delay``: from the begin of a launch call to the
            begin of its work; ``queue_delay``: between two pieces of work on one stream, the second launched before
            the first had ended; ``unknown``: before GPU work whose launch is not in the trace.
        start_ns: On the timeline's clock.
        end_ns: On the timeline's clock.
        work: Row in ``Links.work`` of ``gpu`` segments, and of what a delay delayed; -1 on the host.
    """

    kind: SegmentKind
    start_ns: int
    end_ns: int
    work: int = -1


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The segments, earliest first; they fill ``start_ns`` to ``end_ns`` exactly."""

    start_ns: int
    end_ns: int
    segments: tuple[Segment, ...]

    def totals_ns(self) -> dict[str, int]:
        """Return the length by kind of segment."""
        totals: Counter[str] = Counter()
        for segment in self.segments:
            totals[segment.kind] += segment.end_ns - segment.start_ns
        return dict(totals)


def critical_path(
    timeline: Timeline, window_ns: tuple[int, int] | None = None, links: Links | None = None
) -> CriticalPath | None:
    """Return the critical path of a stretch of time.

    Args:
        timeline: The events.
        window_ns: The stretch; by default from the first to the last event. GPU work that was launched within it and
            ends later lengthens it.
        links: Joins of the timeline, if they are there already.

    Returns:
        The path, or None when there is nothing in the stretch.
    """
    links = links or link(timeline)
    if window_ns is None:
        window_ns = _extent(timeline)
    if window_ns is None:
        return None
    return _Walk(timeline, links, *window_ns).path()


def _extent(timeline: Timeline) -> tuple[int, int] | None:
    tables = [table for table in (timeline.rows, timeline.ops) if len(table)]
    if not tables:
        return None
    return min(int(table["start"].min()) for table in tables), max(int(table["end"].max()) for table in tables)


class _Walk:
    """Tables that one walk looks things up in."""

    def __init__(self, timeline: Timeline, links: Links, start_ns: int, end_ns: int) -> None:
        work, calls = links.work, links.calls
        call_start = np.concatenate([calls["start"].astype(np.int64), [-1]])[links.call]
        launched = (call_start >= start_ns) & (call_start <= end_ns)
        inside = launched | ((links.call < 0) & (work["start"] >= start_ns) & (work["end"] <= end_ns))
        self._low = start_ns
        self._high: int = max([end_ns, *work["end"][inside].astype(np.int64).tolist()])
        self._start: list[int] = work["start"].astype(np.int64).tolist()
        self._end: list[int] = work["end"].astype(np.int64).tolist()
        self._next_row = -1
        self._call_start: list[int] = call_start.tolist()
        self._before = _previous_on_stream(links)
        self._by_end = np.flatnonzero(inside)[np.argsort(work["end"][inside], kind="stable")].tolist()
        self._ends = [self._end[row] for row in self._by_end]
        waits = calls[synchronizing(timeline, calls)]
        waits = waits[np.argsort(waits["end"], kind="stable")]
        self._wait_start, self._wait_end = (
            waits["start"].astype(np.int64).tolist(),
            waits["end"].astype(np.int64).tolist(),
        )

    def path(self) -> CriticalPath:
        segments: list[Segment] = []
        time = self._high
        row = self._by_end[-1] if self._ends and self._ends[-1] >= time else -1
        while time > self._low:
            if row < 0:
                row, until = self._host(time)
                segments.append(Segment("host", until, time))
                time = until
            else:
                time = self._gpu(segments, row, time)
                row = self._next_row
        kept = [segment for segment in reversed(segments) if segment.end_ns > segment.start_ns]
        return CriticalPath(self._low, self._high, tuple(kept))

    def _host(self, time: int) -> tuple[int, int]:
        """Return the GPU work that the host last waited for before ``time``, and its end; (-1, start) if none."""
        at = bisect_right(self._wait_end, time)
        while at > 0:
            at -= 1
            position = bisect_right(self._ends, self._wait_end[at]) - 1
            if self._wait_end[at] <= self._low:
                break
            if position >= 0 and self._wait_start[at] < self._ends[position] <= time:
                return self._by_end[position], max(self._ends[position], self._low)
        return -1, self._low

    def _gpu(self, segments: list[Segment], row: int, time: int) -> int:
        """Add a piece of GPU work and what it waited for; return the time before that, with the next row set."""
        start = max(self._start[row], self._low)
        segments.append(Segment("gpu", min(start, time), time, row))
        time = min(start, time)
        before, launched = self._before[row], self._call_start[row]
        self._next_row = -1
        if before >= 0 and self._end[before] > launched and self._end[before] <= time:
            until = max(self._end[before], self._low)
            segments.append(Segment("queue_delay" if launched >= 0 else "unknown", until, time, row))
            self._next_row = before
            return until
        if launched < 0:
            segments.append(Segment("unknown", self._low, time, row))
            return self._low
        until = max(min(launched, time), self._low)
        segments.append(Segment("launch_delay", until, time, row))
        return until


def _previous_on_stream(links: Links) -> list[int]:
    """Return for each piece of work the one before it on its stream; -1 = none."""
    work = links.work
    order = np.lexsort((work["start"], work["stream"], work["device"]))
    before = np.full(len(work), -1, np.int64)
    same = (work["stream"][order[1:]] == work["stream"][order[:-1]]) & (
        work["device"][order[1:]] == work["device"][order[:-1]]
    )
    before[order[1:][same]] = order[:-1][same]
    return before.tolist()
