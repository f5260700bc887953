"""CUDA devices by ordinal, as CUPTI numbers them: ``hw.id`` is the GPU's UUID, as NVML and nvidia-smi print it."""

from __future__ import annotations

import ctypes
import uuid
from functools import cache


@cache
def device_uuid(ordinal: int) -> str:
    """Return ``GPU-<uuid>`` of a CUDA device, or ``cuda:<ordinal>`` where the driver does not tell."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        read = driver.cuDeviceGetUuid_v2
    except (OSError, AttributeError):
        return f"cuda:{ordinal}"
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuDeviceGet(ctypes.byref(device), ordinal) != 0 or read(ctypes.byref(raw), device) != 0:
        return f"cuda:{ordinal}"
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"
