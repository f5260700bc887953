"""CUDA devices by ordinal, as CUPTI numbers them: ``hw.id`` is the GPU's UUID, as NVML and nvidia-smi print it."""

from __future__ import annotations

import ctypes
import uuid

_known: dict[int, str] = {}


def device_uuid(ordinal: int) -> str:
    """Return ``GPU-<uuid>`` of a CUDA device, or ``cuda:<ordinal>`` while the driver does not tell (before cuInit)."""
    if ordinal not in _known:
        found = _ask(ordinal)
        if found is None:  # not kept: the driver may tell later
            return f"cuda:{ordinal}"
        _known[ordinal] = found
    return _known[ordinal]


def device_count() -> int:
    """Return how many CUDA devices this process has; 0 before it has initialised CUDA, and without a driver."""
    count = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return count.value if code == 0 else 0


def _ask(ordinal: int) -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        read = driver.cuDeviceGetUuid_v2
    except (OSError, AttributeError):
        return None
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuDeviceGet(ctypes.byref(device), ordinal) != 0 or read(ctypes.byref(raw), device) != 0:
        return None
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"
