"""What needs no probe: throttling, run delay, memory events, pressure and accept queues, from files, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pasta_otel import semconv
from pasta_otel.clock import Clock
from pasta_otel.ebpf.hostfiles import (
    HostSampler,
    Netstat,
    Pressure,
    find_cgroup,
    read_memory_events,
    read_netstat,
    read_pressure,
)
from pasta_otel.errors import InputError
from pasta_otel.model import HostSample

RESOURCES = ("cpu", "memory", "io")
PRESSURE = "pressure"
"""No v1 controller, so a process's v2 cgroup is found by it: v1 has no pressure files."""
_SAMPLES = {
    semconv.RUN_DELAY: semconv.PROCESS_RUN_DELAY,
    semconv.CPU_TIME: semconv.PROCESS_CPU_TIME,
    semconv.CGROUP_THROTTLED_TIME: semconv.CGROUP_THROTTLED,
    semconv.CGROUP_THROTTLED_PERIODS: semconv.CGROUP_THROTTLED_COUNT,
}


class HostFiles:
    """Reads the files of known processes when asked, and exports the last reading.

    Args:
        proc: ``/proc``.
        cgroup: Where cgroups are mounted.
        clock: Time.
        meter: Where it goes.
    """

    def __init__(self, proc: Path, cgroup: Path, clock: Clock, meter: Meter) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._sampler = HostSampler(proc, cgroup, clock)
        self._samples: list[HostSample] = []
        self._memory: dict[tuple[str, int, str], int] = {}
        self._pressure: dict[str, Pressure] = {}
        self._cgroup_pressure: dict[tuple[str, int, str], Pressure] = {}
        self._netstat: dict[str, Netstat] = {}
        self._observe(meter)

    def poll(self, processes: Mapping[int, str]) -> None:
        """Read everything once.

        Args:
            processes: Process id to service name, of the processes that publish their context.
        """
        self._samples = self._sampler.sample(processes)
        self._memory = dict(self._memory_events(processes))
        found = ((resource, read_pressure(self._proc / "pressure", resource)) for resource in RESOURCES)
        self._pressure = {resource: pressure for resource, pressure in found if pressure is not None}
        self._cgroup_pressure = dict(self._cgroup_pressures(processes))
        self._netstat = dict(self._namespaces([1, *processes]))

    def _memory_events(self, processes: Mapping[int, str]) -> Iterator[tuple[tuple[str, int, str], int]]:
        for pid, service in processes.items():
            cgroup = find_cgroup(self._proc, self._cgroup, pid, "memory")
            for event, count in (read_memory_events(cgroup) if cgroup is not None else {}).items():
                yield (service, pid, event), count

    def _cgroup_pressures(self, processes: Mapping[int, str]) -> Iterator[tuple[tuple[str, int, str], Pressure]]:
        """Yield what each process's own cgroup waited for; the topmost one's is the machine's, which is read anyway."""
        for pid, service in processes.items():
            cgroup = find_cgroup(self._proc, self._cgroup, pid, PRESSURE)
            if cgroup is None or cgroup.path == cgroup.top:
                continue
            for resource in RESOURCES:
                pressure = read_pressure(cgroup.path, resource)
                if pressure is not None:
                    yield (service, pid, resource), pressure

    def _namespaces(self, pids: Iterable[int]) -> Iterator[tuple[str, Netstat]]:
        """Yield each network namespace once, by a name that can be read of any process in it."""
        seen: dict[int, tuple[str, Netstat]] = {}
        for pid in pids:
            try:
                found = read_netstat(self._proc, pid)
            except InputError:  # a file that contradicts itself is no reading
                continue
            if found is not None:
                name = seen[found.inode][0] if found.inode in seen else ""
                seen[found.inode] = name or found.namespace, found
        yield from seen.values()

    def _observe(self, meter: Meter) -> None:
        for sample, metric in _SAMPLES.items():
            self._counter(meter, metric, self._of_sample(sample))
        self._counter(meter, semconv.CGROUP_MEMORY_EVENTS, self._memory_observations)
        self._counter(meter, semconv.PRESSURE_TIME, self._pressure_observations)
        self._counter(meter, semconv.CGROUP_PRESSURE, self._cgroup_pressure_observations)
        self._counter(meter, semconv.NETSTAT_OVERFLOWS, lambda: self._sockets("listen_overflows"))
        self._counter(meter, semconv.NETSTAT_DROPS, lambda: self._sockets("listen_drops"))

    def _of_sample(self, name: str) -> Callable[[], Iterator[Observation]]:
        def read() -> Iterator[Observation]:
            for sample in self._samples:
                if sample.metric == name:
                    yield Observation(sample.value, _labels(sample.service, sample.pid))

        return read

    def _memory_observations(self) -> Iterator[Observation]:
        for (service, pid, event), count in self._memory.items():
            yield Observation(count, {**_labels(service, pid), "event": event})

    def _pressure_observations(self) -> Iterator[Observation]:
        for resource, pressure in self._pressure.items():
            yield from _stalls(pressure, {"resource": resource})

    def _cgroup_pressure_observations(self) -> Iterator[Observation]:
        for (service, pid, resource), pressure in self._cgroup_pressure.items():
            yield from _stalls(pressure, {**_labels(service, pid), "resource": resource})

    def _sockets(self, field: str) -> Iterator[Observation]:
        for namespace, found in self._netstat.items():
            value = getattr(found, field)
            if value is not None:
                yield Observation(value, {"network_namespace": namespace})

    @staticmethod
    def _counter(meter: Meter, name: str, source: Callable[[], Iterable[Observation]]) -> None:
        spec = semconv.METRICS[name]

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return source()

        meter.create_observable_counter(spec.name, [observe], spec.unit, spec.description)


def _stalls(pressure: Pressure, labels: Mapping[str, str | int]) -> Iterator[Observation]:
    yield Observation(pressure.some_us / 1e6, {**labels, "kind": "some"})
    if pressure.full_us is not None:
        yield Observation(pressure.full_us / 1e6, {**labels, "kind": "full"})


def _labels(service: str, pid: int) -> dict[str, str | int]:
    return {semconv.HOST_SERVICE: service, semconv.PROCESS_PID: pid}
