"""What one launch did to memory, in the words of NVIDIA's profilers: requests, sectors, wavefronts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pasta_otel.gpu.memory.callers import NOBODY, Caller
from pasta_otel.gpu.memory.slots import CONTENTION, GLOBAL, SHARED, STRIDES

WARP_LANES = 32
SECTOR_BYTES = 32


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
class Accesses:
    """All that was counted, of one launch or summed over several.

    Attributes:
        global_: By kind: load, store, atomic, async_copy.
        shared: By kind and width: load_4, load_8, load_16, store_..., atomic, matrix_load, matrix_store.
        contention: By space: global, shared.
        strides: Requests by stride class (``slots.GLOBAL_STRIDES``, ``slots.SHARED_STRIDES``), by space.
    """

    global_: dict[str, GlobalAccess]
    shared: dict[str, SharedAccess]
    contention: dict[str, Contention]
    strides: dict[str, tuple[int, ...]]


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
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    stream: int
    words: tuple[int, ...] = field(repr=False)
    caller: Caller = NOBODY

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
    )
