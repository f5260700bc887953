"""The one thread that writes: batches at once, a trace's times when it settles."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from opentelemetry.metrics import Meter, NoOpMeter

from pasta_otel import semconv
from pasta_otel.clock import Clock
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver.batch import SpanBatch
from pasta_otel.exporters.store.aged import Aged
from pasta_otel.exporters.store.columns import MAX_INT64, Columns, concatenate, span_columns, texts
from pasta_otel.exporters.store.dimensions import Dimensions
from pasta_otel.exporters.store.duplicates import Suspects, repeated, stored
from pasta_otel.exporters.store.missing import Missing, services
from pasta_otel.exporters.store.schema import with_transaction
from pasta_otel.exporters.store.traces import OpenTraces, Times
from pasta_otel.model import HostSample

logger = logging.getLogger(__name__)

_LOSS_NS = 60_000_000_000  # between two log lines of one run of losses; a failure older than this says nothing of now
DUPLICATE = "duplicate"
_ROWS_AT_ONCE = 50_000  # of one insert: bounds the writer's memory when the queue is long


class Writer:
    """Write batches from a bounded queue and account for every span.

    Args:
        connection: The store's connection; used by this thread alone.
        dimensions: Numbers for what repeats.
        traces: Traces that are still arriving.
        ledger: Account of spans.
        sink: Name in the ledger.
        clock: Both clocks.
        queue_spans: Most spans that may wait.
        flush_interval_s: A batch waits at most this long for company.
        grace_ns: Spans that arrive later after their end are counted as late.
        meter: Where late spans are counted.
        check_all: Look for every span among those that are stored, not only for those that may have come before.
        aged: Told of what is written.
    """

    def __init__(  # noqa: PLR0913 - the parts of the world that it uses
        self,
        connection: Any,
        dimensions: Dimensions,
        traces: OpenTraces,
        ledger: Ledger,
        *,
        sink: str,
        clock: Clock,
        queue_spans: int,
        flush_interval_s: float,
        grace_ns: int,
        meter: Meter | None = None,
        check_all: bool = False,
        aged: Aged | None = None,
    ) -> None:
        self._connection, self._dimensions, self._traces, self._ledger = connection, dimensions, traces, ledger
        self._sink, self._clock, self._grace_ns = sink, clock, grace_ns
        self._limit, self._flush_interval_s = queue_spans, flush_interval_s
        self._wake = threading.Condition()
        self._queue: deque[SpanBatch] = deque()
        self._samples: list[HostSample] = []
        self._waiting = 0
        self._asked = self._done = 0
        self._stopping = False
        self._settle_all = False
        self._failed = False
        self._suspects = Suspects(clock.unix_nano(), everything=check_all)
        self._newest_unix_nano = _newest(connection)
        self._aged = aged
        self.lost, self.late = Missing(), Missing()
        self.loss = Losses(clock)
        spec = semconv.METRICS[semconv.STORE_LATE]
        self._late = (meter or NoOpMeter("")).create_counter(spec.name, spec.unit, spec.description)
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def has_room(self, spans: int) -> bool:
        """Say whether so many spans may wait; an empty queue takes a batch of any size."""
        return not self._stopping and (not self._waiting or self._waiting + spans <= self._limit)

    def put(self, batch: SpanBatch) -> bool:
        """Queue a batch; one too many is settled as dropped."""
        with self._wake:
            taken = self.has_room(len(batch))
            if taken:
                self._queue.append(batch)
                self._waiting += len(batch)
                self._wake.notify()
        if not taken:
            self._ledger.settle(self._sink, dropped={"shutdown" if self._stopping else "queue_full": len(batch)})
        return taken

    def put_samples(self, samples: Sequence[HostSample]) -> None:
        """Queue host samples; they are written with the next flush."""
        with self._wake:
            self._samples.extend(samples)

    def flush(self, timeout_s: float, *, settle: bool) -> bool:
        """Wait until everything queued so far is written; ``settle`` also closes every trace, complete or not."""
        with self._wake:
            self._settle_all = self._settle_all or settle
            self._asked += 1
            mine = self._asked
            self._wake.notify()
            return self._wake.wait_for(lambda: self._done >= mine, timeout_s)

    def stop(self, deadline_s: float) -> None:
        """Write what waits and end; what could not be written by the deadline is dropped as ``shutdown``."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(deadline_s)
        with self._wake:
            left, self._queue = list(self._queue), deque()
        for batch in left:
            self._ledger.settle(self._sink, dropped={"shutdown": len(batch)})
        self._thread.join()  # the batch in hand is finite; the connection must not be closed under it

    def _run(self) -> None:
        while True:
            with self._wake:
                if not (self._queue or self._stopping or self._asked > self._done):
                    self._wake.wait(self._flush_interval_s)
                batches = self._take()
                samples, self._samples = self._samples, []
                asked = self._asked if not self._queue else self._done
                settle = (self._settle_all or self._stopping) and not self._queue
                self._settle_all = self._settle_all and not settle
                stopping = self._stopping and not self._queue
            self._guarded(self._write_samples, samples)
            self._write(batches)
            self._guarded(self._settle, settle)
            with self._wake:
                self._done = asked
                self._wake.notify_all()
            if stopping:
                return

    def _take(self) -> list[SpanBatch]:
        batches: list[SpanBatch] = []
        rows = 0
        while self._queue and (not batches or rows + len(self._queue[0]) <= _ROWS_AT_ONCE):
            batches.append(self._queue.popleft())
            rows += len(batches[-1])
        return batches

    def _write(self, batches: Sequence[SpanBatch]) -> None:
        if not batches:
            return
        rows = sum(len(batch) for batch in batches)
        try:
            columns = concatenate([span_columns(batch, self._dimensions) for batch in batches])
            twice = self._twice(batches, columns)
            columns = {name: column[~twice] for name, column in columns.items()} if twice.any() else columns
            if len(columns["span_id"]):
                self._insert("spans", columns)
        except Exception as error:  # noqa: BLE001 - counted as dropped; telemetry must not stop the process
            self._lose(batches, rows, error)
            return
        self._failed = False
        self.loss.over()
        written = len(columns["span_id"])
        self._settled(rows, ok=written, dropped={DUPLICATE: rows - written} if written < rows else None)
        if not written:
            return
        self._newest_unix_nano = max(self._newest_unix_nano, int(columns["end_unix_nano"].max()))
        is_late = np.zeros(rows, dtype=bool)
        is_late[~twice] = columns["lateness_ns"] > self._grace_ns
        if is_late.any():
            self._late.add(int(is_late.sum()))
            self._note_late(batches, is_late)
        if self._aged is not None:
            self._aged.note(columns["end_unix_nano"], self._clock.unix_nano(), self._clock.monotonic_ns())
        self._guarded(self._traces.add, columns, self._clock.monotonic_ns())

    def _twice(self, batches: Sequence[SpanBatch], columns: Columns) -> NDArray[np.bool_]:
        """Say of each row whether its span is stored already, or stands in an earlier one of these batches."""
        suspects = self._suspects.among(batches, columns["end_unix_nano"])
        if not suspects.any():
            return suspects
        return repeated(columns) | stored(self._connection, columns, suspects, self._newest_unix_nano)

    def _lose(self, batches: Sequence[SpanBatch], rows: int, error: Exception) -> None:
        self.loss.happened(rows, error)
        for batch in batches:
            arrived = batch.arrived_unix_nano
            earliest = min(max(min(batch.end_time_unix_nano), arrived - _LOSS_NS), arrived)
            for service, spans in services([batch]).items():
                self.lost.add(service, earliest, arrived, spans)
        self._settled(rows, dropped={"write_error": rows})

    def _note_late(self, batches: Sequence[SpanBatch], is_late: Any) -> None:
        """Remember late spans by service, when they arrived."""
        first = 0
        for batch in batches:
            for group in batch.groups:
                late = int(is_late[first : first + group.rows].sum())
                first += group.rows
                if late:
                    self.late.add(group.resource.service, batch.arrived_unix_nano, batch.arrived_unix_nano, late)

    def trouble(self) -> str:
        """Return what is wrong now; empty = nothing."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self._stopping:
            return "the thread that writes has died"
        return self.loss.trouble()

    def fill(self) -> tuple[int, int]:
        """Return the spans that wait, and how many may."""
        return self._waiting, self._limit

    def _settled(self, rows: int, ok: int = 0, dropped: dict[str, int] | None = None) -> None:
        with self._wake:
            self._waiting -= rows
        self._ledger.settle(self._sink, ok=ok, dropped=dropped)

    def _settle(self, everything: bool) -> None:
        times = self._traces.due(self._clock.monotonic_ns(), everything=everything)
        if times is not None and (len(times) or times.replaced):
            self._insert("span_times", times.columns, times)

    def _write_samples(self, samples: Sequence[HostSample]) -> None:
        if not samples:
            return
        columns = {
            "time_unix_nano": np.array([sample.time_unix_nano for sample in samples], dtype=np.int64),
            "service": texts([sample.service for sample in samples]),
            "pid": np.array([sample.pid for sample in samples], dtype=np.int32),
            "metric": texts([sample.metric for sample in samples]),
            "value": np.array([sample.value for sample in samples], dtype=np.float64),
        }
        self._insert("host_samples", columns)

    def _insert(self, table: str, columns: Columns, times: Times | None = None) -> None:
        def work(connection: Any) -> None:
            self._dimensions.write_new(connection)
            if times is not None and times.replaced:
                _delete_replaced(connection, times)
            connection.register("incoming", columns)
            try:
                connection.execute(f"insert into {table} by name select * from incoming")  # noqa: S608 - our own table
            finally:
                connection.unregister("incoming")

        with_transaction(self._connection, work)
        self._dimensions.written()

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception:  # noqa: BLE001 - the spans themselves are stored; the next round goes on
            self._report("a trace's times or host samples could not be stored")

    def _report(self, what: str) -> None:
        """Log the first of a run of failures."""
        if not self._failed:
            logger.warning("%s", what, exc_info=True)  # noqa: LOG014 - called by exception handlers only
        self._failed = True


class Losses:
    """Writes that failed: said in the log at once, every minute, and at their end.

    Args:
        clock: Monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.why = ""
        self._spans = 0
        self._last_ns = self._logged_ns = 0

    def happened(self, spans: int, error: Exception) -> None:
        """Count spans that are lost."""
        now = self._clock.monotonic_ns()
        first = not self._spans
        self._spans += spans
        self.why, self._last_ns = str(error).partition("\n")[0] or type(error).__name__, now
        if first or now - self._logged_ns >= _LOSS_NS:
            self._logged_ns = now
            logger.error("spans are lost: %d could not be stored so far: %s", self._spans, self.why)

    def over(self) -> None:
        """Say that spans are written again."""
        if self._spans:
            logger.warning("spans are stored again; %d were lost", self._spans)
        self._spans = 0

    def trouble(self) -> str:
        """Return why spans are lost; empty when they are not, or when none came for a minute and nobody knows."""
        spans = self._spans
        if not spans or self._clock.monotonic_ns() - self._last_ns > _LOSS_NS:
            return ""
        return f"spans are lost: {spans} could not be stored so far: {self.why}"


def _newest(connection: Any) -> int:
    """Return when the last stored span ended; 0 = there is none."""
    return int(connection.execute("select coalesce(max(end_unix_nano), 0) from spans").fetchall()[0][0])


def _delete_replaced(connection: Any, times: Times) -> None:
    keys = np.array(times.replaced, dtype=np.uint64)
    replaced = {"trace_hi": np.ascontiguousarray(keys[:, 0]), "trace_lo": np.ascontiguousarray(keys[:, 1])}
    # the new rows hold the old spans too, so nothing to delete ended earlier: the scan skips what is older
    since = int(times.columns["end_unix_nano"].min(initial=MAX_INT64))
    connection.register("replaced", replaced)
    try:
        connection.execute(
            """delete from span_times t using replaced r
               where t.trace_hi = r.trace_hi and t.trace_lo = r.trace_lo and t.end_unix_nano >= ?""",
            [since],
        )
    finally:
        connection.unregister("replaced")
