"""Keep the store within its age and size, from a thread of its own that the writer never waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry.metrics import Meter, NoOpMeter

from pasta_otel import semconv
from pasta_otel.clock import Clock

logger = logging.getLogger(__name__)

_SLACK = 0.1  # delete this share more than the excess, so that not every round has to delete


class Retention:
    """Delete what is too old or too much, every ``interval_s`` seconds.

    Args:
        open_cursor: Returns a new cursor.
        clock: Wall clock.
        max_age_ns: Spans and samples that ended longer ago are deleted.
        max_bytes: Above this many bytes the oldest spans are deleted.
        interval_s: Seconds between rounds.
        path: The store's file; None = it has none: its size is the memory it holds.
        meter: Where deletions are counted.
    """

    def __init__(  # noqa: PLR0913 - the parts of the world that it uses
        self,
        open_cursor: Callable[[], Any],
        clock: Clock,
        *,
        max_age_ns: int,
        max_bytes: int,
        interval_s: float,
        path: Path | None,
        meter: Meter | None = None,
    ) -> None:
        self._cursor, self._clock, self._path = open_cursor, clock, path
        self._max_age_ns, self._max_bytes, self._interval_s = max_age_ns, max_bytes, interval_s
        spec = semconv.METRICS[semconv.STORE_EXPIRED]
        self._expired = (meter or NoOpMeter("")).create_counter(spec.name, spec.unit, spec.description)
        self._must_compact = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-retention", daemon=True)

    def start(self) -> None:
        """Begin the rounds."""
        self._thread.start()

    def stop(self) -> None:
        """End them; waits for a round in progress."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def trouble(self) -> str:
        """Return what is wrong now; empty = nothing."""
        died = self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set()
        return "the thread that deletes old spans has died" if died else ""

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.round()
            except Exception:
                logger.warning("retention failed; it is tried again", exc_info=True)

    def round(self) -> int:
        """Delete what is due and return how many spans went."""
        with self._cursor() as cursor:
            aged = self._delete(cursor, self._clock.unix_nano() - self._max_age_ns, "age")
            return aged + self._shrink(cursor)

    def size_bytes(self) -> int:
        """Return how much the store holds: blocks in use and the write-ahead log, or memory without a file."""
        with self._cursor() as cursor:
            return self._size(cursor)

    def _size(self, cursor: Any) -> int:
        if self._path is None:
            row = cursor.execute("select sum(memory_usage_bytes) from duckdb_memory()").fetchall()[0]
            return int(row[0] or 0)
        row = cursor.execute("select block_size * used_blocks from pragma_database_size()").fetchall()[0]
        return int(row[0] or 0) + self._log_bytes()

    def _log_bytes(self) -> int:
        """Return the size of DuckDB's write-ahead log: what is written and not yet in the file (16 MiB and more)."""
        try:
            return self._path.with_name(f"{self._path.name}.wal").stat().st_size if self._path else 0
        except OSError:
            return 0  # there is none after a checkpoint

    def _shrink(self, cursor: Any) -> int:
        if self._must_compact and not self._compact(cursor):
            return 0  # what was deleted is not given back yet: the size says nothing
        size = self._size(cursor)
        if size > self._max_bytes and self._log_bytes() and self._compact(cursor):
            size = self._size(cursor)  # the same rows are smaller in the file than in the log
        if size <= self._max_bytes:
            return 0
        share = min(1.0, (size - self._max_bytes) / size + _SLACK)
        query = f"select approx_quantile(end_unix_nano, {share:.4f}) from spans where end_unix_nano > 0"  # noqa: S608
        row = cursor.execute(query).fetchall()[0]
        if row is None or row[0] is None:
            return 0
        deleted = self._delete(cursor, int(row[0]) + 1, "size")
        self._must_compact = True
        self._compact(cursor)
        return deleted

    def _compact(self, cursor: Any) -> bool:
        try:
            cursor.execute("checkpoint")
        except Exception:  # noqa: BLE001 - refused while somebody writes
            return False
        self._must_compact = False
        return True

    def _delete(self, cursor: Any, before_unix_nano: int, reason: str) -> int:
        deleted = 0
        for table, column in (
            ("spans", "case when end_unix_nano = 0 then raw_start_unix_nano else end_unix_nano end"),
            ("span_times", "end_unix_nano"),
            ("host_samples", "time_unix_nano"),
        ):
            row = cursor.execute(f"delete from {table} where {column} < ?", [before_unix_nano]).fetchone()  # noqa: S608
            if table == "spans":
                deleted = int(row[0])
        if deleted:
            self._expired.add(deleted, {"reason": reason})
        return deleted
