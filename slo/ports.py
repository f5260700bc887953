"""What the SLO controller asks of the world; ``pasta_otel.app`` hands in what answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pasta_otel.model import Attribution, EventCounts, TimeWindow


@dataclass(frozen=True, slots=True)
class SpanSLI:
    """Which spans are an SLO's events, and which of them are good (``metricSource.type: spans``).

    Attributes:
        service: ``service.name``.
        operation: Span name, or None for any.
        kind: ``server`` (default), ``client``, ``internal``, ``producer`` or ``consumer``.
        where: Span attributes that must equal these values.
        good_status: True when a span with status ERROR is bad (``good: status != error``).
        threshold_ns: A span longer than this is bad; None = no latency condition.
    """

    service: str
    operation: str | None = None
    kind: str = "server"
    where: tuple[tuple[str, str | int | float | bool], ...] = ()
    good_status: bool = True
    threshold_ns: int | None = None


@dataclass(frozen=True, slots=True)
class CountRequest:
    """One window of one SLI."""

    sli: Any  # SpanSLI, or another source's own frozen record
    window: TimeWindow
    options: dict[str, Any] = field(default_factory=dict)


class SLISource(Protocol):
    """Answer counts for many windows in one pass."""

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order; never raises for a source that is down: it says ``no_data``."""


class Attributor(Protocol):
    """Say why an SLO burns."""

    def attribute(self, sli: Any, baseline: TimeWindow, window: TimeWindow) -> Attribution:
        """Return ranked causes, or none."""
