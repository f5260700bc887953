"""SDK spans to OTLP: the exporter for BatchSpanProcessor, and the provider used when the service has none."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.metrics import Meter
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Link, Status

from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.counts import SinkCounts, observe
from pasta_otel.exporters.otlp.fork import renew_in_children
from pasta_otel.exporters.otlp.resource import ProcessIdentity, build_resource, default_identity, renew_resource
from pasta_otel.exporters.otlp.sender import Outcome, Sender
from pasta_otel.exporters.otlp.text import clean_utf8, is_clean
from pasta_otel.model import Attributes

_logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 5.0


class PastaSpanExporter(SpanExporter):
    """Export SDK spans: bad text is repaired, partial success is read, every span is accounted for.

    Args:
        config: Destination.
        identity: If given, ``service.instance.id`` and ``process.pid`` of every resource are this process's own, also
            in a forked child of an SDK that does not renew them.
        sender: How to send; made from ``config`` if not given.
    """

    def __init__(
        self, config: OtlpConfig, *, identity: ProcessIdentity | None = None, sender: Sender | None = None
    ) -> None:
        self._identity = identity
        self._sender = sender or Sender(config)
        self._max_bytes = config.max_request_bytes
        self._lock = threading.Lock()
        self._received = self._ok = 0
        self._dropped: Counter[str] = Counter()
        self._closed = False
        renew_in_children(self)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; called on the processor's thread."""
        with self._lock:
            self._received += len(spans)
        outcomes = [Outcome(0, len(spans), "shutdown")] if self._closed else list(self._send(spans))
        with self._lock:
            for outcome in outcomes:
                self._ok += outcome.ok
                if outcome.dropped:
                    self._dropped[outcome.reason] += outcome.dropped
        failed = any(outcome.dropped and outcome.reason != "rejected" for outcome in outcomes)
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def counts(self) -> SinkCounts:
        """Return this process's account of what reached the exporter."""
        with self._lock:
            done = self._ok + sum(self._dropped.values())
            return SinkCounts(self._received, self._ok, dict(self._dropped), self._received - done)

    def limit(self, timeout_s: float) -> None:
        """Let every present and later export end within ``timeout_s`` from now."""
        self._sender.limit(timeout_s)

    def abort(self) -> None:
        """End an export in flight."""
        self._sender.abort()

    def shutdown(self) -> None:
        """Refuse further spans and release the connection."""
        self._closed = True
        self._sender.abort()
        self._sender.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:  # noqa: ARG002  the SDK's signature
        """Nothing waits here."""
        return True

    def _send(self, spans: Sequence[ReadableSpan]) -> Iterable[Outcome]:
        try:
            body = self._encode(spans)
        except Exception:
            _logger.exception("a batch of spans cannot be encoded; trying one by one")
            if len(spans) == 1:
                yield Outcome(0, 1, "encode")
                return
            for span in spans:
                yield from self._send([span])
            return
        if len(body) <= self._max_bytes:
            yield self._sender.send(body, len(spans))
        elif len(spans) == 1:
            yield Outcome(0, 1, "too_large")
        else:
            half = len(spans) // 2
            yield from self._send(spans[:half])
            yield from self._send(spans[half:])

    def _encode(self, spans: Sequence[ReadableSpan]) -> bytes:
        request = encode_spans([clean_span(span) for span in spans])
        if self._identity is not None:
            for group in request.resource_spans:
                renew_resource(group.resource, self._identity)
        return bytes(request.SerializeToString())

    def after_fork(self) -> None:
        """Start a new account in a child."""
        self._lock = threading.Lock()
        self._received = self._ok = 0
        self._dropped = Counter()


def clean_span(span: ReadableSpan) -> ReadableSpan:
    """Return the span itself, or a copy whose names, attributes, events and status are valid UTF-8."""
    if _is_clean_span(span):
        return span
    return ReadableSpan(
        name=clean_utf8(span.name),
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=_clean_attributes(span.attributes),
        events=[
            Event(clean_utf8(item.name), _clean_attributes(item.attributes), item.timestamp) for item in span.events
        ],
        links=[Link(item.context, _clean_attributes(item.attributes)) for item in span.links],
        kind=span.kind,
        status=_clean_status(span.status),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _is_clean_span(span: ReadableSpan) -> bool:
    return (
        is_clean(span.name)
        and is_clean(span.status.description or "")
        and _are_clean(span.attributes)
        and all(is_clean(event.name) and _are_clean(event.attributes) for event in span.events)
        and all(_are_clean(link.attributes) for link in span.links)
    )


def _are_clean(attributes: Mapping[str, Any] | None) -> bool:
    return not attributes or all(is_clean(key) and _is_clean_value(value) for key, value in attributes.items())


def _is_clean_value(value: Any) -> bool:
    if isinstance(value, str):
        return is_clean(value)
    if isinstance(value, Mapping):
        return _are_clean(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return all(_is_clean_value(item) for item in value)
    return True


def _clean_attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {clean_utf8(key): _clean_value(value) for key, value in (attributes or {}).items()}


def _clean_value(value: Any) -> Any:
    if isinstance(value, str):
        return clean_utf8(value)
    if isinstance(value, Mapping):
        return _clean_attributes(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return tuple(_clean_value(item) for item in value)
    return value


def _clean_status(status: Status) -> Status:
    return status if status.description is None else Status(status.status_code, clean_utf8(status.description))


class PastaSpanProcessor(BatchSpanProcessor):
    """The SDK's BatchSpanProcessor with a shutdown that keeps its time, and an account of its own queue.

    Args:
        exporter: Where spans go.
        shutdown_timeout_s: How long ``shutdown`` may take, seconds (the SDK's own waits 30 s).
    """

    def __init__(self, exporter: PastaSpanExporter, *, shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        super().__init__(exporter)
        self._pasta_exporter, self._shutdown_timeout_s = exporter, shutdown_timeout_s
        self._count_lock = threading.Lock()
        self._ended = self._overflowed = 0
        self._ended_late = 0
        self._stopped = self._finished = False
        renew_in_children(self)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span; never blocks."""
        if not (span.context and span.context.trace_flags.sampled):
            return
        with self._count_lock:
            self._ended += 1
            self._ended_late += self._stopped
        super().on_end(span)

    def counts(self) -> SinkCounts:
        """Return this process's account: queue and exporter together.

        Spans that the full queue pushed out are known exactly whenever no export runs; until then they are pending.
        """
        with self._count_lock:
            ended, late = self._ended, self._ended_late
        sent = self._pasta_exporter.counts()
        self._overflowed = max(self._overflowed, self._pushed_out())
        dropped = Counter(sent.dropped)
        dropped.update({key: n for key, n in (("queue_full", self._overflowed), ("shutdown", late)) if n})
        left = max(ended - sent.ok - sum(dropped.values()), 0)
        if self._finished and left:
            dropped["shutdown"] += left
            left = 0
        return SinkCounts(ended, sent.ok, dict(dropped), left)

    def _pushed_out(self) -> int:
        batch = self._batch_processor
        if not batch._export_lock.acquire(blocking=False):  # noqa: SLF001  the SDK shows no count of its queue
            return 0
        try:
            with self._count_lock:
                ended = self._ended - self._ended_late
                waiting = len(batch._queue)  # noqa: SLF001  as above
                return ended - self._pasta_exporter.counts().received - waiting
        finally:
            batch._export_lock.release()  # noqa: SLF001  as above

    def shutdown(self) -> None:
        """Send what is queued within the time limit, then stop."""
        with self._count_lock:
            self._stopped = True
        self._pasta_exporter.limit(self._shutdown_timeout_s)
        timer = threading.Timer(self._shutdown_timeout_s, self._pasta_exporter.abort)
        timer.daemon = True
        timer.start()
        self._batch_processor.shutdown(timeout_millis=int(1000 * self._shutdown_timeout_s))
        timer.cancel()
        self._finished = True

    def after_fork(self) -> None:
        """Start a new account in a child."""
        self._count_lock = threading.Lock()
        self._ended = self._overflowed = self._ended_late = 0
        self._finished = self._stopped


def build_tracer_provider(  # noqa: PLR0913  keyword-only: everything it touches is a parameter
    config: OtlpConfig | None = None,
    *,
    attributes: Attributes | None = None,
    identity: ProcessIdentity | None = None,
    sampler: Sampler | None = None,
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
    meter: Meter | None = None,
    export: bool = True,
    console: bool = False,
) -> TracerProvider:
    """Return a provider for a service that has none; nothing global is set.

    ``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_*``, ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` are honoured.

    Args:
        config: Destination; from ``OTEL_EXPORTER_OTLP_*`` if not given.
        attributes: Resource attributes that the caller knows.
        identity: Shared with the process's RowExporter and meter provider, so that all say one instance id.
        sampler: Instead of the environment's.
        shutdown_timeout_s: How long the provider's shutdown may take.
        meter: Where ``pasta.sink.spans.*`` is exported for sink ``otlp_spans``.
        export: Send spans by OTLP.
        console: Also write spans to stdout, as JSON.
    """
    identity = identity or default_identity()
    provider = TracerProvider(sampler=sampler, resource=build_resource(identity, attributes), shutdown_on_exit=False)
    if console:
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
    if not export:
        return provider
    exporter = PastaSpanExporter(config or OtlpConfig.from_env(), identity=identity)
    processor = PastaSpanProcessor(exporter, shutdown_timeout_s=shutdown_timeout_s)
    provider.add_span_processor(processor)
    if meter is not None:
        observe(meter, "otlp_spans", processor.counts)
    return provider


__all__ = ["PastaSpanExporter", "PastaSpanProcessor", "build_tracer_provider", "clean_span"]
