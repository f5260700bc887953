"""How busy each stream and each device was within a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pasta_otel.gpu.analysis.intervals import clip, length
from pasta_otel.gpu.analysis.timeline import Timeline


class StreamKey(NamedTuple):
    """A stream: its number means something only on its device."""

    device: int
    stream: int


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of a window in which something ran, 0..1.

    Attributes:
        window_ns: Start and end of the window, on the timeline's clock.
        streams: By stream.
        devices: By device: the union over its streams.
    """

    window_ns: tuple[int, int]
    streams: dict[StreamKey, float]
    devices: dict[int, float]

    @property
    def mean(self) -> float | None:
        """Return the mean over the devices; None when there are none."""
        return sum(self.devices.values()) / len(self.devices) if self.devices else None


def utilization(timeline: Timeline, window_ns: tuple[int, int] | None = None) -> Utilization:
    """Compute how busy streams and devices were.

    Args:
        timeline: The events.
        window_ns: The window; by default from the first start to the last end of GPU work. A cut-off trace never
            claims anything about the time after its last whole event.
    """
    work = timeline.work
    if not len(work):
        return Utilization(window_ns or (0, 0), {}, {})
    low, high = int(work["start"].min()), int(work["end"].max())
    if window_ns is not None:
        low, high = window_ns[0], window_ns[1] if timeline.complete else min(window_ns[1], high)
    span = max(high - low, 1)
    start, end = clip(work["start"].astype(np.int64), work["end"].astype(np.int64), low, high)
    streams, devices = {}, {}
    for device in np.unique(work["device"]).tolist():
        of_device = work["device"] == device
        devices[device] = length(start[of_device], end[of_device]) / span
        for stream in np.unique(work["stream"][of_device]).tolist():
            chosen = of_device & (work["stream"] == stream)
            streams[StreamKey(device, stream)] = length(start[chosen], end[chosen]) / span
    return Utilization((low, high), streams, devices)
