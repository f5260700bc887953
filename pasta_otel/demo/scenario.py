"""One run of the demo: baseline, fault, detection, cause, action, recovery, orderly stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pasta_otel.demo.faults import Fault
from pasta_otel.demo.judge import is_answered
from pasta_otel.demo.load import RequestRecord, read_log
from pasta_otel.demo.processes import TooBusyError
from pasta_otel.demo.stage import Stage
from pasta_otel.demo.watch import Watch

Phase = Literal["start", "baseline", "fault", "burning", "recovery", "stop", "done"]
POLL_SECONDS = 0.2
LEDGER_SECONDS = 15.0
AFTER_RECOVERY_SECONDS = 1.5
AFTER_ANSWER_SECONDS = 1.0  # time for a wrong extra action to show


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the parts of a run may take, seconds.

    Attributes:
        baseline: Normal service before the fault.
        detect: Most time until an SLO burns; with no fault, how long is watched.
        answer: Most time from there until cause and action are there.
        recover: Most time from there (or from the removal of the fault) until every SLO is fine.
        start: Most time until the SLOs have data.
    """

    baseline: float = 10.0
    detect: float = 45.0
    answer: float = 12.0
    recover: float = 60.0
    start: float = 45.0


@dataclass(slots=True)
class Story:
    """What happened when; times are CLOCK_MONOTONIC nanoseconds, 0 = it did not happen.

    Attributes:
        fault_words: What was done to the service.
        started: The first order was sent.
        injected: The fault began (read before it was injected).
        detected: An SLO first burned, by the controller's own time.
        answered: The expected cause and action were first seen together.
        removed: The fault was taken back.
        recovered: Every SLO was fine again.
        injected_unix_nano: Wall time of ``injected``.
        before: SLO states just before the fault.
        during: SLO states at the detection.
        after: SLO states at the end.
        actions: The audit.
        spans: The ledger after the stop.
        trace: One slow request.
        device: Where the model ran.
    """

    fault_words: str = ""
    started: int = 0
    injected: int = 0
    detected: int = 0
    answered: int = 0
    removed: int = 0
    recovered: int = 0
    injected_unix_nano: int = 0
    before: list[dict[str, Any]] = field(default_factory=list)
    during: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    spans: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] | None = None
    device: str = "cpu"


class Audience(Protocol):
    """Who is told how it goes."""

    def phase(self, phase: Phase, words: str) -> None:
        """Hear that a phase began."""

    def update(self, watch: Watch, latest: RequestRecord | None) -> None:
        """See the latest readings."""


class Scenario:
    """Play one run.

    Args:
        stage: The processes.
        fault: What goes wrong.
        pace: How long things may take.
        audience: Who is told.
    """

    def __init__(self, stage: Stage, fault: Fault, pace: Pace, audience: Audience) -> None:
        self._stage, self._fault, self._pace, self._audience = stage, fault, pace, audience
        self.story = Story()
        self.watch = Watch(stage.sidecar)
        self._tail = _Tail(stage.load_log)

    def play(self) -> Story:
        """Run from start to stop; the fault is taken back however it ends.

        Raises:
            DemoError: A process broke, or the machine is too busy (``TooBusyError``).
        """
        self._start()
        try:
            self._baseline()
            self._inject()
            self._detect()
            if self.story.detected:
                self._answer()
            self._recover()
        finally:
            self._remove()
        self._stop()
        return self.story

    def _start(self) -> None:
        self._audience.phase("start", "starting the sidecar and four services")
        self._stage.start()
        self.watch = Watch(self._stage.sidecar)
        self.story.device = self._stage.device
        self._stage.start_load()
        self.story.started = time.monotonic_ns()

    def _baseline(self) -> None:
        self._audience.phase("baseline", "normal service")
        self._until(lambda: self.watch.settled, self._pace.start)
        if not self.watch.settled:
            raise TooBusyError(f"the SLOs are not fine before the fault: {_verdicts(self.watch)}")
        left = self._pace.baseline - (time.monotonic_ns() - self.story.started) / 1e9
        cpu, since = _cpu_seconds(self._model_pid), time.monotonic()
        self._until(lambda: False, max(left, 3.0))
        self._model_cores = (_cpu_seconds(self._model_pid) - cpu) / (time.monotonic() - since)
        self.story.before = self.watch.snapshot()
        if self.watch.burned:
            raise TooBusyError("an SLO burned before the fault: this machine is too busy for the demo's objectives")

    def _inject(self) -> None:
        victims = self._stage.victims(self._model_cores)
        self.story.injected, self.story.injected_unix_nano = time.monotonic_ns(), time.time_ns()
        self.story.fault_words = self._fault.inject(victims)
        self._audience.phase("fault", self.story.fault_words)

    def _detect(self) -> None:
        self._until(lambda: bool(self.watch.burned), self._pace.detect)
        if name := self.watch.first_burned:
            self.story.detected = self.watch.burned[name]
            self.story.during = self.watch.snapshot()
            self._audience.phase("burning", f"{name} burns")

    def _answer(self) -> None:
        self._until(self._is_answered, self._pace.answer)
        self._until(lambda: False, AFTER_ANSWER_SECONDS)
        self.story.during = self.watch.snapshot()

    def _is_answered(self) -> bool:
        actions = self._stage.sidecar.actions()
        if is_answered(self._fault.expected, self.watch.causes(), actions):
            self.story.answered = self.story.answered or time.monotonic_ns()
        return bool(self.story.answered)

    def _recover(self) -> None:
        if not self._fault.expected.degrades:
            self._remove()
        if not self.story.detected:
            return
        self._audience.phase("recovery", "waiting for the SLOs to be fine again")
        self._until(lambda: self.watch.settled, self._pace.recover)
        if self.watch.settled:
            self.story.recovered = self.watch.settled_since
            self._until(lambda: False, AFTER_RECOVERY_SECONDS)

    def _remove(self) -> None:
        if self.story.injected and not self.story.removed:
            self._fault.remove()
            self.story.removed = time.monotonic_ns()

    def _stop(self) -> None:
        self._audience.phase("stop", "stopping load and services, draining spans")
        stage, story = self._stage, self.story
        story.after = self.watch.snapshot()
        stage.stop_load()
        stage.stop_services()
        story.actions = stage.sidecar.actions()
        story.spans = self._settle_ledger()
        story.trace = self._slow_trace()
        last = stage.stop_sidecar()
        story.spans = last.get("ledger", story.spans)
        self._audience.phase("done", "")

    def _settle_ledger(self) -> dict[str, Any]:
        deadline = time.monotonic() + LEDGER_SECONDS
        while True:
            ledger = self._stage.sidecar.ledger()
            if time.monotonic() > deadline or not any(sink["pending"] for sink in ledger["sinks"].values()):
                return ledger
            time.sleep(POLL_SECONDS)

    def _slow_trace(self) -> dict[str, Any] | None:
        """Return the slowest answered order between the fault and its answer, else of all."""
        records = [record for record in read_log(self._stage.load_log) if record.trace_id]
        end = self.story.answered or self.story.detected or self.story.removed
        hit = [record for record in records if self.story.injected < record.end_monotonic_ns < end]
        for record in sorted(hit or records, key=lambda record: -record.latency_ms)[:3]:
            if trace := self._stage.sidecar.trace(record.trace_id):
                return trace
        return None

    @property
    def _model_pid(self) -> int:
        return self._stage.victims(0.0).model_pid

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Read and tell until ``done``, or until the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            self._stage.check()
            self.watch.read()
            self._audience.update(self.watch, self._tail.latest())
            left = deadline - time.monotonic()
            if done() or left <= 0:
                return
            time.sleep(min(POLL_SECONDS, left))


class _Tail:
    """The last request in a log that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._latest: RequestRecord | None = None

    def latest(self) -> RequestRecord | None:
        """Return the last whole line, parsed once."""
        if not self._path.exists():
            return None
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._at += len(whole) + 1
            self._latest = RequestRecord.parse(whole.rsplit(b"\n", 1)[-1])
        return self._latest


def _verdicts(watch: Watch) -> str:
    return ", ".join(
        f"{name} {state['verdict']} {state.get('reason') or ''} {state.get('detail') or ''}".strip()
        for name, state in sorted(watch.states.items())
    )


def _cpu_seconds(pid: int) -> float:
    """Return user and system time of a process, from /proc/PID/stat."""
    fields = Path("/proc", str(pid), "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
