"""Device memory that the driver hands out, as the Sanitizer tells of it: received without Python's interpreter lock.

PyTorch's allocator holds a lock of its own while it calls cudaMalloc or cudaFree. If a callback within waited for the
interpreter lock, and a Python thread that has it dropped a tensor meanwhile, both would wait for ever.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

_native: ModuleType | None
try:
    from pasta_otel._native import _sanitizer as _native
except ImportError:  # built without a C compiler
    _native = None

Event = tuple[int, int, int]
"""Whether it was freed, address, bytes."""


def nothing() -> list[Event]:
    """Return no events."""
    return []


def receiver(function: Any, wanted_resources: Iterable[int]) -> tuple[Any, Callable[[], list[Event]]]:
    """Put the native receiver in front of a callback.

    Args:
        function: The Sanitizer's callback (``ctypes``); it must live as long as the process.
        wanted_resources: Ids of the resource domain that it wants, but for device memory's.

    Returns:
        What to subscribe, and what returns the events about device memory since its last call. Without the native part,
        the callback itself, which then gets them all, and no events.
    """
    if _native is None:
        return function, nothing
    mask = sum(1 << number for number in set(wanted_resources))
    address = _native.before(ctypes.cast(function, ctypes.c_void_p).value, mask)
    return type(function)(address), _native.take
