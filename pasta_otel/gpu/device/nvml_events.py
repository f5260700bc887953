"""XID messages by code, from NVML's event set: a counter, which needs no reset after the GPU recovered."""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pasta_otel import semconv
from pasta_otel.gpu.device.model import Reading, readings_of

XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError
MOST_PER_READ = 1000  # a GPU in trouble can send many; the rest waits for the next reading
FELL_OFF_THE_BUS = 79  # https://docs.nvidia.com/deploy/xid-errors/: the GPU cannot be reached any more


class XidEvents:
    """Count XIDs by device and code; without support or permission there is nothing to count, and no reading.

    Args:
        nvml: The ``pynvml`` module, or a double of it.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._set: Any = None
        self._counts: Counter[tuple[str, int]] = Counter()
        self._failed: set[str] = set()
        self._ids: dict[int | None, str] = {}

    def open(self, handles: Mapping[str, Any]) -> None:
        """Subscribe for devices by ``hw.id``; counts so far are kept."""
        self._failed.clear()
        self._ids = {_address(handle): device for device, handle in handles.items()}
        try:
            self._set = self._nvml.nvmlEventSetCreate()
        except self._nvml.NVMLError:
            return
        for handle in handles.values():
            try:
                self._nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._set)
            except self._nvml.NVMLError:
                continue  # vGPU, MIG, or no permission

    def drain(self) -> None:
        """Take the events that wait; never blocks."""
        for _ in range(MOST_PER_READ if self._set is not None else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError:  # NVML_ERROR_TIMEOUT: none waits
                return
            device = self._ids.get(_address(event.device))  # a lost device could not tell its UUID
            if event.eventType == XID_EVENT and device is not None:
                self._counts[device, int(event.eventData)] += 1
                self._failed |= {device} if event.eventData == FELL_OFF_THE_BUS else set()

    def failed(self, device: str) -> bool:
        """Return whether the device fell off the bus since ``open``."""
        return device in self._failed

    def readings(self, device: str) -> Iterator[Reading]:
        """Yield the counts of one device."""
        for (who, code), count in self._counts.items():
            if who == device:
                yield from readings_of(semconv.HW_ERRORS, count, (semconv.ERROR_TYPE, "xid"), (semconv.GPU_XID, code))

    def close(self) -> None:
        """Unsubscribe."""
        if self._set is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # it went with the driver
                self._nvml.nvmlEventSetFree(self._set)
            self._set = None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
