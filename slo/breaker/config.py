"""What a breaker is told: states, thresholds and which outcomes count; validated when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pasta_otel.errors import InputError

HalfOpenPolicy = Literal["any_failure", "rate"]
WindowType = Literal["count", "time"]


class BreakerState(StrEnum):
    """The six states of resilience4j, by its meaning of them."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    DISABLED = "disabled"
    FORCED_OPEN = "forced_open"
    METRICS_ONLY = "metrics_only"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """Thresholds of one breaker; the defaults are resilience4j's.

    Attributes:
        failure_rate: Share of failed calls in the window that opens it, in (0, 1].
        slow_call_rate: Share of slow calls in the window that opens it, in (0, 1].
        slow_call_seconds: A call that lasts longer is slow.
        open_seconds: How long it stays open before the first probe.
        half_open_max_calls: How many probes one half-open phase admits, in all.
        close_after_successes: Good probes that close it; None = ``half_open_max_calls``. Policy ``any_failure`` only.
        half_open_policy: ``any_failure``: one failed or slow probe opens it again; ``rate``: the rates decide once all
            probes are back.
        half_open_max_wait_seconds: A half-open phase that lasts longer opens again; 0 = as long as its probes run.
        minimum_calls: Calls in the window below which no rate is judged.
        window_type: ``count`` (the last N calls) or ``time`` (the last N seconds, in whole seconds).
        window_size: N.
        open_by_rate: False = the rates never open it: only an SLO or a person does (probes are judged all the same).
        failures: Exceptions that count as failed; any other Exception counts as a good answer.
        ignored: Exceptions that count as nothing; they win over ``failures``.
        is_failure: Says whether a returned value counts as failed; called without any lock.
    """

    failure_rate: float = 0.5
    slow_call_rate: float = 1.0
    slow_call_seconds: float = 60.0
    open_seconds: float = 60.0
    half_open_max_calls: int = 10
    close_after_successes: int | None = None
    half_open_policy: HalfOpenPolicy = "rate"
    half_open_max_wait_seconds: float = 0.0
    minimum_calls: int = 100
    window_type: WindowType = "count"
    window_size: int = 100
    open_by_rate: bool = True
    failures: tuple[type[Exception], ...] = (Exception,)
    ignored: tuple[type[Exception], ...] = ()
    is_failure: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        """Refuse values with which the breaker could never open, or never close.

        Raises:
            InputError: Names the field.
        """
        for name in ("failure_rate", "slow_call_rate"):
            _check(0.0 < getattr(self, name) <= 1.0, name, "expected a share above 0 and at most 1")
        for name in ("slow_call_seconds", "open_seconds"):
            _check(getattr(self, name) > 0.0, name, "expected seconds above 0")
        for name in ("half_open_max_calls", "minimum_calls", "window_size"):
            _check(getattr(self, name) >= 1, name, "expected at least 1")
        _check(self.half_open_max_wait_seconds >= 0.0, "half_open_max_wait_seconds", "expected 0 or more seconds")
        _check(1 <= self.successes_to_close <= self.half_open_max_calls, "close_after_successes",
               "expected at least 1 and at most half_open_max_calls")  # fmt: skip
        _check(self.half_open_policy in {"any_failure", "rate"}, "half_open_policy", "expected any_failure or rate")
        _check(self.window_type in {"count", "time"}, "window_type", "expected count or time")

    @property
    def successes_to_close(self) -> int:
        """Return how many good probes close the breaker under ``any_failure``."""
        return self.half_open_max_calls if self.close_after_successes is None else self.close_after_successes

    @property
    def calls_to_judge(self) -> int:
        """Return the calls needed before a rate is judged; a count window never holds more than its size."""
        return min(self.minimum_calls, self.window_size) if self.window_type == "count" else self.minimum_calls


def _check(good: bool, field: str, message: str) -> None:
    if not good:
        raise InputError(message, field=f"breaker.{field}")
