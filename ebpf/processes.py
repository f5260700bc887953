"""Which processes there are, what they publish and which libraries they map; found again and again through /proc."""

from __future__ import annotations

import heapq
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pasta_otel.ebpf.ports import Refusal
from pasta_otel.ebpf.process_context import ProcessContext, context_address, published_at, read_context

SOONEST_S, LATEST_S = 0.1, 15.0
LIKELY_PART, AGE_PART = 8, 2
"""A process's map is read again after this part of its age, within these bounds: imports take their time, and then
nothing changes. A program's age counts from its exec, where a probe tells of it."""
LIKELY = "python"
"""Programs that map such a file are likely to publish, and looked at more often than shells and compilers."""
GLANCES = 32
"""Most processes that one glance reads: a storm of short programs is not worth the agent's budget."""
READ_SIZE = 1 << 16
CAP_SYS_PTRACE = 19
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
HOST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO in include/linux/proc_ns.h."""


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


def seen_from(proc: Path) -> Refusal | None:
    """Return why processes cannot be told apart as the kernel counts them, or None: only the host's namespace can."""
    try:
        namespace = os.readlink(f"{proc}/self/ns/pid")  # noqa: PTH115 - one call less
    except OSError:
        return None  # not known, and not ours to guess
    if namespace == HOST_PID_NAMESPACE:
        return None
    return Refusal("pid_namespace", 0, f"{namespace} is not the host's: processes outside it are not seen")


def may_trace(status: str | None = None) -> bool:
    """Return whether this process may read the maps of all others, from the text of ``/proc/self/status``."""
    text = _read("/proc/self/status") if status is None else status
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> CAP_SYS_PTRACE & 1)


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
        began_s: When its program began, as far as it is known, on the table's clock.
        next_scan_s: When to look at its map again.
        likely: It is likely to publish.
        size: Of its memory when its map was read, as statm writes it: a map that has grown or shrunk has changed.
        read_s: When that was.
        unreadable: Its map, or what it publishes, may not be read.
    """

    def __init__(self, pid: int, start: int, began_s: float) -> None:
        self.pid, self.start = pid, start
        self.began_s, self.next_scan_s = began_s, 0.0
        self.context: ProcessContext | None = None
        self.address: int | None = None
        self.libraries: tuple[Library, ...] = ()
        self.namespace: tuple[int, int] = (0, 0)
        self.unreadable = self.likely = False
        self.size, self.read_s = "", 0.0

    @property
    def service(self) -> str:
        """Return its service name, or empty."""
        return str(self.context.resource.get("service.name", "")) if self.context else ""


class Changes(NamedTuple):
    """What a scan found."""

    appeared: tuple[Process, ...] = ()
    changed: tuple[Process, ...] = ()
    gone: tuple[Process, ...] = ()


class _Found:
    """What a scan finds, while it does."""

    def __init__(self) -> None:
        self.appeared: list[Process] = []
        self.changed: list[Process] = []
        self.gone: list[Process] = []

    def changes(self) -> Changes:
        return Changes(tuple(self.appeared), tuple(self.changed), tuple(self.gone))


class ProcessTable:
    """All processes, scanned on demand.

    Args:
        proc: ``/proc``.
        library: Start of the file names of libraries to find, e.g. ``libcuda.so``.
        now_s: A clock that does not go back, seconds.
        boot_s: Seconds since boot, by which the kernel stamps processes.
    """

    def __init__(
        self,
        proc: Path,
        library: str,
        now_s: Callable[[], float] = time.monotonic,
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._proc, self._now, self._boot = proc, now_s, boot_s
        self._name = library
        self._library = re.compile(rf"^\S+ ..x\S* \S+ (\S+) (\d+)\s+(/\S*/{re.escape(library)}\S*)", re.MULTILINE)
        self.processes: dict[int, Process] = {}
        self._expected: dict[int, tuple[float, bool]] = {}  # pid -> when to look, and whether it may be a thread
        self._agenda: list[tuple[float, int]] = []  # when to look, pid; the first is the next

    def scan(self, hints: Iterable[int] = ()) -> Changes:
        """Look at all new processes, at those whose time has come, and at ``hints`` at once."""
        now, soon, found = self._now(), set(hints), _Found()
        pids = set(self._pids())
        self._expected.clear()  # what is there now is looked at now
        found.gone += [self.processes.pop(pid) for pid in [*self.processes] if pid not in pids]
        for pid in pids:
            known = self.processes.get(pid)
            if known is None or self._due(known, now, soon):
                self._visit(pid, now, found, certain=pid in soon or known is None or self._republished(known))
        return found.changes()

    def note(self, started: Iterable[int] = (), forked: Iterable[int] = (), ended: Iterable[int] = ()) -> None:
        """Take what a probe saw of processes, for the next glance.

        Args:
            started: They began another program, whose age counts from now.
            forked: New processes of those who publish; they may be threads.
            ended: They ended, or their main thread did.
        """
        now = self._now()
        for pid in started:
            known = self.processes.get(pid)
            if known is not None:
                known.began_s = now
                self._plan(known, now + SOONEST_S)
            self._expected[pid] = now + SOONEST_S, False  # nothing publishes, or maps a driver, sooner
        for pid in (*forked, *ended):
            self._expected[pid] = now, True

    def glance(self) -> Changes:
        """Look at what was noted and at young processes whose time has come; without a list of all, so it is cheap."""
        now, found = self._now(), _Found()
        for pid in [pid for pid, (due_s, _) in self._expected.items() if due_s <= now][:GLANCES]:
            _, doubtful = self._expected.pop(pid)
            if not doubtful or pid in self.processes or self._leads(pid):
                self._visit(pid, now, found, certain=True)
        for pid in self._due_until(now, GLANCES):
            self._visit(pid, now, found, certain=False)
        return found.changes()

    def _due_until(self, now: float, limit: int) -> list[int]:
        """Return the processes whose time has come."""
        due: list[int] = []
        while self._agenda and self._agenda[0][0] <= now and len(due) < limit:
            when, pid = heapq.heappop(self._agenda)
            known = self.processes.get(pid)
            if known is not None and known.next_scan_s == when:  # or it has another entry, for later
                due.append(pid)
        return due

    def _plan(self, process: Process, when: float) -> None:
        process.next_scan_s = when
        heapq.heappush(self._agenda, (when, process.pid))

    def _visit(self, pid: int, now: float, found: _Found, *, certain: bool) -> None:
        """Look at one process; ``certain`` says that it has changed, though it may look the same."""
        known, start = self.processes.get(pid), self._start(pid)
        if known is not None and start != known.start:
            found.gone.append(self.processes.pop(pid))
            known = None
        if start is None:
            return
        if known is None:
            age_s = max(self._boot() - start / TICKS_PER_S, 0.0)
            known = self.processes[pid] = Process(pid, start, now - age_s)
            found.appeared.append(known)
            self._look(known, now)
        elif self._look(known, now, certain=certain) or certain:
            found.changed.append(known)

    def _leads(self, pid: int) -> bool:
        """Return whether an id is a process's, and not that of one of its threads."""
        return f"\nTgid:\t{pid}\n" in _read(f"{self._proc}/{pid}/status")

    def _due(self, process: Process, now: float, soon: set[int]) -> bool:
        return self._republished(process) or now >= process.next_scan_s or process.pid in soon

    def _republished(self, process: Process) -> bool:
        if process.context is None or process.address is None:
            return False
        return published_at(self._proc, process.pid, process.address) != process.context.published_at_ns

    def _pids(self) -> Iterator[int]:
        return (int(name) for name in os.listdir(self._proc) if name.isdigit())  # noqa: PTH208 - thousands of entries

    def _start(self, pid: int) -> int | None:
        """Return when a process started, in clock ticks; None when it is gone, or a kernel thread."""
        fields = _read(f"{self._proc}/{pid}/stat").rpartition(")")[2].split()
        return int(fields[19]) if len(fields) > 20 and int(fields[20]) > 0 else None

    def _look(self, process: Process, now: float, *, certain: bool = True) -> bool:
        """Read a process's map; return whether something changed."""
        first = process.read_s == 0  # when probes are about to be attached each call of the system counts
        size = "" if first else _read(f"{self._proc}/{process.pid}/statm").partition(" ")[0]
        if not certain and size == process.size and now < process.read_s + LATEST_S:
            self._plan(process, now + self._patience(process, now))
            return False
        process.size, process.read_s = size, now
        maps = _read(f"{self._proc}/{process.pid}/maps")
        before = (process.context, process.libraries)
        process.address = context_address(maps)
        context = read_context(self._proc, process.pid, process.address) if process.address else None
        process.unreadable = (not maps and self._closed(process.pid, "maps")) or (
            process.address is not None and context is None and self._closed(process.pid, "mem")
        )
        if context is None and process.context is not None:  # another program, which nobody told us of
            process.began_s = now
        process.likely = LIKELY in maps or context is not None
        self._plan(process, now + self._patience(process, now))
        process.context = context
        process.libraries = tuple(self._libraries(process.pid, maps))
        process.namespace = self._namespace(process.pid)
        return before != (process.context, process.libraries)

    @staticmethod
    def _patience(process: Process, now: float) -> float:
        part = LIKELY_PART if process.likely else AGE_PART
        return min(max((now - process.began_s) / part, SOONEST_S), LATEST_S)

    def _closed(self, pid: int, name: str) -> bool:
        """Return whether a file may not be read: one that is empty may be that of a process that just ended."""
        try:
            os.close(os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC))
        except PermissionError:
            return True
        except OSError:
            pass
        return False

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
