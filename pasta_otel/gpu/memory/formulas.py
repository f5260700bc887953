"""Ratios that say how well memory was used; each is None where there was nothing to measure."""

from __future__ import annotations

from collections.abc import Iterable

from pasta_otel.gpu.memory.model import SECTOR_BYTES, WARP_LANES, Accesses, Contention, GlobalAccess, SharedAccess

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


def active_lane_ratio(accesses: Accesses) -> float | None:
    """Return active lanes over lanes of the warps that accessed memory, 0..1; what is missing is divergence.

    Matrix instructions are left out: how many lanes name a row depends on the number of matrices, not on branches.
    """
    chosen: list[GlobalAccess | SharedAccess] = [*accesses.global_.values()]
    chosen += [access for kind, access in accesses.shared.items() if not kind.startswith("matrix")]
    return _ratio(sum(one.lanes for one in chosen), WARP_LANES * sum(one.requests for one in chosen))


def lanes_per_address(atomics: GlobalAccess | SharedAccess, contention: Contention) -> float | None:
    """Return lanes of an atomic request that share one address, on average; 1 is no contention within the warp."""
    return _ratio(atomics.lanes, contention.addresses)


def predicted_sectors(access: GlobalAccess) -> int:
    """Return the fewest sectors that the same bytes could take, were neighbouring lanes on neighbouring addresses."""
    return min(access.sectors, -(-access.bytes // SECTOR_BYTES))
