"""The node agent: host probes, host files, their metrics and spans, in one process without an event loop.

``app.agent_start`` has attached the probes before this module is imported.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from functools import partial

from pasta_otel.app.agent_exports import AgentExports
from pasta_otel.app.agent_start import AgentStart, Announce
from pasta_otel.app.launches import LaunchWindows
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.ebpf.observer import Attachment, Harvest
from pasta_otel.ebpf.ports import Refusal
from pasta_otel.ebpf.processes import ProcessTable, may_trace, seen_from

ATTEND_S = 0.2
"""How often processes that start are looked at: what they do before they are found is linked to nothing."""
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
        self._programs: list[Attachment] = []
        self._may_trace = may_trace()
        self._said: set[tuple[str, str]] = set()
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
            announce: Told where ``/metrics`` is, and at the end what became of the spans.
        """
        self._say_refusals()
        try:
            self._exports.load_programs()
            self._exports.start()
            announce({"event": "ready", "metrics": self._exports.url, "refused_programs": self._refused_programs()})
            while not stop.is_set():
                self._step(stop)
        finally:
            self._finish()
        announce({"event": "stopped", **self._exports.account()})

    def _step(self, stop: threading.Event) -> None:
        """Work for one interval."""
        deadline = time.monotonic() + self.options.interval_seconds
        while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
            if self._launches is not None and self._launches.due():
                weight = self._launches.record(partial(self._wait, stop))
                self.collect(launch_weight=weight)  # launches of this window alone: between windows none is recorded
            else:
                self._wait(stop, left if self._launches is None else min(left, self._launches.wait_s()))
        self.collect()
        self.refresh()
        self._exports.poll_programs()
        if self._clock.monotonic_ns() >= self._files_due_ns:
            self._files_due_ns = self._clock.monotonic_ns() + FILES_NS
            self._exports.poll_files()

    def _wait(self, stop: threading.Event, seconds: float) -> None:
        """Wait, and look at processes that start meanwhile."""
        deadline = time.monotonic() + seconds
        while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
            stop.wait(min(left, ATTEND_S))
            self._exports.mark()
            self._attend()

    def _attend(self) -> None:
        if self.observer is None:
            return
        try:
            events = self.observer.attend()
        except OSError:
            log.exception("looking at processes that start")
            return
        if events:
            self._exports.totals.add(Harvest(critical=events))

    def refresh(self) -> None:
        """Look for processes that came or went."""
        look = self.observer.refresh if self.observer is not None else self.processes.scan
        try:
            look()
        except OSError:
            log.exception("looking at processes")
        self._say_refusals()

    def report(self) -> list[Attachment]:
        """Return what is attached and what was refused: our probes, users' programs, and what cannot be seen."""
        return [*self.start.report(), *self._programs, *self._blind()]

    def _blind(self) -> list[Attachment]:
        """Return what keeps this agent from seeing processes."""
        found = []
        outside = seen_from(self.options.proc_root)
        if outside is not None:
            found.append(outside)
        unreadable = sum(process.unreadable for process in [*self.processes.processes.values()])
        if unreadable and not self._may_trace:  # with the privilege, a few are still closed by some security module
            found.append(Refusal("no_ptrace", errno.EACCES, f"{unreadable} processes cannot be looked into"))
        return [Attachment("processes", "", refusal) for refusal in found]

    def _say_refusals(self) -> None:
        """Log each refusal once; it is said again when its library went and came back."""
        refused = {_named(item): item.refusal for item in self.report() if item.refusal is not None}
        for name in refused.keys() - self._said:
            log.warning("%s: %s: %s", name[0], refused[name].reason, refused[name].text)
        self._said = {*refused}

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
        self._exports.take(harvest, launch_weight)
        return harvest

    def took(self, program: str, refusal: Refusal | None) -> None:
        """Remember that a user's own program runs, or why it does not."""
        self._programs.append(Attachment("program", program, refusal))

    def _refused_programs(self) -> dict[str, str]:
        return {
            item.target: f"{item.refusal.reason}: {item.refusal.text}"
            for item in self._programs
            if item.refusal is not None
        }

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


def _named(item: Attachment) -> tuple[str, str]:
    """Return what a refusal is about, and its reason: its text may count, and is not said again with each number."""
    where = f"{item.probe} on {item.target}" if item.target else item.probe
    return where, item.refusal.reason if item.refusal is not None else ""
