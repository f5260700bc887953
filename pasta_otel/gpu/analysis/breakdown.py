"""Where the GPU's time went: compute, communication, memory, idle; and what ran beside what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.groups import split, work_codes
from pasta_otel.gpu.analysis.intervals import intersection, length
from pasta_otel.gpu.analysis.timeline import Timeline
from pasta_otel.gpu.classes import CLASSES


@dataclass(frozen=True, slots=True)
class TemporalBreakdown:
    """Times of one device in ns; each a union of intervals, so that the parts may overlap but none counts twice.

    Attributes:
        device: Device number.
        window_ns: From the first start to the last end of its GPU work.
        idle_ns: Nothing ran. ``window_ns = idle_ns + busy_ns``.
        busy_ns: Anything ran.
        compute_ns: A GPU kernel other than a collective ran.
        communication_ns: A collective ran.
        memory_ns: A copy or set ran.
        overlap_ns: Compute and a collective ran at once.
    """

    device: int
    window_ns: int
    idle_ns: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    memory_ns: int
    overlap_ns: int

    @property
    def non_compute_ns(self) -> int:
        """Return the busy time without compute: exposed communication and memory."""
        return self.busy_ns - self.compute_ns

    @property
    def overlap_ratio(self) -> float | None:
        """Return the share of communication that compute hides; None without communication."""
        return self.overlap_ns / self.communication_ns if self.communication_ns else None


@dataclass(frozen=True, slots=True)
class ClassTime:
    """GPU work of one class or one name.

    Attributes:
        name: The class, or the GPU kernel's name.
        count: Pieces of work.
        total_ns: Sum of durations: streams that ran at once count each.
        longest_ns: The longest.
    """

    name: str
    count: int
    total_ns: int
    longest_ns: int


def temporal_breakdown(timeline: Timeline) -> list[TemporalBreakdown]:
    """Return the breakdown of each device."""
    work, codes = timeline.work, work_codes(timeline)
    start, end = work["start"].astype(np.int64), work["end"].astype(np.int64)
    compute, communication, memory = split(codes)
    result = []
    for device in np.unique(work["device"]).tolist():
        mine = work["device"] == device
        window = int(end[mine].max() - start[mine].min())
        busy = length(start[mine], end[mine])
        parts = [(start[mine & part], end[mine & part]) for part in (compute, communication, memory)]
        times = [length(*part) for part in parts]
        overlap = intersection(parts[0], parts[1])
        result.append(TemporalBreakdown(device, window, window - busy, busy, times[0], times[1], times[2], overlap))
    return result


def by_class(timeline: Timeline) -> list[ClassTime]:
    """Return the GPU time by class, longest first."""
    return _times(timeline, work_codes(timeline), CLASSES)


def by_name(timeline: Timeline, limit: int = 20) -> list[ClassTime]:
    """Return the GPU work that took longest, by name."""
    return _times(timeline, timeline.work["name"].astype(np.int64), timeline.names)[:limit]


def _times(timeline: Timeline, codes: NDArray[np.int64], names: Sequence[str]) -> list[ClassTime]:
    work = timeline.work
    duration = (work["end"] - work["start"]).astype(np.int64)
    distinct, inverse = np.unique(codes, return_inverse=True)
    count = np.bincount(inverse, minlength=len(distinct))
    total, longest = np.zeros(len(distinct), np.int64), np.zeros(len(distinct), np.int64)
    np.add.at(total, inverse, duration)
    np.maximum.at(longest, inverse, duration)
    found = [
        ClassTime(names[code], int(count[i]), int(total[i]), int(longest[i]))
        for i, code in enumerate(distinct.tolist())
    ]
    return sorted(found, key=lambda entry: -entry.total_ns)
