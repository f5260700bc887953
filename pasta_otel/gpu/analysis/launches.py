"""What a launch costs the host, how long work waits on the device, and how much of it waits at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.intervals import Times, times
from pasta_otel.gpu.analysis.link import Links
from pasta_otel.gpu.analysis.utilization import StreamKey


@dataclass(frozen=True, slots=True)
class Launches:
    """One row for each piece of GPU work whose launch call is in the trace; the rest is left out, never guessed.

    Attributes:
        work: Row numbers in ``Links.work``.
        call_ns: Duration of the launch call on the host.
        gpu_ns: Duration on the device.
        delay_ns: From the call's end to the work's start; 0 when the work began before the call returned.
    """

    work: NDArray[np.int64]
    call_ns: NDArray[np.int64]
    gpu_ns: NDArray[np.int64]
    delay_ns: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.work)


@dataclass(frozen=True, slots=True)
class QueueLength:
    """Work that was launched on a stream and had not begun.

    Attributes:
        time_ns: When the length changed.
        length: The length from then on.
    """

    time_ns: NDArray[np.int64]
    length: NDArray[np.int64]

    @property
    def most(self) -> int:
        """Return the greatest length."""
        return int(self.length.max()) if len(self.length) else 0


def launches(links: Links) -> Launches:
    """Pair GPU work with its launch calls."""
    paired = np.flatnonzero(links.call >= 0)
    work, call = links.work[paired], links.calls[links.call[paired]]
    started = work["start"].astype(np.int64) - call["end"].astype(np.int64)
    return Launches(
        work=paired,
        call_ns=(call["end"] - call["start"]).astype(np.int64),
        gpu_ns=(work["end"] - work["start"]).astype(np.int64),
        delay_ns=np.maximum(started, 0),
    )


def outstanding(links: Links) -> tuple[Times, Times]:
    """Return from when to when each piece of work was the device's: from its launch call's end to its own end.

    Work whose launch call is not in the trace, or that began within it (a copy that blocks), counts from its begin.
    """
    start, end = times(links.work)
    launched = np.append(links.calls["end"].astype(np.int64), np.iinfo(np.int64).max)[links.call]
    return np.minimum(start, launched), end


def queue_lengths(links: Links) -> dict[StreamKey, QueueLength]:
    """Return each stream's queue over time: +1 when a launch call begins, -1 when its work begins.

    Work that seems to begin before its call (two clocks) counts from its own start, so that no length is negative.
    """
    paired = np.flatnonzero(links.call >= 0)
    work = links.work[paired]
    begun = work["start"].astype(np.int64)
    asked = np.minimum(links.calls["start"][links.call[paired]].astype(np.int64), begun)
    result = {}
    keys = work["device"].astype(np.uint64) << np.uint64(32) | work["stream"].astype(np.uint64)
    for key in np.unique(keys).tolist():
        mine = keys == key
        time = np.concatenate([asked[mine], begun[mine]])
        step = np.concatenate([np.ones(mine.sum(), np.int64), -np.ones(mine.sum(), np.int64)])
        order = np.lexsort((-step, time))
        result[StreamKey(key >> 32, key & 0xFFFFFFFF)] = QueueLength(time[order], np.cumsum(step[order]))
    return result
