"""Attaches host probes, tells them which processes to watch, and brings what they counted."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from pasta_otel.ebpf import layout
from pasta_otel.ebpf.elf import NotElfError, function_offsets
from pasta_otel.ebpf.ports import Link, Loaded, Loader, Refusal, RefusedError, Site
from pasta_otel.ebpf.probes import Api, EventProgram, Probe
from pasta_otel.ebpf.processes import Changes, Library, Process, ProcessTable
from pasta_otel.ebpf.return_probes import return_probes_refusal
from pasta_otel.ebpf.ring import Ring
from pasta_otel.ebpf.start_reason import StartReason
from pasta_otel.ebpf.syscall import BpfMap, possible_cpus

EVENTS_SIZE, CRITICAL_SIZE = 256 * 4096, 16 * 4096
EPOCH_GRACE_S = 0.05
"""How long a program may still add to an epoch that has ended: far longer than one runs."""
_U32 = struct.Struct("<I")
Timing = Literal["duration", "count", "off"]


class Thresholds(NamedTuple):
    """What leaves as a record of its own besides the aggregates.

    Attributes:
        slow_ns: Calls that last at least this long.
        off_cpu_ns: Absences from the CPU that last at least this long.
        sample: One call in so many, a power of two; 0 = none.
    """

    slow_ns: int = 1_000_000
    off_cpu_ns: int = 1_000_000
    sample: int = 0


_DEFAULT = Thresholds()


class Attachment(NamedTuple):
    """What became of one probe on one target."""

    probe: str
    target: str
    refusal: Refusal | None = None


class Harvest(NamedTuple):
    """What probes brought since the last harvest.

    Attributes:
        aggregates: Ended epochs' sums.
        events: Slow or sampled events.
        critical: Processes that ended, started or were killed.
    """

    aggregates: tuple[layout.Aggregate, ...] = ()
    events: tuple[layout.Event, ...] = ()
    critical: tuple[layout.CriticalEvent, ...] = ()


class _Target:
    """One library with its links."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.users: set[int] = set()
        self.calls: list[Link] = []
        self.launches: list[Link] = []


class HostObserver:
    """Host probes over one loader.

    Args:
        loader: How to load; the next one is tried when it is refused altogether.
        probes: What to attach.
        proc: ``/proc``.
        thresholds: Which events leave as records.
        count_unregistered: Count driver calls of processes without a process context too.
        sleep: Waits, seconds.
        return_refusal: Why return probes are not safe here, or None.
        launch_timing: Whether launch calls are timed, counted or left alone at first.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: the world and the policy are parameters
        self,
        loader: Loader,
        probes: Sequence[Probe],
        *,
        proc: Path = Path("/proc"),
        thresholds: Thresholds = _DEFAULT,
        count_unregistered: bool = True,
        sleep: Callable[[float], None] = time.sleep,
        return_refusal: Refusal | None = None,
        launch_timing: Timing = "duration",
    ) -> None:
        self._probes = {probe.name: probe for probe in probes}
        self.apis: dict[int, Api] = {api.number: api for probe in probes for api in probe.apis}
        self._proc, self._sleep = proc, sleep
        self._uprobes = next((probe for probe in probes if probe.library), None)
        self.processes = ProcessTable(proc, self._uprobes.library if self._uprobes else "libcuda.so")
        self.attachments: dict[tuple[str, str], Attachment] = {}
        self._targets: dict[tuple[str, int], _Target] = {}
        self._return_refusal = return_refusal or return_probes_refusal()
        self._launch_timing: Timing = launch_timing
        self._flags = layout.FLAG_COUNT_UNREGISTERED if count_unregistered else 0
        self._epoch = 0
        self._forked = False
        self._registered: set[int] = set()
        self._event_links: list[Link] = []
        self._undo = ExitStack()
        self.loaded: Loaded = loader.load(probes)
        self._undo.callback(self.loaded.close)
        with self._undo as undo:
            self._open_maps()
            self._configure(thresholds)
            self._undo = undo.pop_all()

    def _open_maps(self) -> None:
        fd = self.loaded.map_fd
        self._process_map = BpfMap(fd("processes"), 4, layout.PROCESS.size)
        self._aggregates = BpfMap(fd("aggregates"), layout.AGGREGATE_KEY.size, layout.AGGREGATE.size)
        self._settings = BpfMap(fd("settings"), 4, layout.SETTINGS.size)
        self._limits = BpfMap(fd("limits"), 4, layout.LIMIT.size)
        self._counts = BpfMap(fd("counts"), 4, layout.COUNTERS.size, possible_cpus())
        self._events, self._critical = Ring(fd("events"), EVENTS_SIZE), Ring(fd("critical"), CRITICAL_SIZE)
        self._undo.callback(self._events.close)
        self._undo.callback(self._critical.close)

    def _configure(self, thresholds: Thresholds) -> None:
        self._settings.put(_U32.pack(0), layout.SETTINGS.pack(self._epoch, self._flags))
        sample = thresholds.sample - 1 if thresholds.sample else layout.NO_SAMPLE
        for number, api in self.apis.items():
            slow = thresholds.off_cpu_ns if api.kind in {"off_cpu", "run_queue"} else thresholds.slow_ns
            self._limits.put(_U32.pack(number), layout.LIMIT.pack(slow, sample, 0))

    # -- attaching -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach what needs no process, then what the present processes need."""
        for probe in self._probes.values():
            for item in self._carried(probe):
                self._try(probe.name, item.event, partial(self._attach_event, probe.name, item))
        self.refresh()

    def _carried(self, probe: Probe) -> list[EventProgram]:
        refusals = self.loaded.refusals
        if probe.name in refusals:
            return []
        return [item for item in probe.programs if f"{probe.name}/{item.program}" not in refusals]

    def _attach_event(self, probe: str, item: EventProgram) -> None:
        attach = self.loaded.attach_perf if item.perf else self.loaded.attach_tracepoint
        self._event_links.append(attach(probe, item.program, item.event))

    def refresh(self, hints: Iterable[int] = ()) -> Changes:
        """Look for processes and libraries that came or went."""
        changes = self._apply(self.processes.scan(hints))
        if self._forked:  # children that ended before anybody looked
            self._forked = False
            for key in [key for key, _ in self._process_map.items() if _pid(key) not in self.processes.processes]:
                self._process_map.delete(key)
        return changes

    def attend(self) -> tuple[layout.CriticalEvent, ...]:
        """Look at processes that started or ended since the last time, cheaply; return those events."""
        events = self._drain_critical()
        self._apply(self.processes.glance())
        return events

    def _drain_critical(self) -> tuple[layout.CriticalEvent, ...]:
        events = tuple(map(layout.decode_critical, self._critical.drain()))
        by_kind: dict[int, list[int]] = {}
        for event in events:
            by_kind.setdefault(event.kind, []).append(event.tgid)
        started, ended, forked = (by_kind.get(kind, []) for kind in (layout.EXEC, layout.EXIT, layout.FORK))
        self._forked = self._forked or bool(forked)
        self.processes.note(started, forked, ended)
        return events

    def _apply(self, changes: Changes) -> Changes:
        for process in changes.gone:
            self._registered.discard(process.pid)
            self._process_map.delete(_U32.pack(process.pid))
            self._release(process.pid, keep=())
        for process in (*changes.appeared, *changes.changed):
            self._register(process)
            self._use(process)
        return changes

    def _register(self, process: Process) -> None:
        key = _U32.pack(process.pid)
        if process.context is None:
            if process.pid in self._registered:  # else it may be a child that is about to publish: the probe knows it
                self._registered.discard(process.pid)
                self._process_map.delete(key)
            return
        self._registered.add(process.pid)
        address, count = process.context.slots() or (0, 1)
        self._process_map.put(key, layout.PROCESS.pack(address, *process.namespace, count - 1, 1))

    def _use(self, process: Process) -> None:
        self._release(process.pid, keep=tuple(library.key for library in process.libraries))
        for library in process.libraries:
            target = self._targets.get(library.key)
            if target is None:
                target = self._targets[library.key] = _Target(library)
                self._attach(target)
            target.users.add(process.pid)

    def _release(self, pid: int, keep: tuple[tuple[str, int], ...]) -> None:
        for key, target in [*self._targets.items()]:
            if pid in target.users and key not in keep:
                target.users.discard(pid)
                if not target.users:
                    _close(target.calls)
                    _close(target.launches)
                    del self._targets[key]
                    self._forget(target.library.shown)

    def _forget(self, shown: str) -> None:
        for key in [key for key in self.attachments if key[1] == shown]:
            del self.attachments[key]

    def _attach(self, target: _Target) -> None:
        probe = self._uprobes
        if probe is None:
            return
        self._try(probe.name, target.library.shown, partial(self._attach_calls, probe, target))
        if self._launch_timing != "off":
            self._try(f"{probe.name}/launch", target.library.shown, partial(self._attach_launches, probe, target))

    def _attach_calls(self, probe: Probe, target: _Target) -> None:
        sites = self._sites(probe, target.library, launches=False)
        target.calls += self._attach_sites(probe, target.library, sites, "duration")

    def _attach_launches(self, probe: Probe, target: _Target) -> None:
        sites = self._sites(probe, target.library, launches=True)
        target.launches += self._attach_sites(probe, target.library, sites, self._launch_timing)

    def _attach_sites(self, probe: Probe, library: Library, sites: list[Site], timing: Timing) -> list[Link]:
        if timing == "count" or self._return_refusal is not None:
            return [self.loaded.attach_uprobes(probe.name, probe.counting, library.path, sites)]
        # returns first: a call between the two attachments has an entry that nobody counts, instead of a return
        returning = self.loaded.attach_uretprobes(probe.name, probe.returning, library.path, sites)
        try:
            return [returning, self.loaded.attach_uprobes(probe.name, probe.entry, library.path, sites)]
        except RefusedError:
            returning.close()
            raise

    def _sites(self, probe: Probe, library: Library, *, launches: bool) -> list[Site]:
        wanted = {symbol: api for api in probe.apis if (api.kind == "launch") == launches for symbol in api.symbols}
        try:
            offsets = function_offsets(library.path, wanted)
        except (OSError, NotElfError) as error:
            number = error.errno or 0 if isinstance(error, OSError) else 0
            reason: StartReason = "no_ptrace" if isinstance(error, PermissionError) else "symbol_not_found"
            raise RefusedError(Refusal(reason, number, f"{library.shown}: {error}")) from error
        if not offsets:
            raise RefusedError(Refusal("library_stripped", 0, f"{library.shown} names none of the functions"))
        return [Site(symbol, offset, wanted[symbol].cookie) for symbol, offset in _once(offsets).items()]

    def time_launches(self, timing: Timing) -> None:
        """Attach launch probes with or without durations, or detach them (the overhead governor's decision)."""
        if timing == self._launch_timing:
            return
        self._launch_timing = timing
        for target in self._targets.values():
            _close(target.launches)
            if timing != "off" and self._uprobes is not None:
                launch = f"{self._uprobes.name}/launch"
                self._try(launch, target.library.shown, partial(self._attach_launches, self._uprobes, target))

    def _try(self, probe: str, target: str, attach: Callable[[], object]) -> None:
        refusal = None
        try:
            attach()
        except RefusedError as error:
            refusal = error.refusal
        self.attachments[probe, target] = Attachment(probe, target, refusal)

    # -- what was counted ----------------------------------------------------------------------------------------------

    def harvest(self) -> Harvest:
        """End the epoch; return its sums and the records that came meanwhile."""
        critical = self._drain_critical()
        ended, self._epoch = self._epoch, (self._epoch + 1) & 0xFF
        self._settings.put(_U32.pack(0), layout.SETTINGS.pack(self._epoch, self._flags))
        self._sleep(EPOCH_GRACE_S)
        events = tuple(map(layout.decode_event, self._events.drain()))
        return Harvest(tuple(self._take(ended)), events, critical)

    def _take(self, epoch: int) -> list[layout.Aggregate]:
        found = [(key, layout.decode_aggregate(key, value)) for key, value in self._aggregates.items()]
        ended = [(key, item) for key, item in found if item.epoch == epoch]
        for key, _ in ended:
            self._aggregates.delete(key)
        return [item for _, item in ended]

    def counters(self) -> dict[int, layout.Counters]:
        """Return every probe's account, by its number."""
        numbers = range(layout.PROBES)
        return {number: layout.decode_counters(self._counts.per_cpu(_U32.pack(number))) for number in numbers}

    def service_of(self, pid: int) -> str:
        """Return the service name of a process, or empty."""
        process = self.processes.processes.get(pid)
        return process.service if process else ""

    def report(self) -> list[Attachment]:
        """Return what is attached and what was refused, and why."""
        unloaded = [Attachment(name, "", refusal) for name, refusal in self.loaded.refusals.items()]
        return [*unloaded, *self.attachments.values()]

    @property
    def targets(self) -> int:
        """Return how many libraries are probed."""
        return len(self._targets)

    def detach(self) -> None:
        """Detach everything; what was counted can still be read."""
        for link in self._event_links:
            link.close()
        self._detach_libraries()

    def close(self) -> None:
        """Detach and unload everything."""
        self._detach_libraries()
        self._undo.close()

    def _detach_libraries(self) -> None:
        for target in self._targets.values():
            _close(target.calls)
            _close(target.launches)
        self._targets.clear()


def _pid(key: bytes) -> int:
    return int.from_bytes(key, "little")


def _once(offsets: Mapping[str, int]) -> dict[str, int]:
    """Leave out functions that lie where another one does: they would be counted twice."""
    seen: dict[int, str] = {}
    for symbol, offset in offsets.items():
        seen.setdefault(offset, symbol)
    return {symbol: offset for offset, symbol in seen.items()}


def _close(links: list[Link]) -> None:
    while links:
        links.pop().close()
