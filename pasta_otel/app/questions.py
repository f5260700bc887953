"""Answers of the API: states and traces as JSON-ready documents."""

from __future__ import annotations

from typing import Any, Protocol

from pasta_otel.slo.controller import SLOController
from pasta_otel.slo.report import evaluation_to_json


class TraceSource(Protocol):
    """Where whole traces lie."""

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """Return every span of a trace, earliest first; empty = unknown."""


class Questions:
    """Answer the API from a store and a controller.

    Args:
        traces: Whole traces.
        controller: The states; None = no SLO is watched.
    """

    def __init__(self, traces: TraceSource, controller: SLOController | None) -> None:
        self._traces, self._controller = traces, controller

    def slos(self) -> dict[str, Any]:
        """Return the states of the last tick and its time; no time before the first one."""
        controller = self._controller
        if controller is None or controller.evaluation is None:
            return {"time": None, "slos": []}
        return evaluation_to_json(controller.evaluation)

    def slo_history(self) -> dict[str, Any]:
        """Return budget and burn rate over time by SLO."""
        return {"history": self._controller.history() if self._controller else {}}

    def trace(self, trace_id: str) -> dict[str, Any] | None:
        """Return one trace, or None."""
        spans = self._traces.trace(trace_id)
        return {"trace_id": trace_id, "spans": spans} if spans else None
