"""Device memory of the analysis: slabs of slots, and what the launches of a stream share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Protocol

from pasta_otel.gpu.memory.native import Node, Note, Slot
from pasta_otel.gpu.memory.tool import LaunchInfo


class Device(Protocol):
    """What the collector asks of the Sanitizer API."""

    def inside(self, work: Callable[[], None], /) -> None:
        """Do something as a part of the analysis."""

    def depth(self) -> int:
        """Return how many calls into the analysis this thread is in, one inside the other."""

    def noted(self) -> bool:
        """Return whether there are notes."""

    def notes(self) -> list[Note]:
        """Return what happened since the last call."""

    def give_slot(self, slot: Slot, /) -> None:
        """Have the launch that this thread is entering count into a slot."""

    def reserve(self, slots: list[Slot], /) -> None:
        """Have the graph that this thread is launching count into slots, each for the nodes of one GPU kernel."""

    def slab(self, number: int, turn: int, /) -> int:
        """Return where a slab lies; 0 = no launch of this turn has begun."""

    def idle(self, stream: int | None, entered: int, /) -> bool:
        """Return whether no launch has begun in a stream since so many had begun in all (``Note.entered``)."""

    def nodes(self) -> list[Node]:
        """Return the GPU kernels of the graph that this thread has launched, with the slots they got."""

    def raise_later(self, error: BaseException, /) -> None:
        """Raise an exception in the program, once its call into the driver is over."""

    def allocate(self, context: int, size: int, /) -> int:
        """Return new device memory."""

    def write(self, address: int, content: bytes, stream: int | None, /) -> None:
        """Copy to device memory in a stream's order; the content lives until the stream has passed."""

    def read(self, address: int, size: int, stream: int | None, /) -> bytes:
        """Copy memory to the host in a stream's order."""


@dataclass(slots=True, eq=False)
class Slab:
    """A row of slots.

    ``open`` counts slots that are given to launches which are not yet in their stream; ``lost`` is a slab that there
    was no device memory for. Its device memory is allocated, and cleared for each ``turn`` of using it, when the first
    launch begins that has a slot in it.
    """

    number: int
    stream: int | None = None
    turn: int = 0
    open: int = 0
    lost: bool = False
    pending: list[LaunchInfo | None] = field(default_factory=list)
    sources: list[bytes] = field(default_factory=list)
    """What is being copied to the device."""

    def claim(self) -> tuple[Slab, int]:
        """Take the next place, held open; under the collector's lock."""
        self.pending.append(None)
        self.open += 1
        return self, len(self.pending) - 1


@dataclass(slots=True)
class Region:
    """Device memory that the launches of one stream share."""

    address: int
    size: int
    version: int


@dataclass(slots=True)
class Regions:
    """A stream's."""

    by_key: dict[str, Region] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


class StreamRegions:
    """A stream's regions by key, for one launch (``tool.StreamMemory``)."""

    def __init__(self, device: Device, context: int, stream: int | None, regions: Regions, slab: Slab) -> None:
        self._device, self._context, self._stream = device, context, stream
        self._regions, self._slab = regions, slab

    def put(self, key: str, version: int, content: Callable[[], bytes]) -> int:
        """Return the device address of some content, copied there where the version is new."""
        with self._regions.lock:  # of two threads the later content must be written last
            region = self._regions.by_key.get(key)
            if region is not None and region.version == version:
                return region.address
            data = content()
            if not isinstance(data, bytes):
                raise TypeError(f"memory.put() wants bytes, got {type(data).__name__}")
            if region is None or len(data) > region.size:  # earlier launches of the stream may still read the old one
                region = Region(self._device.allocate(self._context, 2 * len(data)), 2 * len(data), version)
            region.version = -1  # until it is written
            self.write(region.address, data)
            region.version = version
            self._regions.by_key[key] = region
            return region.address

    def write(self, address: int, content: bytes) -> None:
        """Copy to device memory; the slab keeps the content until it is read."""
        self._slab.sources.append(content)
        self._device.write(address, content, self._stream)


@dataclass(slots=True)
class Context:
    """One CUDA context's slabs.

    ``refused`` if it cannot be patched; ``most`` slabs can be allocated, as far as is known (None = all that may be).
    """

    slabs: int = 0
    most: int | None = None
    free: list[Slab] = field(default_factory=list)
    filling: dict[int | None, Slab] = field(default_factory=dict)
    full: list[Slab] = field(default_factory=list)
    streams: dict[int | None, int] = field(default_factory=dict)
    reading: list[Slab] = field(default_factory=list)
    """Taken by a thread that reads them now."""
    regions: dict[int | None, Regions] = field(default_factory=dict)
    refused: bool = False

    def number(self, stream: int | None) -> int:
        """Return a stream's number, in the order of first use."""
        return self.streams.setdefault(stream, len(self.streams))

    def readable(self, streams: Container[int | None]) -> list[Slab]:
        """Return the slabs of some streams that can be read: those without an open launch."""
        return [slab for slab in self.unread if not slab.open and slab.stream in streams]

    def begin_reading(self, slab: Slab) -> None:
        """Keep a slab from being read or filled by anybody else."""
        self.reading.append(slab)
        self.drop(slab)

    def drop(self, slab: Slab) -> None:
        """Have nobody read or fill a slab."""
        if slab in self.full:
            self.full.remove(slab)
        if self.filling.get(slab.stream) is slab:
            del self.filling[slab.stream]

    def put_back(self, slab: Slab) -> None:
        """Have a slab that was not read after all read some other time."""
        if slab in self.reading:
            self.reading.remove(slab)
        if slab not in self.unread:
            self.full.append(slab)

    def give_back(self, slab: Slab, *, allocated: bool) -> bool:
        """Have a slab that was read used again; False = there is no device memory for it, it is dropped."""
        if slab.lost and not allocated:
            return False
        self.slabs += slab.lost
        slab.lost = False
        self.free.append(slab)
        return True

    @property
    def unread(self) -> list[Slab]:
        """Return the slabs that nobody reads yet."""
        return [*self.full, *self.filling.values()]
