"""Host counters of named processes, cumulative and never falling while the process lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pasta_otel.clock import Clock
from pasta_otel.ebpf.hostfiles.cgroup import CpuStat, find_cgroup, read_cpu_stat
from pasta_otel.ebpf.hostfiles.schedstat import SchedStat, read_stat, read_threads
from pasta_otel.model import HostSample
from pasta_otel.semconv import CGROUP_PERIODS, CGROUP_THROTTLED_PERIODS, CGROUP_THROTTLED_TIME, CPU_TIME, RUN_DELAY

SECOND_NS = 1e9
_NOTHING = SchedStat(0, 0)


@dataclass
class _Process:
    """What is remembered of one process: counters of threads that ended, and of cgroups it was in."""

    started: int
    threads: dict[int, SchedStat] = field(default_factory=dict)
    ended: SchedStat = _NOTHING
    cpu_time_ns: int = 0
    quota: CpuStat | None = None
    left: tuple[int, int, int] = (0, 0, 0)  # periods, throttled periods, throttled ns before the present cgroup

    def take_threads(self, now: Mapping[int, SchedStat]) -> SchedStat | None:
        """Return the sum over all threads that ever were; one that ended keeps what it last showed."""
        for tid, last in self.threads.items():
            # a thread id whose counter fell is another thread with a reused id
            if tid not in now or now[tid].cpu_time_ns < last.cpu_time_ns:
                self.ended = SchedStat(
                    self.ended.cpu_time_ns + last.cpu_time_ns, self.ended.run_delay_ns + last.run_delay_ns
                )
        self.threads = dict(now)
        if not now:
            return None
        return SchedStat(
            self.ended.cpu_time_ns + sum(stat.cpu_time_ns for stat in now.values()),
            self.ended.run_delay_ns + sum(stat.run_delay_ns for stat in now.values()),
        )

    def take_quota(self, now: CpuStat | None) -> tuple[int, int, int] | None:
        """Return the bandwidth counters, continued when the process moves to another cgroup."""
        last = self.quota
        if now is None:
            return None
        counters = (now.periods, now.throttled_periods, now.throttled_ns)
        if last is not None and (last.path != now.path or now.periods < last.periods):
            shown = (last.periods, last.throttled_periods, last.throttled_ns)
            # continue where the old cgroup stopped: what the new one counted before is not this process's doing
            entry = counters if last.path != now.path else (0, 0, 0)
            self.left = (
                self.left[0] + shown[0] - entry[0],
                self.left[1] + shown[1] - entry[1],
                self.left[2] + shown[2] - entry[2],
            )
        self.quota = now
        return self.left[0] + counters[0], self.left[1] + counters[1], self.left[2] + counters[2]


class HostSampler:
    """Read the counters of processes whenever asked.

    Args:
        proc_root: ``/proc``, or where the host's is mounted.
        cgroup_root: What stands for ``/sys/fs/cgroup``.
        clock: Stamps the readings.
    """

    def __init__(self, proc_root: Path | str, cgroup_root: Path | str, clock: Clock) -> None:
        self._proc, self._cgroup, self._clock = Path(proc_root), Path(cgroup_root), clock
        self._known: dict[int, _Process] = {}

    def sample(self, processes: Mapping[int, str]) -> list[HostSample]:
        """Return one reading of every counter that can be read of the processes (pid -> service name).

        A process that vanished is skipped and forgotten, as is one that is no longer asked for; a pid that now names
        another process starts anew.
        """
        self._known = {pid: process for pid, process in self._known.items() if pid in processes}
        readings: list[HostSample] = []
        for pid, service in sorted(processes.items()):
            process = self._process(pid)
            if process is not None:
                now = self._clock.unix_nano()
                readings += [HostSample(service, pid, metric, now, value) for metric, value in self._read(pid, process)]
        return readings

    def _process(self, pid: int) -> _Process | None:
        stat = read_stat(self._proc, pid)
        if stat is None:
            self._known.pop(pid, None)
            return None
        process = self._known.get(pid)
        if process is None or process.started != stat.start_ticks:
            process = self._known[pid] = _Process(stat.start_ticks)
        process.cpu_time_ns = max(process.cpu_time_ns, stat.cpu_time_ns)
        return process

    def _read(self, pid: int, process: _Process) -> Iterator[tuple[str, float]]:
        stat = process.take_threads(read_threads(self._proc, pid))
        if stat is not None:
            # threads tell to the nanosecond, and the process's own file knows those that came and went in between
            process.cpu_time_ns = max(process.cpu_time_ns, stat.cpu_time_ns)
            yield CPU_TIME, process.cpu_time_ns / SECOND_NS
            yield RUN_DELAY, stat.run_delay_ns / SECOND_NS
        cgroup = find_cgroup(self._proc, self._cgroup, pid, "cpu")
        quota = process.take_quota(read_cpu_stat(cgroup) if cgroup else None)
        if quota is not None:
            yield CGROUP_PERIODS, float(quota[0])
            yield CGROUP_THROTTLED_PERIODS, float(quota[1])
            yield CGROUP_THROTTLED_TIME, quota[2] / SECOND_NS
