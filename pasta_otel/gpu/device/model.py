"""What a source says about devices: values that are there, states of those that are not; never a 0 for "unknown"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pasta_otel import semconv
from pasta_otel.model import AttributeValue

Labels = tuple[tuple[str, AttributeValue], ...]
HwState = Literal["ok", "degraded", "failed"]
HW_STATES: tuple[HwState, ...] = ("ok", "degraded", "failed")
Owner = Callable[[int], Mapping[str, str]]
"""From a process id, as the source counts them, to ``container.id`` and ``k8s.pod.uid``; empty when unknown."""


class SourceDownError(Exception):
    """A source cannot say anything now.

    Args:
        reason: A stable word: ``no_driver``, ``no_library``, ``version_mismatch``, ``no_permission``, ``timeout``, ...
        detail: The words of the driver or tool, for people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one MIG instance of it.

    Attributes:
        id: ``hw.id``: the UUID; the index where no UUID is told.
        name: Product name, or empty.
        vendor: ``nvidia`` or ``amd``.
        parent: ``hw.id`` of the GPU that a MIG instance belongs to, or empty.
        info: What does not change: driver version, serial number, MIG mode.
    """

    id: str
    name: str = ""
    vendor: str = ""
    parent: str = ""
    info: Labels = ()

    def labels(self) -> dict[str, AttributeValue]:
        """Return the attributes that every metric of this device carries."""
        told = {semconv.HW_NAME: self.name, semconv.HW_VENDOR: self.vendor, semconv.HW_PARENT: self.parent}
        always: dict[str, AttributeValue] = {semconv.HW_ID: self.id, semconv.HW_TYPE: "gpu"}
        return always | {key: value for key, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one device, in the metric's base unit."""

    metric: str
    value: float
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at one moment.

    Attributes:
        device: Which one.
        readings: The values there are; a field that the device lacks is absent.
        down: Why the device does not answer (``lost``, ``timeout``, ``gone``, ...), or empty.
        state: ``hw.state``; None when it is not known.
    """

    device: Device
    readings: tuple[Reading, ...] = ()
    down: str = ""
    state: HwState | None = "ok"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All devices of one source at one moment.

    Attributes:
        source: ``nvml``, ``amdsmi``, ``nvidia-smi`` or ``dcgm``.
        devices: In the source's own order.
        down: Why the whole source does not answer, or empty.
        detail: The same in words.
        blank_values: Values dropped because they were marked as blank or impossible.
        parse_errors: Lines that could not be read.
        duration_ns: How long it took.
    """

    source: str
    devices: tuple[DeviceReading, ...] = ()
    down: str = ""
    detail: str = ""
    blank_values: int = 0
    parse_errors: int = 0
    duration_ns: int = 0

    def without_values(self, down: str, detail: str = "") -> Snapshot:
        """Return the same devices, none of which answers: no value outlives its source."""
        silent = tuple(DeviceReading(known.device, down=known.down or down, state=None) for known in self.devices)
        return Snapshot(self.source, silent, down=down, detail=detail)

    def lasting(self, duration_ns: int) -> Snapshot:
        """Return it with the time it took."""
        return replace(self, duration_ns=duration_ns)


def readings_of(metric: str, value: float | None, *labels: tuple[str, AttributeValue]) -> Iterator[Reading]:
    """Yield a reading if there is a finite value."""
    if value is not None and math.isfinite(value):
        yield Reading(metric, value, labels)


def scaled(value: float, factor: float) -> float:
    """Return value times factor, by division when that is exact: 83 / 100 is 0.83, and 83 * 0.01 is not."""
    return value * factor if factor >= 1 else value / round(1 / factor)


def memory_readings(used: float | None, limit: float | None) -> Iterator[Reading]:
    """Yield limit, usage and utilization from bytes; utilization needs both."""
    yield from readings_of(semconv.HW_GPU_MEMORY_LIMIT, limit)
    yield from readings_of(semconv.HW_GPU_MEMORY_USAGE, used)
    if used is not None and limit:
        yield from readings_of(semconv.HW_GPU_MEMORY_UTILIZATION, used / limit)
