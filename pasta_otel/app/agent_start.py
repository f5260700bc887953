"""What an agent does first: load the probes and attach them.

Python imports slowly and the kernel attaches fast: exporters alone take longer to import than everything here takes to
run. So this module and what it imports are all that attaching needs, and a test holds them to it: no click, no logging,
no dataclasses, no exporter. The rest (``app.agent``) is imported when what happens is counted already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pasta_otel.ebpf.choose import start_observer
from pasta_otel.ebpf.observer import Attachment, HostObserver, Thresholds, Timing
from pasta_otel.ebpf.ports import Loader, Refusal
from pasta_otel.ebpf.probes import OBJECT_FOLDER, load_built_probes
from pasta_otel.errors import InputError

if TYPE_CHECKING:
    import threading

LOADER_CHOICES = ("auto", "core", "bcc", "files")
MOST_PORT = 65_535
MOST_SECONDS = 86_400
"""Longest interval: a harvest a day."""
Announce = Callable[[dict[str, Any]], None]


class AgentOptions(NamedTuple):
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

    def checked(self) -> Self:
        """Return these options.

        Raises:
            InputError: Something in them would fail late, or never do what it says.
        """
        self._check_address()
        if not 0 < self.interval_seconds <= MOST_SECONDS:  # not NaN either
            raise InputError(f"must be above 0 and at most {MOST_SECONDS:,} seconds", field="--interval")
        if not 0 <= self.slow_ms <= MOST_SECONDS * 1000:
            raise InputError(f"must be from 0 to {MOST_SECONDS * 1000:,} milliseconds", field="--slow-ms")
        if not 0 <= self.budget <= 1:
            raise InputError("must be a share from 0 to 1", field="--budget")
        if self.loader not in LOADER_CHOICES:
            raise InputError(f"expected one of {', '.join(LOADER_CHOICES)}", field="--loader")
        known = {probe.name for probe in load_built_probes(self.objects)} if self.probes else set()
        for name in self.probes:
            if name not in known:
                raise InputError(f"no probe {name!r}; there are {', '.join(sorted(known))}", field="--probes")
        for path in self.programs:
            if not path.is_file():
                raise InputError("no such file", file=str(path), field="--probe")
        return self

    def _check_address(self) -> None:
        if not self.host.strip():  # which the system takes for every address
            raise InputError("expected an address to listen on", field="--host")
        if not 0 <= self.port <= MOST_PORT:
            raise InputError(f"must be from 0 (any free one) to {MOST_PORT}", field="--port")

    @property
    def loaders(self) -> tuple[str, ...]:
        """Return the loaders to try, best first."""
        return {"auto": ("core", "bcc"), "files": ()}.get(self.loader, (self.loader,))


class AgentStart(NamedTuple):
    """What became of attaching.

    Attributes:
        options: What was wanted.
        observer: The attached probes; None where no loader loads, and only files are read.
        refusals: Why loaders before the one that loaded did not.
    """

    options: AgentOptions
    observer: HostObserver | None
    refusals: Mapping[str, Refusal]

    def report(self) -> list[Attachment]:
        """Return what is attached and what was refused, loaders included."""
        loaders = [Attachment("loader", name, refusal) for name, refusal in self.refusals.items()]
        return [*loaders, *(self.observer.report() if self.observer is not None else ())]

    def document(self) -> dict[str, Any]:
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


def _words(refusal: Refusal) -> Mapping[str, Any]:
    return {"reason": refusal.reason, "errno": refusal.errno, "text": refusal.text}


def attach(options: AgentOptions) -> AgentStart:
    """Load and attach what can be; what cannot be is in the result, and fails nothing."""
    wanted = set(options.probes)
    probes = [probe for probe in load_built_probes(options.objects) if not wanted or probe.name in wanted]
    slow = int(options.slow_ms * 1e6)
    timing: Timing = "duration" if options.budget >= 1 else "off"

    def make(loader: Loader) -> HostObserver:
        thresholds = Thresholds(slow_ns=slow, off_cpu_ns=slow)
        return HostObserver(loader, probes, proc=options.proc_root, thresholds=thresholds, launch_timing=timing)

    observer, refusals = start_observer(make, options.loaders, folder=options.objects)
    if observer is not None:
        observer.start()
    return AgentStart(options, observer, refusals)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set from now on; for a process of our own, which may install handlers."""
    import signal  # noqa: PLC0415 - after attaching
    import threading  # noqa: PLC0415 - after attaching

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
