"""Answers of the API: states, traces and "why", as JSON-ready documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pasta_otel.clock import Clock
from pasta_otel.errors import InputError
from pasta_otel.model import SpanSLI, TimeWindow
from pasta_otel.slo.controller import SLOController
from pasta_otel.slo.ports import Attributor
from pasta_otel.slo.report import attribution_to_json, state_to_json
from pasta_otel.slo.spec.model import SLO

DEFAULT_WINDOW_SECONDS = 300.0
BASELINE_FACTOR = 4.0


class TraceSource(Protocol):
    """Where whole traces lie."""

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """Return every span of a trace, earliest first; empty = unknown."""


class Questions:
    """Answer the API from a store, an attributor and a controller.

    Args:
        traces: Whole traces.
        attributor: Says why.
        controller: The states; None = no SLO is watched.
        slos: To ask "why" by an SLO's name.
        clock: Now.
    """

    def __init__(
        self,
        traces: TraceSource,
        attributor: Attributor,
        controller: SLOController | None,
        slos: Sequence[SLO],
        clock: Clock,
    ) -> None:
        self._traces, self._attributor, self._controller, self._clock = traces, attributor, controller, clock
        self._slis = {slo.name: slo.sli for slo in slos}

    def slos(self) -> list[dict[str, Any]]:
        """Return the states of the last tick."""
        return [state_to_json(state) for state in self._controller.states()] if self._controller else []

    def trace(self, trace_id: str) -> dict[str, Any] | None:
        """Return one trace, or None."""
        spans = self._traces.trace(trace_id)
        return {"trace_id": trace_id, "spans": spans} if spans else None

    def attribute(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Compare a window with the baseline that ends where it begins.

        Args:
            document: ``slo``, or ``service`` with or without ``operation``; ``window_seconds``, ``baseline_seconds``,
                ``ago_seconds`` (how long ago the window ended).

        Raises:
            InputError: Naming the field.
        """
        sli = self._sli(document)
        window_ns = _seconds_ns(document, "window_seconds", DEFAULT_WINDOW_SECONDS)
        baseline_ns = _seconds_ns(document, "baseline_seconds", window_ns / 1e9 * BASELINE_FACTOR)
        end = self._clock.unix_nano() - _seconds_ns(document, "ago_seconds", 0.0, least=0.0)
        window = TimeWindow(end - window_ns, end)
        baseline = TimeWindow(window.start_unix_nano - baseline_ns, window.start_unix_nano)
        return attribution_to_json(self._attributor.attribute(sli, baseline, window))

    def _sli(self, document: Mapping[str, Any]) -> Any:
        name = document.get("slo")
        if name is not None:
            if name not in self._slis:
                raise InputError(f"no such SLO: {name!r}", field="slo", kind="not_found")
            return self._slis[name]
        service, operation = document.get("service"), document.get("operation")
        if not isinstance(service, str) or not service:
            raise InputError("expected a service's name", field="service")
        if operation is not None and not isinstance(operation, str):
            raise InputError("expected an operation's name", field="operation")
        return SpanSLI(service, operation)


def _seconds_ns(document: Mapping[str, Any], field: str, default: float, least: float = 1e-3) -> int:
    value = document.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e9:
        raise InputError(f"expected seconds of at least {least:g}", field=field)
    return int(value * 1e9)
