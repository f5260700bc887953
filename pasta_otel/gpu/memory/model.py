"""What one launch did to memory, in the words of NVIDIA's profilers: requests, sectors, wavefronts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pasta_otel.gpu.memory.callers import NOBODY, Caller
from pasta_otel.gpu.memory.slots import CONTENTION, GLOBAL, OTHER, SHARED, STRIDES, WORST

WARP_LANES = 32
SECTOR_BYTES = 32
_IRREGULAR = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class GlobalAccess:
    """Accesses to global memory of one kind.

    Attributes:
        requests: Instructions, one a warp.
        lanes: Active lanes, summed over requests.
        sectors: 32-byte sectors touched, summed over requests.
        bytes: What the lanes asked for.
    """

    requests: int
    lanes: int
    sectors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SharedAccess:
    """Accesses to shared memory of one kind and width.

    Attributes:
        requests: Instructions, one a warp.
        lanes: Active lanes, summed over requests.
        wavefronts: Passes through the banks, summed over requests.
        phases: Passes that no layout could save: halves of a warp for 8 bytes a lane, quarters for 16; half as
            many for loads where neighbouring lanes share addresses.
    """

    requests: int
    lanes: int
    wavefronts: int
    phases: int

    @property
    def conflicts(self) -> int:
        """Return the passes that bank conflicts added."""
        return self.wavefronts - self.phases


@dataclass(frozen=True, slots=True)
class Contention:
    """Atomics of one memory space.

    Attributes:
        addresses: Distinct addresses, summed over requests.
        depth: The most lanes of one request on one address, summed over requests.
    """

    addresses: int
    depth: int


@dataclass(frozen=True, slots=True)
class Worst:
    """The request that took most transactions, of those that took more than they had to.

    Attributes:
        transactions: Its sectors (global) or wavefronts (shared).
        width: Bytes that a lane asked for.
        stride: Distance between neighbouring lanes, in accesses of that width; None where it is not the same for all.
    """

    transactions: int
    width: int
    stride: int | None


@dataclass(frozen=True, slots=True)
class Accesses:
    """All that was counted, of one launch or summed over several.

    Attributes:
        global_: By kind: load, store, atomic, async_copy (``cp.async``), bulk_load and bulk_store (``cp.async.bulk``).
        shared: By kind and width: load_4, load_8, load_16, store_..., atomic, matrix_load, matrix_store.
        contention: By space: global, shared.
        strides: Requests by stride class (``slots.GLOBAL_STRIDES``, ``slots.SHARED_STRIDES``), by space.
        worst: The worst request, by space; a space without one has no entry.
        other: Words that stand alone (``slots.OTHER``).
    """

    global_: dict[str, GlobalAccess]
    shared: dict[str, SharedAccess]
    contention: dict[str, Contention]
    strides: dict[str, tuple[int, ...]]
    worst: dict[str, Worst]
    other: dict[str, int]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A piece of device memory that the program allocated.

    Attributes:
        number: Its own for the life of the process, from 1 on.
        address: Where it begins.
        bytes: How long it is.
        name: Qualified name where it is a module's parameter or buffer; else empty.
        module: Qualified name of the torch module that was running when it was allocated; may be empty.
        source: ``file:line function`` of the program that allocated it; may be empty.
        allocated_unix_nano: When.
        freed_unix_nano: When it was given back; 0 = never.
    """

    number: int
    address: int
    bytes: int
    name: str = ""
    module: str = ""
    source: str = ""
    allocated_unix_nano: int = 0
    freed_unix_nano: int = 0

    @property
    def label(self) -> str:
        """Return what a person would call it: its name, else its module and line, else its address."""
        place = " ".join(part for part in (self.module, f"({self.source})" if self.source else "") if part)
        return self.name or place or f"{self.address:#x}"


@dataclass(frozen=True, slots=True)
class Launch:
    """One analysed launch of a GPU kernel.

    Attributes:
        name: The GPU kernel's name as the driver gives it.
        grid: Blocks in x, y, z.
        block: Threads of a block in x, y, z.
        stream: Number of the stream, in order of first use within the process.
        words: The slot's counters.
        caller: Who launched it.
        begin_unix_nano: When its first block began, by the device's clock put beside the host's; 0 = unknown.
        end_unix_nano: When its last block ended.
        working_set: Bytes of the distinct 4 KiB pages that it touched; None where that was not counted.
        tensors: Numbers of tensors and lane accesses to each, most first.
        ranges: Beginnings of 2 MiB ranges and lane accesses to each, by address.
        nodes: How many nodes of a CUDA graph, all of this GPU kernel, the counters are of; 0 = launched by itself.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    stream: int
    words: tuple[int, ...] = field(repr=False)
    caller: Caller = NOBODY
    begin_unix_nano: int = 0
    end_unix_nano: int = 0
    working_set: int | None = None
    tensors: tuple[tuple[int, int], ...] = ()
    ranges: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    nodes: int = 0

    @property
    def accesses(self) -> Accesses:
        """Return the counters by name."""
        return accesses(self.words)


def accesses(words: Sequence[int]) -> Accesses:
    """Name a slot's counters."""
    return Accesses(
        {kind: GlobalAccess(*words[at : at + 4]) for kind, at in GLOBAL.items()},
        {kind: SharedAccess(*words[at : at + 4]) for kind, at in SHARED.items()},
        {space: Contention(*words[at : at + 2]) for space, at in CONTENTION.items()},
        {space: tuple(words[at : at + 8]) for space, at in STRIDES.items()},
        {space: _worst(words[at]) for space, at in WORST.items() if words[at]},
        {name: words[at] for name, at in OTHER.items()},
    )


def _worst(word: int) -> Worst:
    stride = word & 0xFFFFFFFF
    return Worst(word >> 48, word >> 32 & 0xFFFF, None if stride == _IRREGULAR else stride)
