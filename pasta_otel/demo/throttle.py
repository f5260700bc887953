"""The ``cpu-throttle`` fault: less CPU for one process, while this helper lives.

A process of its own (``python -m pasta_otel.demo.throttle``), because it must take the quota back however the demo
ends: it does so at SIGTERM, which it also gets when the demo is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from pasta_otel.demo import cgroup
from pasta_otel.demo.processes import die_with_parent

HOGS_MOST = 32
HOGS_RAISED_MOST = 128
LOOK_SECONDS = 2.0
OVERUSE = 1.15  # a victim that runs this much more than it should is not squeezed
NS = 1e-9
Method = Literal["auto", "cgroup", "hog"]


class Squeeze(Protocol):
    """A way to take CPU from a process."""

    method: str
    detail: str

    def apply(self) -> None:
        """Begin; raises OSError where that is not possible."""

    def tend(self) -> str:
        """See whether it bites, and squeeze harder if not; returns what was changed, in words."""

    def revert(self) -> None:
        """End; safe to call twice."""


class Hogs:
    """Busy processes pinned to one CPU together with the victim, for machines whose cgroups are not ours to write.

    Args:
        pid: The victim; it keeps its own CPUs' first one.
        cores: CPU seconds a second that the victim should be left with, about.
        proc: Where the victim's times are read.
        now: A clock, seconds.

    Equal processes get equal shares where the kernel knows no groups between them; with groups (autogroup, cgroups) and
    for a victim that mostly sleeps it depends. So what the victim really runs is measured, and hogs are added until it
    fits. Its priority is left alone: who may lower one may not always raise it again.
    """

    method = "hog"

    def __init__(
        self, pid: int, cores: float, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic
    ) -> None:
        self._pid, self._cores, self._proc, self._now = pid, cores, proc, now
        self._seen = (0.0, 0.0)
        self._count = min(HOGS_MOST, max(1, round(1 / cores) - 1))  # equal shares: 1 / (hogs + 1) each
        self._children: list[int] = []
        self._affinity: dict[int, set[int]] = {}
        self._cpu = min(os.sched_getaffinity(pid))
        self.detail = f"{self._count} busy processes on CPU {self._cpu}"

    def apply(self) -> None:
        """Pin the victim's threads and start the hogs."""
        for thread in _threads(self._pid):
            self._affinity[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, {self._cpu})
        self._add(self._count)

    def tend(self) -> str:
        """Add hogs while the victim runs more than it should."""
        (ran, at), self._seen = self._seen, (_ran_seconds(self._proc, self._pid), self._now())
        elapsed, children = self._seen[1] - at, len(self._children)
        if elapsed <= 0 or self._seen[0] - ran <= self._cores * OVERUSE * elapsed or children >= HOGS_RAISED_MOST:
            return ""
        with contextlib.suppress(OSError):  # no more processes are allowed: what there is must do
            self._add(min(children, HOGS_RAISED_MOST - children))
        return f"it still ran {(self._seen[0] - ran) / elapsed:.3f} s a second: {len(self._children)} busy processes"

    def _add(self, count: int) -> None:
        for _ in range(count):
            self._children.append(_spawn_hog(self._cpu))
        self._seen = (_ran_seconds(self._proc, self._pid), self._now())

    def revert(self) -> None:
        """End the hogs and give the victim its CPUs back."""
        for child in self._children:  # all before the first wait: each needs its turn on the CPU to end
            os.kill(child, signal.SIGKILL)
        for child in self._children:
            os.waitpid(child, 0)
        self._children = []
        everywhere = set().union(*self._affinity.values()) if self._affinity else set()
        for thread in _threads(self._pid) if everywhere else ():
            with contextlib.suppress(ProcessLookupError):  # threads come and go; new ones inherited the pin
                os.sched_setaffinity(thread, self._affinity.get(thread, everywhere))
        self._affinity = {}


def squeeze(pid: int, cores: float, method: Method) -> Squeeze:
    """Apply the best method that works here, and return it.

    Raises:
        OSError: None of the allowed methods works.
    """
    home = cgroup.find(pid) if method != "hog" else None
    if home is not None:
        cgroup.sweep(home)
        quota = cgroup.Quota(pid, cores, home)
        try:
            quota.apply()
        except OSError:
            if method == "cgroup":
                raise
        else:
            return quota
    elif method == "cgroup":
        raise OSError("no cgroup hierarchy with a cpu controller is mounted")
    hogs = Hogs(pid, cores)
    hogs.apply()
    return hogs


def _threads(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(entry.name) for entry in Path("/proc", str(pid), "task").iterdir()]
    return []


def _ran_seconds(proc: Path, pid: int) -> float:
    """Return how long the process's threads have run, from their schedstat; 0 where the kernel does not tell."""
    total = 0
    for file in (proc / str(pid) / "task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # threads come and go
            total += int(file.read_text(encoding="ascii").split()[0])
    return total * NS


def _spawn_hog(cpu: int) -> int:
    arrange = die_with_parent(os.getpid())
    pid = os.fork()
    if pid:
        return pid
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    arrange()
    os.setsid()  # the kernel shares CPUs out by session first (sched_autogroup): one session would weigh as one process
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


def main() -> None:
    """Squeeze a process until SIGTERM or SIGINT, then let it go."""
    parser = argparse.ArgumentParser(description="Take CPU from a process, until SIGTERM.")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--cores", type=float, required=True, help="CPU seconds a second that it keeps")
    parser.add_argument("--method", choices=("auto", "cgroup", "hog"), default="auto")
    options = parser.parse_args()
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # never between applying and being able to revert
    active = squeeze(options.pid, options.cores, options.method)
    try:
        sys.stdout.write(json.dumps({"event": "ready", "method": active.method, "detail": active.detail}) + "\n")
        sys.stdout.flush()
        while signal.sigtimedwait(signals, LOOK_SECONDS) is None:
            if words := active.tend():
                sys.stderr.write(words + "\n")
                sys.stderr.flush()
    finally:
        active.revert()


if __name__ == "__main__":
    main()
