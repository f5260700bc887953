"""CLOCK_MONOTONIC to wall time for batches of events, without ever swapping two of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pasta_otel.clock import Clock, measure_offset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ANCHORS = 600
STEP_NS = 1_000_000_000
"""A change of the offset by more than this is no drift: the machine was suspended, or its clock was set."""


class WallClock:
    """Converts by the offsets that were measured before and after an event, in a straight line between them.

    ``mark`` is called after each harvest, so an event always lies before the last anchor. One function converts all
    events, and it rises: NTP corrects at most 500 us a second. A new offset for a whole batch would swap events across
    two batches whenever the clock is corrected backwards.

    Args:
        clock: Both clocks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._anchors: deque[tuple[int, int]] = deque(maxlen=ANCHORS)
        self.mark()

    def mark(self) -> None:
        """Measure the offset now."""
        found = measure_offset(self._clock.monotonic_ns, self._clock.unix_nano)
        self.add(found.measured_at_ns, found.offset_ns)

    def add(self, monotonic_ns: int, offset_ns: int) -> None:
        """Take an offset as measured at a time."""
        if self._anchors and abs(offset_ns - self._anchors[-1][1]) > STEP_NS:
            self._anchors.append((monotonic_ns - 1, self._anchors[-1][1]))
        self._anchors.append((monotonic_ns, offset_ns))

    def convert(self, monotonic_ns: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return wall time in nanoseconds since the epoch."""
        import numpy as np  # noqa: PLC0415 - an optional extra

        first_time, first_offset = self._anchors[0]
        times = [float(time - first_time) for time, _ in self._anchors]
        offsets = [float(offset - first_offset) for _, offset in self._anchors]  # small, so floats hold nanoseconds
        change = np.interp((monotonic_ns - first_time).astype(np.float64), times, offsets)
        return (monotonic_ns + first_offset + np.rint(change).astype(np.int64)).astype(np.uint64)
