"""The node agent: host probes, host files, their metrics and spans, in one process without an event loop.

``app.agent_start`` has attached the probes before this module is imported.
"""

from __future__ import annotations

import logging
import threading
import time

from pasta_otel.app.agent_exports import AgentExports
from pasta_otel.app.agent_start import AgentStart, Announce
from pasta_otel.app.launches import LaunchWindows
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.ebpf.observer import Attachment, Harvest
from pasta_otel.ebpf.processes import ProcessTable

MAX_STEP_S = 0.25
FILES_NS = 5_000_000_000
"""How often files are read: their counters are cumulative, and are scraped less often than this."""
CUDA_DRIVER = "libcuda.so"
log = logging.getLogger(__name__)


class Agent:
    """One agent, whose probes are attached.

    Args:
        start: What became of attaching.
        clock: Time.
    """

    def __init__(self, start: AgentStart, clock: Clock | None = None) -> None:
        self.start, self.options, self.observer = start, start.options, start.observer
        self._clock = clock or SystemClock()
        self.processes = (
            ProcessTable(self.options.proc_root, CUDA_DRIVER) if self.observer is None else self.observer.processes
        )
        self._hints: set[int] = set()
        self._refused_programs: dict[str, str] = {}
        self._said: set[Attachment] = set()
        self.last_harvest_ns = self._files_due_ns = 0
        exports = self._exports = AgentExports(self, self._clock)
        budgeted = self.observer is not None and 0 < self.options.budget < 1
        self._launches: LaunchWindows | None = None
        if self.observer is not None and budgeted:
            self._launches = LaunchWindows(self.observer, self.options.budget, self._clock, exports.meter)

    def run(self, stop: threading.Event, announce: Announce) -> None:
        """Observe until ``stop`` is set, then harvest once more and send what is left.

        Args:
            stop: Set by a signal handler.
            announce: Told where ``/metrics`` is, and that everything has been sent.
        """
        self._say_refusals()
        try:
            self._exports.load_programs()
            self._exports.start()
            announce({"event": "ready", "metrics": self._exports.url, "refused_programs": self._refused_programs})
            while not stop.is_set():
                self._step(stop)
        finally:
            self._finish()
        announce({"event": "stopped", "spans": dict(self._exports.totals.spans)})

    def _step(self, stop: threading.Event) -> None:
        """Work for one interval."""
        deadline = time.monotonic() + self.options.interval_seconds
        if self._launches is None:
            stop.wait(self.options.interval_seconds)
        else:
            while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
                if self._launches.due():
                    self.collect()
                    weight = self._launches.record(stop.wait)
                    self.collect(launch_weight=weight)
                else:
                    stop.wait(min(left, MAX_STEP_S, self._launches.wait_s()))
        self.collect()
        self.refresh()
        self._exports.poll_programs()
        if self._clock.monotonic_ns() >= self._files_due_ns:
            self._files_due_ns = self._clock.monotonic_ns() + FILES_NS
            self._exports.poll_files()

    def refresh(self) -> None:
        """Look for processes that came or went."""
        hints, self._hints = self._hints, set()
        look = self.observer.refresh if self.observer is not None else self.processes.scan
        try:
            look(hints)
        except OSError:
            log.exception("looking at processes")
        self._say_refusals()

    def _say_refusals(self) -> None:
        """Log each refusal once; it is said again when its library went and came back."""
        refused = {item for item in self.start.report() if item.refusal is not None}
        for item in refused - self._said:
            if item.refusal is not None:
                log.warning("%s on %s: %s: %s", item.probe, item.target, item.refusal.reason, item.refusal.text)
        self._said = refused

    def collect(self, launch_weight: float = 1.0) -> Harvest | None:
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
        self._exports.take(harvest, launch_weight)
        return harvest

    def refuse(self, program: str, error: Exception) -> None:
        """Remember why a user's own program does not run."""
        self._refused_programs[program] = str(error)

    def _finish(self) -> None:
        self.collect()
        self._exports.poll_programs()
        if self.observer is not None:
            if self.observer.loaded.loader == "bcc":  # which takes 20 s to detach: longer than we may have left
                self._exports.flush()
            self.observer.detach()
            self.collect()
        self._exports.stop()
        if self.observer is not None:
            self.observer.close()
