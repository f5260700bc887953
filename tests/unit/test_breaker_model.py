"""Random histories of a breaker: whatever happens, in whatever order, these stay true."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pasta_otel.slo.breaker import BreakerConfig, BreakerState, CircuitBreaker, CircuitOpenError


class BreakerHistory(RuleBasedStateMachine):
    @initialize(
        probes=st.integers(1, 4),
        policy=st.sampled_from(["any_failure", "rate"]),
        window=st.sampled_from(["count", "time"]),
    )
    def build(self, probes, policy, window):
        self.now_ns, self.changes, self.running, self.admitted_probes = 0, [], [], 0
        self.config = BreakerConfig(
            half_open_max_calls=probes,
            half_open_policy=policy,
            window_type=window,
            window_size=5,
            minimum_calls=3,
            open_seconds=10,
            slow_call_seconds=2,
        )
        self.breaker = CircuitBreaker(
            "model", self.config, monotonic_ns=lambda: self.now_ns, listeners=[lambda _, change: self.note(change)]
        )
        self.opened_ns = None

    def note(self, change):
        assert not self.changes or self.changes[-1].after is change.before
        assert change.sequence == len(self.changes) + 1
        if change.after is BreakerState.OPEN:
            self.opened_ns = self.now_ns
        if change.after is BreakerState.HALF_OPEN:
            assert self.now_ns - self.opened_ns >= 10e9
            self.admitted_probes = self.abandoned = self.bad_probes = 0
        self.changes.append(change)

    @rule(seconds=st.sampled_from([0.1, 1, 3, 10, 30]))
    def wait(self, seconds):
        self.now_ns += int(seconds * 1e9)

    @rule()
    def start(self):
        try:
            guard = self.breaker.guard().__enter__()
        except CircuitOpenError as error:
            assert self.breaker.state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.FORCED_OPEN)
            assert 0 <= error.retry_after_seconds <= 10  # noqa: PT017 - either way is a legal step of the history
            return
        assert self.breaker.state not in (BreakerState.OPEN, BreakerState.FORCED_OPEN)
        episode = len(self.changes)
        if self.breaker.state is BreakerState.HALF_OPEN:
            self.admitted_probes += 1
            assert self.admitted_probes - self.abandoned <= self.config.half_open_max_calls
        self.running.append((guard, episode, self.now_ns))

    @precondition(lambda self: getattr(self, "running", None))
    @rule(data=st.data(), error=st.sampled_from([None, ValueError(), KeyboardInterrupt()]))
    def finish(self, data, error):
        guard, episode, started_ns = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        state, current = self.breaker.state, episode == len(self.changes)
        if isinstance(error, KeyboardInterrupt) and current and state is BreakerState.HALF_OPEN:
            self.abandoned += 1
        guard.__exit__(type(error) if error else None, error, None)
        if not current or isinstance(error, KeyboardInterrupt):
            assert self.breaker.state is state
        elif state is BreakerState.HALF_OPEN and self.config.half_open_policy == "any_failure":
            bad = error is not None or self.now_ns - started_ns > 2e9
            assert (self.breaker.state is BreakerState.OPEN) == bad

    @rule(policy=st.sampled_from([None, "any_failure"]))
    def slo_opens(self, policy):
        before = self.breaker.state
        self.breaker.open("slo", half_open_policy=policy if self.config.half_open_policy == "any_failure" else None)
        manual = before in (BreakerState.DISABLED, BreakerState.FORCED_OPEN, BreakerState.METRICS_ONLY)
        assert self.breaker.state is (before if manual else BreakerState.OPEN)

    @rule(move=st.sampled_from(["close", "disable", "force_open", "metrics_only"]))
    def person_moves_it(self, move):
        getattr(self.breaker, move)()

    @invariant()
    def the_state_is_what_was_reported_last(self):
        if getattr(self, "breaker", None) is not None:
            assert self.breaker.state is (self.changes[-1].after if self.changes else BreakerState.CLOSED)
            totals = self.breaker.totals
            assert 0 <= max(totals.failed, totals.slow) <= totals.calls


TestBreakerHistory = BreakerHistory.TestCase
TestBreakerHistory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
