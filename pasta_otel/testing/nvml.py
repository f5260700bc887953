"""A double of the ``pynvml`` module: real structures, real exceptions, devices that can be lost or hang.

A function that a fake device has no answer for raises NVML_ERROR_NOT_SUPPORTED, as NVML does.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

NOT_SUPPORTED, NOT_FOUND, TIMEOUT, GPU_IS_LOST = 3, 6, 10, 15


@dataclass
class FakeGpu:
    """One device, or MIG instance.

    Attributes:
        uuid: As ``nvmlDeviceGetUUID`` says it.
        answers: By function name: the value, or a callable over the remaining arguments; a missing one is unsupported.
        fields: Field values by (field id, scope id): (nvmlValueType_t, value).
        error: NVML error code that every call for this device raises, or None.
        instances: Its MIG instances; None is an empty slot.
    """

    uuid: str
    answers: dict[str, Any] = field(default_factory=dict)
    fields: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    error: int | None = None
    instances: list[FakeGpu | None] = field(default_factory=list)

    def call(self, function: str, *arguments: Any) -> Any:
        """Answer one NVML function."""
        if self.error is not None:
            raise pynvml.NVMLError(self.error)
        if function == "nvmlDeviceGetUUID":
            return self.uuid
        if function == "nvmlDeviceGetFieldValues":
            return self._field_values(arguments[0])
        answer = self.answers.get(function)
        if answer is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return answer(*arguments) if callable(answer) else answer

    def _field_values(self, asked: list[Any]) -> Any:
        values = (pynvml.c_nvmlFieldValue_t * len(asked))()
        for slot, one in zip(values, asked, strict=True):
            slot.fieldId, slot.scopeId = one if isinstance(one, tuple) else (one, 0)
            kind, value = self.fields.get((slot.fieldId, slot.scopeId), (None, 0))
            slot.nvmlReturn = NOT_SUPPORTED if kind is None else 0
            if kind is not None:
                slot.valueType = kind
                setattr(slot.value, ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[kind], value)
        return values


class FakeNvml:
    """What ``NvmlSource`` uses of ``pynvml``.

    Attributes:
        gpus: The devices, in index order.
        init_error: NVML error code that ``nvmlInit`` raises, or None.
        hang: When set, ``nvmlDeviceGetCount`` waits for it.
        sessions: How often ``nvmlInit`` was called.
        open: Whether a session is open.
        waiting: XID events that wait: (device, code).
        events: Whether devices accept event registration.
    """

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2  # noqa: N815  # pynvml's own name

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.init_error: int | None = None
        self.hang: threading.Event | None = None
        self.sessions, self.open, self.entered = 0, False, 0
        self.waiting: deque[tuple[FakeGpu, int]] = deque()
        self.events = True
        self._handles: dict[int, FakeGpu] = {}

    def handle(self, gpu: FakeGpu) -> Any:
        """Return the opaque pointer that stands for a device."""
        address = id(gpu)
        self._handles[address] = gpu
        return ctypes.cast(address, pynvml.c_nvmlDevice_t)

    def nvmlInit(self) -> None:  # noqa: N802  # pynvml's own names, here and below
        """Begin a session."""
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.sessions, self.open = self.sessions + 1, True

    def nvmlShutdown(self) -> None:  # noqa: N802
        """End the session."""
        self.open = False

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        """Return a driver version."""
        return "999.01"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Return the number of devices, when it does not hang."""
        self.entered += 1
        if self.hang is not None:
            self.hang.wait()
        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        """Return a device; a lost one has none."""
        gpu = self.gpus[index]
        if gpu.error is not None:
            raise pynvml.NVMLError(gpu.error)
        return self.handle(gpu)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:  # noqa: N802
        """Return the number of MIG slots."""
        return len(self._of(handle).instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:  # noqa: N802
        """Return a MIG instance, unless the slot is empty."""
        instance = self._of(handle).instances[index]
        if instance is None:
            raise pynvml.NVMLError(NOT_FOUND)
        return self.handle(instance)

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        """Return an event set."""
        return object()

    def nvmlEventSetFree(self, event_set: object) -> None:  # noqa: N802
        """Free it."""

    def nvmlDeviceRegisterEvents(self, _handle: Any, _kinds: int, _event_set: object) -> None:  # noqa: N802
        """Subscribe, if devices accept it."""
        if not self.events:
            raise pynvml.NVMLError(NOT_SUPPORTED)

    def nvmlEventSetWait_v2(self, _event_set: object, _timeout_ms: int) -> Any:  # noqa: N802
        """Return the next XID event."""
        if not self.waiting:
            raise pynvml.NVMLError(TIMEOUT)
        gpu, code = self.waiting.popleft()
        return pynvml.c_nvmlEventData_t(
            device=self.handle(gpu), eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=code
        )

    def __getattr__(self, function: str) -> Callable[..., Any]:
        """Return any other device function: the device's own answer."""
        if not function.startswith("nvmlDeviceGet"):
            raise AttributeError(function)
        return lambda handle, *arguments: self._of(handle).call(function, *arguments)

    def _of(self, handle: Any) -> FakeGpu:
        address = ctypes.cast(handle, ctypes.c_void_p).value
        return self._handles[address or 0]


def memory(total: int, used: int) -> Any:
    """Return NVML's memory structure, version 2."""
    return pynvml.c_nvmlMemory_v2_t(total=total, used=used, free=total - used)


def utilization(gpu: int, memory_busy: int) -> Any:
    """Return NVML's utilization structure, percent."""
    return pynvml.c_nvmlUtilization_t(gpu=gpu, memory=memory_busy)


def violation(nanoseconds: int | None) -> Any:
    """Return NVML's violation structure; None is an unsupported policy."""
    if nanoseconds is None:
        raise pynvml.NVMLError(NOT_SUPPORTED)
    return pynvml.c_nvmlViolationTime_t(violationTime=nanoseconds)


def process(pid: int, size: int | None) -> Any:
    """Return one running process as pynvml gives it; no size when the driver does not tell."""
    return pynvml.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": size})


def full_gpu(uuid: str = "GPU-1", **changes: Any) -> FakeGpu:
    """Return a device that answers everything, in NVML's units; ``changes`` replaces answers by function name."""
    answers: dict[str, Any] = {
        "nvmlDeviceGetName": "NVIDIA Test",
        "nvmlDeviceGetSerial": "123",
        "nvmlDeviceGetUtilizationRates": utilization(97, 40),
        "nvmlDeviceGetEncoderUtilization": [10, 167000],
        "nvmlDeviceGetDecoderUtilization": [0, 167000],
        "nvmlDeviceGetMemoryInfo": lambda _version=None: memory(80 << 30, 20 << 30),
        "nvmlDeviceGetPowerUsage": 250_500,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": 12_345_678,
        "nvmlDeviceGetTemperatureV": 61,
        "nvmlDeviceGetFanSpeed": 30,
        "nvmlDeviceGetTotalEccErrors": lambda kind, _counter: {0: 5, 1: 0}[kind],
        "nvmlDeviceGetPcieReplayCounter": 2,
        "nvmlDeviceGetClockInfo": lambda kind: {0: 1980, 1: 1980, 2: 3201, 3: 1545}[kind],
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetViolationStatus": lambda policy: violation({0: 1_500_000_000, 1: 0}.get(policy)),
        "nvmlDeviceGetPcieThroughput": lambda direction: {0: 1500, 1: 2500}[direction],
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetComputeRunningProcesses": [process(4711, 1 << 30)],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMigMode": [0, 0],
    }
    fields: dict[tuple[int, int], tuple[int, float]] = {
        (82, 0): (1, 70),
        (138, 0xFFFFFFFF): (3, 1000),
        (139, 0xFFFFFFFF): (3, 2000),
    }
    return FakeGpu(uuid, answers | changes, fields)
