"""Histograms that were counted outside the SDK join what the SDK exports: one batch, one resource, exemplars kept.

The SDK records one measurement at a time (2 us each) and has no weights; GPU work comes in batches of thousands, each
standing for many. OpenTelemetry's specification knows this as a MetricProducer; the Python SDK has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.metrics._internal.exemplar import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from pasta_otel import semconv
from pasta_otel.model import Exemplar, HistogramPoint

Source = Callable[[], Sequence[HistogramPoint]]


def with_histograms(data: MetricsData | None, name: str, points: Sequence[HistogramPoint]) -> MetricsData | None:
    """Return the SDK's data with one more histogram metric, in our scope and under the data's own resource.

    Our scope comes once even where the SDK has it already: its OTLP encoder keeps one entry a scope, the last.

    Args:
        data: What the SDK collected; None = nothing.
        name: A histogram of ``semconv.METRICS``.
        points: Its cumulative points; none = the data comes back as it is.
    """
    if not points:
        return data
    spec = semconv.METRICS[name]
    histogram = Histogram([_point(point) for point in points], AggregationTemporality.CUMULATIVE)
    metric = Metric(spec.name, spec.description, spec.unit, histogram)
    groups = list(data.resource_metrics) if data is not None else []
    first = groups[0] if groups else ResourceMetrics(Resource.get_empty(), [], "")
    groups[:1] = [ResourceMetrics(first.resource, _with(metric, first.scope_metrics), first.schema_url)]
    return MetricsData(groups)


def _with(metric: Metric, scopes: Sequence[ScopeMetrics]) -> list[ScopeMetrics]:
    """Return scopes with a metric in ours."""
    ours = next((one for one in scopes if one.scope.name == semconv.SCOPE), None)
    if ours is None:
        return [*scopes, ScopeMetrics(InstrumentationScope(semconv.SCOPE), [metric], "")]
    joined = ScopeMetrics(ours.scope, [*ours.metrics, metric], ours.schema_url)
    return [joined if one is ours else one for one in scopes]


def _point(point: HistogramPoint) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=point.attributes,
        start_time_unix_nano=point.start_time_unix_nano,
        time_unix_nano=point.time_unix_nano,
        count=sum(point.counts),
        sum=point.total,
        bucket_counts=point.counts,
        explicit_bounds=point.bounds,
        min=point.minimum,
        max=point.maximum,
        exemplars=[_exemplar(exemplar) for exemplar in point.exemplars],
    )


def _exemplar(exemplar: Exemplar) -> SdkExemplar:
    return SdkExemplar({}, exemplar.value, exemplar.time_unix_nano, exemplar.span_id, exemplar.trace_id)


class PrecomputedExporter(MetricExporter):
    """Adds histograms to every batch that a metric exporter sends.

    Args:
        inner: Sends.
        name: A histogram of ``semconv.METRICS``.
        source: Its points, read at each export.
    """

    def __init__(self, inner: MetricExporter, name: str, source: Source) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)  # noqa: SLF001 - the reader asks for them
        self._inner, self._name, self._source = inner, name, source

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **options: Any) -> MetricExportResult:
        """Send a batch, with the histograms in it."""
        data = with_histograms(metrics_data, self._name, self._source())
        return self._inner.export(data or metrics_data, timeout_millis, **options)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Flush the exporter."""
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **options: Any) -> None:
        """Shut the exporter down."""
        self._inner.shutdown(timeout_millis, **options)
