"""The controller's own metrics and spans, on instruments that are handed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation
from opentelemetry.trace import Link, NoOpTracer, SpanContext, TraceFlags, Tracer

from pasta_otel import semconv
from pasta_otel.model import SpanRef
from pasta_otel.slo.alerts import AlertChange, condition_text
from pasta_otel.slo.evaluation import SLOState, Transition
from pasta_otel.slo.windows import duration_text

States = Callable[[], Sequence[SLOState]]


class Telemetry:
    """Metrics ``pasta.slo.*`` and one span for every change of verdict.

    Args:
        states: The states of the last tick; gauges read them when they are collected, so that an SLO without data has
            no stale value.
        meter: Records metrics; None = nowhere.
        tracer: Records transitions; None = nowhere.
    """

    def __init__(self, states: States, meter: Meter | None, tracer: Tracer | None) -> None:
        meter = meter or NoOpMeter(semconv.SCOPE)
        self._tracer = tracer or NoOpTracer()
        self._states = states
        self._transitions = _counter(meter, semconv.SLO_TRANSITIONS)
        self._missed = _counter(meter, semconv.SLO_TICKS_MISSED)
        self._errors = _counter(meter, semconv.SLO_ERRORS)
        spec = semconv.METRICS[semconv.SLO_TICK_DURATION]
        self._duration = meter.create_histogram(spec.name, unit=spec.unit, description=spec.description)
        self._gauges(meter)

    def _gauges(self, meter: Meter) -> None:
        readers: dict[str, Callable[[SLOState], Iterator[Observation]]] = {
            semconv.SLO_OBJECTIVE: lambda state: iter([Observation(state.objective, _labels(state))]),
            semconv.SLO_BURN_RATE: _burn_rates,
            semconv.SLO_BUDGET_REMAINING: _budget,
            semconv.SLO_BURNING: _burning,
            semconv.SLO_NO_DATA: _no_data,
            semconv.SLO_ALERT_FIRING: _alerts,
        }
        for name, read in readers.items():
            spec = semconv.METRICS[name]
            meter.create_observable_gauge(
                spec.name, callbacks=[self._callback(read)], unit=spec.unit, description=spec.description
            )

    def _callback(
        self, read: Callable[[SLOState], Iterator[Observation]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [observation for state in self._states() for observation in read(state)]

        return observe

    def tick_took(self, duration_ns: int) -> None:
        """Record how long a tick took."""
        self._duration.record(duration_ns / 1e9)

    def missed(self, ticks: int) -> None:
        """Record ticks that were skipped."""
        self._missed.add(ticks)

    def error(self, part: str) -> None:
        """Record an error that the controller survived."""
        self._errors.add(1, {"part": part})

    def transition(self, transition: Transition, state: SLOState, bad: Sequence[SpanRef]) -> None:
        """Record a change of verdict as a span that links to traces of bad events."""
        self._transitions.add(1, {"slo": transition.slo, "to": transition.after})
        attributes: dict[str, Any] = {
            semconv.SLO_NAME: transition.slo,
            semconv.SLO_FROM: transition.before,
            semconv.SLO_TO: transition.after,
            semconv.SLO_REASON: state.reason or state.detail,
        }
        causes = state.attribution.causes if state.attribution else ()
        if causes:
            attributes[semconv.SLO_CAUSE] = f"{causes[0].kind} {causes[0].target}"
        span = self._tracer.start_span(
            semconv.SLO_SPAN,
            context=Context(),
            attributes=attributes,
            links=[Link(_context(ref), {semconv.LINK_METHOD: "id"}) for ref in bad],
            start_time=transition.time_unix_nano,
        )
        span.end(transition.time_unix_nano)

    def alert(self, change: AlertChange, time_unix_nano: int, bad: Sequence[SpanRef]) -> None:
        """Record that an alert of an AlertPolicy fires or is resolved, as a span that links to traces of bad events."""
        rule = change.state.rule
        span = self._tracer.start_span(
            semconv.SLO_ALERT_SPAN,
            context=Context(),
            attributes={
                semconv.SLO_NAME: change.slo,
                semconv.SLO_ALERT_POLICY: rule.policy,
                semconv.SLO_ALERT_CONDITION: rule.condition,
                semconv.SLO_ALERT_SEVERITY: rule.severity,
                semconv.SLO_TO: "firing" if change.firing else "resolved",
                semconv.SLO_REASON: change.state.reason or condition_text(rule),
            },
            links=[Link(_context(ref), {semconv.LINK_METHOD: "id"}) for ref in bad],
            start_time=time_unix_nano,
        )
        span.end(time_unix_nano)


def _counter(meter: Meter, name: str) -> Any:
    spec = semconv.METRICS[name]
    return meter.create_counter(spec.name, unit=spec.unit, description=spec.description)


def _labels(state: SLOState) -> dict[str, str]:
    return {"slo": state.name, "service": state.service}


def _burn_rates(state: SLOState) -> Iterator[Observation]:
    seen: set[str] = set()
    for rate in state.burn_rates:
        for window_ns, value in ((rate.long_window_ns, rate.long), (rate.short_window_ns, rate.short)):
            window = duration_text(window_ns)
            if value is not None and window not in seen:
                seen.add(window)
                yield Observation(value, {**_labels(state), "window": window})


def _budget(state: SLOState) -> Iterator[Observation]:
    if state.budget_remaining is not None:
        yield Observation(state.budget_remaining, _labels(state))


def _burning(state: SLOState) -> Iterator[Observation]:
    if state.verdict != "no_data":
        yield Observation(int(state.verdict == "burning"), _labels(state))


def _no_data(state: SLOState) -> Iterator[Observation]:
    if state.verdict == "no_data":
        yield Observation(1, {**_labels(state), "reason": state.reason or "absent"})


def _alerts(state: SLOState) -> Iterator[Observation]:
    for alert in state.alerts:
        rule = alert.rule
        named = {"policy": rule.policy, "condition": rule.condition, "severity": rule.severity}
        yield Observation(int(alert.phase == "firing"), {**_labels(state), **named})


def _context(ref: SpanRef) -> SpanContext:
    return SpanContext(int(ref.trace_id, 16), int(ref.span_id, 16), is_remote=True, trace_flags=TraceFlags(1))
