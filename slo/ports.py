"""What the SLO controller asks of the world; ``pasta_otel.app`` hands in what answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pasta_otel.model import Attribution, CountRequest, EventCounts, SpanRef, TimeWindow
from pasta_otel.slo.evaluation import ActionRecord, Evaluation


class SLISource(Protocol):
    """Answer counts for many windows in one pass."""

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order; never raises for a source that is down: it says ``no_data``."""


class Attributor(Protocol):
    """Say why an SLO burns."""

    def attribute(self, sli: Any, baseline: TimeWindow, window: TimeWindow) -> Attribution:
        """Return ranked causes, or none."""


class Responder(Protocol):
    """Act on an evaluation, or decline to, and say so."""

    def respond(self, evaluation: Evaluation) -> Sequence[ActionRecord]:
        """Return one record for everything done, undone or refused at this tick."""


class BadExamples(Protocol):
    """Name traces that a person can open to see what went wrong."""

    def bad_spans(self, sli: Any, window: TimeWindow, limit: int) -> Sequence[SpanRef]:
        """Return a few bad events of the window; empty when the source knows no traces."""
