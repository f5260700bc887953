"""Requests as regions: a span processor that puts the thread a local root span starts on inside that span."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class RequestObserver(Protocol):
    """Told which request each thread is in (``Regions``, ``TaggedRegions``)."""

    def enter_request(self, trace_id: int, span_id: int) -> None:
        """Begin a request on this thread."""

    def leave(self, span_id: int) -> None:
        """End it on this thread."""

    def end(self, external_id: int) -> None:
        """Note that nothing belongs to it from now on, on whatever thread."""


class RequestRegions:
    """Duck-typed as the SDK's SpanProcessor; touches nothing but ids.

    A thread that runs an event loop serves many requests in turns and is never inside one of them from beginning to
    end: there, and in worker threads, ``steps`` follows who is served.

    Args:
        regions: Told about each sampled local root span.
        ended: Told name, begin and end (unix nanoseconds) of each local root span that ends without an error, to
            compare requests inside and outside capture windows; None = nobody asks.
    """

    def __init__(self, regions: RequestObserver, ended: Callable[[str, int, int], object] | None = None) -> None:
        self._regions, self._ended = regions, ended

    def on_start(self, span: Any, parent_context: object = None) -> None:
        """Begin the request on this thread (SDK callback)."""
        del parent_context
        parent, context = span.parent, span.get_span_context()
        if (parent is None or parent.is_remote) and context.trace_flags.sampled and not _runs_an_event_loop():
            self._regions.enter_request(context.trace_id, context.span_id)

    def on_end(self, span: Any) -> None:
        """End it; on whatever thread this is, nothing launched from now on belongs to it (SDK callback)."""
        parent = span.parent
        if parent is None or parent.is_remote:
            self._regions.end(span.context.span_id)
            self._regions.leave(span.context.span_id)
            if self._ended is not None and span.status.is_ok:
                self._ended(span.name, span.start_time, span.end_time)

    def _on_ending(self, span: object) -> None:
        """Do nothing (SDK callback)."""

    def shutdown(self) -> None:
        """Do nothing (SDK callback)."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: nothing is buffered here (SDK callback)."""
        del timeout_millis
        return True


def _runs_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
