"""Doubles for the SLO controller's ports: exact, in memory, with every failure a source can have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from pasta_otel.model import Attribution, CountRequest, EventCounts, TimeWindow
from pasta_otel.slo.evaluation import ActionRecord, Evaluation


class EventListSource:
    """Count events from a list: the definition that every real source is compared with.

    Args:
        events: (end time in ns, good) in any order.
    """

    def __init__(self, events: Iterable[tuple[int, bool]] = ()) -> None:
        self._events = sorted(events)
        self.answer: EventCounts | None = None
        self.error: Exception | None = None
        self.calls = 0

    def add(self, end_unix_nano: int, *, good: bool) -> None:
        """Add one event, not older than the newest."""
        self._events.append((end_unix_nano, good))

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return exact counts, or what ``answer`` or ``error`` says instead."""
        del now_unix_nano
        self.calls += 1
        if self.error is not None:
            raise self.error
        if self.answer is not None:
            return [self.answer] * len(requests)
        return [self._count(request.window) for request in requests]

    def _count(self, window: TimeWindow) -> EventCounts:
        first = bisect_left(self._events, (window.start_unix_nano, False))
        last = bisect_left(self._events, (window.end_unix_nano, False))
        total = last - first
        good = sum(good for _, good in self._events[first:last])
        return EventCounts(float(good), float(total))


class RecordingResponder:
    """Keep every evaluation."""

    def __init__(self) -> None:
        self.evaluations: list[Evaluation] = []

    def respond(self, evaluation: Evaluation) -> Sequence[ActionRecord]:
        """Do nothing but remember."""
        self.evaluations.append(evaluation)
        return ()


class FixedAttributor:
    """Answer with given attributions, one a call, the last one for ever.

    Args:
        answers: Causes by call; None = raise.
    """

    def __init__(self, *answers: Attribution | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[TimeWindow, TimeWindow]] = []

    def attribute(self, sli: object, baseline: TimeWindow, window: TimeWindow) -> Attribution:
        """Return the next answer."""
        del sli
        self.asked.append((baseline, window))
        answer = self._answers[min(len(self.asked), len(self._answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer
