"""The process context of OTEP-4719: what this process is, found by readers through its memory map, unprivileged."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping

NAME = "OTEL_CTX"
SIGNATURE = b"OTEL_CTX"
VERSION = 2
HEADER = struct.Struct("<8sIIQQ")  # signature, version, payload size, published at (CLOCK_BOOTTIME), payload address
PUBLISHED = struct.Struct("<Q")
PUBLISHED_AT = 16
SIZE = 16384
PR_SET_VMA, PR_SET_VMA_ANON_NAME = 0x53564D41, 0
MFD_NOEXEC_SEAL = 0x8
Value = str | int


def encode(resource: Mapping[str, Value], attributes: Mapping[str, Value], limit: int = SIZE - HEADER.size) -> bytes:
    """Return a ``ProcessContext`` message: resource = 1, attributes = 2.

    Attributes that do not fit are left out, from the end of ``resource``; ours come first, because readers need them.
    """
    own = b"".join(_field(2, _pair(key, value)) for key, value in attributes.items())
    pairs, room = b"", limit - len(own) - 16
    for key, value in resource.items():
        pair = _field(1, _pair(key, value))
        if len(pairs) + len(pair) > room:
            break
        pairs += pair
    return _field(1, pairs) + own


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _pair(key: str, value: Value) -> bytes:
    number = isinstance(value, int)
    body = _varint(3 << 3) + _varint(int(value)) if number else _field(1, str(value).encode("utf-8", "replace"))
    return _field(1, key.encode("utf-8", "replace")) + _field(2, body)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(NAME, flags | MFD_NOEXEC_SEAL)
    except OSError:  # before Linux 6.3
        return os.memfd_create(NAME, flags)


class ProcessContext:
    """A published process context; it ends with the process, and a forked child does not inherit it.

    Args:
        resource: Resource attributes.
        attributes: Further attributes, for readers that know them.
        boottime_ns: CLOCK_BOOTTIME.
    """

    def __init__(
        self,
        resource: Mapping[str, Value],
        attributes: Mapping[str, Value],
        boottime_ns: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    ) -> None:
        self._boottime = boottime_ns
        self._attributes = dict(attributes)
        fd = _memfd()
        try:
            os.ftruncate(fd, SIZE)
            self._memory = mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.update(resource)
        self._name()

    def update(self, resource: Mapping[str, Value]) -> None:
        """Publish again; while it is written the time stands at 0, and readers come back later."""
        payload = encode(resource, self._attributes)
        memory, start = self._memory, HEADER.size
        PUBLISHED.pack_into(memory, PUBLISHED_AT, 0)
        memory[start : start + len(payload)] = payload
        HEADER.pack_into(memory, 0, SIGNATURE, VERSION, len(payload), 0, self._address + start)
        PUBLISHED.pack_into(memory, PUBLISHED_AT, self._boottime())

    def withdraw(self) -> None:
        """Take it back: readers find no signature. The mapping stays, since somebody may be reading."""
        HEADER.pack_into(self._memory, 0, bytes(8), 0, 0, 0, 0)

    def abandon(self) -> None:
        """In a forked child: let go of it without unmapping anything.

        The mapping did not come along, and by now its addresses may be somebody else's, such as the stack of a thread
        that another fork handler started: an unmap would end the process. So the object is never freed here.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))

    def _name(self) -> None:
        """Name the mapping; kernels without CONFIG_ANON_VMA_NAME refuse, and show the memfd's name all the same."""
        libc = ctypes.CDLL(None)
        address, size = ctypes.c_ulong(self._address), ctypes.c_ulong(SIZE)
        libc.prctl(ctypes.c_int(PR_SET_VMA), ctypes.c_ulong(PR_SET_VMA_ANON_NAME), address, size, NAME.encode())
