"""Reads the process contexts (OTEP-4719) that other processes publish, through their memory maps."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

NAMES = ("[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]", "/memfd:OTEL_CTX")
HEADER = struct.Struct("<8sIIQQ")  # signature, version, payload size, published at (CLOCK_BOOTTIME), payload address
SIGNATURE = b"OTEL_CTX"
VERSION = 2
MAX_PAYLOAD = 1 << 16
SLOT_SCHEMA = "pasta.slots.v1"
ADDRESS, COUNT, SCHEMA = "pasta.thread_slots.address", "pasta.thread_slots.count", "threadlocal.schema_version"
MAX_SLOTS = 1 << 20
Value = str | int
_NOTHING: Mapping[str, Value] = MappingProxyType({})


class ProcessContext(NamedTuple):
    """What a process says about itself.

    Attributes:
        published_at_ns: CLOCK_BOOTTIME of the publication.
        resource: Resource attributes.
        attributes: Further attributes.
    """

    published_at_ns: int
    resource: Mapping[str, Value] = _NOTHING
    attributes: Mapping[str, Value] = _NOTHING

    def slots(self) -> tuple[int, int] | None:
        """Return address and number of the thread slots, or None when there are none that we can read.

        The numbers come from another process: they are checked, and the kernel checks every read.
        """
        address, count = self.attributes.get(ADDRESS), self.attributes.get(COUNT)
        known = self.attributes.get(SCHEMA) == SLOT_SCHEMA and isinstance(address, int) and isinstance(count, int)
        if not known or not isinstance(address, int) or not isinstance(count, int):
            return None
        return (address, count) if address > 0 and 0 < count <= MAX_SLOTS and count & (count - 1) == 0 else None


def context_address(maps: str) -> int | None:
    """Return where a process context is mapped, from the text of ``/proc/PID/maps``."""
    if "OTEL_CTX" not in maps:
        return None
    for line in maps.splitlines():
        if "OTEL_CTX" in line and line.split(None, 5)[-1].startswith(NAMES):
            return int(line.partition("-")[0], 16)
    return None


def published_at(proc: Path, pid: int, address: int) -> int:
    """Return when a context was published; 0 while it is being written or when it cannot be read."""
    header = _read(proc, pid, address, HEADER.size)
    return HEADER.unpack(header)[3] if len(header) == HEADER.size else 0


def read_context(proc: Path, pid: int, address: int) -> ProcessContext | None:
    """Read a process context; None while it is being written, or when it is no context after all."""
    raw = _read(proc, pid, address, HEADER.size)
    if len(raw) < HEADER.size:
        return None
    signature, version, size, published, payload = HEADER.unpack(raw)
    if signature != SIGNATURE or version != VERSION or not published or size > MAX_PAYLOAD:
        return None
    body = _read(proc, pid, payload, size)
    if len(body) < size or published_at(proc, pid, address) != published:
        return None
    try:
        return decode(body, published)
    except (IndexError, UnicodeDecodeError, ValueError):
        return None


def _read(proc: Path, pid: int, address: int, size: int) -> bytes:
    try:
        fd = os.open(f"{proc}/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, size, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(fd)


def decode(payload: bytes, published_at_ns: int) -> ProcessContext:
    """Decode a ``ProcessContext`` message; fields and kinds of value that we do not know are skipped.

    Raises:
        ValueError: Not a protobuf message (so do IndexError and UnicodeDecodeError).
    """
    resource: dict[str, Value] = {}
    attributes: dict[str, Value] = {}
    for number, value in _fields(payload):
        if number == 1 and isinstance(value, bytes):
            resource |= dict(_pairs(value, 1))
        elif number == 2 and isinstance(value, bytes):
            attributes |= dict([_pair(value)])
    return ProcessContext(published_at_ns, resource, {k: v for k, v in attributes.items() if k})


def _pairs(message: bytes, wanted: int) -> Iterator[tuple[str, Value]]:
    for number, value in _fields(message):
        if number == wanted and isinstance(value, bytes):
            key, found = _pair(value)
            if key:
                yield key, found


def _pair(message: bytes) -> tuple[str, Value]:
    key, found = "", b""
    for number, value in _fields(message):
        if number == 1 and isinstance(value, bytes):
            key = value.decode()
        elif number == 2 and isinstance(value, bytes):
            found = value
    for number, value in _fields(found):
        if number == 1 and isinstance(value, bytes):
            return key, value.decode()
        if number == 3 and isinstance(value, int):
            return key, value - (1 << 64) if value >> 63 else value
    return "", 0


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("not a protobuf message")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")
