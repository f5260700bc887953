"""AMD devices by ``amdsmi``, the Python API of AMD SMI. NEVER RUN ON AMD HARDWARE.

Written from the API's documentation and header (ROCm 6.2 to 7.x, https://rocm.docs.amd.com/projects/amdsmi/) and tested
only against a double of the structures described there. What an AMD card answers in practice may differ.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pasta_otel import semconv
from pasta_otel.errors import MissingError
from pasta_otel.gpu.device.model import (
    Device,
    DeviceReading,
    HwState,
    Labels,
    Owner,
    Reading,
    Snapshot,
    SourceDownError,
    memory_readings,
    readings_of,
    scaled,
)
from pasta_otel.model import AttributeValue

# amdsmi_status_t: what each means for the source or a device
REASONS = {
    4: "no_driver",  # FAIL_LOAD_MODULE
    8: "timeout",
    10: "no_permission",
    12: "lost",  # IO: the device's files cannot be read any more
    18: "no_driver",  # INIT_ERROR
    31: "lost",  # NOT_FOUND
    34: "no_driver",  # DRIVER_NOT_LOADED
}
# the library's "not available" for 16, 32 and 64 bits, where the Python layer has not made "N/A" of it
BLANKS = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
MILLIDEGREES_ABOVE = 1000  # the documentation says millidegrees, the library divides by 1000; no chip lives at 1000 C
CLOCKS = {"GFX": "graphics", "MEM": "memory", "VCLK0": "video"}
SENSORS = {"EDGE": "edge", "HOTSPOT": "hotspot", "VRAM": "memory"}
ECC = {"correctable_count": "corrected", "uncorrectable_count": "uncorrected", "deferred_count": "deferred"}
VIOLATIONS = {
    "active_ppt_pwr": "sw_power_cap",
    "active_socket_thrm": "hw_thermal",
    "active_hbm_thrm": "memory_thermal",
    "active_vr_thrm": "regulator_thermal",
    "active_prochot_thrm": "prochot",
}
DEGRADING = frozenset({"hw_thermal", "memory_thermal", "regulator_thermal", "prochot"})
MIB = 2**20
log = logging.getLogger(__name__)


def amd_source(owner: Owner | None = None) -> AmdSource:
    """Return the amdsmi source; nothing is asked of the driver yet.

    Args:
        owner: Tells a process's container and pod.

    Raises:
        MissingError: ``amdsmi``, or the library under it, is not there.
    """
    try:
        amdsmi = importlib.import_module("amdsmi")
    except Exception as error:  # it loads libamd_smi.so while it is imported
        raise MissingError(f"amdsmi: {error}", how="install amd-smi-lib of ROCm and its Python package") from error
    return AmdSource(amdsmi, owner)


class _Asker:
    """Ask amdsmi about one device: a value, or None; remembers the first refusal that was not "not supported"."""

    NOT_SUPPORTED = frozenset({2, 3, 40, 49})  # NOT_SUPPORTED, NOT_YET_IMPLEMENTED, NO_DATA, NO_HSMP_MSG_SUP

    def __init__(self, amdsmi: Any, handle: Any) -> None:
        self.amdsmi, self._handle = amdsmi, handle
        self.refusal = ""
        self.answers = 0

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return what a function says, or None."""
        call = getattr(self.amdsmi, f"amdsmi_{function}", None)
        if call is None:  # an older binding
            return None
        try:
            answer = call(self._handle, *arguments)
        except self.amdsmi.AmdSmiException as error:
            code = getattr(error, "err_code", None)
            if code not in self.NOT_SUPPORTED:
                self.refusal = self.refusal or _reason(error)
            return None
        self.answers += 1
        return answer

    def mapping(self, function: str, *arguments: Any) -> Mapping[str, Any]:
        """Return an answer that is a dictionary, or an empty one."""
        answer = self.ask(function, *arguments)
        return answer if isinstance(answer, Mapping) else {}

    def member(self, enum: str, name: str) -> Any:
        """Return a member of one of the binding's enums, or None."""
        return getattr(getattr(self.amdsmi, enum, None), name, None)


class AmdSource:
    """All AMD GPUs of this machine.

    Args:
        amdsmi: The ``amdsmi`` module, or ``pasta_otel.testing.amdsmi.FakeAmdSmi``.
        owner: Tells a process's container and pod.
    """

    name = "amdsmi"

    def __init__(self, amdsmi: Any, owner: Owner | None = None) -> None:
        self._amdsmi, self._owner = amdsmi, owner
        self._started = False
        self._at: dict[int, Device] = {}  # by index, for a device that cannot tell any more
        self._known: dict[str, Device] = {}

    def read(self) -> Snapshot:
        """Return every device.

        Raises:
            SourceDownError: No driver, or no permission.
        """
        try:
            if not self._started:
                self._amdsmi.amdsmi_init()
                self._started = True
            handles = self._amdsmi.amdsmi_get_processor_handles()
        except self._amdsmi.AmdSmiException as error:
            self.close()
            raise SourceDownError(_reason(error), " ".join(str(error).split())) from error
        read = [self._read_device(index, _Asker(self._amdsmi, handle)) for index, handle in enumerate(handles)]
        seen = {found.device.id for found in read}
        vanished = [device for key, device in self._known.items() if key not in seen]
        gone = [DeviceReading(device, down="gone", state="failed") for device in vanished]
        return Snapshot(self.name, (*read, *gone))

    def close(self) -> None:
        """End the session; the next ``read`` begins a new one."""
        if not self._started:
            return
        self._started = False
        try:
            self._amdsmi.amdsmi_shut_down()
        except self._amdsmi.AmdSmiException as error:
            log.debug("amdsmi_shut_down: %s", error)

    def _read_device(self, index: int, asker: _Asker) -> DeviceReading:
        device = _identify(index, asker) or self._at.get(index) or Device(f"index:{index}", vendor="amd")
        readings = [reading for reader in READERS for reading in reader(asker)]
        readings += processes(asker, self._owner)
        if not asker.answers and asker.refusal:
            return DeviceReading(device, down=asker.refusal, state="failed" if asker.refusal == "lost" else None)
        self._at[index] = self._known[device.id] = device
        return DeviceReading(device, tuple(readings), state=_state(readings))


def number(value: Any) -> float | None:
    """Return a number, or None for "N/A" and the blanks of the library."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value in BLANKS:
        return None
    return float(value)


def _times(value: Any, factor: float) -> float | None:
    found = number(value)
    return None if found is None else scaled(found, factor)


def _first(answer: Mapping[str, Any], *keys: str) -> float | None:
    return next((found for found in (number(answer.get(key)) for key in keys) if found is not None), None)


def _identify(index: int, asker: _Asker) -> Device | None:
    uuid, asic = asker.ask("get_gpu_device_uuid"), asker.mapping("get_gpu_asic_info")
    if not uuid and not asic:
        return None
    told = {
        semconv.HW_DRIVER_VERSION: asker.mapping("get_gpu_driver_info").get("driver_version", ""),
        semconv.HW_SERIAL_NUMBER: asic.get("asic_serial", ""),
    }
    info: Labels = tuple((key, str(word)) for key, word in told.items() if word and word != "N/A")
    name = str(asic.get("market_name", ""))
    return Device(str(uuid or f"index:{index}"), "" if name == "N/A" else name, "amd", info=info)


def utilization(asker: _Asker) -> Iterator[Reading]:
    """Yield activity of the graphics, memory and media engines (percent)."""
    activity = asker.mapping("get_gpu_activity")
    general = _times(activity.get("gfx_activity"), 0.01)
    yield from readings_of(semconv.HW_GPU_UTILIZATION, general, (semconv.HW_GPU_TASK, "general"))
    yield from readings_of(semconv.GPU_MEMORY_ACTIVITY, _times(activity.get("umc_activity"), 0.01))


def memory(asker: _Asker) -> Iterator[Reading]:
    """Yield VRAM (MiB)."""
    vram = asker.mapping("get_gpu_vram_usage")
    yield from memory_readings(_times(vram.get("vram_used"), MIB), _times(vram.get("vram_total"), MIB))


def power(asker: _Asker) -> Iterator[Reading]:
    """Yield power (W), its cap (uW) and energy (counts of ``counter_resolution`` uJ).

    Newer cards tell the current power, older ones an average.
    """
    info = asker.mapping("get_power_info")
    watts = _first(info, "socket_power", "current_socket_power", "average_socket_power")
    yield from readings_of(semconv.HW_POWER, watts)
    yield from readings_of(semconv.GPU_POWER_LIMIT, _times(asker.mapping("get_power_cap_info").get("power_cap"), 1e-6))
    energy = asker.mapping("get_energy_count")
    count = _first(energy, "energy_accumulator", "power")  # the second is the name until ROCm 6.4
    resolution = number(energy.get("counter_resolution"))
    if count is not None and resolution is not None:
        yield from readings_of(semconv.HW_ENERGY, count * resolution / 1e6)


def temperature(asker: _Asker) -> Iterator[Reading]:
    """Yield temperatures, and the speed of the first fan as a share of its maximum."""
    current = asker.member("AmdSmiTemperatureMetric", "CURRENT")
    for sensor, place in SENSORS.items():
        which = asker.member("AmdSmiTemperatureType", sensor)
        found = None if which is None else number(asker.ask("get_temp_metric", which, current))
        celsius = found / 1000 if found is not None and found > MILLIDEGREES_ABOVE else found
        yield from readings_of(semconv.HW_TEMPERATURE, celsius, (semconv.HW_SENSOR_LOCATION, place))
    speed, most = number(asker.ask("get_gpu_fan_speed", 0)), number(asker.ask("get_gpu_fan_speed_max", 0))
    if speed is not None and most:
        yield from readings_of(semconv.HW_FAN_SPEED_RATIO, speed / most)


def clocks(asker: _Asker) -> Iterator[Reading]:
    """Yield clock frequencies (MHz)."""
    for kind, word in CLOCKS.items():
        which = asker.member("AmdSmiClkType", kind)
        info = {} if which is None else asker.mapping("get_clock_info", which)
        megahertz = _first(info, "clk", "cur_clk")  # the second is the name until ROCm 6.1
        hertz = None if megahertz is None else megahertz * 1e6
        yield from readings_of(semconv.GPU_CLOCK_FREQUENCY, hertz, (semconv.GPU_CLOCK, word))


def errors(asker: _Asker) -> Iterator[Reading]:
    """Yield ECC errors of all blocks."""
    counts = asker.mapping("get_gpu_total_ecc_count")
    for key, word in ECC.items():
        yield from readings_of(semconv.HW_ERRORS, number(counts.get(key)), (semconv.ERROR_TYPE, word))


def pcie(asker: _Asker) -> Iterator[Reading]:
    """Yield PCIe throughput of both directions together (Mb/s), and replays."""
    metric = asker.mapping("get_pcie_info").get("pcie_metric", {})
    yield from readings_of(semconv.GPU_PCIE_THROUGHPUT, _times(metric.get("pcie_bandwidth"), 1e6 / 8))
    replays = number(metric.get("pcie_replay_count"))
    yield from readings_of(semconv.HW_ERRORS, replays, (semconv.ERROR_TYPE, "pcie_replay"))


def throttles(asker: _Asker) -> Iterator[Reading]:
    """Yield 1 or 0 for each limit that can hold the clocks down."""
    status = asker.mapping("get_violation_status")
    for key, word in VIOLATIONS.items():
        if isinstance(status.get(key), bool):  # "N/A" on cards without these counters
            yield from readings_of(semconv.GPU_THROTTLED, int(status[key]), (semconv.REASON, word))


def processes(asker: _Asker, owner: Owner | None) -> Iterator[Reading]:
    """Yield VRAM by process (bytes)."""
    for process in asker.ask("get_gpu_process_list") or ():
        if isinstance(process, Mapping) and isinstance(process.get("pid"), int):
            size = _first(process.get("memory_usage", {}), "vram_mem")
            size = _first(process, "mem") if size is None else size
            pid = process["pid"]
            labels: dict[str, AttributeValue] = {semconv.PROCESS_PID: pid, **(owner(pid) if owner else {})}
            yield from readings_of(semconv.GPU_PROCESS_MEMORY, size, *labels.items())


READERS: tuple[Callable[[_Asker], Iterator[Reading]], ...] = (
    utilization,
    memory,
    power,
    temperature,
    clocks,
    errors,
    pcie,
    throttles,
)


def _state(readings: list[Reading]) -> HwState:
    held = {dict(r.labels)[semconv.REASON] for r in readings if r.metric == semconv.GPU_THROTTLED and r.value}
    return "degraded" if held & DEGRADING else "ok"


def _reason(error: Any) -> str:
    code = getattr(error, "err_code", None)
    return "bad_parameter" if code is None else REASONS.get(code, f"amdsmi_{code}")
