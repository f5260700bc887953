"""Imported traces to where they go: a span store, or an OTLP destination."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from opentelemetry.metrics import Meter

from pasta_otel import semconv
from pasta_otel.errors import MissingError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.metrics import build_meter_provider
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.encoder import Scope, encode_spans, slice_columns
from pasta_otel.exporters.otlp.refusal import help_for
from pasta_otel.exporters.otlp.sender import Sender
from pasta_otel.exporters.receiver import wire
from pasta_otel.exporters.receiver.decode import TraceDecoder
from pasta_otel.exporters.receiver.otlpjson import to_protobuf
from pasta_otel.exporters.store import DuckDBSpanStore, StoreConfig
from pasta_otel.exporters.store.writer import DUPLICATE
from pasta_otel.model import Attributes, SpanColumns

ROWS_A_REQUEST = 4000
REQUEST_BYTES = 3_500_000
"""gRPC servers refuse messages above 4 MiB unless told otherwise."""
KEEP_ALL_S, KEEP_ALL_BYTES = 4e9, 2**60  # importing an old trace must not make the store forget it: since 1970, 1 EiB
QUEUE_SPANS, STORE_MEMORY_BYTES = 20_000, 256 << 20  # an import of 1 GB stays within 1 GB of memory
ROOM_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Delivered:
    """What became of the spans: ``spans = ok + sum(dropped)``.

    Attributes:
        spans: How many there were.
        ok: How many arrived.
        dropped: Why the others did not.
        lost: How many of the dropped should have arrived: neither bad nor there already.
        why: What is wrong with the destination.
        aged: How many ended longer ago than a sidecar keeps spans by default.
    """

    spans: int = 0
    ok: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    why: str = ""
    aged: int = 0

    def note_ends(self, ends: Sequence[int]) -> None:
        """Take note of when spans ended, in ns; 0 = unfinished."""
        limit = time.time_ns() - int(StoreConfig().max_age_s * 1e9)
        self.aged += sum(0 < end < limit for end in ends)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        return {
            "spans": self.spans,
            "ok": self.ok,
            "dropped": dict(self.dropped),
            "lost": self.lost,
            "why": self.why,
            "aged": self.aged,
        }


class SpanTarget(Protocol):
    """Takes encoded requests."""

    def put(self, body: bytes, rejected: int = 0) -> None:
        """Take an ``ExportTraceServiceRequest``; ``rejected`` spans of it were already left out."""

    def close(self) -> Delivered:
        """Deliver what waits and say what became of everything."""


@contextmanager
def import_meter(service: str, config: OtlpConfig | None = None) -> Iterator[Meter]:
    """Give a meter whose points are sent, by default to what ``OTEL_EXPORTER_OTLP_*`` say, when the block ends."""
    config = config or OtlpConfig.from_env(signal="metrics")
    provider = build_meter_provider(config=config, attributes={semconv.SERVICE_NAME: service})
    try:
        yield provider.get_meter(semconv.SCOPE)
    finally:
        provider.shutdown()


def put_columns(target: SpanTarget, columns: SpanColumns, resource: Attributes) -> None:
    """Encode spans in requests that servers take, and hand them over."""
    for start in range(0, len(columns), ROWS_A_REQUEST):
        _put_rows(target, slice_columns(columns, start, min(start + ROWS_A_REQUEST, len(columns))), resource)


def _put_rows(target: SpanTarget, columns: SpanColumns, resource: Attributes) -> None:
    body = encode_spans(columns, resource, Scope(semconv.SCOPE))
    if len(body) <= REQUEST_BYTES or len(columns) == 1:
        target.put(body)
        return
    middle = len(columns) // 2
    for part in (slice_columns(columns, 0, middle), slice_columns(columns, middle, len(columns))):
        _put_rows(target, part, resource)


def put_json(target: SpanTarget, request: bytes) -> None:
    """Hand over an OTLP/JSON request; spans with a bad field are left out and counted.

    Raises:
        InputError: A field outside a span has the wrong form.
    """
    converted = to_protobuf(request, wire.TRACE_REQUEST)
    target.put(converted.body, converted.rejected)


class StoreTarget:
    """A DuckDB store file.

    Args:
        path: The file; created when it is not there.

    Raises:
        MissingError: DuckDB is not installed, or another process holds the file.
    """

    def __init__(self, path: str) -> None:
        self._ledger = Ledger([DuckDBSpanStore.name])
        self._delivered = Delivered()
        config = StoreConfig(
            max_age_s=KEEP_ALL_S,
            max_bytes=KEEP_ALL_BYTES,
            queue_spans=QUEUE_SPANS,
            memory_limit_bytes=STORE_MEMORY_BYTES,
            check_all=True,
        )
        self._store = DuckDBSpanStore.open(path, self._ledger, config)
        self._decoder = TraceDecoder()

    def put(self, body: bytes, rejected: int = 0) -> None:
        """Queue a request's spans, waiting for room."""
        decoded = self._decoder.decode(body, time.time_ns())
        batch = decoded.batch
        batch.arrived_unix_nano = max(batch.end_time_unix_nano, default=batch.arrived_unix_nano)  # not late: imported
        deadline = time.monotonic() + ROOM_TIMEOUT_S
        while not self._store.has_room(len(batch)):
            if time.monotonic() > deadline:
                raise MissingError(f"the store took no spans for {ROOM_TIMEOUT_S:.0f} s", how="check the disk it is on")
            time.sleep(0.01)
        self._delivered.note_ends(batch.end_time_unix_nano)
        refused = Counter(decoded.rejected) + Counter({"bad_field": rejected} if rejected else {})
        self._ledger.receive(decoded.received + rejected, refused)
        if len(batch):
            self._store.offer(batch)

    def close(self) -> Delivered:
        """Write what waits and close the file."""
        self._store.flush(ROOM_TIMEOUT_S, settle=True)
        done = self._delivered
        done.why = self._store.trouble()
        self._store.close(ROOM_TIMEOUT_S)
        account = self._ledger.snapshot().as_dict()
        sink = account["sinks"][DuckDBSpanStore.name]
        done.spans, done.ok = account["received"], sink["ok"]
        done.dropped = Counter(account["rejected"]) + Counter(sink["dropped"])
        done.lost = sum(count for reason, count in sink["dropped"].items() if reason != DUPLICATE)
        return done


class OtlpTarget:
    """An OTLP destination, by default what ``OTEL_EXPORTER_OTLP_*`` say.

    Args:
        config: The destination.
    """

    def __init__(self, config: OtlpConfig | None = None) -> None:
        self._sender = Sender(config or OtlpConfig.from_env())
        self._decoder = TraceDecoder()
        self._delivered = Delivered()

    def put(self, body: bytes, rejected: int = 0) -> None:
        """Send a request; what the decoder refuses is left out, so that one bad span cannot cost the request.

        Raises:
            MissingError: Nothing could be sent at all: the destination is wrong or down.
        """
        decoded = self._decoder.decode(body, time.time_ns())
        done = self._delivered
        done.spans += decoded.received + rejected
        done.dropped.update(decoded.rejected)
        if rejected:
            done.dropped["bad_field"] += rejected
        if not len(decoded.batch):
            return
        outcome = self._sender.send(decoded.batch.body, len(decoded.batch))
        done.ok += outcome.ok
        done.note_ends(decoded.batch.end_time_unix_nano)
        if outcome.dropped:
            done.dropped[outcome.reason] += outcome.dropped
            done.lost += outcome.dropped
            done.why = f"{self._sender.config.target} took not all: {outcome.reason}"
        if not done.ok and outcome.dropped:
            target = self._sender.config.target
            raise MissingError(f"nothing reached {target}: {outcome.reason}", how=help_for(outcome.reason))

    def close(self) -> Delivered:
        """Release the connection."""
        self._sender.close()
        return self._delivered
