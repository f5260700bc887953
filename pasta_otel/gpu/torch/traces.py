"""Which traces are being recorded right now, told by the user's own TracerProvider.

A span processor (duck-typed: the SDK asks for nothing but the methods) sees local root spans start and end. While at
least one selected trace is open, the listener's hooks are installed; otherwise the process runs without them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from opentelemetry.trace import SpanContext

from pasta_otel.context import selected

_log = logging.getLogger(__name__)
DEFAULT_ROW_LIMIT = 2000
"""Rows per trace and process: a 48-layer transformer has about 600 modules a forward pass (4 passes fit)."""


SHUTDOWN_FLUSH_MS = 5000


class ActiveTrace:
    """A selected trace with at least one open local root span.

    Attributes:
        local_root: Identity of the first local root span.
        position: Counts module calls; beyond ``limit`` they are dropped and counted.
        limit: Most rows that this process records for this trace.
        lost: Calls that began and whose end went unseen.
        open_roots: Local root spans that have not ended, by span id; weak, so that a span that is lost ends nothing
            forever.
    """

    __slots__ = ("limit", "local_root", "lost", "open_roots", "position")

    def __init__(self, local_root: SpanContext, limit: int) -> None:
        self.local_root, self.limit, self.lost = local_root, limit, 0
        self.position = itertools.count()
        self.open_roots: dict[int, Any] = {}


class TraceListener(Protocol):
    """What wants to know when recording has to start and may stop."""

    def activate(self) -> None:
        """Install what records; called when the first selected trace starts."""

    def deactivate(self) -> None:
        """Remove what records; called when the last selected trace has ended."""

    def trace_ended(self, calls: int, limit: int, lost: int) -> None:
        """Take note of an ended trace: module calls, how many at most became rows, how many of these were lost."""


class Selection(Protocol):
    """Decides by trace id and by the local root's name whether a sampled trace is recorded."""

    def __call__(self, trace_id: int, operation: str) -> bool:
        """Return whether the trace is recorded."""


class RateSelection:
    """Select a fixed share of the traces."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def __call__(self, trace_id: int, operation: str) -> bool:
        """Return whether the trace id falls in the share."""
        del operation
        return selected(trace_id, self._rate)


class TraceWatch:
    """A span processor that keeps the selected traces that are open in this process.

    Args:
        select: Which sampled traces are recorded.
        listener: Told about the first and after the last of them.
        row_limit: Most rows a trace.
    """

    def __init__(self, select: Selection, listener: TraceListener, row_limit: int = DEFAULT_ROW_LIMIT) -> None:
        self._select, self._listener, self._row_limit = select, listener, row_limit
        self._lock = threading.Lock()
        self._lost: deque[tuple[int, int]] = deque()
        self._closed = self._failed = False
        self.active: dict[int, ActiveTrace] = {}
        self.flush: Callable[[float], object] | None = None  # sends the rows, within so many seconds
        if hasattr(os, "register_at_fork"):
            own = weakref.WeakMethod(self._after_fork)
            os.register_at_fork(after_in_child=lambda: (method := own()) and method())

    # -- the SDK's SpanProcessor ---------------------------------------------------------------------------------------

    def on_start(self, span: Any, parent_context: object = None) -> None:
        """Open a trace when its local root starts (SDK callback); never raises into the program's request."""
        del parent_context
        if self._closed:
            return
        try:
            self._start(span)
        except Exception:  # noqa: BLE001 - telemetry never breaks the service
            self._fail()

    def _start(self, span: Any) -> None:
        context = span.get_span_context()
        if not context.trace_flags.sampled:
            return
        parent = span.parent
        trace_id = context.trace_id
        if parent is not None and not parent.is_remote and trace_id in self.active:
            return
        if self._select(trace_id, span.name):
            self._open(span, context)

    def on_end(self, span: Any) -> None:
        """Close a trace when its last local root has ended (SDK callback); never raises, as above."""
        try:
            context = span.context
            trace = self.active.get(context.trace_id)
            if trace is not None and context.span_id in trace.open_roots:
                self._close(context.trace_id, context.span_id)
        except Exception:  # noqa: BLE001 - as above
            self._fail()

    def _on_ending(self, span: object) -> None:
        """Do nothing (SDK callback)."""

    def shutdown(self) -> None:
        """Stop selecting, forget what is open, and send the rows: the program's provider ends (SDK callback)."""
        self.close()
        self.force_flush(SHUTDOWN_FLUSH_MS)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send the rows with the provider's spans (SDK callback); returns False if the time was not enough."""
        flush = self.flush
        return flush is None or flush(timeout_millis / 1000) is not False

    def close(self) -> None:
        """Stop selecting, and forget what is open."""
        self._closed = True
        with self._lock:
            self._clear()

    # ------------------------------------------------------------------------------------------------------------------

    def _fail(self) -> None:
        if not self._failed:  # once: a request may come a thousand times a second
            self._failed = True
            _log.warning("a trace's module spans are not recorded; further failures stay silent", exc_info=True)

    def _open(self, span: Any, context: SpanContext) -> None:
        reference = weakref.ref(span, self._note_lost(context.trace_id, context.span_id))
        with self._lock:
            ended: Sequence[ActiveTrace] = self._collect_lost() if self._lost else ()
            first = not self.active
            trace = self.active.get(context.trace_id)
            if trace is None:
                trace = self.active[context.trace_id] = ActiveTrace(context, self._row_limit)
            trace.open_roots[context.span_id] = reference
            if first:
                self._listener.activate()
        self._report(ended)

    def _close(self, trace_id: int, span_id: int) -> None:
        with self._lock:
            ended = self._forget(trace_id, span_id)
            if self._lost:
                ended += self._collect_lost()
            if ended and not self.active:
                self._listener.deactivate()
        self._report(ended)

    def _forget(self, trace_id: int, span_id: int) -> list[ActiveTrace]:
        trace = self.active.get(trace_id)
        if trace is None or trace.open_roots.pop(span_id, None) is None or trace.open_roots:
            return []
        del self.active[trace_id]
        return [trace]

    def _report(self, ended: Sequence[ActiveTrace]) -> None:
        for trace in ended:
            self._listener.trace_ended(next(trace.position), trace.limit, trace.lost)

    def _note_lost(self, trace_id: int, span_id: int) -> Callable[[object], None]:
        lost = self._lost  # runs inside the garbage collector, perhaps while our lock is held: only append

        def note(_: object) -> None:
            lost.append((trace_id, span_id))

        return note

    def _collect_lost(self) -> list[ActiveTrace]:
        ended: list[ActiveTrace] = []
        while self._lost:
            ended += self._forget(*self._lost.popleft())
        return ended

    def _after_fork(self) -> None:
        """Start empty in a forked child: the spans that were open belong to the parent's threads."""
        self._lock = threading.Lock()
        self._lost.clear()
        self._clear()

    def _clear(self) -> None:
        if self.active:
            for trace in self.active.values():
                trace.open_roots.clear()  # rows that are still current see that their trace is over
            self.active.clear()
            self._listener.deactivate()
