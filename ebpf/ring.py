"""A BPF ring buffer's consumer, over the mapping that the kernel defines (kernel/bpf/ringbuf.c)."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

PAGE = mmap.PAGESIZE
BUSY, DISCARD = 1 << 31, 1 << 30
HEADER = 8
_POSITION = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")


class Ring:
    """One consumer of one ring; the descriptor stays its owner's.

    Args:
        fd: The map.
        size: Its size in bytes (``max_entries``).
    """

    def __init__(self, fd: int, size: int) -> None:
        self._mask = size - 1
        self._consumer = mmap.mmap(fd, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        # the data pages are mapped twice in a row: a record that wraps around reads in one piece
        self._producer = mmap.mmap(fd, PAGE + 2 * size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=PAGE)

    def drain(self, limit: int = 1 << 20) -> Iterator[bytes]:
        """Yield finished records, oldest first, freeing their room on the way; stop at one still being written."""
        position = _POSITION.unpack_from(self._consumer, 0)[0]
        for _ in range(limit):
            if position >= _POSITION.unpack_from(self._producer, 0)[0]:
                return
            at = PAGE + (position & self._mask)
            length = _LENGTH.unpack_from(self._producer, at)[0]
            if length & BUSY:
                return
            size = length & ~DISCARD
            record = None if length & DISCARD else self._producer[at + HEADER : at + HEADER + size]
            position += (HEADER + size + 7) & ~7
            _POSITION.pack_into(self._consumer, 0, position)
            if record is not None:
                yield record

    def close(self) -> None:
        """Unmap."""
        self._consumer.close()
        self._producer.close()
