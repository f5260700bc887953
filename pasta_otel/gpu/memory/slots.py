"""The device's slot: 72 counters a launch, in eight ways; the layout that ``kernels/memory.cu`` writes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORDS = 72
WAYS = 8
SLOT_BYTES = WORDS * WAYS * 8

GLOBAL = {"load": 0, "store": 4, "atomic": 8, "async_copy": 12}
"""First word of each kind of global access: requests, lanes, sectors, bytes."""
SHARED = {
    "load_4": 16,
    "load_8": 20,
    "load_16": 24,
    "store_4": 28,
    "store_8": 32,
    "store_16": 36,
    "atomic": 40,
    "matrix_load": 44,
    "matrix_store": 68,
}
"""First word of each kind of shared access, by its width in bytes: requests, lanes, wavefronts, phases."""
CONTENTION = {"global": 48, "shared": 50}
"""First word of atomics: distinct addresses, and the sum over requests of the most lanes on one address."""
STRIDES = {"global": 52, "shared": 60}
"""First of eight words: requests by stride class."""
GLOBAL_STRIDES = ("one address", "1", "2", "3..4", "5..8", "9..32", "over 32", "irregular")
"""Distance between neighbouring lanes in accesses of the request's size."""
SHARED_STRIDES = ("one address", "odd", "2", "4", "8", "16", "32", "irregular")
"""Greatest power of two that divides the distance between neighbouring lanes, in accesses of the request's size."""

Words = NDArray[np.uint64]


def fold(raw: bytes) -> Words:
    """Return one row of ``WORDS`` counters for each slot in a copy of device memory.

    Args:
        raw: Whole slots.
    """
    ways = np.frombuffer(raw, dtype="<u8").reshape(-1, WAYS, WORDS)
    folded: Words = ways.sum(axis=1, dtype=np.uint64)
    return folded
