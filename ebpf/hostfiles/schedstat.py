"""CPU time and run delay by thread.

``/proc/PID/schedstat`` tells of the main thread only (measured on Linux 6.18: two busy threads, process file 0.04 s,
their own files 0.95 s each), so a process is the sum over ``/proc/PID/task/*``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pasta_otel.ebpf.hostfiles.files import read_text

SECOND_NS = 1_000_000_000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class SchedStat(NamedTuple):
    """First two fields of a schedstat file: nanoseconds on a CPU, nanoseconds runnable but waiting for one."""

    cpu_time_ns: int
    run_delay_ns: int


def parse_schedstat(text: str) -> SchedStat | None:
    """Return the counters, or None when the text has another form."""
    fields = text.split()
    if len(fields) < 2 or not all(field.isdigit() for field in fields[:2]):
        return None
    return SchedStat(int(fields[0]), int(fields[1]))


def read_threads(proc_root: Path, pid: int) -> dict[int, SchedStat]:
    """Return the counters of every thread that is alive; empty when the process or schedstat is not there."""
    try:
        tasks = sorted(int(entry.name) for entry in (proc_root / str(pid) / "task").iterdir() if entry.name.isdigit())
    except OSError:
        return {}
    found: dict[int, SchedStat] = {}
    for tid in tasks:
        text = read_text(proc_root / str(pid) / "task" / str(tid) / "schedstat")
        stat = parse_schedstat(text) if text is not None else None
        if stat is not None:
            found[tid] = stat
    return found


def read_schedstat(proc_root: Path, pid: int) -> SchedStat | None:
    """Return the sum over the threads that are alive, or None when nothing can be read.

    Threads that ended are not in it, so the sum may fall; ``HostSampler`` keeps them.
    """
    threads = read_threads(proc_root, pid).values()
    if not threads:
        return None
    return SchedStat(sum(stat.cpu_time_ns for stat in threads), sum(stat.run_delay_ns for stat in threads))


class ProcessStat(NamedTuple):
    """What ``/proc/PID/stat`` says.

    Attributes:
        start_ticks: When the process started, in clock ticks since boot.
        cpu_time_ns: CPU time of all its threads, those that ended included, in steps of a clock tick.
    """

    start_ticks: int
    cpu_time_ns: int


def read_stat(proc_root: Path, pid: int) -> ProcessStat | None:
    """Return fields 14, 15 and 22 of stat, or None.

    The name in field 2 may hold spaces and parentheses, so fields are counted from the last one.
    """
    text = read_text(proc_root / str(pid) / "stat")
    if text is None:
        return None
    fields = text.rpartition(")")[2].split()
    if len(fields) <= 19 or not all(fields[place].isdigit() for place in (11, 12, 19)):
        return None
    return ProcessStat(int(fields[19]), (int(fields[11]) + int(fields[12])) * (SECOND_NS // TICKS_PER_S))


def start_time_ticks(proc_root: Path, pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot, or None.

    Two processes that had one pid differ in it.
    """
    stat = read_stat(proc_root, pid)
    return stat.start_ticks if stat is not None else None
