"""Recorded activity buffers: what CUPTI handed over, byte for byte, with the names its pointers stood for."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pasta_otel.errors import InputError

if TYPE_CHECKING:
    from pasta_otel._native import _cupti

MAGIC = b"PASTACU1"
_HEAD = struct.Struct("<8sII")  # magic, CUPTI API version, number of names
_NAME = struct.Struct("<QI")  # pointer, length
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Recording:
    """Activity buffers of one run.

    Attributes:
        api_version: What ``cuptiGetVersion`` said.
        names: GPU kernel names by the pointer value that stands in the records.
        buffers: The buffers, oldest first.
    """

    api_version: int
    names: Mapping[int, bytes]
    buffers: tuple[bytes, ...]

    def decode_into(self, ring: _cupti.Ring) -> None:
        """Decode every buffer into a ring, with the decoder that the live capture uses.

        Raises:
            ValueError: The CUPTI version's record layout is not known.
        """
        for buffer in self.buffers:
            ring.decode(buffer, self.api_version, dict(self.names))


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording, compressed."""
    parts = [_HEAD.pack(MAGIC, recording.api_version, len(recording.names))]
    for pointer, name in recording.names.items():
        parts += [_NAME.pack(pointer, len(name)), name]
    for buffer in recording.buffers:
        parts += [_LENGTH.pack(len(buffer)), buffer]
    path.write_bytes(gzip.compress(b"".join(parts), mtime=0))


def read_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        InputError: It is not one, or it is cut off.
    """
    try:
        data = gzip.decompress(path.read_bytes())
        magic, version, count = _HEAD.unpack_from(data)
        if magic != MAGIC:
            raise InputError("not a recording of CUPTI buffers", file=str(path))
        at, names = _HEAD.size, {}
        for _ in range(count):
            pointer, length = _NAME.unpack_from(data, at)
            at += _NAME.size
            names[pointer] = data[at : at + length]
            at += length
        return Recording(version, names, tuple(split_buffers(data[at:])))
    except (OSError, EOFError, struct.error) as error:
        raise InputError("the recording is cut off or not compressed with gzip", file=str(path)) from error


def split_buffers(data: bytes) -> Iterator[bytes]:
    """Yield the buffers of ``(u64 length, bytes)*``, as the extension keeps them; a torn last one is an error."""
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            msg = "torn buffer"
            raise struct.error(msg)
        yield data[at : at + length]
        at += length
