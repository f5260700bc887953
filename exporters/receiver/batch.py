"""What the receiver hands on: spans by column, and the Protocol of what takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ResourceInfo:
    """A resource, decoded once however many batches carry it.

    Attributes:
        key: Its serialised form: the identity.
        service: ``service.name``, or ``unknown_service``.
        attributes: All attributes, as JSON-compatible values.
    """

    key: bytes
    service: str
    attributes: Mapping[str, Any]


class Group(NamedTuple):
    """A run of consecutive rows that share resource and scope."""

    resource: ResourceInfo
    scope: str
    rows: int


@dataclass(slots=True, eq=False)
class SpanBatch:
    """N accepted spans by column, in the order in which they arrived.

    Attributes:
        body: A serialised ``ExportTraceServiceRequest`` that holds exactly these spans, in valid UTF-8.
        groups: Runs of rows that share resource and scope; their rows add up to N.
        trace_id: 16 bytes each, never all zero.
        span_id: 8 bytes each, never all zero.
        parent_span_id: 8 bytes each; all zero means a root.
        name: Operation names.
        kind: OTLP SpanKind; 0 (unspecified) is read as 1 (internal).
        start_time_unix_nano: As sent.
        end_time_unix_nano: As sent; 0 means unfinished.
        status: OTLP StatusCode: 2 is an error.
        status_message: As sent.
        trace_state: W3C tracestate, mostly empty.
        attributes: One JSON object each.
        events: One JSON array each, or None.
        links: One JSON array each, or None.
        arrived_unix_nano: When the batch arrived, wall time.
    """

    body: bytes
    arrived_unix_nano: int
    groups: list[Group] = field(default_factory=list)
    trace_id: list[bytes] = field(default_factory=list)
    span_id: list[bytes] = field(default_factory=list)
    parent_span_id: list[bytes] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    start_time_unix_nano: list[int] = field(default_factory=list)
    end_time_unix_nano: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    status_message: list[str] = field(default_factory=list)
    trace_state: list[str] = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)
    events: list[str | None] = field(default_factory=list)
    links: list[str | None] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self.span_id)


class PointBatch(NamedTuple):
    """N accepted metric points: only the bytes, which are forwarded."""

    body: bytes
    points: int

    def __len__(self) -> int:
        """Return the number of points."""
        return self.points


class SpanSink(Protocol):
    """Takes every accepted batch and settles each span of it in the ledger, under its own name."""

    name: str

    def has_room(self, spans: int) -> bool:
        """Say whether a batch of this size would be queued; False makes the receiver answer "try again later"."""

    def offer(self, batch: SpanBatch) -> bool:
        """Queue a batch without blocking; a sink that cannot settles it as dropped and returns False."""


class PointSink(Protocol):
    """Takes every accepted batch of metric points and settles it in the points' ledger."""

    name: str

    def offer_points(self, batch: PointBatch) -> bool:
        """Queue a batch without blocking; a sink that cannot settles it as dropped and returns False."""
