"""What a GPU kernel's memory counters say to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from pasta_otel.gpu.memory import formulas
from pasta_otel.gpu.memory.model import Accesses, SharedAccess
from pasta_otel.gpu.memory.slots import GLOBAL_STRIDES, SHARED_STRIDES


@dataclass(frozen=True, slots=True)
class MemoryThreshold:
    """A number that decides, with its origin."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class MemoryFinding:
    """Something about a GPU kernel's memory accesses that costs time and can be changed.

    Attributes:
        kind: Stable word: coalescing, bank_conflicts, divergence, global_atomics.
        value: What was measured, in the threshold's unit.
        threshold: What it was compared with.
        title: One sentence.
        suggestion: What to change.
        gain: Share of the transactions concerned that the change would save at best, 0..1; None where it depends.
    """

    kind: str
    value: float
    threshold: MemoryThreshold
    title: str
    suggestion: str
    gain: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        return asdict(self)


@cache
def thresholds() -> Mapping[str, Mapping[str, MemoryThreshold]]:
    """Return the thresholds from ``thresholds.yaml``, by finding and name."""
    text = files("pasta_otel.gpu.memory").joinpath("thresholds.yaml").read_text(encoding="utf-8")
    table = yaml.safe_load(text)
    return {
        kind: {name: MemoryThreshold(**entry) for name, entry in entries.items()} for kind, entries in table.items()
    }


def find(accesses: Accesses) -> list[MemoryFinding]:
    """Return the findings of one GPU kernel, or of several launches of it summed."""
    return [finding for finder in FINDERS for finding in finder(accesses)]


def _enough(requests: int) -> bool:
    return requests >= thresholds()["minimum"]["requests"].value


def _most_usual(counts: Sequence[int], names: Sequence[str]) -> str:
    return names[max(range(len(names)), key=counts.__getitem__)]


def _coalescing(accesses: Accesses) -> Iterator[MemoryFinding]:
    limit = thresholds()["coalescing"]["efficiency"]
    for kind in formulas.COALESCED:
        access = accesses.global_[kind]
        efficiency = formulas.coalescing_efficiency([access])
        if efficiency is None or efficiency >= limit.value or not _enough(access.requests):
            continue
        stride = _most_usual(accesses.strides["global"], GLOBAL_STRIDES)
        where = "" if kind == "async_copy" else f"; the usual distance between lanes is {stride} elements"
        yield MemoryFinding(
            "coalescing",
            efficiency,
            limit,
            f"{kind}: {efficiency:.0%} of the bytes moved are asked for,"
            f" {access.sectors / access.requests:.1f} sectors a request{where}",
            "let neighbouring threads access neighbouring elements: a contiguous layout (structure of arrays, "
            ".contiguous(), channels_last where the operation wants it), or a tile through shared memory",
            1 - formulas.predicted_sectors(access) / access.sectors,
        )


def _bank_conflicts(accesses: Accesses) -> Iterator[MemoryFinding]:
    limit = thresholds()["bank_conflicts"]["ratio"]
    chosen: list[SharedAccess] = [access for kind, access in accesses.shared.items() if kind != "atomic"]
    ratio = formulas.bank_conflict_ratio(chosen)
    if ratio is None or ratio <= limit.value or not _enough(sum(access.requests for access in chosen)):
        return
    worst = max((kind for kind in accesses.shared if kind != "atomic"), key=lambda k: accesses.shared[k].conflicts)
    stride = _most_usual(accesses.strides["shared"], SHARED_STRIDES)
    yield MemoryFinding(
        "bank_conflicts",
        ratio,
        limit,
        f"{ratio:.0%} of the wavefronts of shared memory are bank conflicts, most of them in {worst};"
        f" the usual power of two in the distance between lanes is {stride}",
        "pad the rows of the shared array by one element of the access' width, or swizzle its columns",
        ratio,
    )


def _divergence(accesses: Accesses) -> Iterator[MemoryFinding]:
    limit = thresholds()["divergence"]["active_lanes"]
    active = formulas.active_lane_ratio(accesses)
    requests = sum(access.requests for access in accesses.global_.values())
    requests += sum(access.requests for access in accesses.shared.values())
    if active is None or active >= limit.value or not _enough(requests):
        return
    yield MemoryFinding(
        "divergence",
        active,
        limit,
        f"{active:.0%} of the lanes are active where warps access memory",
        "branch by warp rather than by thread, or give idle threads work: block sizes that are multiples of 32,"
        " fewer tail elements",
    )


def _global_atomics(accesses: Accesses) -> Iterator[MemoryFinding]:
    limit = thresholds()["global_atomics"]["lanes_per_address"]
    atomics = accesses.global_["atomic"]
    lanes = formulas.lanes_per_address(atomics, accesses.contention["global"])
    if lanes is None or lanes < limit.value or not _enough(atomics.requests):
        return
    yield MemoryFinding(
        "global_atomics",
        lanes,
        limit,
        f"{lanes:.1f} lanes of a warp meet on one address in {atomics.requests} atomic requests to global memory",
        "reduce within the warp or block first (warp shuffles, shared memory), then one atomic a block",
        1 - 1 / lanes,
    )


FINDERS: tuple[Callable[[Accesses], Iterator[MemoryFinding]], ...] = (
    _coalescing,
    _bank_conflicts,
    _divergence,
    _global_atomics,
)
