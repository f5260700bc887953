"""What a GPU kernel's memory counters say to change, and how many transactions that would save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from pasta_otel.gpu.memory import formulas
from pasta_otel.gpu.memory.model import WARP_LANES, Accesses, GlobalAccess, Worst
from pasta_otel.gpu.memory.slots import GLOBAL_STRIDES, SHARED_STRIDES

FIELDS = range(2, 9)
"""Distances between lanes, in elements, that fields of one structure usually have; farther ones are a matrix' rows."""
VECTOR_BYTES = (8, 16)
"""What one lane can load at once, beyond 4 bytes."""
TILE = 32
_LEAST_GAIN = 0.05
_NEIGHBOURS, _IRREGULAR = 1, 7


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
        access: Kind of access that most of it is: ``load``, ``store_4``, ...
        unit: Of ``measured`` and ``predicted``: sector, wavefront, request, lane.
        measured: Transactions that were counted.
        predicted: Transactions after the change, at best; None where it cannot be known.
        stride: Distance between neighbouring lanes of the worst request, in elements; None where irregular or unknown.
        width: Bytes of an element.
        row: For bank conflicts: elements that a row of ``stride`` should have instead.
        module: The torch module with most of the launches; empty where unknown.
        source: The line of the program with most of the launches.
        tensor: The tensor most accessed.
    """

    kind: str
    value: float
    threshold: MemoryThreshold
    title: str
    suggestion: str
    access: str
    unit: str
    measured: int
    predicted: int | None = None
    stride: int | None = None
    width: int | None = None
    row: int | None = None
    module: str = ""
    source: str = ""
    tensor: str = ""

    @property
    def gain(self) -> float | None:
        """Return the share of the transactions that the change would save at best, 0..1; None where it depends."""
        return None if self.predicted is None else 1 - self.predicted / self.measured

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        return {**asdict(self), "gain": self.gain}


@cache
def thresholds() -> Mapping[str, Mapping[str, MemoryThreshold]]:
    """Return the thresholds from ``thresholds.yaml``, by finding and name."""
    text = files("pasta_otel.gpu.memory").joinpath("thresholds.yaml").read_text(encoding="utf-8")
    table = yaml.safe_load(text)
    return {
        kind: {name: MemoryThreshold(**entry) for name, entry in entries.items()} for kind, entries in table.items()
    }


def find(accesses: Accesses, least: float | None = None) -> list[MemoryFinding]:
    """Return the findings of one launch, or of several launches of a GPU kernel summed.

    Args:
        accesses: What it did.
        least: Requests of a kind from which on it is judged; None = ``least_requests``.
    """
    return [finding for finder in FINDERS for finding in finder(accesses, least_requests() if least is None else least)]


def least_requests() -> float:
    """Return from how many requests of a kind on a GPU kernel is judged by them."""
    return thresholds()["minimum"]["requests"].value


def unjudged(accesses: Accesses) -> tuple[str, ...]:
    """Return the kinds of findings that there would be, if there were requests enough to judge by."""
    found = {finding.kind for finding in find(accesses)}
    return tuple(dict.fromkeys(one.kind for one in find(accesses, 0) if one.kind not in found))


def _most_usual(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return the most usual class of distances that cost transactions: neither one address nor neighbours, if any."""
    costly = [place for place in range(_NEIGHBOURS + 1, len(names)) if counts[place]]
    return names[max(costly or range(len(names)), key=counts.__getitem__)]


def _saved(most: int, irregular: int, worst: Worst) -> int:
    """Return what a layout saves of ``most``: without what irregular requests may have of it.

    A request that takes more than it has to takes at most as many transactions as the worst one.
    """
    return max(0, most - irregular * (worst.transactions - 1))


def _coalescing(accesses: Accesses, least: float) -> Iterator[MemoryFinding]:
    limit, share = (thresholds()["coalescing"][name] for name in ("efficiency", "share"))
    every = sum(access.sectors for access in accesses.global_.values())
    for kind in formulas.COALESCED:
        access = accesses.global_[kind]
        efficiency = formulas.coalescing_efficiency([access])
        if efficiency is None or efficiency >= limit.value or access.requests < least:
            continue
        if access.sectors < share.value * every:
            continue
        advice = _layout(accesses, kind)
        yield MemoryFinding(
            "coalescing",
            efficiency,
            limit,
            f"{kind}: {efficiency:.0%} of the bytes moved are asked for,"
            f" {access.sectors / access.requests:.1f} sectors a request{advice.what}",
            advice.change,
            kind,
            "sector",
            access.sectors,
            None if advice.saved is None else access.sectors - advice.saved,
            advice.stride,
            advice.width,
        )


@dataclass(frozen=True, slots=True)
class _Advice:
    """What is wrong with a layout, what to do, and the transactions that it saves."""

    what: str
    change: str
    saved: int | None = None
    stride: int | None = None
    width: int | None = None
    row: int | None = None


def _layout(accesses: Accesses, kind: str) -> _Advice:
    access = accesses.global_[kind]
    saved = access.sectors - formulas.predicted_sectors(access)
    if saved < _LEAST_GAIN * access.sectors:
        return _few_lanes(access)
    if kind == "async_copy":
        return _Advice(
            "", "let neighbouring threads copy neighbouring pieces, 16 bytes each where rows allow it", saved
        )
    classes, worst = accesses.strides["global"], _worst_of(accesses, kind)
    if worst is not None and worst.stride is not None and worst.stride <= 1:
        # such lanes waste sectors only where those between them are idle
        return _few_lanes(access)
    if worst is not None and worst.stride is not None:
        left = _saved(saved, classes[_IRREGULAR], worst)
        what = f"; lanes are {_elements(worst.stride, worst.width)} apart in the worst request"
        return _Advice(what, _contiguous(worst.stride, worst.width), left or None, worst.stride, worst.width)
    usual = _most_usual(classes, GLOBAL_STRIDES)
    if usual == "irregular":
        return _Advice(
            "; the distance between lanes is irregular",
            "a gather or scatter: sort or bucket the indices, let a warp take whole rows together, or stage rows in"
            " shared memory",
        )
    return _Advice(
        f"; the usual distance between lanes is {usual} elements",
        "let neighbouring threads access neighbouring elements: a contiguous layout (structure of arrays,"
        " .contiguous(), channels_last where the operation wants it), or a tile through shared memory",
    )


def _few_lanes(access: GlobalAccess) -> _Advice:
    return _Advice(
        f" for {access.lanes / access.requests:.1f} active lanes",
        "no layout helps requests of so few lanes: have all lanes of a warp access neighbouring elements at once",
    )


def _worst_of(accesses: Accesses, kind: str) -> Worst | None:
    """Return the worst request of loads and stores where it can be one of this kind."""
    worst = accesses.worst.get("global")
    other = accesses.global_["store" if kind == "load" else "load"]
    if worst is None or (_wasteful(other) and not _has_width(accesses.global_[kind], worst)):
        return None
    return worst


def _wasteful(access: GlobalAccess) -> bool:
    return access.sectors > formulas.predicted_sectors(access)


def _has_width(access: GlobalAccess, worst: Worst) -> bool:
    return access.bytes == access.lanes * worst.width


def _contiguous(stride: int, width: int) -> str:
    """Return the layout that makes neighbouring lanes' elements neighbours."""
    if stride in FIELDS:
        whole = stride * width
        once = f", or let each lane take the {whole} bytes in one access" if whole in VECTOR_BYTES else ""
        return (
            f"like fields of a structure of {whole} bytes: keep each field in an array of its own"
            f" (structure of arrays){once}"
        )
    tile = f"rows of {formulas.conflict_free_stride(TILE, width)} elements of {width} bytes"
    return (
        f"lanes go down a column of rows of {stride:,} elements: make this dimension the contiguous one (transpose"
        " once, .contiguous(), channels_last, structure of arrays), or move tiles of 32 x 32 through shared memory,"
        f" with {tile}"
    )


def _bank_conflicts(accesses: Accesses, least: float) -> Iterator[MemoryFinding]:
    limit = thresholds()["bank_conflicts"]["ratio"]
    chosen = {kind: access for kind, access in accesses.shared.items() if kind != "atomic"}
    ratio = formulas.bank_conflict_ratio(chosen.values())
    if ratio is None or ratio <= limit.value or sum(access.requests for access in chosen.values()) < least:
        return
    kind = max(chosen, key=lambda name: chosen[name].conflicts)
    wavefronts = sum(access.wavefronts for access in chosen.values())
    advice = _padding(accesses, kind)
    yield MemoryFinding(
        "bank_conflicts",
        ratio,
        limit,
        f"{ratio:.0%} of the wavefronts of shared memory are bank conflicts, most of them in {kind}{advice.what}",
        advice.change,
        kind,
        "wavefront",
        wavefronts,
        None if advice.saved is None else wavefronts - advice.saved,
        advice.stride,
        advice.width,
        advice.row,
    )


def _padding(accesses: Accesses, kind: str) -> _Advice:
    classes, worst = accesses.strides["shared"], accesses.worst.get("shared")
    if kind.startswith("matrix"):
        return _Advice("", "pad the rows of the tile by 16 bytes, or swizzle its 16-byte pieces (piece ^ row % 8)")
    if worst is None or worst.stride is None:
        usual = _most_usual(classes, SHARED_STRIDES)
        power = "" if usual == "irregular" else f", usually with {usual} as its greatest power of two"
        return _Advice(
            f"; the distance between lanes of the worst request is irregular{power}",
            "swizzle the shared array's columns (column ^ row), or lay it out in the order in which a warp accesses it",
        )
    row = formulas.conflict_free_stride(worst.stride, worst.width)
    if row == worst.stride:
        return _Advice(
            f"; lanes are {_elements(worst.stride, worst.width)} apart in the worst request, which is no conflict by"
            " itself: lanes between them are idle",
            "have all lanes of a warp access the shared array at once, each its own element of a row",
        )
    shared = accesses.shared.items()
    most = sum(access.conflicts for name, access in shared if name != "atomic" and not name.startswith("matrix"))
    left = _saved(most, classes[_IRREGULAR], worst)
    return _Advice(
        f"; lanes are {_elements(worst.stride, worst.width)} apart in the worst request",
        f"pad rows from {worst.stride:,} to {row:,} elements of {worst.width} bytes, or {_instead(worst.stride)}",
        left or None,
        worst.stride,
        worst.width,
        row,
    )


def _elements(count: int, width: int) -> str:
    return f"{count:,} element{'' if count == 1 else 's'} of {width} byte{'' if width == 1 else 's'}"


def _instead(stride: int) -> str:
    if stride in FIELDS:
        return f"keep the {stride} elements of each structure in arrays of their own"
    return "swizzle columns (column ^ row)"


def _divergence(accesses: Accesses, least: float) -> Iterator[MemoryFinding]:
    limit, share = (thresholds()["divergence"][name] for name in ("active_lanes", "share"))
    active = formulas.active_lane_ratio(accesses)
    chosen = formulas.judged_by_lanes(accesses)
    requests, lanes = (sum(getattr(one, name) for one in chosen.values()) for name in ("requests", "lanes"))
    if active is None or active >= limit.value or requests < least:
        return
    if requests < share.value * (requests + formulas.instructions_of_one(accesses)):
        return
    yield MemoryFinding(
        "divergence",
        active,
        limit,
        f"{active:.0%} of the lanes are active where warps access memory",
        "branch by warp rather than by thread, or give idle threads work: block sizes that are multiples of 32,"
        " fewer tail elements",
        max(chosen, key=lambda name: WARP_LANES * chosen[name].requests - chosen[name].lanes),
        "request",
        requests,
        -(-lanes // WARP_LANES),
    )


def _global_atomics(accesses: Accesses, least: float) -> Iterator[MemoryFinding]:
    limit = thresholds()["global_atomics"]["lanes_per_address"]
    atomics, contention = accesses.global_["atomic"], accesses.contention["global"]
    lanes = formulas.lanes_per_address(atomics, contention)
    if lanes is None or lanes < limit.value or atomics.requests < least:
        return
    yield MemoryFinding(
        "global_atomics",
        lanes,
        limit,
        f"{lanes:.1f} lanes of a warp meet on one address in {atomics.requests:,} atomic requests to global memory",
        "reduce within the warp or block first (warp shuffles, shared memory), then one atomic a block",
        "atomic",
        "lane",
        atomics.lanes,
        contention.addresses,
    )


FINDERS: tuple[Callable[[Accesses, float], Iterator[MemoryFinding]], ...] = (
    _coalescing,
    _bank_conflicts,
    _divergence,
    _global_atomics,
)
