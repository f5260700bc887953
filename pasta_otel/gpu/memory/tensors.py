"""Which tensor lies where on the devices: told by allocators as it changes, read as a table for the device functions.

Everything here may be called from any thread, and again from inside itself: a garbage collection that one of our own
objects sets off may free a tensor, and its allocator tells us so at once, below our frames. So a change is put into a
queue and then applied by whoever is not in the middle of applying another one.
"""

from __future__ import annotations

import struct
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from heapq import nlargest

from pasta_otel.gpu.memory.model import Tensor
from pasta_otel.gpu.memory.native import Event, nothing

MOST_ENTRIES = 16_384
"""Entries of the device's table: 14 steps of its binary search, 393 KB."""
LEAST_BYTES = 512
"""What a tensor of unknown length has at least: the allocators of PyTorch and CuPy round to it."""
MOST_FREED = 16_384
"""Freed tensors that are remembered for results yet to be read."""
MOST_TOUCHED = 131_072
"""Freed tensors that are remembered because a launch touched them."""


class _Record:
    """One allocation; ``segment`` if it is raw device memory, ``guessed`` if its length is not known."""

    __slots__ = (
        "address",
        "allocated",
        "bytes",
        "freed",
        "guessed",
        "module",
        "name",
        "named_at",
        "segment",
        "source",
        "touched",
    )

    def __init__(self, address: int, size: int, source: str, module: str, allocated: int) -> None:
        self.address, self.bytes, self.source, self.module = address, size, source, module
        self.allocated, self.freed = allocated, 0
        self.guessed, self.touched, self.segment = size == 0, False, False
        self.name, self.named_at = "", 0


class Tensors:
    """The tensors of this process, of all its devices: their addresses are disjoint in CUDA's one address space.

    Args:
        now_unix_nano: Wall time.
        most_entries: Most entries of the table.
        most_freed: Most freed tensors that are remembered until a launch is known to have touched them.

    Attributes:
        raw: Returns what happened to raw device memory since its last call; asked before every change.
        lost: Tensors that a launch touched, of which nothing is remembered.
        left_out: The most entries that one table had no room for.
    """

    def __init__(
        self,
        now_unix_nano: Callable[[], int] = time.time_ns,
        most_entries: int = MOST_ENTRIES,
        most_freed: int = MOST_FREED,
    ) -> None:
        self._now, self._most_entries, self._most_freed = now_unix_nano, most_entries, most_freed
        self._begins, self._ends, self._numbers = array("Q"), array("Q"), array("Q")
        self._segment_begins, self._segment_ends = array("Q"), array("Q")
        self._records: dict[int, _Record] = {}
        self._freed: deque[int] = deque()
        self._kept: deque[int] = deque()
        self._queue: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._lock = threading.RLock()
        self._busy = False
        self.raw: Callable[[], list[Event]] = nothing
        self._last = self._version = 0
        self._table, self._table_version = struct.pack("<Q", 0), 0
        self.lost = self.left_out = 0

    def allocated(self, address: int, size: int, *, source: str = "", module: str = "") -> None:
        """Note a tensor that an allocator handed out.

        Args:
            address: Where it begins; 0 is none.
            size: Its bytes; 0 = unknown: it ends where the next one begins, or its segment ends.
            source: ``file:line function`` of the program.
            module: Qualified name of the torch module that is running.
        """
        if address:
            self._apply(self._allocate, address, size, source, module, self._now())

    def freed(self, address: int) -> None:
        """Note that the tensor that begins here was given back."""
        self._apply(self._free, address, self._now())

    def segment_allocated(self, address: int, size: int, source: str = "") -> None:
        """Note raw device memory: a tensor of its own until an allocator hands out a part of it."""
        if address and size:
            self._apply(self._allocate_segment, address, size, source, self._now())

    def segment_freed(self, address: int) -> None:
        """Note that raw device memory was given back, with all that lay in it."""
        self._apply(self._free_segment, address, self._now())

    def name(self, address: int, name: str) -> None:
        """Give the tensor that holds an address the qualified name of a parameter or buffer.

        Of several names for one beginning the first stays (tied weights), unless another one only says more; several
        within one (flattened weights) leave what they have in common.
        """
        self._apply(self._name, address, name)

    def touched(self, numbers: Iterable[int]) -> None:
        """Have tensors that a launch touched remembered for ``describe``."""
        self._apply(self._touch, tuple(numbers))

    @property
    def version(self) -> int:
        """Return a number that is another one whenever the table is."""
        self._apply(None)
        return self._version

    def table(self) -> bytes:
        """Return the device's table: little-endian u64: how many, begins in ascending order, ends, numbers."""
        with self._lock:
            self._apply(None)
            if self._table_version != self._version and not self._busy:
                self._busy = True
                try:
                    self._table, self._table_version = self._build(), self._version
                finally:
                    self._busy = False
                self._apply(None)
            return self._table

    def describe(self, numbers: Iterable[int]) -> list[Tensor]:
        """Return what is remembered of tensors, freed ones too."""
        self._apply(None)
        found = ((number, self._records.get(number)) for number in numbers)
        return [
            Tensor(number, one.address, one.bytes, one.name, one.module, one.source, one.allocated, one.freed)
            for number, one in found
            if one is not None
        ]

    def forked(self) -> None:
        """Begin afresh in a forked child: another thread may have had the lock."""
        self._lock, self._busy, self.raw = threading.RLock(), False, nothing
        self._queue.clear()

    def _apply(self, change: Callable[..., None] | None, *arguments: object) -> None:
        with self._lock:
            for freed, address, size in self.raw():
                self._note_raw(freed, address, size)
            if change is not None:
                self._queue.append((change, arguments))
            if self._busy:
                return  # we are below a change of this same thread, which goes on with the queue
            self._busy = True
            try:
                while self._queue:
                    waiting, its = self._queue.popleft()
                    waiting(*its)
            finally:
                self._busy = False

    def _note_raw(self, freed: int, address: int, size: int) -> None:
        if freed:
            self._queue.append((self._free_segment, (address, self._now())))
        elif address and size:
            self._queue.append((self._allocate_segment, (address, size, "", self._now())))

    def _allocate(self, address: int, size: int, source: str, module: str, now: int) -> None:
        record = _Record(address, size, source, module, now)
        end = address + size if size else self._guess_end(address)
        at = self._make_room(address, end, now)
        self._insert(at, end, record)

    def _guess_end(self, address: int) -> int:
        after = bisect_right(self._begins, address)
        bounds = [self._begins[after]] if after < len(self._begins) else []
        at = bisect_right(self._segment_begins, address) - 1
        if at >= 0 and address < self._segment_ends[at]:
            bounds.append(self._segment_ends[at])
        elif not bounds or bounds[0] - address > LEAST_BYTES:
            bounds = [address + LEAST_BYTES]  # the next one may be anywhere
        return min(bounds)

    def _make_room(self, begin: int, end: int, now: int) -> int:
        """End what lies in the way, and return the index for a new entry.

        Memory that is handed out again was free: its old entry's end was not told, or it is the segment that the new
        one is a part of. One whose length was guessed may just have been shorter.
        """
        at = bisect_left(self._begins, begin)
        if at and self._ends[at - 1] > begin:
            before = self._records[self._numbers[at - 1]]
            if before.guessed:
                self._ends[at - 1] = begin
                before.bytes = begin - before.address
            else:
                at -= 1
                self._remove(at, now)
        while at < len(self._begins) and self._begins[at] < end:
            self._remove(at, now)
        return at

    def _insert(self, at: int, end: int, record: _Record) -> None:
        self._last += 1
        record.bytes = end - record.address
        self._records[self._last] = record
        self._begins.insert(at, record.address)
        self._ends.insert(at, end)
        self._numbers.insert(at, self._last)
        self._version += 1

    def _remove(self, at: int, now: int) -> None:
        number = self._numbers[at]
        del self._begins[at], self._ends[at], self._numbers[at]
        self._version += 1
        record = self._records[number]
        record.freed = now
        if record.touched:
            self._keep(number)
            return
        self._freed.append(number)
        while len(self._freed) > self._most_freed:
            gone = self._records.get(oldest := self._freed.popleft())
            if gone is not None and not gone.touched:
                del self._records[oldest]

    def _keep(self, number: int) -> None:
        self._kept.append(number)
        if len(self._kept) > MOST_TOUCHED:
            del self._records[self._kept.popleft()]
            self.lost += 1

    def _free(self, address: int, now: int) -> None:
        at = bisect_left(self._begins, address)
        known = at < len(self._begins) and self._begins[at] == address
        if known and not self._records[self._numbers[at]].segment:
            self._remove(at, now)

    def _allocate_segment(self, address: int, size: int, source: str, now: int) -> None:
        end = address + size
        self._forget_segments(address, end)
        at = bisect_right(self._segment_begins, address)
        self._segment_begins.insert(at, address)
        self._segment_ends.insert(at, end)
        at = bisect_left(self._begins, address)
        if at == len(self._begins) or self._begins[at] >= end:
            at = self._make_room(address, end, now)
            record = _Record(address, size, source, "", now)
            record.segment = True
            self._insert(at, end, record)

    def _forget_segments(self, begin: int, end: int) -> None:
        at = bisect_right(self._segment_begins, begin) - 1
        if at < 0 or self._segment_ends[at] <= begin:
            at += 1
        while at < len(self._segment_begins) and self._segment_begins[at] < end:
            del self._segment_begins[at], self._segment_ends[at]

    def _free_segment(self, address: int, now: int) -> None:
        at = bisect_left(self._segment_begins, address)
        if at < len(self._segment_begins) and self._segment_begins[at] == address:
            end = self._segment_ends[at]
            del self._segment_begins[at], self._segment_ends[at]
            self._make_room(address, end, now)

    def _name(self, address: int, name: str) -> None:
        at = bisect_right(self._begins, address) - 1
        if at < 0 or address >= self._ends[at]:
            return
        record = self._records[self._numbers[at]]
        if not record.name or name.endswith(f".{record.name}"):
            record.name, record.named_at = name, address
        elif address != record.named_at and name != record.name:
            record.name = _common(record.name, name)

    def _touch(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            record = self._records.get(number)
            if record is None:
                self.lost += 1
            elif not record.touched:
                record.touched = True
                if record.freed:
                    self._keep(number)

    def _build(self) -> bytes:
        begins, ends, numbers = self._begins, self._ends, self._numbers
        too_many = len(begins) - self._most_entries
        if too_many > 0:
            self.left_out = max(self.left_out, too_many)
            largest = nlargest(self._most_entries, range(len(begins)), key=lambda at: ends[at] - begins[at])
            chosen = sorted(largest)
            begins, ends, numbers = (array("Q", [of[at] for at in chosen]) for of in (begins, ends, numbers))
        return b"".join((struct.pack("<Q", len(begins)), begins.tobytes(), ends.tobytes(), numbers.tobytes()))


def _common(one: str, other: str) -> str:
    """Return the beginning that two qualified names share, as ``layer.*``; the first name where they share none."""
    parts, others = one.removesuffix(".*").split("."), other.split(".")
    same = next(
        (at for at, (a, b) in enumerate(zip(parts, others, strict=False)) if a != b), min(len(parts), len(others))
    )
    return ".".join(parts[:same]) + ".*" if same else one
