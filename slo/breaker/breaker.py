"""The breaker that applications use: ``call``, ``acall``, decorator and context manager around one state machine."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from pasta_otel.errors import PastaError
from pasta_otel.slo.breaker.config import BreakerConfig, BreakerState, HalfOpenPolicy
from pasta_otel.slo.breaker.machine import Machine, Permit, StateChange
from pasta_otel.slo.breaker.telemetry import BreakerTelemetry
from pasta_otel.slo.breaker.window import SECOND_NS, Totals

P = ParamSpec("P")
R = TypeVar("R")
Listener = Callable[[str, StateChange], None]


class CircuitOpenError(PastaError):
    """Report a call that the breaker refused.

    Attributes:
        name: The breaker.
        state: Its state at the refusal.
        retry_after_seconds: When a call may be admitted again; 0 = not known (probes are running, or forced open).
    """

    def __init__(self, name: str, state: BreakerState, retry_after_seconds: float) -> None:
        self.name, self.state, self.retry_after_seconds = name, state, retry_after_seconds
        hint = f", retry after {retry_after_seconds:.3f} s" if retry_after_seconds else ""
        super().__init__(f"circuit breaker {name} is {state.value}{hint}")


class CircuitBreaker:
    """Refuse calls to a dependency that fails, and let it come back through a few probes.

    No lock is held while the caller's function, a listener or a telemetry exporter runs.

    Args:
        name: What it protects, e.g. ``recommendations``.
        config: Thresholds; the defaults are resilience4j's.
        monotonic_ns: Clock, nanoseconds.
        telemetry: Where transitions and calls are reported; None = nowhere.
        listeners: Called after each transition with (name, change); what they raise is not caught.
    """

    def __init__(
        self,
        name: str,
        config: BreakerConfig | None = None,
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        telemetry: BreakerTelemetry | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.name = name
        self.config = config or BreakerConfig()
        self._monotonic_ns, self._telemetry, self._listeners = monotonic_ns, telemetry, tuple(listeners)
        self._machine = Machine(self.config)
        self._lock = threading.Lock()

    @property
    def state(self) -> BreakerState:
        """Return the state; an open breaker becomes half-open when the next call asks, not before."""
        return self._machine.state

    @property
    def totals(self) -> Totals:
        """Return calls, failures and slow calls in the window."""
        with self._lock:
            return self._machine.totals(self._monotonic_ns())

    # calling

    def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function if the breaker admits it.

        Raises:
            CircuitOpenError: It was refused.
            Exception: What the function raised.
        """
        with self.guard() as guard:
            return guard.judge(function(*args, **kwargs))

    async def acall(self, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Await the function if the breaker admits it; a cancelled call counts as neither good nor failed.

        Raises:
            CircuitOpenError: It was refused.
            Exception: What the function raised.
        """
        with self.guard() as guard:
            return guard.judge(await function(*args, **kwargs))

    def guard(self) -> Guard:
        """Return a context manager (sync and async) for one call."""
        return Guard(self)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function or coroutine function."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def guarded(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await self.acall(function, *args, **kwargs)

            return guarded  # type: ignore[return-value]  # a coroutine function again, which R cannot express

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            return self.call(function, *args, **kwargs)

        return wrapper

    # moving it from outside

    def open(self, reason: str = "manual", half_open_policy: HalfOpenPolicy | None = None) -> bool:
        """Open it, with a fresh timer; a breaker that a person disabled, forced or set to metrics only stays as it is.

        Returns:
            True when it changed state.
        """
        return self._move(
            BreakerState.OPEN,
            reason,
            half_open_policy,
            only_from=(BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN),
        )

    def close(self, reason: str = "manual") -> bool:
        """Close it with an empty window."""
        return self._move(BreakerState.CLOSED, reason)

    def disable(self, reason: str = "manual") -> bool:
        """Admit everything and count nothing, until told otherwise."""
        return self._move(BreakerState.DISABLED, reason)

    def force_open(self, reason: str = "manual") -> bool:
        """Refuse everything until told otherwise."""
        return self._move(BreakerState.FORCED_OPEN, reason)

    def metrics_only(self, reason: str = "manual") -> bool:
        """Admit everything, count, and never open: the dry run."""
        return self._move(BreakerState.METRICS_ONLY, reason)

    def report_to(self, telemetry: BreakerTelemetry) -> None:
        """Report transitions and calls there from now on."""
        self._telemetry = telemetry

    def reset_after_fork(self) -> None:
        """Forget the parent's lock holder and its probes, which do not exist in the child."""
        self._lock = threading.Lock()
        if self._machine.state is BreakerState.HALF_OPEN:
            self._machine.generation += 1
            self._machine.restart_probes()

    def _move(
        self,
        after: BreakerState,
        reason: str,
        policy: HalfOpenPolicy | None = None,
        only_from: tuple[BreakerState, ...] = (),
    ) -> bool:
        with self._lock:
            if only_from and self._machine.state not in only_from:
                return False
            self._machine.move(after, reason, self._monotonic_ns(), policy)
            changes = self._machine.take_changes()
        self._report(changes)
        return bool(changes)

    # one call, in three steps that Guard drives

    def acquire(self) -> Permit:
        """Return a permit, which must go to ``settle`` or ``release``; prefer ``guard``.

        Raises:
            CircuitOpenError: The call is refused.
        """
        now_ns = self._monotonic_ns()
        with self._lock:
            permit = self._machine.acquire(now_ns)
            state, wait_ns = self._machine.state, self._machine.retry_after_ns(now_ns)
            changes = self._machine.take_changes()
        self._report(changes)
        if permit is None:
            self._count("refused")
            raise CircuitOpenError(self.name, state, wait_ns / SECOND_NS)
        return permit

    def settle(self, permit: Permit, *, failed: bool) -> None:
        """Count a finished call."""
        now_ns = self._monotonic_ns()
        slow = now_ns - permit.start_ns > self.config.slow_call_seconds * SECOND_NS
        with self._lock:
            self._machine.settle(permit, failed, slow, now_ns)
            changes = self._machine.take_changes()
        self._report(changes)
        self._count("failed" if failed else "slow" if slow else "ok")

    def release(self, permit: Permit) -> None:
        """Return the permit of a call that says nothing about the dependency."""
        with self._lock:
            self._machine.release(permit)
        self._count("abandoned")

    def _count(self, outcome: str) -> None:
        if self._telemetry is not None:
            self._telemetry.call(self.name, outcome)

    def _report(self, changes: Sequence[StateChange]) -> None:
        for change in changes:
            if self._telemetry is not None:
                self._telemetry.transition(self.name, change)
            for listener in self._listeners:
                listener(self.name, change)


class Guard:
    """One guarded call: ``with breaker.guard() as call: call.judge(fetch())``."""

    __slots__ = ("_breaker", "_failed", "_permit")

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._breaker = breaker
        self._permit: Permit | None = None
        self._failed = False

    def judge(self, result: R) -> R:
        """Let the configured ``is_failure`` see a returned value; returns it unchanged."""
        is_failure = self._breaker.config.is_failure
        if is_failure is not None:
            self._failed = bool(is_failure(result))
        return result

    def __enter__(self) -> Self:
        """Ask for a permit."""
        self._permit = self._breaker.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Count the outcome: an abandoned call (cancelled, interrupted) only returns its permit."""
        del tb
        permit, self._permit = self._permit, None
        if permit is None:
            return
        config = self._breaker.config
        if kind is not None and (not issubclass(kind, Exception) or isinstance(error, config.ignored)):
            self._breaker.release(permit)
        else:
            self._breaker.settle(permit, failed=self._failed if error is None else isinstance(error, config.failures))

    async def __aenter__(self) -> Self:
        """Ask for a permit; never waits."""
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Count the outcome."""
        self.__exit__(kind, error, tb)
