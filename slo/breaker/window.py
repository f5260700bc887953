"""Sliding windows of call outcomes, by count and by time, with constant cost a call."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from pasta_otel.slo.breaker.config import BreakerConfig

SECOND_NS = 1_000_000_000


class Totals(NamedTuple):
    """Outcomes in a window."""

    calls: int
    failed: int
    slow: int


class OutcomeWindow(Protocol):
    """What the state machine asks of a window."""

    def record(self, failed: bool, slow: bool, now_ns: int) -> None:
        """Add one outcome."""

    def totals(self, now_ns: int) -> Totals:
        """Return the outcomes that are still inside."""


class CountWindow:
    """The last ``size`` calls."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._outcomes: deque[tuple[bool, bool]] = deque()
        self._failed = self._slow = 0

    def record(self, failed: bool, slow: bool, now_ns: int) -> None:
        """Add one outcome and drop the oldest beyond the size."""
        del now_ns
        self._outcomes.append((failed, slow))
        self._failed += failed
        self._slow += slow
        if len(self._outcomes) > self._size:
            old_failed, old_slow = self._outcomes.popleft()
            self._failed -= old_failed
            self._slow -= old_slow

    def totals(self, now_ns: int) -> Totals:
        """Return the totals."""
        del now_ns
        return Totals(len(self._outcomes), self._failed, self._slow)


class TimeWindow:
    """The last ``seconds`` seconds, in buckets of one whole second as resilience4j keeps them."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._buckets: deque[tuple[int, list[int]]] = deque()  # (second, [calls, failed, slow])

    def record(self, failed: bool, slow: bool, now_ns: int) -> None:
        """Add one outcome to the present second."""
        second = self._expire(now_ns)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append((second, [0, 0, 0]))
        counts = self._buckets[-1][1]
        counts[0] += 1
        counts[1] += failed
        counts[2] += slow

    def totals(self, now_ns: int) -> Totals:
        """Return the sums of the seconds that are still inside."""
        self._expire(now_ns)
        return Totals(*(sum(counts[index] for _, counts in self._buckets) for index in range(3)))

    def _expire(self, now_ns: int) -> int:
        second = now_ns // SECOND_NS
        if self._buckets:  # readings taken by two threads may arrive in the other order
            second = max(second, self._buckets[-1][0])
        while self._buckets and self._buckets[0][0] <= second - self._seconds:
            self._buckets.popleft()
        return second


def make_window(config: BreakerConfig) -> OutcomeWindow:
    """Return an empty window of the configured type."""
    return CountWindow(config.window_size) if config.window_type == "count" else TimeWindow(config.window_size)
