"""Spans of the synthetic world as OTLP requests, one a service, as the services would send them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pasta_otel import semconv
from pasta_otel.testing.spans import MemorySpan

KINDS = {"internal": 1, "server": 2, "client": 3}
BATCH = 2000


def requests(spans: Iterable[MemorySpan]) -> Iterator[bytes]:
    """Yield serialised requests of at most BATCH spans."""
    by_service: dict[str, list[MemorySpan]] = defaultdict(list)
    for span in spans:
        by_service[span.service].append(span)
    for service, own in by_service.items():
        for start in range(0, len(own), BATCH):
            yield _request(service, own[start : start + BATCH])


def _request(service: str, spans: list[MemorySpan]) -> bytes:
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    _attribute(resource.resource, semconv.SERVICE_NAME, service)
    scope = resource.scope_spans.add()
    for span in spans:
        sent = scope.spans.add(
            trace_id=bytes.fromhex(span.trace_id),
            span_id=bytes.fromhex(span.span_id),
            parent_span_id=bytes.fromhex(span.parent_span_id),
            name=span.operation,
            kind=KINDS[span.kind],
            start_time_unix_nano=span.start_time_unix_nano,
            end_time_unix_nano=span.end_time_unix_nano,
        )
        if span.error:
            sent.status.code = 2
        for name, value in ((semconv.MODULE_PATH, span.module), (semconv.SERVER_ADDRESS, span.peer)):
            if value:
                _attribute(sent, name, value)
    return message.SerializeToString()


def _attribute(owner: object, name: str, value: str) -> None:
    pair = owner.attributes.add(key=name)  # type: ignore[attr-defined]
    pair.value.string_value = value
