"""Ratios that say how well memory was used; each is None where there was nothing to measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pasta_otel.gpu.memory.model import SECTOR_BYTES, WARP_LANES, Accesses, Contention, GlobalAccess, SharedAccess

BANKS, BANK_BYTES = 32, 4
"""Shared memory of every GPU since compute capability 5.0 (CUDA C++ Programming Guide, "Shared Memory")."""
COALESCED = ("load", "store", "async_copy")
"""Kinds of global access that a layout can coalesce; atomics are judged by contention."""


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def coalescing_efficiency(accesses: Iterable[GlobalAccess]) -> float | None:
    """Return bytes asked for over bytes of the sectors touched.

    1 is a fully used transfer. It is above 1 where lanes read the same address: one sector serves them all. This is
    NVIDIA's ``gld_efficiency`` (``smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct``).
    """
    chosen = list(accesses)
    return _ratio(sum(one.bytes for one in chosen), SECTOR_BYTES * sum(one.sectors for one in chosen))


def sectors_per_request(access: GlobalAccess) -> float | None:
    """Return 32-byte sectors a request; 4 is best for 4 bytes a lane, 32 worst."""
    return _ratio(access.sectors, access.requests)


def bank_conflict_ratio(accesses: Iterable[SharedAccess]) -> float | None:
    """Return the share of shared-memory wavefronts that bank conflicts added, 0..1."""
    chosen = list(accesses)
    return _ratio(sum(one.conflicts for one in chosen), sum(one.wavefronts for one in chosen))


def judged_by_lanes(accesses: Accesses) -> dict[str, GlobalAccess | SharedAccess]:
    """Return the kinds of access whose idle lanes mean divergence, those to shared memory with ``shared_`` before.

    Matrix instructions are left out: how many lanes name a row depends on the number of matrices, not on branches.
    So are bulk copies, which one lane makes for all.
    """
    chosen: dict[str, GlobalAccess | SharedAccess] = {
        kind: access for kind, access in accesses.global_.items() if not kind.startswith("bulk")
    }
    return chosen | {
        f"shared_{kind}": access for kind, access in accesses.shared.items() if not kind.startswith("matrix")
    }


def instructions_of_one(accesses: Accesses) -> int:
    """Return the memory instructions that few lanes make for their warp by design: matrix and bulk ones."""
    other = accesses.other
    kinds = [access.requests for kind, access in accesses.shared.items() if kind.startswith("matrix")]
    kinds += [access.requests for kind, access in accesses.global_.items() if kind.startswith("bulk")]
    return sum(kinds) + other["wgmma_instructions"] + other["tensor_map_copies"]


def active_lane_ratio(accesses: Accesses) -> float | None:
    """Return active lanes over lanes of the warps that accessed memory, 0..1; what is missing is divergence."""
    chosen = judged_by_lanes(accesses).values()
    return _ratio(sum(one.lanes for one in chosen), WARP_LANES * sum(one.requests for one in chosen))


def lanes_per_address(atomics: GlobalAccess | SharedAccess, contention: Contention) -> float | None:
    """Return lanes of an atomic request that share one address, on average; 1 is no contention within the warp."""
    return _ratio(atomics.lanes, contention.addresses)


def predicted_sectors(access: GlobalAccess) -> int:
    """Return the fewest sectors that the same requests could take, were neighbouring lanes on neighbouring addresses.

    Each request touches at least one sector, and all of them together as many as their bytes fill.
    """
    return min(access.sectors, max(access.requests, -(-access.bytes // SECTOR_BYTES)))


def sectors_of_stride(stride: int, width: int) -> int:
    """Return the sectors that one request of a full warp touches, from a sector's beginning on.

    Args:
        stride: Distance between neighbouring lanes, in accesses.
        width: Bytes that a lane asks for.
    """
    ends = ((lane * stride * width, lane * stride * width + width - 1) for lane in range(WARP_LANES))
    return len({end // SECTOR_BYTES for pair in ends for end in pair})


def phases_of_width(width: int) -> int:
    """Return the passes of a full warp that no layout could save: 1 up to 4 bytes a lane, 2 for 8, 4 for 16."""
    return max(1, width // BANK_BYTES)


def wavefronts_of_stride(stride: int, width: int, begin: int = 0) -> int:
    """Return the passes through shared memory's banks of one request of a full warp: what ``kernels/memory.cu`` counts.

    Args:
        stride: Distance between neighbouring lanes, in accesses.
        width: Bytes that a lane asks for: 1, 2, 4, 8 or 16.
        begin: Address of the first lane, in bytes.
    """
    phases = phases_of_width(width)
    unit_bytes, groups, lanes = BANK_BYTES * phases, BANKS // phases, WARP_LANES // phases
    passes = 0
    for phase in range(phases):
        of_phase = range(phase * lanes, (phase + 1) * lanes)
        units = {(begin + lane * stride * width) // unit_bytes for lane in of_phase}
        passes += max(Counter(unit % groups for unit in units).values())
    return passes


def conflict_free_stride(stride: int, width: int) -> int:
    """Return the shortest row, of at least ``stride`` elements, down whose columns a warp goes without bank conflicts.

    It is the next odd number of elements of 4, 8 or 16 bytes (odd numbers have no factor in common with the 32 banks,
    16 pairs or 8 fours), and the next odd number of 4-byte words of smaller elements.

    Args:
        stride: Elements of a row.
        width: Bytes of an element: 1, 2, 4, 8 or 16.
    """
    begins = range(0, BANK_BYTES, min(width, BANK_BYTES))
    best = phases_of_width(width)
    longest = stride + 2 * BANK_BYTES  # an odd number of words is at most two words farther
    candidates = range(stride, longest + 1)
    return next(row for row in candidates if all(wavefronts_of_stride(row, width, begin) == best for begin in begins))
