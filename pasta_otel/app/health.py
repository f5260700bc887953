"""Whether a sidecar does its work: its threads live, its spans are written, its SLOs are evaluated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pasta_otel.clock import Clock

STALE_TICKS = 10
STALE_SECONDS = 60.0


class Part(Protocol):
    """A part that knows whether it works."""

    def trouble(self) -> str:
        """Return what is wrong now; empty = nothing."""

    def limits(self) -> Mapping[str, tuple[int, int]]:
        """Return what fills up: how much is used, and how much there may be."""


class Health:
    """Answer ``/healthz``.

    An upstream that is down is no fault of this process: its queue shows under ``limits``, what it loses in the ledger.

    Args:
        threads: Threads that run until the end.
        parts: By name.
        evaluation: Return the last evaluation; None = no SLO is watched.
        tick_seconds: Time between two evaluations.
        clock: Monotonic time.
    """

    def __init__(
        self,
        threads: Sequence[threading.Thread],
        parts: Mapping[str, Part],
        evaluation: Callable[[], Any] | None,
        tick_seconds: float,
        clock: Clock,
    ) -> None:
        self._threads, self._parts, self._evaluation, self._clock = threads, parts, evaluation, clock
        self._patience_s = max(STALE_SECONDS, STALE_TICKS * tick_seconds)
        self._lock = threading.Lock()
        self._last: tuple[Any, int] = (None, clock.monotonic_ns())

    def __call__(self) -> tuple[bool, dict[str, Any]]:
        """Return whether everything works, and what does not."""
        found: dict[str, Any] = {name: text for name, part in self._parts.items() if (text := part.trouble())}
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead:
            found["dead_threads"] = dead
        stale = self._stale()
        if stale:
            found["slo"] = stale
        limits = {
            f"{name}.{what}": {"used": used, "most": most}
            for name, part in self._parts.items()
            for what, (used, most) in part.limits().items()
        }
        return not found, found | {"limits": limits}

    def _stale(self) -> str:
        """Return how long no new evaluation came, if that is too long; by monotonic time, question to question."""
        if self._evaluation is None:
            return ""
        now, evaluation = self._clock.monotonic_ns(), self._evaluation()
        with self._lock:
            if evaluation is not self._last[0]:
                self._last = (evaluation, now)
            age_s = (now - self._last[1]) / 1e9
        return f"no evaluation for {age_s:.0f} s; see the log" if age_s > self._patience_s else ""
