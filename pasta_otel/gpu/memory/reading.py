"""Read slabs, and decode what they hold: in the thread that happens to, while others go on.

A launch never waits for a thread that reads, nor does anybody who waits for one have a lock: a stream's work may depend
on a launch that is yet to come, and a tool's ``decode`` on a lock of the program's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TypeAlias

from pasta_otel.errors import PastaError
from pasta_otel.gpu.memory.locks import OwnedLock
from pasta_otel.gpu.memory.slabs import Context, Device, Slab
from pasta_otel.gpu.memory.tool import LaunchInfo, Record

LEAST_READ = 8
"""Bytes."""
Batch: TypeAlias = list[tuple[Context, Slab]]


@dataclass(slots=True, eq=False)
class _Job:
    """A record that a thread decodes."""

    record: Record
    delivered: bool = False


class Reader:
    """Those who read, and what they are at.

    Args:
        device: The Sanitizer API.
        lock: Guards contexts and slabs.
        slot_bytes: The size of a slot.
        decode: Returns what is to be done with a record, under the lock; is called without it.
        unreadable: Is told of a slab that could not be read, under the lock.
    """

    def __init__(
        self,
        device: Device,
        lock: OwnedLock,
        slot_bytes: int,
        decode: Callable[[Record], Callable[[], None]],
        unreadable: Callable[[Slab, PastaError], None],
    ) -> None:
        self._device, self._lock, self._slot_bytes = device, lock, slot_bytes
        self._decode, self._unreadable = decode, unreadable
        self._changed = threading.Condition(lock)
        self._batches: dict[int, list[Batch]] = {}
        self._records: deque[Record] = deque()
        self._decoding: dict[int, _Job] = {}
        self.kept: list[list[bytes]] = []
        """What may still be on its way to the device, of slabs that are gone."""

    @property
    def mine(self) -> bool:
        """Return whether the calling thread is reading or decoding."""
        me = threading.get_ident()
        return me in self._batches or me in self._decoding

    def read(self, choose: Callable[[Batch], None]) -> bool:
        """Read and decode some slabs; returns whether there were any.

        Args:
            choose: Puts what it takes from contexts into the batch, by ``take``; is called under the lock.
        """
        me, batch = threading.get_ident(), Batch()
        found = False
        try:
            with self._lock:
                self._batches.setdefault(me, []).append(batch)
                choose(batch)
                found = bool(batch)
            while batch:
                self._read(*batch[0], batch)
        finally:  # a handler of a signal may have raised: the rest is read some other time
            self._end(me, batch)
        self.decode()
        return found

    def recover(self) -> None:
        """Give back what this thread left when a handler of a signal raised; it is neither reading nor decoding now."""
        me = threading.get_ident()
        for batch in list(self._batches.get(me, ())):
            self._end(me, batch)
        self._leave_job(me)

    def _end(self, me: int, batch: Batch) -> None:
        with self._lock:
            for context, slab in batch:
                context.put_back(slab)
            others = [other for other in self._batches.get(me, ()) if other is not batch]
            if others:
                self._batches[me] = others
            else:
                self._batches.pop(me, None)
            self._changed.notify_all()

    def take(self, context: Context, slab: Slab, batch: Batch) -> None:
        """Put a slab into a batch, so that nobody else reads or fills it; under the lock."""
        if slab not in context.unread:
            return  # a collection of garbage has just destroyed its stream
        batch.append((context, slab))
        context.begin_reading(slab)

    def take_back(self, streams: Container[int | None]) -> Batch:
        """Return slabs of some streams that are to be read but not yet, by any thread; that is left to the caller now.

        The first slab of a batch is being read. Under the lock.
        """
        taken = Batch()
        for batch in (batch for batches in self._batches.values() for batch in batches):
            taken += [item for item in batch[1:] if item[1].stream in streams]
            batch[1:] = [item for item in batch[1:] if item[1].stream not in streams]
        return taken

    def _read(self, context: Context, slab: Slab, batch: Batch) -> None:
        """Copy a slab's results once its stream has passed; only then may another stream have it.

        Also where no launch in it is chosen: a graph's GPU kernels count before that is decided.
        """
        size = self._slot_bytes
        chosen = [(at, launch) for at, launch in enumerate(slab.pending) if launch is not None]
        length = size * (chosen[-1][0] + 1) if chosen else LEAST_READ
        address = self._device.slab(slab.number, slab.turn)
        problem, raw, records = None, b"", list[Record]()
        try:
            raw = self._device.read(address, length, slab.stream) if address else b""
            records = [Record(launch, raw[at * size : (at + 1) * size]) for at, launch in chosen]
        except PastaError as error:
            problem = error
        with self._lock:
            if problem is not None:
                self._unreadable(slab, problem)
            self._records += records
            slab.pending = []
            if raw:  # else no launch began, but tables may be on their way
                slab.sources = []
            del batch[0]
            context.reading.remove(slab)
            # one that could not be read may still be counted into
            if problem is not None or not context.give_back(slab, allocated=bool(address)):
                self.kept.append(slab.sources)
            self._changed.notify_all()

    def decode(self) -> None:
        """Decode what was read, by whomever."""
        me = threading.get_ident()
        if me in self._decoding:
            return  # a tool's decode has us read: its caller goes on with the rest
        try:
            while self._decode_next(me):
                pass
        finally:
            self._leave_job(me)

    def _leave_job(self, me: int) -> None:
        with self._lock:
            left = self._decoding.pop(me, None)
            if left is not None and not left.delivered:  # a handler of a signal has raised
                self._records.appendleft(left.record)
            self._changed.notify_all()

    def _decode_next(self, me: int) -> bool:
        with self._lock:
            if not self._records:
                return False
            job = self._decoding[me] = _Job(self._records.popleft())
        done = self._decode(job.record)
        with self._lock:
            done()
            job.delivered = True
            self._changed.notify_all()
        return True

    def wait_until_read(self, streams: Container[int | None], timeout_s: float) -> None:
        """Wait for other threads that read slabs of some streams now."""
        me = threading.get_ident()
        with self._lock:
            turns = {(slab.number, slab.turn) for slab in self._others(me) if slab.stream in streams}
            self._changed.wait_for(
                lambda: turns.isdisjoint((slab.number, slab.turn) for slab in self._others(me)), timeout_s
            )

    def wait(self, timeout_s: float) -> None:
        """Wait until all that is being read or decoded now is in."""
        self.wait_until_read(EVERY_STREAM, timeout_s)
        self.decode()
        with self._lock:
            me = threading.get_ident()
            jobs = [job for thread, job in self._decoding.items() if thread != me]
            self._changed.wait_for(
                lambda: all(job.delivered for job in jobs if job in self._decoding.values()), timeout_s
            )

    def late(self) -> list[LaunchInfo]:
        """Return the launches that other threads read or decode now."""
        with self._lock:
            slabs = self._others(threading.get_ident())
            records = [*self._records, *(job.record for job in self._decoding.values() if not job.delivered)]
            return [
                *(launch for slab in slabs for launch in slab.pending if launch is not None),
                *(record.launch for record in records),
            ]

    def _others(self, me: int) -> list[Slab]:
        return [
            slab for thread, batches in self._batches.items() if thread != me for batch in batches for _, slab in batch
        ]


class _Every:
    """Contains every stream."""

    def __contains__(self, _stream: object) -> bool:
        return True


EVERY_STREAM = _Every()
