"""What NVML tells about one device, field by field; a field that the device, driver or binding lacks is no reading.

Units and meanings: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pasta_otel import semconv
from pasta_otel.gpu.device.model import HwState, Owner, Reading, memory_readings, readings_of, scaled
from pasta_otel.model import AttributeValue

ALL_LINKS = 0xFFFFFFFF  # scopeId that sums over all NVLinks
FIELD_MEMORY_TEMP = 82  # NVML_FI_DEV_MEMORY_TEMP, degrees Celsius
NVLINK_KIB = {138: "transmit", 139: "receive"}  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
SENSOR_GPU = 0  # NVML_TEMPERATURE_GPU
AGGREGATE_ECC = 1  # NVML_AGGREGATE_ECC: over the board's life; the volatile count restarts with the driver
ECC_TYPES = {0: "corrected", 1: "uncorrected"}  # nvmlMemoryErrorType_t
CLOCKS = {0: "graphics", 1: "sm", 2: "memory", 3: "video"}  # nvmlClockType_t
PCIE = {0: "transmit", 1: "receive"}  # nvmlPcieUtilCounter_t, seen from the GPU
# nvmlClocksEventReasons; idle, application and display settings lower the clocks too, but nobody is held down
THROTTLES = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
# nvmlPerfPolicyType_t; by function and not by field value, because the field ids moved between drivers
VIOLATIONS = {0: "sw_power_cap", 1: "sw_thermal", 2: "sync_boost", 3: "board_limit", 5: "reliability"}
DEGRADING = 0x08 | 0x40 | 0x80  # the board protects itself


class Fields:
    """Ask NVML about one device: a value, or None where it is not supported.

    Args:
        nvml: The ``pynvml`` module, or a double of it.
        handle: The device.
        lost: NVML error codes that mean the device is gone; these are raised.
    """

    def __init__(self, nvml: Any, handle: Any, lost: frozenset[int]) -> None:
        self.nvml, self.handle, self._lost = nvml, handle, lost
        # raised by the binding, and no NVMLError, where the library is older than its newest version of a function
        self._mismatch: type[Exception] = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return what an NVML function says, or None.

        Raises:
            NVMLError: The device is gone.
        """
        call = getattr(self.nvml, function, None)
        if call is None:  # an older binding
            return None
        try:
            return call(self.handle, *arguments)
        except self.nvml.NVMLError as error:
            if error.value in self._lost:
                raise
            return None
        except self._mismatch:
            return None

    def first(self, *functions: str) -> Any:
        """Return what the first function that works says: names change with driver and binding."""
        return next((value for value in map(self.ask, functions) if value is not None), None)

    def values(self, *fields: int | tuple[int, int]) -> dict[int, float]:
        """Return field values by field id, without those that failed."""
        found = self.ask("nvmlDeviceGetFieldValues", list(fields))
        return {f.fieldId: _number(f) for f in found or () if f.nvmlReturn == 0 and f.valueType < len(VALUE_MEMBERS)}


def _number(field: Any) -> float:
    return float(getattr(field.value, VALUE_MEMBERS[field.valueType]))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else scaled(value, factor)


def utilization(fields: Fields) -> Iterator[Reading]:
    """Yield shares of the driver's last sample period (1/6 s to 1 s)."""
    rates = fields.ask("nvmlDeviceGetUtilizationRates")
    if rates is not None:
        yield from readings_of(semconv.HW_GPU_UTILIZATION, rates.gpu / 100, (semconv.HW_GPU_TASK, "general"))
        yield from readings_of(semconv.GPU_MEMORY_ACTIVITY, rates.memory / 100)
    for task in ("Encoder", "Decoder"):
        found = fields.ask(f"nvmlDeviceGet{task}Utilization")  # [percent, sample period in us]
        if found is not None:
            yield from readings_of(semconv.HW_GPU_UTILIZATION, found[0] / 100, (semconv.HW_GPU_TASK, task.lower()))


def memory(fields: Fields) -> Iterator[Reading]:
    """Yield memory in bytes; version 2 of the structure counts the driver's own part apart."""
    version = getattr(fields.nvml, "nvmlMemory_v2", None)
    info = fields.ask("nvmlDeviceGetMemoryInfo", version) if version else None
    info = info if info is not None else fields.ask("nvmlDeviceGetMemoryInfo")
    if info is not None:
        yield from memory_readings(info.used, info.total)


def power(fields: Fields) -> Iterator[Reading]:
    """Yield power and its limit (NVML: mW) and energy (NVML: mJ since the driver was loaded)."""
    yield from readings_of(semconv.HW_POWER, _scaled(fields.ask("nvmlDeviceGetPowerUsage"), 1e-3))
    yield from readings_of(semconv.GPU_POWER_LIMIT, _scaled(fields.ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3))
    yield from readings_of(semconv.HW_ENERGY, _scaled(fields.ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3))


def temperature(fields: Fields) -> Iterator[Reading]:
    """Yield temperatures of the GPU and of its memory, and the speed of its fans."""
    chip = fields.ask("nvmlDeviceGetTemperatureV", SENSOR_GPU)
    chip = chip if chip is not None else fields.ask("nvmlDeviceGetTemperature", SENSOR_GPU)
    yield from readings_of(semconv.HW_TEMPERATURE, chip, (semconv.HW_SENSOR_LOCATION, "gpu"))
    hbm = fields.values(FIELD_MEMORY_TEMP).get(FIELD_MEMORY_TEMP)
    yield from readings_of(semconv.HW_TEMPERATURE, hbm, (semconv.HW_SENSOR_LOCATION, "memory"))
    yield from readings_of(semconv.HW_FAN_SPEED_RATIO, _scaled(fields.ask("nvmlDeviceGetFanSpeed"), 0.01))


def errors(fields: Fields) -> Iterator[Reading]:
    """Yield ECC errors over the board's life, and PCIe replays."""
    for code, word in ECC_TYPES.items():
        count = fields.ask("nvmlDeviceGetTotalEccErrors", code, AGGREGATE_ECC)
        yield from readings_of(semconv.HW_ERRORS, count, (semconv.ERROR_TYPE, word))
    replays = fields.ask("nvmlDeviceGetPcieReplayCounter")
    yield from readings_of(semconv.HW_ERRORS, replays, (semconv.ERROR_TYPE, "pcie_replay"))


def clocks(fields: Fields) -> Iterator[Reading]:
    """Yield clock frequencies (NVML: MHz)."""
    for code, word in CLOCKS.items():
        hertz = _scaled(fields.ask("nvmlDeviceGetClockInfo", code), 1e6)
        yield from readings_of(semconv.GPU_CLOCK_FREQUENCY, hertz, (semconv.GPU_CLOCK, word))


def throttle_bits(fields: Fields) -> int | None:
    """Return why the clocks are lower than they could be, as NVML's bit mask."""
    bits = fields.first("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    return None if bits is None else int(bits)


def throttles(fields: Fields) -> Iterator[Reading]:
    """Yield 1 or 0 for each reason to hold the clocks down."""
    bits = throttle_bits(fields)
    if bits is not None:
        for bit, word in THROTTLES.items():
            yield from readings_of(semconv.GPU_THROTTLED, int(bool(bits & bit)), (semconv.REASON, word))


def violations(fields: Fields) -> Iterator[Reading]:
    """Yield how long each limit held the clocks down (NVML: ns since the driver was loaded)."""
    for policy, word in VIOLATIONS.items():
        status = fields.ask("nvmlDeviceGetViolationStatus", policy)
        if status is not None:
            seconds = scaled(status.violationTime, 1e-9)
            yield from readings_of(semconv.GPU_THROTTLED_TIME, seconds, (semconv.REASON, word))


def links(fields: Fields) -> Iterator[Reading]:
    """Yield PCIe throughput (NVML: KB/s over 20 ms, which is how long each call takes) and NVLink bytes (KiB)."""
    for code, direction in PCIE.items():
        rate = _scaled(fields.ask("nvmlDeviceGetPcieThroughput", code), 1e3)
        yield from readings_of(semconv.GPU_PCIE_THROUGHPUT, rate, (semconv.NETWORK_IO_DIRECTION, direction))
    kib = fields.values(*((code, ALL_LINKS) for code in NVLINK_KIB))
    for code, direction in NVLINK_KIB.items():
        labels = ((semconv.NETWORK_IO_DIRECTION, direction), (semconv.GPU_LINK, "nvlink"))
        yield from readings_of(semconv.HW_GPU_IO, _scaled(kib.get(code), 1024), *labels)


def processes(fields: Fields, owner: Owner | None) -> Iterator[Reading]:
    """Yield device memory by process, with what is known of its container and pod."""
    used: dict[int, int] = {}
    for kind in ("Compute", "Graphics"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"  # _v2: drivers 450 to 509
        for process in fields.first(name, f"{name}_v2") or ():
            if process.usedGpuMemory is not None:  # None: the driver does not tell
                used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory)
    for pid, size in used.items():
        labels: dict[str, AttributeValue] = {semconv.PROCESS_PID: pid, **(owner(pid) if owner else {})}
        yield from readings_of(semconv.GPU_PROCESS_MEMORY, size, *labels.items())


def state(fields: Fields) -> HwState:
    """Return ``degraded`` while the board protects itself, or has memory rows it could not repair."""
    rows = fields.ask("nvmlDeviceGetRemappedRows")  # (correctable, uncorrectable, pending, failed)
    unrepaired = rows is not None and bool(rows[3])
    return "degraded" if unrepaired or (throttle_bits(fields) or 0) & DEGRADING else "ok"


READERS: tuple[Callable[[Fields], Iterator[Reading]], ...] = (
    utilization,
    memory,
    power,
    temperature,
    errors,
    clocks,
    throttles,
    violations,
    links,
)
