"""Device memory of the analysis: slabs of slots, and what the launches of a stream share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pasta_otel.gpu.memory.sanitizer import LaunchData
from pasta_otel.gpu.memory.tool import LaunchInfo


class Device(Protocol):
    """What the collector asks of the Sanitizer API."""

    def add_patches(self, file: str, context: int, /) -> None:
        """Load the device functions into a context."""

    def patch(self, module: int, /) -> None:
        """Patch a module."""

    def give_slot(self, launch: LaunchData, slot: int, /) -> None:
        """Have a launch count into a slot."""

    def give_function_slot(self, function: int, slot: int, /) -> None:
        """Have a GPU kernel's nodes in graphs that are launched from now on count into a slot; 0 = into none."""

    def allocate(self, context: int, size: int, /) -> int:
        """Return new device memory."""

    def clear(self, address: int, size: int, stream: int | None, /) -> None:
        """Zero memory in a stream's order."""

    def write(self, address: int, content: bytes, stream: int | None, /) -> None:
        """Copy to device memory in a stream's order; the content lives until the stream has passed."""

    def read(self, address: int, size: int, stream: int | None, /) -> bytes:
        """Copy memory to the host in a stream's order."""


@dataclass(slots=True)
class Slab:
    """A row of slots. ``open`` counts launches whose slot is given but which are not yet in their stream."""

    address: int
    stream: int | None = None
    open: int = 0
    pending: list[LaunchInfo | None] = field(default_factory=list)
    sources: list[bytes] = field(default_factory=list)
    """What is being copied to the device."""


@dataclass(slots=True)
class Region:
    """Device memory that the launches of one stream share."""

    address: int
    size: int
    version: int


class StreamRegions:
    """A stream's regions by key, for one launch (``tool.StreamMemory``)."""

    def __init__(
        self, device: Device, context: int, stream: int | None, regions: dict[str, Region], slab: Slab
    ) -> None:
        self._device, self._context, self._stream = device, context, stream
        self._regions, self._slab = regions, slab

    def put(self, key: str, version: int, content: Callable[[], bytes]) -> int:
        """Return the device address of some content, copied there where the version is new."""
        region = self._regions.get(key)
        if region is not None and region.version == version:
            return region.address
        data = content()
        if not isinstance(data, bytes):
            raise TypeError(f"memory.put() wants bytes, got {type(data).__name__}")
        if region is None or len(data) > region.size:  # earlier launches of the stream may still read the old one
            region = Region(self._device.allocate(self._context, 2 * len(data)), 2 * len(data), version)
        self.write(region.address, data)
        region.version = version
        self._regions[key] = region
        return region.address

    def write(self, address: int, content: bytes) -> None:
        """Copy to device memory; the slab keeps the content until it is read."""
        self._slab.sources.append(content)
        self._device.write(address, content, self._stream)


@dataclass(slots=True)
class Context:
    """One CUDA context's slabs; ``refused`` if it cannot be patched."""

    slabs: int = 0
    free: list[Slab] = field(default_factory=list)
    filling: dict[int | None, Slab] = field(default_factory=dict)
    full: list[Slab] = field(default_factory=list)
    streams: dict[int | None, int] = field(default_factory=dict)
    regions: dict[int | None, dict[str, Region]] = field(default_factory=dict)
    refused: bool = False

    def take(self, stream: int | None, *, every_stream: bool) -> list[Slab]:
        """Remove and return the slabs that can be read; one with an open launch stays."""
        ready = [slab for slab in self.full if not slab.open and (every_stream or slab.stream == stream)]
        for slab in ready:
            self.full.remove(slab)
        keys = [key for key, slab in self.filling.items() if not slab.open and (every_stream or key == stream)]
        return ready + [self.filling.pop(key) for key in keys]
