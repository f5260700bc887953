"""Spans that arrived and are in no count, because they could not be written or came too late: how many, and when."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pasta_otel.exporters.receiver.batch import SpanBatch
from pasta_otel.model import EventCounts, TimeWindow

RUN_NS = 60_000_000_000  # of one run at most, so that "how many in this window" stays near the truth
JOIN_NS = 10_000_000_000  # two batches this near to each other are one run
RUNS_MOST = 2000  # of one service; beyond, the two oldest become one
SERVICES_MOST = 1000  # beyond, all others share one account
SHARE_PARTIAL = 0.1  # a window is partial when spans were lost in more than this share of its time
_OTHERS = "\0"  # no service.name: such a name would not be valid text


@dataclass(slots=True)
class _Run:
    start_unix_nano: int
    end_unix_nano: int
    spans: int

    def within(self, window: TimeWindow) -> tuple[float, int]:
        """Return the spans and the time of this run inside a window; spans are spread evenly over the run."""
        start = max(self.start_unix_nano, window.start_unix_nano)
        overlap = min(self.end_unix_nano, window.end_unix_nano) - start
        if overlap <= 0:
            return 0.0, 0
        return self.spans * overlap / (self.end_unix_nano - self.start_unix_nano), overlap


class Missing:
    """Spans by service and time; safe from any thread, and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, list[_Run]] = {}

    def add(self, service: str, start_unix_nano: int, end_unix_nano: int, spans: int) -> None:
        """Count spans of a service between two times."""
        end = max(end_unix_nano, start_unix_nano + 1)
        with self._lock:
            known = service in self._runs or len(self._runs) < SERVICES_MOST
            runs = self._runs.setdefault(service if known else _OTHERS, [])
            last = runs[-1] if runs else None
            near = last is not None and start_unix_nano <= last.end_unix_nano + JOIN_NS
            if last is not None and near and end - last.start_unix_nano <= RUN_NS:
                last.start_unix_nano = min(last.start_unix_nano, start_unix_nano)
                last.end_unix_nano = max(last.end_unix_nano, end)
                last.spans += spans
                return
            runs.append(_Run(start_unix_nano, end, spans))
            if len(runs) > RUNS_MOST:
                first, second = runs[:2]
                joined = _Run(first.start_unix_nano, second.end_unix_nano, first.spans + second.spans)
                runs[:2] = [joined]

    def within(self, service: str, window: TimeWindow) -> tuple[int, int]:
        """Return how many spans of a service are missing in a window, and for how much of its time in ns."""
        with self._lock:
            found = [run.within(window) for name in (service, _OTHERS) for run in self._runs.get(name, ())]
        if not found:
            return 0, 0
        spans, covered = (sum(column) for column in zip(*found, strict=True))
        return math.ceil(spans), int(covered)


def services(batches: Iterable[SpanBatch]) -> Mapping[str, int]:
    """Return the spans by service of batches."""
    found: dict[str, int] = {}
    for batch in batches:
        for group in batch.groups:
            found[group.resource.service] = found.get(group.resource.service, 0) + group.rows
    return found


def with_lost(counts: EventCounts, lost: int, lost_ns: int, window: TimeWindow, why: str) -> EventCounts:
    """Return what counts say when spans of their window could not be written: ``partial``, or flagged if few.

    A loss that took little of the window's time must not silence a budget of 30 days: such counts are used and flagged.
    """
    if not lost or counts.no_data not in {None, "no_traffic"}:
        return counts
    detail = f"{lost} spans could not be stored: {why}"
    share = lost_ns / (window.end_unix_nano - window.start_unix_nano)
    if counts.no_data or share > SHARE_PARTIAL:
        return replace(counts, no_data="partial", detail=detail, degraded=True)
    return replace(counts, degraded=True, detail=detail)


def with_late(counts: EventCounts, late: int, grace_ns: int) -> EventCounts:
    """Return ``no_traffic`` with the number of late spans, which is what an idle service does not have."""
    if not late or counts.no_data != "no_traffic":
        return counts
    why = "a clock that is behind, a sender that was cut off, or traces of earlier"
    text = f"{late} late spans came more than {grace_ns / 1e9:g} s (--grace) after their end"
    return replace(counts, detail=f"no events in time, but {text}: {why}")
