"""The thread slots: where a host probe finds the span of the thread it interrupts.

One slot of 64 bytes a thread, at (native thread id mod slots) or one of the next three places: the thread id as 8
bytes, then a record as OTEP-4947 lays it out (trace id 16, span id 8, valid 1, trace flags 1, attribute size 2), then 4
bytes that are 1 when the process cannot see its own task switches. The reader runs in the kernel, on the very thread,
so a record is either valid or not, never half: it is marked invalid while it is written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable

SCHEMA = "pasta.slots.v1"
SLOTS = 4096
SLOT_SIZE = 64
PROBES = 4
VALID = 8 + 24
STATE = 8 + 28
NOWHERE = -1
_TID = struct.Struct("<Q")
RECORD = struct.Struct(">QQQBBHI")
"""Ids (big-endian, as in W3C trace context), valid, flags, attribute size, then our state: anything but 0 = unsure."""
LOW64 = (1 << 64) - 1


class _Owned(threading.local):
    """The calling thread's slot; it is freed when the thread ends.

    Attributes:
        offset: Where it begins.
        keeper: Frees it.
        followed: The thread runs a step of a task that tells its end, in an event loop that does not.
    """

    offset: int | None = None
    keeper: object = None
    followed: bool = False


class _Keeper:
    """Frees a thread's slot when its thread-local storage goes."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def __del__(self) -> None:
        self._release()


class SlotTable:
    """The table of one process, in private memory: a forked child writes into its own copy.

    Args:
        slots: Number of slots, a power of two.
        thread_id: Native id of the calling thread, in the process's own pid namespace.
        alive: Whether a native thread id is a thread of this process.
    """

    def __init__(
        self,
        slots: int = SLOTS,
        thread_id: Callable[[], int] = threading.get_native_id,
        alive: Callable[[int], bool] | None = None,
    ) -> None:
        self.slots = slots
        self.memory = mmap.mmap(-1, slots * SLOT_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._thread_id, self._alive = thread_id, alive or _is_thread
        self._lock = threading.Lock()
        self.owned = _Owned()
        self.homeless = 0

    def offset(self) -> int:
        """Return where the calling thread's slot begins; ``NOWHERE`` (below 0) when all its places are taken."""
        offset = self.owned.offset
        return offset if offset is not None else self._claim()

    def write(self, offset: int, trace_id: int, span_id: int, flags: int, unsure: bool = False) -> None:
        """Publish a span in the calling thread's own slot."""
        self.memory[offset + VALID] = 0
        # fields are written in their order, so the ids are whole when "valid" follows them
        RECORD.pack_into(self.memory, offset + 8, trace_id >> 64, trace_id & LOW64, span_id, 1, flags & 0xFF, 0, unsure)

    def clear(self, offset: int) -> None:
        """Say that the calling thread has no span."""
        self.memory[offset + VALID] = 0

    def _claim(self) -> int:
        tid = self._thread_id()
        with self._lock:
            offset = self._free_place(tid)
            if offset != NOWHERE:
                self.memory[offset + VALID] = 0
                self.memory[offset + STATE] = 0
                _TID.pack_into(self.memory, offset, tid)
            else:
                self.homeless += 1
        self.owned.offset = offset
        if offset != NOWHERE:
            self.owned.keeper = _Keeper(lambda: self._release(offset, tid))
        return offset

    def _free_place(self, tid: int) -> int:
        for place in range(PROBES):
            offset = ((tid + place) & (self.slots - 1)) * SLOT_SIZE
            owner = _TID.unpack_from(self.memory, offset)[0]
            if owner in {0, tid} or not self._alive(owner):
                return offset
        return NOWHERE

    def _release(self, offset: int, tid: int) -> None:
        """Free a slot; its thread id stays, so that readers look on behind it, until ``_claim`` gives it away."""
        if not self.memory.closed and _TID.unpack_from(self.memory, offset)[0] == tid:
            self.memory[offset + VALID] = 0

    def forget_threads(self) -> None:
        """Start anew in a forked child: only its one thread is there, under another id."""
        self._lock = threading.Lock()
        self.owned.offset = self.owned.keeper = None  # the same object: whoever publishes holds it
        self.memory[:] = bytes(len(self.memory))


def _is_thread(tid: int) -> bool:
    return os.path.exists(f"/proc/self/task/{tid}")  # noqa: PTH110 - asked under a lock, often


def unseen_switches() -> bool:
    """Return whether this process runs green threads, whose switches Python code cannot see."""
    monkey = sys.modules.get("gevent.monkey")
    return bool(monkey is not None and monkey.is_module_patched("threading"))
