"""NVIDIA devices by NVML (``nvidia-ml-py``): start, enumerate, read, start again after a loss."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from pasta_otel import semconv
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.errors import MissingError
from pasta_otel.gpu.device.model import Device, DeviceReading, Labels, Owner, Snapshot, SourceDownError
from pasta_otel.gpu.device.nvml_events import XidEvents
from pasta_otel.gpu.device.nvml_fields import READERS, Fields, memory, processes, state

# nvmlReturn_t: what each means for the whole source
REASONS = {
    4: "no_permission",
    9: "no_driver",
    10: "timeout",
    12: "no_driver",  # the library is part of the driver
    13: "version_mismatch",  # a library without a function that the binding needs
    15: "lost",
    16: "reset_required",
    18: "version_mismatch",
    28: "gone",
}
LOST = frozenset({15, 16, 28})  # NVML_ERROR_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND
BROKEN = frozenset({"lost", "reset_required", "gone"})  # what is wrong lies in the device, not in our asking
RESTART_NS = 60_000_000_000  # a session does not see that a lost GPU came back
NEEDED = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "NVMLError")
INSTEAD = "pip uninstall pynvml, then pip install 'pasta-otel[gpu]'"
log = logging.getLogger(__name__)
MIG_MODES = {0: "disabled", 1: "enabled"}


def nvml_source(owner: Owner | None = None, *, clock: Clock | None = None) -> NvmlSource:
    """Return the NVML source; nothing is asked of the driver yet.

    Args:
        owner: Tells a process's container and pod.
        clock: Time.

    Raises:
        MissingError: ``nvidia-ml-py`` is not installed, or what is there cannot be used.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError as error:
        raise MissingError("nvidia-ml-py is not installed", how="pip install 'pasta-otel[gpu]'") from error
    except Exception as error:  # whatever stands in for it, or half of an installation
        why = str(error).partition("\n")[0] or type(error).__name__
        how = "pip install --force-reinstall nvidia-ml-py"
        raise MissingError(f"nvidia-ml-py cannot be imported: {why}", how=how) from error
    if lacking := next((name for name in NEEDED if not hasattr(nvml, name)), None):
        raise MissingError(f"the module pynvml is not nvidia-ml-py: it has no {lacking}", how=INSTEAD)
    return NvmlSource(nvml, owner, clock=clock)


class NvmlSource:
    """All NVIDIA devices of this machine and their MIG instances.

    Args:
        nvml: The ``pynvml`` module, or ``pasta_otel.testing.nvml.FakeNvml``.
        owner: Tells a process's container and pod.
        clock: Time.
    """

    name = "nvml"

    def __init__(self, nvml: Any, owner: Owner | None = None, *, clock: Clock | None = None) -> None:
        self._nvml, self._owner, self._clock = nvml, owner, clock or SystemClock()
        self._started_ns: int | None = None
        self._lost_before = False
        self._known: dict[str, Device] = {}  # by hw.id, in the order seen
        self._at: dict[int, str] = {}  # index to hw.id, for a device that cannot tell any more
        self._driver = ""
        self._xids = XidEvents(nvml)

    def read(self) -> Snapshot:
        """Return every device; one that was there before and is not now is down, not forgotten.

        Raises:
            SourceDownError: No library, no driver, or they do not fit.
        """
        try:
            self._start()
            self._xids.drain()
            read = [found for index in range(self._nvml.nvmlDeviceGetCount()) for found in self._read_index(index)]
        except self._nvml.NVMLError as error:
            self.close()
            raise SourceDownError(_reason(error), str(error)) from error
        seen = {found.device.id for found in read}
        gone = [self._gone(device, "gone") for key, device in self._known.items() if key not in seen]
        self._lost_before = any(found.down or found.state == "failed" for found in (*read, *gone))
        return Snapshot(self.name, (*read, *gone))

    def close(self) -> None:
        """End the NVML session; the next ``read`` begins a new one."""
        if self._started_ns is None:
            return
        self._started_ns = None
        self._xids.close()
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.debug("nvmlShutdown: %s", error)  # the session went with the driver

    def _start(self) -> None:
        now = self._clock.monotonic_ns()
        if self._started_ns is not None and self._lost_before and now - self._started_ns > RESTART_NS:
            self.close()
        if self._started_ns is not None:
            return
        self._nvml.nvmlInit()
        self._started_ns = now
        self._driver = str(self._nvml.nvmlSystemGetDriverVersion())
        self._xids.open(self._find_handles())

    def _find_handles(self) -> dict[str, Any]:
        found = {}
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                found[str(self._nvml.nvmlDeviceGetUUID(handle))] = handle
            except self._nvml.NVMLError:
                continue  # the reading will say why
        return found

    def _read_index(self, index: int) -> list[DeviceReading]:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            return self._read_device(index, Fields(self._nvml, handle, LOST))
        except self._nvml.NVMLError as error:
            key = self._at.get(index, f"index:{index}")
            return [self._gone(self._known.get(key, Device(key, vendor="nvidia")), _reason(error))]

    def _read_device(self, index: int, fields: Fields) -> list[DeviceReading]:
        mode = fields.ask("nvmlDeviceGetMigMode")  # [current, pending]
        mig = MIG_MODES.get(mode[0], "") if mode is not None else ""
        device = self._identify(index, fields, mig)
        readings = [reading for reader in READERS for reading in reader(fields)]
        readings += self._xids.readings(device.id)
        found = "failed" if self._xids.failed(device.id) else state(fields)
        instances = self._instances(device, fields) if mig == "enabled" else []
        if not instances:
            readings += processes(fields, self._owner)
        return [DeviceReading(device, tuple(readings), state=found), *instances]

    def _identify(self, index: int, fields: Fields, mig: str) -> Device:
        key = str(self._nvml.nvmlDeviceGetUUID(fields.handle))
        told = {
            semconv.HW_DRIVER_VERSION: self._driver,
            semconv.HW_SERIAL_NUMBER: str(fields.ask("nvmlDeviceGetSerial") or ""),
            semconv.GPU_MIG_MODE: mig,
        }
        info: Labels = tuple((name, value) for name, value in told.items() if value)
        device = Device(key, str(fields.ask("nvmlDeviceGetName") or ""), "nvidia", info=info)
        self._known[key], self._at[index] = device, key
        return device

    def _instances(self, parent: Device, fields: Fields) -> list[DeviceReading]:
        """Return the MIG instances: memory and processes are theirs, power and temperature the whole GPU's."""
        found = []
        for index in range(fields.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = fields.ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if handle is None:  # an empty slot
                continue
            own = Fields(self._nvml, handle, LOST)
            device = Device(
                str(own.ask("nvmlDeviceGetUUID")), str(own.ask("nvmlDeviceGetName") or ""), "nvidia", parent=parent.id
            )
            found.append(DeviceReading(device, (*memory(own), *processes(own, self._owner))))
        return found

    def _gone(self, device: Device, reason: str) -> DeviceReading:
        failed = reason in BROKEN or self._xids.failed(device.id)
        readings = tuple(self._xids.readings(device.id))
        return DeviceReading(device, readings, down=reason, state="failed" if failed else None)


def _reason(error: Any) -> str:
    return REASONS.get(error.value, f"nvml_{error.value}")
