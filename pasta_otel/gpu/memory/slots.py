"""The device's slot: counters by multiprocessor, and the tables of hotness; laid out as in ``kernels/memory.cu``."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

HEADER = 8
WORDS = 96
WAYS = 128
RANGES, RANGE_WORDS = 1024, 10
TENSORS, TENSOR_WAYS, TENSOR_WORDS = 128, 31, 32
COUNTER_BYTES = 8 * (HEADER + WORDS * WAYS)
SLOT_BYTES = COUNTER_BYTES + 8 * (RANGES * RANGE_WORDS + TENSORS * TENSOR_WORDS)
"""A slot with hotness; one without ends after the counters."""
RANGE_BYTES = 2 << 20
PAGE_BYTES = 4096

GLOBAL = {"load": 0, "store": 4, "atomic": 8, "async_copy": 12, "bulk_load": 72, "bulk_store": 76}
"""First word of each kind of global access: requests, lanes, sectors, bytes."""
OTHER = {
    "remote_shared_requests": 80,
    "remote_shared_lanes": 81,
    "remote_shared_bytes": 82,
    "wgmma_instructions": 84,
    "wgmma_a_bytes": 85,
    "wgmma_b_bytes": 86,
    "blocks": 88,
    "hot_lost": 89,
    "hot_outside": 90,
    "tensor_map_copies": 91,
}
"""Words that stand alone."""
NOT_BEGIN, END, WORST = 92, 93, {"global": 94, "shared": 95}
"""Words that are raised, not added up: times of the device's clock (the first complemented), the worst requests."""
_RAISED = 92
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


def fold(raw: bytes, slot_bytes: int = COUNTER_BYTES) -> Words:
    """Return one row of ``WORDS`` counters for each slot in a copy of device memory.

    Args:
        raw: Whole slots.
        slot_bytes: Bytes of one.
    """
    slots = np.frombuffer(raw, dtype="<u8").reshape(-1, slot_bytes // 8)
    ways = slots[:, HEADER : HEADER + WAYS * WORDS].reshape(-1, WAYS, WORDS)
    folded: Words = ways.sum(axis=1, dtype=np.uint64)
    folded[:, _RAISED:] = ways[:, :, _RAISED:].max(axis=1)
    return folded


def total(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the counters of several launches as those of one: sums, and the greatest of what is raised."""
    columns = list(zip(*rows, strict=True))
    return tuple(max(column) if at >= _RAISED else sum(column) for at, column in enumerate(columns))


def accessed_unseen(words: Sequence[int]) -> bool:
    """Return whether global memory was accessed in a way that is not counted: by tensor maps (TMA).

    Its copies by a tensor map say so, where the Sanitizer tells of them. Else there are ``wgmma`` instructions, whose
    matrices come from global memory, and not one counted read of that: what brought them was not counted.
    """
    reads = sum(words[GLOBAL[kind]] for kind in ("load", "async_copy", "bulk_load"))
    return bool(words[OTHER["tensor_map_copies"]] or (words[OTHER["wgmma_instructions"]] and not reads))


def header(table: int) -> bytes:
    """Return the header that asks for hotness.

    Args:
        table: Address of the table of tensors on the device; 0 = none.
    """
    return struct.pack("<QQ", 1, table)


def hot_tables(raw: bytes) -> tuple[Words, Words]:
    """Return the used entries of one slot's tables: of 2 MiB ranges and of tensors, each (entries, words of one)."""
    words = np.frombuffer(raw, dtype="<u8", offset=COUNTER_BYTES)
    ranges = words[: RANGES * RANGE_WORDS].reshape(RANGES, RANGE_WORDS)
    tensors = words[RANGES * RANGE_WORDS :].reshape(TENSORS, TENSOR_WORDS)
    return ranges[ranges[:, 0] != 0], tensors[tensors[:, 0] != 0]
