"""The node agent: host probes, host files, their metrics and spans, in one process without an event loop.

Attach first, import the rest afterwards: what happens while exporters load is counted already.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_otel.clock import Clock, SystemClock
from pasta_otel.ebpf.choose import start_observer
from pasta_otel.ebpf.observer import Attachment, Harvest, HostObserver, Thresholds, Timing
from pasta_otel.ebpf.probes import OBJECT_FOLDER, load_built_probes
from pasta_otel.ebpf.processes import ProcessTable
from pasta_otel.errors import InputError

if TYPE_CHECKING:
    from pasta_otel.app.agent_exports import AgentExports
    from pasta_otel.app.launches import LaunchWindows
    from pasta_otel.ebpf.ports import Loader, Refusal

LOADER_CHOICES = ("auto", "core", "bcc", "files")
MAX_STEP_S = 0.25
FILES_NS = 5_000_000_000
"""How often files are read: their counters are cumulative, and are scraped less often than this."""
CUDA_DRIVER = "libcuda.so"
log = logging.getLogger(__name__)
Announce = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """One agent.

    Attributes:
        host: Address of ``/metrics`` and ``/healthz``; loopback unless told otherwise.
        port: Its port; 0 takes a free one.
        loader: ``auto`` (core, then bcc, then files), ``core``, ``bcc`` or ``files``.
        probes: Names of probes to load; empty = all.
        programs: A user's own bcc programs.
        interval_seconds: Time between two harvests.
        slow_ms: Driver calls and absences that last longer become spans of their own.
        budget: Share of time that launch probes may cost; 0 leaves launches alone.
        exports: Send spans and metrics by OTLP; False serves ``/metrics`` only.
        token: Bearer token for ``/metrics``; empty asks for none.
        proc_root: Where process files lie.
        cgroup_root: Where cgroups are mounted.
        objects: Where the built probes lie.
    """

    host: str = "127.0.0.1"
    port: int = 4321
    loader: str = "auto"
    probes: tuple[str, ...] = ()
    programs: tuple[Path, ...] = ()
    interval_seconds: float = 1.0
    slow_ms: float = 1.0
    budget: float = 0.01
    exports: bool = True
    token: str = ""
    proc_root: Path = Path("/proc")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    objects: Path = OBJECT_FOLDER

    def __post_init__(self) -> None:
        """Check what would otherwise fail late."""
        if self.interval_seconds <= 0:
            raise InputError("must be above 0", field="--interval")
        if self.loader not in LOADER_CHOICES:
            raise InputError(f"expected one of {', '.join(LOADER_CHOICES)}", field="--loader")
        known = {probe.name for probe in load_built_probes(self.objects)} if self.probes else set()
        for name in self.probes:
            if name not in known:
                raise InputError(f"no probe {name!r}; there are {', '.join(sorted(known))}", field="--probes")
        for path in self.programs:
            if not path.is_file():
                raise InputError("no such file", file=str(path), field="--probe")

    @property
    def loaders(self) -> tuple[str, ...]:
        """Return the loaders to try, best first."""
        return {"auto": ("core", "bcc"), "files": ()}.get(self.loader, (self.loader,))


class Agent:
    """One agent: ``attach``, then ``run``.

    Args:
        options: What to do.
        clock: Time.
    """

    def __init__(self, options: AgentOptions, clock: Clock | None = None) -> None:
        self.options, self._clock = options, clock or SystemClock()
        self.observer: HostObserver | None = None
        self.refusals: dict[str, Refusal] = {}
        self.processes = ProcessTable(options.proc_root, CUDA_DRIVER)
        self._exports: AgentExports | None = None
        self._launches: LaunchWindows | None = None
        self._hints: set[int] = set()
        self._refused_programs: dict[str, str] = {}
        self.last_harvest_ns = self._files_due_ns = 0

    def attach(self) -> None:
        """Load and attach what can be; nothing here fails the agent."""
        wanted = set(self.options.probes)
        probes = [probe for probe in load_built_probes(self.options.objects) if not wanted or probe.name in wanted]
        slow = int(self.options.slow_ms * 1e6)

        def make(loader: Loader) -> HostObserver:
            thresholds = Thresholds(slow_ns=slow, off_cpu_ns=slow)
            timing: Timing = "duration" if self.options.budget >= 1 else "off"
            return HostObserver(
                loader, probes, proc=self.options.proc_root, thresholds=thresholds, launch_timing=timing
            )  # fmt: skip

        self.observer, self.refusals = start_observer(make, self.options.loaders, folder=self.options.objects)
        if self.observer is not None:
            self.processes = self.observer.processes
            self.observer.start()

    def run(self, stop: threading.Event, announce: Announce) -> None:
        """Observe until ``stop`` is set, then harvest once more and send what is left.

        Args:
            stop: Set by a signal handler.
            announce: Told what is attached, where ``/metrics`` is, and that everything has been sent.
        """
        announce(self.attached())
        from pasta_otel.app.agent_exports import AgentExports  # noqa: PLC0415 - after attaching: see the module
        from pasta_otel.app.launches import LaunchWindows  # noqa: PLC0415 - as above

        exports = self._exports = AgentExports(self, self._clock)
        if self.observer is not None and 0 < self.options.budget < 1:
            self._launches = LaunchWindows(self.observer, self.options.budget, self._clock, exports.meter)
        try:
            exports.load_programs()
            exports.start()
            announce({"event": "ready", "metrics": exports.url, "refused_programs": self._refused_programs})
            while not stop.is_set():
                self._step(stop, exports)
        finally:
            self._finish(exports)
        announce({"event": "stopped", "spans": dict(exports.totals.spans)})

    def report(self) -> list[Attachment]:
        """Return what is attached and what was refused, loaders included."""
        loaders = [Attachment("loader", name, refusal) for name, refusal in self.refusals.items()]
        return [*loaders, *(self.observer.report() if self.observer is not None else ())]

    def attached(self) -> dict[str, Any]:
        """Return what is attached and what was refused, and why, as one document."""
        report = self.report()
        return {
            "event": "attached",
            "loader": self.observer.loaded.loader if self.observer is not None else "files",
            "attached": [[item.probe, item.target] for item in report if item.refusal is None],
            "refused": [
                {"probe": item.probe, "target": item.target, **_words(item.refusal)}
                for item in report
                if item.refusal is not None
            ],
        }

    def _step(self, stop: threading.Event, exports: AgentExports) -> None:
        """Work for one interval."""
        deadline = time.monotonic() + self.options.interval_seconds
        if self._launches is None:
            stop.wait(self.options.interval_seconds)
        else:
            while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
                if self._launches.due():
                    self.collect(exports)
                    weight = self._launches.record(stop.wait)
                    self.collect(exports, launch_weight=weight)
                else:
                    stop.wait(min(left, MAX_STEP_S, self._launches.wait_s()))
        self.collect(exports)
        self.refresh()
        exports.poll_programs()
        if self._clock.monotonic_ns() >= self._files_due_ns:
            self._files_due_ns = self._clock.monotonic_ns() + FILES_NS
            exports.poll_files()

    def refresh(self) -> None:
        """Look for processes that came or went."""
        hints, self._hints = self._hints, set()
        look = self.observer.refresh if self.observer is not None else self.processes.scan
        try:
            look(hints)
        except OSError:
            log.exception("looking at processes")

    def collect(self, exports: AgentExports, launch_weight: float = 1.0) -> Harvest | None:
        """Bring in what was counted."""
        if self.observer is None:
            return None
        try:
            harvest = self.observer.harvest()
        except OSError:
            log.exception("reading what probes counted")
            return None
        self.last_harvest_ns = self._clock.monotonic_ns()
        self._hints |= {event.tgid for event in harvest.critical}
        exports.take(harvest, launch_weight)
        return harvest

    def refuse(self, program: str, error: Exception) -> None:
        """Remember why a user's own program does not run."""
        self._refused_programs[program] = str(error)

    def _finish(self, exports: AgentExports) -> None:
        self.collect(exports)
        exports.poll_programs()
        if self.observer is not None:
            self.observer.detach()
            self.collect(exports)
        exports.stop()
        if self.observer is not None:
            self.observer.close()


def _words(refusal: Refusal) -> Mapping[str, Any]:
    return {"reason": refusal.reason, "errno": refusal.errno, "text": refusal.text}


def serve(options: AgentOptions, announce: Announce) -> None:
    """Run an agent until SIGTERM or SIGINT."""
    import signal  # noqa: PLC0415  # only a process of our own installs handlers

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    agent = Agent(options)
    agent.attach()
    agent.run(stop, announce)
