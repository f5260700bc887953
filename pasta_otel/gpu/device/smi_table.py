"""nvidia-smi's CSV: numbers with units, and words where a number is missing.

The spelling of "no value" changes with driver and card ([N/A], [Not Supported], [Unknown Error], [Requested
functionality has been deprecated], ...), so a cell is a value only if it is a number; every word is an absent value.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pasta_otel import semconv
from pasta_otel.errors import InputError
from pasta_otel.gpu.device.model import (
    Device,
    DeviceReading,
    Labels,
    Reading,
    Snapshot,
    memory_readings,
    readings_of,
    scaled,
)
from pasta_otel.model import AttributeValue

_NUMBER = re.compile(r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(\S*)", re.ASCII)
_HEADER = re.compile(r"(?P<name>[^\[\]]+?)\s*(?:\[(?P<unit>[^\]]*)\])?\s*")
# to base units; percent becomes a share
UNITS: Mapping[str, float] = {
    "": 1,
    "%": 0.01,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "hz": 1,
    "khz": 1e3,
    "mhz": 1e6,
    "ghz": 1e9,
    "mw": 1e-3,
    "w": 1,
    "c": 1,
    "us": 1e-6,
}
LOST = "gpu is lost"
MEMORY_USED, MEMORY_TOTAL = "memory.used", "memory.total"


class Field(NamedTuple):
    """Which metric a column is."""

    metric: str
    labels: tuple[tuple[str, AttributeValue], ...] = ()


# column's last word: ours, as NVML's source says it
THROTTLES = {
    "sw_power_cap": "sw_power_cap",
    "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_thermal",
    "hw_thermal_slowdown": "hw_thermal",
    "hw_power_brake_slowdown": "hw_power_brake",
}
# names of `nvidia-smi --help-query-gpu`
FIELDS: Mapping[str, Field] = {
    "utilization.gpu": Field(semconv.HW_GPU_UTILIZATION, ((semconv.HW_GPU_TASK, "general"),)),
    "utilization.encoder": Field(semconv.HW_GPU_UTILIZATION, ((semconv.HW_GPU_TASK, "encoder"),)),
    "utilization.decoder": Field(semconv.HW_GPU_UTILIZATION, ((semconv.HW_GPU_TASK, "decoder"),)),
    "utilization.memory": Field(semconv.GPU_MEMORY_ACTIVITY),
    "power.draw": Field(semconv.HW_POWER),
    "enforced.power.limit": Field(semconv.GPU_POWER_LIMIT),
    "temperature.gpu": Field(semconv.HW_TEMPERATURE, ((semconv.HW_SENSOR_LOCATION, "gpu"),)),
    "temperature.memory": Field(semconv.HW_TEMPERATURE, ((semconv.HW_SENSOR_LOCATION, "memory"),)),
    "fan.speed": Field(semconv.HW_FAN_SPEED_RATIO),
    "encoder.stats.averageFps": Field(semconv.GPU_FRAME_RATE),
    "clocks.current.graphics": Field(semconv.GPU_CLOCK_FREQUENCY, ((semconv.GPU_CLOCK, "graphics"),)),
    "clocks.current.sm": Field(semconv.GPU_CLOCK_FREQUENCY, ((semconv.GPU_CLOCK, "sm"),)),
    "clocks.current.memory": Field(semconv.GPU_CLOCK_FREQUENCY, ((semconv.GPU_CLOCK, "memory"),)),
    "clocks.current.video": Field(semconv.GPU_CLOCK_FREQUENCY, ((semconv.GPU_CLOCK, "video"),)),
    "ecc.errors.corrected.aggregate.total": Field(semconv.HW_ERRORS, ((semconv.ERROR_TYPE, "corrected"),)),
    "ecc.errors.uncorrected.aggregate.total": Field(semconv.HW_ERRORS, ((semconv.ERROR_TYPE, "uncorrected"),)),
    **{
        f"clocks_event_reasons_counters.{name}": Field(semconv.GPU_THROTTLED_TIME, ((semconv.REASON, word),))
        for name, word in THROTTLES.items()
    },
}
INFO: Mapping[str, str] = {
    "driver_version": semconv.HW_DRIVER_VERSION,
    "serial": semconv.HW_SERIAL_NUMBER,
    "mig.mode.current": semconv.GPU_MIG_MODE,
}
QUERY = ("index", "uuid", "name", *INFO, MEMORY_USED, MEMORY_TOTAL, *FIELDS)


def parse_table(text: str, source: str = "nvidia-smi") -> Snapshot:
    """Return the devices of ``nvidia-smi --query-gpu=... --format=csv``, with its header line.

    A row that does not fit the header is counted as a parse error; the others are kept.

    Raises:
        InputError: There is no header: what was printed is not such a table.
    """
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), skipinitialspace=True) if row]
    except csv.Error as error:  # a cell beyond the reader's limit
        raise InputError(f"not a table of nvidia-smi: {error}", kind="smi_table") from error
    if not rows or not {"index", "uuid"} & set(rows[0]):
        first = text.strip().splitlines()[0][:200] if text.strip() else "nothing"
        raise InputError(f"not a table of nvidia-smi: {first}", kind="smi_table")
    columns = [_column(cell) for cell in rows[0]]
    good = [row for row in rows[1:] if len(row) == len(columns)]
    devices = tuple(_device(columns, row) for row in good)
    return Snapshot(source, devices, parse_errors=len(rows) - 1 - len(good))


def _column(header: str) -> tuple[str, str]:
    match = _HEADER.fullmatch(header)
    return (match["name"], match["unit"] or "") if match else (header, "")


def number(cell: str, unit: str) -> float | None:
    """Return a cell in base units, or None where it holds words; its own unit goes before the header's."""
    match = _NUMBER.fullmatch(cell)
    factor = UNITS.get((match[2] or unit).lower()) if match else None
    return scaled(float(match[1]), factor) if match and factor is not None else None


def _device(columns: Sequence[tuple[str, str]], row: Sequence[str]) -> DeviceReading:
    words = {name: cell for (name, _), cell in zip(columns, row, strict=True)}
    numbers = {name: number(cell, unit) for (name, unit), cell in zip(columns, row, strict=True)}
    lost = any(LOST in cell.lower() for cell in row)
    key = _word(words.get("uuid")) or words.get("index", "")
    device = Device(key, _word(words.get("name")), "nvidia", info=_info(words))
    readings = tuple(_readings(numbers))
    return DeviceReading(device, readings, down="lost" if lost else "", state="failed" if lost else "ok")


def _readings(numbers: Mapping[str, float | None]) -> Iterator[Reading]:
    yield from memory_readings(numbers.get(MEMORY_USED), numbers.get(MEMORY_TOTAL))
    for name, value in numbers.items():
        if name in FIELDS:
            yield from readings_of(FIELDS[name].metric, value, *FIELDS[name].labels)


def _info(words: Mapping[str, str]) -> Labels:
    told = ((key, _word(words.get(name)).lower()) for name, key in INFO.items())
    return tuple((key, word) for key, word in told if word)


def _word(cell: str | None) -> str:
    """Return a text cell, or empty where it stands for "no value"."""
    return "" if cell is None or cell == "N/A" or cell.startswith("[") else cell
