"""Rows and columns of spans to OTLP: a bounded queue, one daemon thread, the columnar encoder.

The producer's side is an append to a deque. Everything that can wait, fail or lock is on the worker's side, and a
forked child starts with an empty queue, a new worker and its own identity: it never sends what its parent queued.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.metrics import Meter

from pasta_otel import __version__, semconv
from pasta_otel.clock import OffsetTracker, monotonic_to_unix
from pasta_otel.exporters.otlp import wire
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.counts import SinkCounts, observe
from pasta_otel.exporters.otlp.encoder import Scope, encode_spans, slice_columns
from pasta_otel.exporters.otlp.fork import renew_in_children
from pasta_otel.exporters.otlp.resource import ProcessIdentity
from pasta_otel.exporters.otlp.rows import columns_from_rows, valid_rows
from pasta_otel.exporters.otlp.sender import Outcome, Sender
from pasta_otel.model import Attributes, OpSpan, SpanColumns

_logger = logging.getLogger(__name__)

QUEUE_SIZE = 65536
BATCH_SIZE = 8192
SCHEDULE_DELAY_S = 1.0
ABORT_SHARE = 0.1  # the part of a shutdown's time kept for ending a request that hangs


class _State:
    """All that one process owns of an exporter; a child gets a new one."""

    def __init__(self) -> None:
        self.rows: deque[OpSpan] = deque()
        self.batches: deque[SpanColumns] = deque()
        self.batch_rows = 0  # rows waiting in batches
        self.wake = threading.Event()
        self.changed = threading.Condition()  # guards everything below
        self.taken = 0  # left the queues
        self.ok = 0
        self.lost = 0  # of the taken
        self.refused = 0  # never queued
        self.dropped: Counter[str] = Counter()
        self.closed = False
        self.abandoned = False
        self.thread: threading.Thread | None = None

    def waiting(self) -> int:
        return len(self.rows) + self.batch_rows

    def done(self) -> int:
        return self.ok + self.lost


class RowExporter:
    """Export ``OpSpan`` rows and ready ``SpanColumns``.

    Args:
        config: Destination.
        resource: Returns the resource attributes; asked once per process, at its first batch.
        scope: Instrumentation scope of every span.
        identity: Instance id and pid; follows ``resource`` if not given.
        queue_size: Most rows that wait; further ones are dropped and counted. Columns have as much again, times four.
        batch_size: Most spans in one request.
        schedule_delay_s: Longest time a row waits before it is sent, seconds.
        offset: Unix time minus CLOCK_MONOTONIC.
        sender: How to send; made from ``config`` if not given.
        meter: Where the account is exported; None = nowhere.
        sink: The account's ``sink`` attribute.
    """

    def __init__(  # noqa: PLR0913  keyword-only: everything the exporter touches is a parameter
        self,
        config: OtlpConfig,
        *,
        resource: Callable[[], Attributes],
        scope: Scope = Scope(semconv.SCOPE, __version__),  # noqa: B008  an immutable constant
        identity: ProcessIdentity | None = None,
        queue_size: int = QUEUE_SIZE,
        batch_size: int = BATCH_SIZE,
        schedule_delay_s: float = SCHEDULE_DELAY_S,
        offset: OffsetTracker | None = None,
        sender: Sender | None = None,
        meter: Meter | None = None,
        sink: str = "otlp_rows",
    ) -> None:
        self._resource, self._scope = resource, wire.scope(*scope)
        self._identity = identity or ProcessIdentity.following(resource)
        self._queue_size, self._batch_size, self._delay_s = queue_size, batch_size, schedule_delay_s
        self._offset = offset or monotonic_to_unix()
        self._sender = sender or Sender(config)
        self._max_bytes = config.max_request_bytes
        self._resource_bytes: tuple[int, bytes] | None = None
        self._state = _State()
        renew_in_children(self)
        if meter is not None:
            observe(meter, sink, self.counts)

    # ---- the producers' side, any thread

    def offer(self, row: OpSpan) -> bool:
        """Queue one row; never blocks. Returns False when it was dropped (queue full or shut down)."""
        state = self._state
        rows = state.rows
        if state.closed or len(rows) >= self._queue_size:
            return self._refuse(state, 1)
        rows.append(row)
        if state.thread is None:
            self._start(state)
        elif len(rows) >= self._batch_size and not state.wake.is_set():
            state.wake.set()
        if state.abandoned:  # shut down since the first line
            self._abandon(state)
        return True

    def offer_many(self, rows: Sequence[OpSpan]) -> int:
        """Queue rows; returns how many were taken, the rest was dropped and counted."""
        state = self._state
        room = 0 if state.closed else max(self._queue_size - len(state.rows), 0)
        taken = rows if len(rows) <= room else rows[:room]
        state.rows.extend(taken)
        if len(taken) < len(rows):
            self._refuse(state, len(rows) - len(taken))
        self._notify(state)
        return len(taken)

    def offer_columns(self, columns: SpanColumns) -> bool:
        """Queue a ready batch; returns False when it was dropped as a whole."""
        state = self._state
        with state.changed:
            fits = not state.closed and state.batch_rows + len(columns) <= 4 * self._queue_size
            if fits:
                state.batches.append(columns)
                state.batch_rows += len(columns)
        if not fits:
            return self._refuse(state, len(columns))
        self._notify(state)
        return True

    def _notify(self, state: _State) -> None:
        if state.abandoned:
            self._abandon(state)
        if state.thread is None:
            self._start(state)
        if state.waiting() >= self._batch_size and not state.wake.is_set():
            state.wake.set()

    def _refuse(self, state: _State, count: int) -> bool:
        with state.changed:
            state.refused += count
            state.dropped["shutdown" if state.closed else "queue_full"] += count
        return False

    # ---- control

    def counts(self) -> SinkCounts:
        """Return this process's account."""
        state = self._state
        with state.changed:
            waiting = state.waiting()
            return SinkCounts(
                received=state.taken + waiting + state.refused,
                ok=state.ok,
                dropped=dict(state.dropped),
                pending=waiting + state.taken - state.done(),
            )

    def force_flush(self, timeout_s: float = 10.0) -> bool:
        """Send everything that was offered before this call; returns False if the time was not enough."""
        state = self._state
        deadline = time.monotonic() + timeout_s
        with state.changed:
            target = state.taken + state.waiting()
            if target and state.thread is None:
                self._start(state)
            state.wake.set()
            while state.done() < target:
                if not state.changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    return False
        return True

    def shutdown(self, timeout_s: float = 5.0) -> bool:
        """Send what is queued, then stop; what the time does not allow is dropped as ``shutdown``.

        Returns:
            True when nothing was lost in stopping.
        """
        state = self._state
        deadline = time.monotonic() + timeout_s
        with state.changed:
            already, state.closed = state.closed, True
            thread, lost_before = state.thread, state.lost
        if already:
            return True
        self._sender.limit(timeout_s * (1 - ABORT_SHARE))
        state.wake.set()
        if thread is not None:
            thread.join(timeout_s * (1 - ABORT_SHARE))
            if thread.is_alive():
                self._sender.abort()
                thread.join(max(deadline - time.monotonic(), 0.0))
        self._abandon(state)
        if thread is None or not thread.is_alive():
            self._sender.close()
        return state.lost == lost_before

    @staticmethod
    def _abandon(state: _State) -> None:
        """Close the account: what still waits or is in flight is lost."""
        with state.changed:
            state.abandoned = True
            while state.rows:  # one by one: a late producer may still append
                state.rows.popleft()
                state.taken += 1
            state.taken += state.batch_rows
            state.batches.clear()
            state.batch_rows = 0
            left = state.taken - state.done()
            state.lost += left
            if left:
                state.dropped["shutdown"] += left

    # ---- the worker's side

    def _start(self, state: _State) -> None:
        with state.changed:
            if state.thread is not None or state.closed:
                return
            state.thread = threading.Thread(target=self._run, args=(state,), name="pasta-row-exporter", daemon=True)
            try:
                state.thread.start()
            except RuntimeError:  # the interpreter is ending
                state.thread = None

    def _run(self, state: _State) -> None:
        with suppress_instrumentation():  # our own requests are nobody's spans
            closing = False
            while not closing:
                state.wake.wait(self._delay_s)
                state.wake.clear()
                closing = state.closed
                while self._send_next(state):
                    pass

    def _send_next(self, state: _State) -> bool:
        with state.changed:
            if state.abandoned:
                return False
            size = min(len(state.rows), self._batch_size)
            rows = [state.rows.popleft() for _ in range(size)]
            columns = state.batches.popleft() if not rows and state.batches else None
            count = len(rows) or (len(columns) if columns is not None else 0)
            state.taken += count
            if columns is not None:
                state.batch_rows -= count
        if rows:
            self._guarded(state, size, lambda: self._rows_outcomes(rows))
        elif columns is not None:
            self._guarded(state, count, lambda: self._column_outcomes(columns))
        return bool(rows or columns is not None)

    def _guarded(self, state: _State, count: int, outcomes: Callable[[], Iterable[Outcome]]) -> None:
        """Account for a batch whatever happens: the worker must not die of a bad one."""
        accounted = 0
        try:
            for outcome in outcomes():
                self._account(state, outcome)
                accounted += outcome.ok + outcome.dropped
        except Exception:
            _logger.exception("spans dropped: the batch cannot be encoded")
            self._account(state, Outcome(0, count - accounted, "encode"))

    @staticmethod
    def _account(state: _State, outcome: Outcome) -> None:
        with state.changed:
            if state.abandoned:
                return
            state.ok += outcome.ok
            state.lost += outcome.dropped
            if outcome.dropped:
                state.dropped[outcome.reason] += outcome.dropped
            state.changed.notify_all()

    def _rows_outcomes(self, rows: Sequence[OpSpan]) -> Iterable[Outcome]:
        offset = self._offset.current()
        try:
            columns = columns_from_rows(rows, offset)
        except (OverflowError, TypeError, ValueError, AttributeError):
            good = valid_rows(rows, offset)
            yield Outcome(0, len(rows) - len(good), "invalid")
            if not good:
                return
            columns = columns_from_rows(good, offset)
        yield from self._column_outcomes(columns)

    def _column_outcomes(self, columns: SpanColumns) -> Iterable[Outcome]:
        for start in range(0, len(columns), self._batch_size):
            yield from self._send(slice_columns(columns, start, start + self._batch_size))

    def _send(self, columns: SpanColumns) -> Iterable[Outcome]:
        body = encode_spans(columns, self._current_resource(), self._scope)
        count = len(columns)
        if len(body) <= self._max_bytes:
            yield self._sender.send(body, count)
        elif count == 1:
            yield Outcome(0, 1, "too_large")
        else:
            yield from self._send(slice_columns(columns, 0, count // 2))
            yield from self._send(slice_columns(columns, count // 2, count))

    def _current_resource(self) -> bytes:
        pid = os.getpid()
        if self._resource_bytes is None or self._resource_bytes[0] != pid:
            self._resource_bytes = pid, wire.resource({**self._resource(), **self._identity.attributes()})
        return self._resource_bytes[1]

    def after_fork(self) -> None:
        """Start anew in a child: what the parent queued is the parent's to send."""
        closed = self._state.closed
        self._state = _State()
        self._state.closed = closed
