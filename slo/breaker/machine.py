"""The breaker's state machine: plain arithmetic on its own record, no clock, no lock, no user code.

Every permit carries the generation (state episode) that granted it. An answer that comes back in a later episode says
nothing about that one: a call admitted while closed must not close or reopen a half-open breaker.
"""

from __future__ import annotations

from typing import NamedTuple

from pasta_otel.slo.breaker.config import BreakerConfig, BreakerState, HalfOpenPolicy
from pasta_otel.slo.breaker.window import SECOND_NS, CountWindow, OutcomeWindow, Totals, make_window

ADMITTING = frozenset({BreakerState.CLOSED, BreakerState.DISABLED, BreakerState.METRICS_ONLY})
EPISODE = frozenset({BreakerState.OPEN, BreakerState.HALF_OPEN})


class StateChange(NamedTuple):
    """One transition, numbered from 1 within its breaker."""

    sequence: int
    before: BreakerState
    after: BreakerState
    reason: str


class Permit(NamedTuple):
    """Permission for one call."""

    generation: int
    start_ns: int


class Machine:
    """State, window and half-open bookkeeping of one breaker; the caller serialises access."""

    def __init__(self, config: BreakerConfig) -> None:
        self.config = config
        self.state = BreakerState.CLOSED
        self.generation = 0
        self.changes: list[StateChange] = []  # made but not yet taken by ``take_changes``
        self._window: OutcomeWindow = make_window(config)
        self._since_ns = 0
        self._policy: HalfOpenPolicy = config.half_open_policy
        self._permits = 0
        self._successes = 0
        self._sequence = 0

    def take_changes(self) -> list[StateChange]:
        """Hand over the transitions made since the last call; each is handed over once."""
        changes, self.changes = self.changes, []
        return changes

    def acquire(self, now_ns: int) -> Permit | None:
        """Return a permit, or None when the call must be refused."""
        if self.state in ADMITTING:
            return Permit(self.generation, now_ns)
        if self.state is BreakerState.OPEN and self.retry_after_ns(now_ns) == 0:
            self.move(BreakerState.HALF_OPEN, "open_seconds passed", now_ns)
        if self.state is BreakerState.HALF_OPEN and self._overdue(now_ns):
            self.move(BreakerState.OPEN, "half-open phase timed out", now_ns)
        if self.state is BreakerState.HALF_OPEN and self._permits > 0:
            self._permits -= 1
            return Permit(self.generation, now_ns)
        return None

    def retry_after_ns(self, now_ns: int) -> int:
        """Return how long until a call may be admitted; 0 = at once, or not known (half-open, forced open)."""
        if self.state is not BreakerState.OPEN:
            return 0
        return max(0, self._since_ns + int(self.config.open_seconds * SECOND_NS) - now_ns)

    def settle(self, permit: Permit, failed: bool, slow: bool, now_ns: int) -> None:
        """Count a finished call and move if it decides something."""
        if permit.generation != self.generation or self.state is BreakerState.DISABLED:
            return
        self._window.record(failed, slow, now_ns)
        if self.state is BreakerState.CLOSED:
            self._judge_closed(now_ns)
        elif self.state is BreakerState.HALF_OPEN:
            self._judge_half_open(failed or slow, now_ns)

    def release(self, permit: Permit) -> None:
        """Return the permit of a call that was abandoned: another probe may use it."""
        if permit.generation == self.generation and self.state is BreakerState.HALF_OPEN:
            self._permits += 1

    def move(self, after: BreakerState, reason: str, now_ns: int, policy: HalfOpenPolicy | None = None) -> None:
        """Change state; entering a state starts a new generation, with an empty window and a fresh timer."""
        if policy is not None:
            self._policy = policy
        elif after not in EPISODE:  # a reopening keeps the policy that opened it
            self._policy = self.config.half_open_policy
        if after is self.state:
            return
        self._sequence += 1
        self.changes.append(StateChange(self._sequence, self.state, after, reason))
        self.state, self._since_ns = after, now_ns
        self.generation += 1
        if after is BreakerState.HALF_OPEN:
            self.restart_probes()
        elif after is not BreakerState.OPEN:
            self._window = make_window(self.config)

    def restart_probes(self) -> None:
        """Begin a half-open phase: all permits free, nothing seen."""
        self._permits, self._successes = self.config.half_open_max_calls, 0
        self._window = CountWindow(self.config.half_open_max_calls)

    def totals(self, now_ns: int) -> Totals:
        """Return the window's totals."""
        return self._window.totals(now_ns)

    def _overdue(self, now_ns: int) -> bool:
        limit_ns = int(self.config.half_open_max_wait_seconds * SECOND_NS)
        return 0 < limit_ns <= now_ns - self._since_ns

    def _judge_closed(self, now_ns: int) -> None:
        if not self.config.open_by_rate:
            return
        totals = self._window.totals(now_ns)
        if totals.calls >= self.config.calls_to_judge and (reason := self._exceeded(totals)):
            self.move(BreakerState.OPEN, reason, now_ns)

    def _judge_half_open(self, bad: bool, now_ns: int) -> None:
        self._successes += not bad
        if self._policy == "any_failure":
            if bad:
                self.move(BreakerState.OPEN, "probe failed", now_ns)
            elif self._successes >= self.config.successes_to_close:
                self.move(BreakerState.CLOSED, "probes passed", now_ns)
            return
        totals = self._window.totals(now_ns)
        if totals.calls >= self.config.half_open_max_calls:
            reason = self._exceeded(totals)
            after = BreakerState.OPEN if reason else BreakerState.CLOSED
            self.move(after, reason or "probes passed", now_ns)

    def _exceeded(self, totals: Totals) -> str:
        if totals.failed >= self.config.failure_rate * totals.calls:
            return f"failure rate {totals.failed}/{totals.calls}"
        if totals.slow >= self.config.slow_call_rate * totals.calls:
            return f"slow call rate {totals.slow}/{totals.calls}"
        return ""
