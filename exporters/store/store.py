"""The embedded span store: a sink for the receiver, and the answers that SLOs and attribution need."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pasta_otel import semconv
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.errors import InputError, StateError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver.batch import SpanBatch
from pasta_otel.exporters.store import counts, examples
from pasta_otel.exporters.store.aged import Aged, say_opened
from pasta_otel.exporters.store.dimensions import Dimensions
from pasta_otel.exporters.store.missing import with_late, with_lost
from pasta_otel.exporters.store.questions import Questions
from pasta_otel.exporters.store.retention import Retention
from pasta_otel.exporters.store.schema import MEMORY, connect, damaged
from pasta_otel.exporters.store.traces import HELD_COLUMNS, Closing, OpenTraces
from pasta_otel.exporters.store.writer import Writer
from pasta_otel.model import (
    CountRequest,
    EdgeKey,
    EventCounts,
    HostSample,
    ModuleKey,
    OperationKey,
    Samples,
    SpanRef,
    SpanSLI,
    TimeWindow,
)

SAMPLE_LIMIT = 2000
_RECENT_PROCESS_NS = 60_000_000_000
_RESTORED_NS = 60_000_000_000  # before the newest span: traces older than that had closed


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Bounds of a store.

    Attributes:
        max_bytes: Bytes above which the oldest spans are deleted.
        max_age_s: Seconds after which spans are deleted.
        queue_spans: Spans that may wait for the writer; beyond, the receiver answers "try again later".
        flush_interval_s: Longest time a span waits before it is written.
        grace_s: A span that arrives later than this after its end is late: in no SLI count.
        retention_interval_s: Seconds between two looks at age and size.
        memory_limit_bytes: What DuckDB may use.
        threads: What DuckDB may use.
        closing: When a trace's self times and edge gaps are written.
        check_all: Look for every span among those that are stored already: for imports, where a file may come twice.
    """

    max_bytes: int = 4 * 1024**3
    max_age_s: float = 48 * 3600.0
    queue_spans: int = 200_000
    flush_interval_s: float = 0.05
    grace_s: float = 30.0
    retention_interval_s: float = 10.0
    memory_limit_bytes: int = 2 * 1024**3
    threads: int = 2
    closing: Closing = field(default_factory=Closing)
    check_all: bool = False

    def __post_init__(self) -> None:
        """Check that every bound is positive."""
        for name in ("max_bytes", "max_age_s", "queue_spans", "flush_interval_s", "retention_interval_s", "threads"):
            if getattr(self, name) <= 0:
                raise InputError("must be positive", field=f"store.{name}")


class DuckDBSpanStore:
    """Spans in DuckDB; make one with ``open``. A ``SpanSink`` of the receiver under the name ``store``."""

    name = "store"

    def __init__(  # noqa: PLR0913 - the parts of the world that it uses
        self,
        connection: Any,
        config: StoreConfig,
        ledger: Ledger,
        clock: Clock,
        *,
        path: Path | None,
        meter: Meter | None,
    ) -> None:
        self._connection, self._config, self._clock = connection, config, clock
        self._closed = False
        self._dimensions = Dimensions()
        self._dimensions.load(connection)
        self._traces = OpenTraces(self._dimensions, config.closing)
        self._questions = Questions(self._cursor, self._dimensions)
        self._seen = _Processes(socket.gethostname())
        self._restore()
        self._since = self._first_event(clock.unix_nano())
        self._writer = Writer(
            connection.cursor(),
            self._dimensions,
            self._traces,
            ledger,
            sink=self.name,
            clock=clock,
            queue_spans=config.queue_spans,
            flush_interval_s=config.flush_interval_s,
            grace_ns=int(config.grace_s * 1e9),
            meter=meter,
            check_all=config.check_all,
            aged=Aged(int(config.max_age_s * 1e9)),
        )
        self._retention = Retention(
            self._cursor,
            clock,
            max_age_ns=int(config.max_age_s * 1e9),
            max_bytes=config.max_bytes,
            interval_s=config.retention_interval_s,
            path=path,
            meter=meter,
        )
        if meter is not None:
            self._export(meter)
        self._writer.start()
        self._retention.start()

    @classmethod
    def open(
        cls,
        path: str,
        ledger: Ledger | None = None,
        config: StoreConfig | None = None,
        *,
        clock: Clock | None = None,
        meter: Meter | None = None,
    ) -> DuckDBSpanStore:
        """Open or create a store file (``:memory:`` = none) and start its threads.

        Args:
            path: The file.
            ledger: Account of spans, with a sink ``store``; without one the store keeps its own.
            config: Bounds.
            clock: Both clocks.
            meter: Where size, deletions and late spans are exported.

        Raises:
            MissingError: DuckDB is not installed, or another process holds the file; names its pid.
            InputError: The file is not a store of this version, or is damaged.
        """
        config = config or StoreConfig()
        connection = connect(path, memory_limit_bytes=config.memory_limit_bytes, threads=config.threads)
        ledger = ledger or Ledger([cls.name])
        file, clock = None if path == MEMORY else Path(path), clock or SystemClock()
        try:
            store = cls(connection, config, ledger, clock, path=file, meter=meter)
            store._say_aged(path)
        except Exception as error:  # whatever a damaged file makes of the first look at its tables
            connection.close()
            raise damaged(path, error) from error
        return store

    # ---- in

    def has_room(self, spans: int) -> bool:
        """Say whether a batch of this size would be queued."""
        return self._writer.has_room(spans)

    def offer(self, batch: SpanBatch) -> bool:
        """Queue a batch; its spans are pending in the ledger and are settled by the writer."""
        self._seen.note(batch, self._clock.monotonic_ns())
        return self._writer.put(batch)

    def write_host_samples(self, samples: Sequence[HostSample]) -> None:
        """Queue host samples; they are visible after the next flush."""
        self._writer.put_samples(samples)

    def flush(self, timeout_s: float = 10.0, *, settle: bool = False) -> bool:
        """Wait until everything offered so far is visible; ``settle`` also closes all traces. False = timed out."""
        return self._writer.flush(timeout_s, settle=settle)

    def trouble(self) -> str:
        """Return what is wrong now, as failed writes; empty = nothing."""
        return self._writer.trouble() or self._retention.trouble()

    def limits(self) -> Mapping[str, tuple[int, int]]:
        """Return what fills up: used, and most."""
        return {"queue_spans": self._writer.fill()}

    def close(self, deadline_s: float = 10.0) -> None:
        """Write what waits, close every trace and the file; may be called again."""
        if self._closed:
            return
        self._closed = True
        self._retention.stop()
        self._writer.stop(deadline_s)
        self._connection.close()

    # ---- SLI counts

    def count_spans(self, requests: Sequence[CountRequest], now_unix_nano: int, grace_ns: int) -> list[EventCounts]:
        """Return one EventCounts a request, in order, from one grouped pass (one more for each distinct ``where``).

        An event belongs to the window in which it ended; one that arrived more than ``grace_ns`` after its end is left
        out. Sampled spans weigh 1/probability. Open traces count: a span is visible once it is flushed.
        """
        operations = self._dimensions.operations.keys()
        found = counts.count(self._cursor, requests, operations, now_unix_nano, self._since, grace_ns)
        return [self._with_missing(*pair, grace_ns) for pair in zip(requests, found, strict=True)]

    def _with_missing(self, request: CountRequest, answer: EventCounts, grace_ns: int) -> EventCounts:
        """Say of counts which spans they lack: those that could not be written, or that came too late."""
        if not isinstance(request.sli, SpanSLI):
            return answer
        service, window, writer = request.sli.service, request.window, self._writer
        answer = with_lost(answer, *writer.lost.within(service, window), window, writer.loss.why)
        if answer.no_data != "no_traffic":
            return answer
        arrived = TimeWindow(window.start_unix_nano, window.end_unix_nano + grace_ns)
        return with_late(answer, writer.late.within(service, arrived)[0], grace_ns)

    def bad_spans(self, sli: SpanSLI, window: TimeWindow, limit: int) -> list[SpanRef]:
        """Return a few bad events of an SLI, failed ones first, then the slowest."""
        return examples.bad_spans(self._cursor, sli, window, limit)

    # ---- attribution (pasta_otel.slo.attribution.ports.SpanStore and HostSeries)

    def operation_self_times(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[OperationKey, Samples]:
        """Return the self time of server and internal (not module) spans: duration minus the union of its children."""
        return self._questions.operation_self_times(window, through, limit)

    def edge_gaps(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[EdgeKey, Samples]:
        """Return, per call edge, client span duration minus server span duration; the client's errors."""
        return self._questions.edges("gap_ns", window, through, limit)

    def edge_durations(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[EdgeKey, Samples]:
        """Return the client span durations per call edge; ``errors`` are client spans with an error status."""
        return self._questions.edges("duration_ns", window, through, limit)

    def module_self_times(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[ModuleKey, Samples]:
        """Return the self time of torch module spans by qualified module path."""
        return self._questions.module_self_times(window, through, limit)

    def known_requests(self) -> Mapping[OperationKey, TimeWindow]:
        """Return every (service, operation) with server spans, and from the first to the last of their ends."""
        return self._questions.known_requests()

    def host_samples(self, window: TimeWindow) -> Sequence[HostSample]:
        """Return the readings in the window, ordered by (service, pid, metric, time)."""
        return self._questions.host_samples(window)

    # ---- reports

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """Return every span of a trace as a record, earliest first.

        Raises:
            InputError: The id is not 32 hex digits.
        """
        if len(trace_id) != 32 or set(trace_id) - set("0123456789abcdef"):
            raise InputError(f"expected 32 lower-case hex digits, got {trace_id[:40]!r}", field="trace_id")
        return self._questions.trace(trace_id)

    def slow_requests(self, service: str, operation: str, window: TimeWindow, n: int) -> list[dict[str, Any]]:
        """Return the slowest server spans of an operation (``*`` = any): ``ref``, ``duration_ns``, ``error``, end."""
        return self._questions.slow_requests(service, operation, window, n)

    def observed_processes(self) -> Mapping[int, str]:
        """Return service by pid, from resources of this host (or of none) seen within the last minute."""
        return self._seen.recent(self._clock.monotonic_ns())

    # ---- inside

    def _cursor(self) -> Any:
        if self._closed:
            raise StateError("the span store is closed")
        return self._connection.cursor()

    def _say_aged(self, path: str) -> None:
        max_age_ns = int(self._config.max_age_s * 1e9)
        query = "select count(*) from spans where end_unix_nano > 0 and end_unix_nano < ?"
        with self._cursor() as cursor:
            spans = int(cursor.execute(query, [self._clock.unix_nano() - max_age_ns]).fetchall()[0][0])
        if spans:
            say_opened(path, spans, max_age_ns)

    def _first_event(self, now_unix_nano: int) -> int:
        # fetchall, here as elsewhere: a result that is not read to its end keeps a transaction open, and an old
        # transaction keeps deleted rows from being freed
        query = "select min(end_unix_nano) from spans where end_unix_nano > 0"
        earliest = self._connection.execute(query).fetchall()[0][0]
        return now_unix_nano if earliest is None else min(now_unix_nano, int(earliest))

    def _restore(self) -> None:
        """Take up the traces whose times were not written when the last process died."""
        names = ", ".join(f"s.{name}" for name in HELD_COLUMNS)
        query = f"""
            with recent as (select max(end_unix_nano) - {_RESTORED_NS} as since from spans)
            select {names} from spans s where s.end_unix_nano >= (select since from recent) and not exists (
              select 1 from span_times t where t.trace_hi = s.trace_hi and t.trace_lo = s.trace_lo
                and t.end_unix_nano >= (select since from recent))"""  # noqa: S608 - our own names
        columns = self._connection.execute(query).fetchnumpy()
        if len(columns["span_id"]):
            columns = {name: np.ma.getdata(column) for name, column in columns.items()}
            self._traces.add(columns, self._clock.monotonic_ns())

    def _export(self, meter: Meter) -> None:
        def size(_: CallbackOptions) -> Iterable[Observation]:
            if not self._closed:
                yield Observation(self._retention.size_bytes())

        def held(_: CallbackOptions) -> Iterable[Observation]:
            yield Observation(self._traces.spans)

        for name, callback in ((semconv.STORE_SIZE, size), (semconv.STORE_OPEN_SPANS, held)):
            spec = semconv.METRICS[name]
            meter.create_observable_gauge(name, [callback], spec.unit, spec.description)


class _Processes:
    """Which processes of this host sent spans, and when."""

    def __init__(self, host_name: str) -> None:
        self._host_name = host_name
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[str, int]] = {}

    def note(self, batch: SpanBatch, now_ns: int) -> None:
        for group in batch.groups:
            attributes = group.resource.attributes
            pid = attributes.get(semconv.PROCESS_PID)
            if isinstance(pid, int) and attributes.get(semconv.HOST_NAME, self._host_name) == self._host_name:
                with self._lock:
                    self._seen[pid] = (group.resource.service, now_ns)

    def recent(self, now_ns: int) -> dict[int, str]:
        with self._lock:
            self._seen = {pid: seen for pid, seen in self._seen.items() if now_ns - seen[1] <= _RECENT_PROCESS_NS}
            return {pid: service for pid, (service, _) in self._seen.items()}
