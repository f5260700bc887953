"""Which processes there are, what they publish and which libraries they map; found again and again through /proc."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pasta_otel.ebpf.process_context import ProcessContext, context_address, published_at, read_context

SOONEST_S, LATEST_S = 1.0, 15.0
"""A process's map is read again after half its age, within these bounds: imports take their time, and then nothing
changes."""
READ_SIZE = 1 << 16


def _read(path: str) -> str:
    """Return a file's text, empty when it is not there: every process has two, so each call of the system counts."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    parts = []
    try:
        while part := os.read(fd, READ_SIZE):
            parts.append(part)
    except OSError:
        return ""
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "replace")


class Library(NamedTuple):
    """A mapped file, told apart by what the kernel attaches to: the inode.

    Attributes:
        device: Device as the map shows it.
        inode: Inode.
        path: A path through which it can be opened now: ``/proc/PID/root/...``.
        shown: The path as the process sees it.
    """

    device: str
    inode: int
    path: str
    shown: str

    @property
    def key(self) -> tuple[str, int]:
        """Return what makes it one file."""
        return self.device, self.inode


class Process:
    """One process.

    Attributes:
        pid: Its id.
        start: Start time in clock ticks: with the pid, its identity.
        context: What it publishes, or None.
        address: Where its context is mapped.
        libraries: Mapped libraries that somebody wants.
        namespace: Device and inode of its pid namespace.
    """

    def __init__(self, pid: int, start: int, first_seen_s: float) -> None:
        self.pid, self.start = pid, start
        self.first_seen_s, self.next_scan_s = first_seen_s, 0.0
        self.context: ProcessContext | None = None
        self.address: int | None = None
        self.libraries: tuple[Library, ...] = ()
        self.namespace: tuple[int, int] = (0, 0)

    @property
    def service(self) -> str:
        """Return its service name, or empty."""
        return str(self.context.resource.get("service.name", "")) if self.context else ""


class Changes(NamedTuple):
    """What a scan found."""

    appeared: tuple[Process, ...] = ()
    changed: tuple[Process, ...] = ()
    gone: tuple[Process, ...] = ()


class ProcessTable:
    """All processes, scanned on demand.

    Args:
        proc: ``/proc``.
        library: Start of the file names of libraries to find, e.g. ``libcuda.so``.
        now_s: A clock that does not go back, seconds.
    """

    def __init__(self, proc: Path, library: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._now = proc, now_s
        self._name = library
        self._library = re.compile(rf"^\S+ ..x\S* \S+ (\S+) (\d+)\s+(/\S*/{re.escape(library)}\S*)", re.MULTILINE)
        self.processes: dict[int, Process] = {}

    def scan(self, hints: Iterable[int] = ()) -> Changes:
        """Look at new processes, at those whose time has come, and at ``hints`` at once."""
        now, soon = self._now(), set(hints)
        appeared, changed = [], []
        pids = set(self._pids())
        gone = [self.processes.pop(pid) for pid in [*self.processes] if pid not in pids]
        for pid in pids:
            known = self.processes.get(pid)
            if known is not None and not self._due(known, now, soon):
                continue
            start = self._start(pid)
            if known is not None and start != known.start:
                gone.append(self.processes.pop(pid))
                known = None
            if start is None:
                continue
            if known is None:
                known = self.processes[pid] = Process(pid, start, now)
                appeared.append(known)
                self._look(known, now)
            elif self._look(known, now):
                changed.append(known)
        return Changes(tuple(appeared), tuple(changed), tuple(gone))

    def _due(self, process: Process, now: float, soon: set[int]) -> bool:
        if process.context is not None and process.address is not None:
            stamp = published_at(self._proc, process.pid, process.address)
            if stamp != process.context.published_at_ns:
                return True
        return now >= process.next_scan_s or process.pid in soon

    def _pids(self) -> Iterator[int]:
        return (int(name) for name in os.listdir(self._proc) if name.isdigit())  # noqa: PTH208 - thousands of entries

    def _start(self, pid: int) -> int | None:
        """Return when a process started, in clock ticks; None when it is gone, or a kernel thread."""
        fields = _read(f"{self._proc}/{pid}/stat").rpartition(")")[2].split()
        return int(fields[19]) if len(fields) > 20 and int(fields[20]) > 0 else None

    def _look(self, process: Process, now: float) -> bool:
        """Read a process's map; return whether something changed."""
        process.next_scan_s = now + min(max((now - process.first_seen_s) / 2, SOONEST_S), LATEST_S)
        maps = _read(f"{self._proc}/{process.pid}/maps")
        before = (process.context, process.libraries)
        process.address = context_address(maps)
        context = read_context(self._proc, process.pid, process.address) if process.address else None
        process.context = context
        process.libraries = tuple(self._libraries(process.pid, maps))
        process.namespace = self._namespace(process.pid)
        return before != (process.context, process.libraries)

    def _libraries(self, pid: int, maps: str) -> Iterator[Library]:
        if self._name not in maps:
            return
        seen = set()
        for device, inode, shown in self._library.findall(maps):
            library = Library(device, int(inode), f"{self._proc}/{pid}/root{shown}", shown)
            if library.key not in seen:
                seen.add(library.key)
                yield library

    def _namespace(self, pid: int) -> tuple[int, int]:
        try:
            found = os.stat(f"{self._proc}/{pid}/ns/pid")  # noqa: PTH116 - one call less
        except OSError:
            return 0, 0
        return found.st_dev, found.st_ino
