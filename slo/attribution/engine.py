"""The attribution: two windows of one store in, ranked causes out."""

from __future__ import annotations

from typing import Any

from opentelemetry.metrics import Meter
from opentelemetry.trace import Tracer

from pasta_otel import semconv
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.errors import InputError
from pasta_otel.model import Attribution, OperationKey, SpanSLI, TimeWindow
from pasta_otel.slo.attribution.explain import explain
from pasta_otel.slo.attribution.missing import advice, incomplete
from pasta_otel.slo.attribution.ports import HostSeries, RequestDirectory, SpanStore
from pasta_otel.slo.attribution.rank import rank
from pasta_otel.slo.attribution.record import ANY_OPERATION, Record, make_record, take_snapshot
from pasta_otel.slo.attribution.thresholds import Thresholds


class AttributionEngine:
    """Say why an SLO burns: the ``Attributor`` of ``slo.ports``.

    Args:
        store: Answers the questions about spans.
        host: Answers for host counters, or None.
        limits: Thresholds.
        clock: For the time the analysis took.
        meter: Records our own metrics, or None.
        tracer: Records one span per analysis, or None.
    """

    def __init__(  # noqa: PLR0913 - everything the world offers, by keyword
        self,
        store: SpanStore,
        host: HostSeries | None = None,
        *,
        limits: Thresholds | None = None,
        clock: Clock | None = None,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._store, self._host = store, host
        self._limits, self._clock, self._tracer = limits or Thresholds(), clock or SystemClock(), tracer
        self._duration = (
            meter.create_histogram(semconv.ATTRIBUTION_DURATION, unit="s", description="How long an attribution took.")
            if meter
            else None
        )

    def attribute(self, sli: Any, baseline: TimeWindow, window: TimeWindow) -> Attribution:
        """Return ranked causes of what changed between the windows, or none.

        Args:
            sli: A ``SpanSLI``, or any record with ``service`` and, if it has one, ``operation``.
            baseline: Normal operation.
            window: The burn.

        Raises:
            InputError: The SLI names no service.
        """
        if self._tracer is None:
            return self._attribute(sli, baseline, window)
        with self._tracer.start_as_current_span("pasta.attribution") as span:
            answer = self._attribute(sli, baseline, window)
            span.set_attribute("pasta.attribution.causes", len(answer.causes))
            return answer

    def _attribute(self, sli: Any, baseline: TimeWindow, window: TimeWindow) -> Attribution:
        started = self._clock.monotonic_ns()
        record = self._record(own_operation(sli), baseline, window)
        missing = self._missing(record)
        causes = () if missing else rank(record, explain(record), sli)
        took = self._clock.monotonic_ns() - started
        if self._duration is not None:
            self._duration.record(took / 1e9, {"outcome": "cause" if causes else "no_cause"})
        return Attribution(causes=causes, baseline=baseline, window=window, took_ns=took, incomplete=missing)

    def _missing(self, record: Record) -> str:
        missing = incomplete(record)
        if missing and isinstance(self._store, RequestDirectory):
            return f"{missing}; {advice(record.own, self._store.known_requests())}"
        return missing

    def _record(self, own: OperationKey, baseline: TimeWindow, window: TimeWindow) -> Record:
        host = ((), ()) if self._host is None else (self._host.host_samples(baseline), self._host.host_samples(window))
        before, after = take_snapshot(self._store, baseline, own), take_snapshot(self._store, window, own)
        lengths = (_length_ns(baseline), _length_ns(window))
        return make_record(own, before, after, self._limits, host=host, lengths_ns=lengths)


def _length_ns(window: TimeWindow) -> int:
    return window.end_unix_nano - window.start_unix_nano


def own_operation(sli: Any) -> OperationKey:
    """Return whose requests an SLI counts; ``*`` stands for any operation.

    Raises:
        InputError: The SLI names no service.
    """
    service = getattr(sli, "service", "")
    if not service:
        raise InputError("attribution needs an SLI that names a service", field="service")
    return OperationKey(service, (sli.operation if isinstance(sli, SpanSLI) else None) or ANY_OPERATION)
