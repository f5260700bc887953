"""Clocks as parameters, and one measured conversion between them.

Joins happen on CLOCK_MONOTONIC, which is what ``bpf_ktime_get_ns`` returns; wall time is for people and for OTLP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

READ_PAIRS = 5
REFRESH_NS = 30_000_000_000


class Clock(Protocol):
    """What the code asks for time; tests pass their own."""

    def unix_nano(self) -> int:
        """Return wall time in nanoseconds since the epoch."""

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""


class SystemClock:
    """The machine's clocks."""

    def unix_nano(self) -> int:
        """Return wall time in nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""
        return time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A measured difference between two clocks.

    Attributes:
        offset_ns: Target clock minus source clock, in nanoseconds.
        residual_ns: Half the width of the tightest read pair: the conversion's uncertainty.
        measured_at_ns: Source clock reading at the measurement.
    """

    offset_ns: int
    residual_ns: int
    measured_at_ns: int

    def convert(self, source_ns: int) -> int:
        """Return the target clock's reading for a source clock reading."""
        return source_ns + self.offset_ns


def measure_offset(source: Callable[[], int], target: Callable[[], int], pairs: int = READ_PAIRS) -> ClockOffset:
    """Measure target minus source by bracketing, and keep the tightest of several read pairs."""
    best: ClockOffset | None = None
    for _ in range(pairs):
        before = source()
        middle = target()
        after = source()
        half = (after - before + 1) // 2
        if best is None or half < best.residual_ns:
            best = ClockOffset(offset_ns=middle - (before + after) // 2, residual_ns=half, measured_at_ns=after)
    if best is None:
        msg = "at least one read pair is needed"
        raise ValueError(msg)
    return best


class OffsetTracker:
    """Keep a clock offset fresh: re-measured when older than ``refresh_ns``, never per event."""

    def __init__(self, source: Callable[[], int], target: Callable[[], int], refresh_ns: int = REFRESH_NS) -> None:
        self._source, self._target, self._refresh_ns = source, target, refresh_ns
        self._lock = threading.Lock()
        self._offset = measure_offset(source, target)

    def current(self) -> ClockOffset:
        """Return the offset, measured again if it is due."""
        with self._lock:
            if self._source() - self._offset.measured_at_ns > self._refresh_ns:
                self._offset = measure_offset(self._source, self._target)
            return self._offset


def monotonic_to_unix(clock: Clock | None = None) -> OffsetTracker:
    """Return a tracker that converts CLOCK_MONOTONIC to wall time."""
    clock = clock or SystemClock()
    return OffsetTracker(clock.monotonic_ns, clock.unix_nano)
