"""Spans as SLI: ask a span store how many of the events that ended in a window were good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pasta_otel.model import CountRequest, EventCounts, SpanRef, SpanSLI, TimeWindow


class SpanCounter(Protocol):
    """What this source needs of a span store."""

    def count_spans(self, requests: Sequence[CountRequest], now_unix_nano: int, grace_ns: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order, in one grouped pass."""

    def bad_spans(self, sli: SpanSLI, window: TimeWindow, limit: int) -> Sequence[SpanRef]:
        """Return a few bad events of a window."""


class SpanSource:
    """Answer the controller's requests from a span store.

    Args:
        store: The store.
        grace_ns: How long a late span still counts.
    """

    def __init__(self, store: SpanCounter, grace_ns: int) -> None:
        self._store, self._grace_ns = store, grace_ns

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order; requests for other sources are answered with ``absent``."""
        mine = [request for request in requests if isinstance(request.sli, SpanSLI)]
        try:
            found = iter(self._store.count_spans(mine, now_unix_nano, self._grace_ns) if mine else ())
        except Exception as error:  # noqa: BLE001  # a store that fails means no data, not a dead controller
            return [EventCounts(0.0, 0.0, no_data="absent", detail=f"span store: {error}") for _ in requests]
        return [next(found) if isinstance(request.sli, SpanSLI) else _OTHER for request in requests]

    def bad_spans(self, sli: Any, window: TimeWindow, limit: int) -> Sequence[SpanRef]:
        """Return a few bad events of a window, for the controller; none for another kind of indicator."""
        return self._store.bad_spans(sli, window, limit) if isinstance(sli, SpanSLI) else ()


_OTHER = EventCounts(0.0, 0.0, no_data="absent", detail="not a spans indicator")
