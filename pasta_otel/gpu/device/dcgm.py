"""NVIDIA devices as a DCGM exporter's page tells them, without its "blank" numbers.

DCGM marks an unsupported or paused field by a huge number, and exporters print it as if it were one. Source of the
blanks: dcgm_structs.h, DCGM_INT32_BLANK, DCGM_INT64_BLANK and DCGM_FP64_BLANK, each with three more that say why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from pasta_otel import semconv
from pasta_otel.gpu.device.model import Device, DeviceReading, Reading, Snapshot, memory_readings, readings_of, scaled
from pasta_otel.model import AttributeValue

INT32_BLANKS = range(0x7FFFFFF0, 0x7FFFFFF4)  # INT_MAX itself is a number like any other
INT64_BLANK = 2.0**63 - 16  # as a float this is 2^63: rounded forms are caught too
FP64_BLANKS = range(2**47, 2**47 + 4)
_PERCENT = re.compile(r"DCGM_FI_DEV_\w*UTIL")
_SHARE = re.compile(r"DCGM_FI_PROF_\w*(ACTIVE|OCCUPANCY)")


class PageSample(Protocol):
    """One good line of a page."""

    @property
    def name(self) -> str:
        """Return the metric's name."""

    @property
    def labels(self) -> Sequence[tuple[str, str]]:
        """Return its labels."""

    @property
    def value(self) -> float:
        """Return its value."""


class PageReading(Protocol):
    """A page whose bad lines are left out and counted."""

    @property
    def samples(self) -> Sequence[PageSample]:
        """Return the good lines."""

    @property
    def errors(self) -> Sequence[object]:
        """Return the bad ones."""


def is_blank(name: str, value: float) -> bool:
    """Return whether a DCGM value stands for "none", or cannot be one (NaN, a share above its whole)."""
    whole = _whole(name)
    if value != value or value >= INT64_BLANK or value in INT32_BLANKS or value in FP64_BLANKS:  # noqa: PLR0124  # NaN
        return True
    return whole is not None and not 0 <= value <= whole


def _whole(name: str) -> float | None:
    """Return the largest value of a ratio field, or None for other fields."""
    if _PERCENT.fullmatch(name):
        return 100.0
    return 1.0 if _SHARE.fullmatch(name) else None


def without_blanks(samples: Iterable[PageSample]) -> tuple[list[PageSample], int]:
    """Return the samples that hold a value, and how many do not."""
    every = list(samples)
    kept = [sample for sample in every if not is_blank(sample.name, sample.value)]
    return kept, len(every) - len(kept)


class _Field(NamedTuple):
    metric: str
    factor: float = 1.0
    labels: tuple[tuple[str, AttributeValue], ...] = ()


def _unit(name: str) -> _Field:
    return _Field(semconv.GPU_UNIT_ACTIVITY, 1.0, ((semconv.GPU_UNIT, name),))


def _rate(metric: str, direction: str) -> _Field:
    return _Field(metric, 1.0, ((semconv.NETWORK_IO_DIRECTION, direction),))


# units: dcgm_fields.h, and for the profiling fields (PROF) DCGM's user guide, "Profiling Metrics": shares, and averages
# in bytes a second, whatever type an exporter declares. XID_ERRORS is left out: it is the last code ever seen, and
# never goes back.
FIELDS: Mapping[str, _Field] = {
    "DCGM_FI_DEV_GPU_UTIL": _Field(semconv.HW_GPU_UTILIZATION, 0.01, ((semconv.HW_GPU_TASK, "general"),)),
    "DCGM_FI_DEV_ENC_UTIL": _Field(semconv.HW_GPU_UTILIZATION, 0.01, ((semconv.HW_GPU_TASK, "encoder"),)),
    "DCGM_FI_DEV_DEC_UTIL": _Field(semconv.HW_GPU_UTILIZATION, 0.01, ((semconv.HW_GPU_TASK, "decoder"),)),
    "DCGM_FI_DEV_MEM_COPY_UTIL": _Field(semconv.GPU_MEMORY_ACTIVITY, 0.01),
    "DCGM_FI_DEV_SM_CLOCK": _Field(semconv.GPU_CLOCK_FREQUENCY, 1e6, ((semconv.GPU_CLOCK, "sm"),)),
    "DCGM_FI_DEV_MEM_CLOCK": _Field(semconv.GPU_CLOCK_FREQUENCY, 1e6, ((semconv.GPU_CLOCK, "memory"),)),
    "DCGM_FI_DEV_GPU_TEMP": _Field(semconv.HW_TEMPERATURE, 1.0, ((semconv.HW_SENSOR_LOCATION, "gpu"),)),
    "DCGM_FI_DEV_MEMORY_TEMP": _Field(semconv.HW_TEMPERATURE, 1.0, ((semconv.HW_SENSOR_LOCATION, "memory"),)),
    "DCGM_FI_DEV_POWER_USAGE": _Field(semconv.HW_POWER),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": _Field(semconv.HW_ENERGY, 1e-3),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": _Field(semconv.HW_ERRORS, 1.0, ((semconv.ERROR_TYPE, "pcie_replay"),)),
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": _Field(semconv.HW_ERRORS, 1.0, ((semconv.ERROR_TYPE, "corrected"),)),
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": _Field(semconv.HW_ERRORS, 1.0, ((semconv.ERROR_TYPE, "uncorrected"),)),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": _Field(semconv.GPU_POWER_LIMIT),
    "DCGM_FI_DEV_VIDEO_CLOCK": _Field(semconv.GPU_CLOCK_FREQUENCY, 1e6, ((semconv.GPU_CLOCK, "video"),)),
    "DCGM_FI_DEV_FAN_SPEED": _Field(semconv.HW_FAN_SPEED_RATIO, 0.01),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": _unit("engine"),
    "DCGM_FI_PROF_SM_ACTIVE": _unit("sm"),
    "DCGM_FI_PROF_SM_OCCUPANCY": _Field(semconv.GPU_SM_OCCUPANCY),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": _unit("tensor"),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": _unit("fp64"),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": _unit("fp32"),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": _unit("fp16"),
    "DCGM_FI_PROF_PIPE_INT_ACTIVE": _unit("int"),
    "DCGM_FI_PROF_DRAM_ACTIVE": _unit("memory"),
    "DCGM_FI_PROF_PCIE_TX_BYTES": _rate(semconv.GPU_PCIE_THROUGHPUT, "transmit"),
    "DCGM_FI_PROF_PCIE_RX_BYTES": _rate(semconv.GPU_PCIE_THROUGHPUT, "receive"),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": _rate(semconv.GPU_NVLINK_THROUGHPUT, "transmit"),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": _rate(semconv.GPU_NVLINK_THROUGHPUT, "receive"),
}
FB_USED = "DCGM_FI_DEV_FB_USED"
FB_PARTS = (FB_USED, "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_RESERVED")  # MiB; together the whole
MIB = 2**20


class DcgmSource:
    """The devices of one DCGM exporter page.

    Args:
        fetch: Brings the page; raises SourceDownError when it cannot.
    """

    name = "dcgm"

    def __init__(self, fetch: Callable[[], PageReading]) -> None:
        self._fetch = fetch

    def read(self) -> Snapshot:
        """Return the devices on the page; what stands there once for each pod counts once.

        Raises:
            SourceDownError: The page cannot be had.
        """
        page = self._fetch()
        kept, blank = without_blanks(page.samples)
        devices: dict[Device, dict[str, float]] = {}
        for sample in kept:
            if sample.name.startswith("DCGM_"):
                devices.setdefault(_device(dict(sample.labels)), {}).setdefault(sample.name, sample.value)
        found = tuple(DeviceReading(device, tuple(_readings(fields))) for device, fields in devices.items())
        return Snapshot(self.name, found, blank_values=blank, parse_errors=len(page.errors))

    def close(self) -> None:
        """Do nothing: nothing is held."""


def _device(labels: Mapping[str, str]) -> Device:
    key = labels.get("UUID") or labels.get("gpu", "")
    instance = labels.get("GPU_I_ID", "")
    driver = labels.get("DCGM_FI_DRIVER_VERSION", "")
    info = ((semconv.HW_DRIVER_VERSION, driver),) if driver else ()
    own = f"{key}/{instance}" if instance else key  # a MIG instance has its GPU's UUID on the page
    return Device(own, labels.get("modelName", ""), "nvidia", parent=key if instance else "", info=info)


def _readings(values: Mapping[str, float]) -> Iterator[Reading]:
    parts = [values.get(name) for name in FB_PARTS]
    used = values.get(FB_USED)
    limit = sum(part for part in parts if part is not None) if None not in parts else None
    yield from memory_readings(None if used is None else used * MIB, None if limit is None else limit * MIB)
    for name, value in values.items():
        if name in FIELDS:
            field = FIELDS[name]
            yield from readings_of(field.metric, scaled(value, field.factor), *field.labels)
