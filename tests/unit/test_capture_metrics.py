import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from pasta_otel import semconv
from pasta_otel.exporters.precomputed import PrecomputedExporter, with_histograms
from pasta_otel.model import Exemplar, HistogramPoint

POINT = HistogramPoint(
    attributes={"gpu.kernel.class": "gemm", "hw.id": "GPU-0"},
    bounds=(1e-6, 1e-5),
    counts=(40, 20, 0),
    total=3e-4,
    minimum=5e-7,
    maximum=9e-6,
    start_time_unix_nano=1,
    time_unix_nano=2,
    exemplars=(Exemplar(9e-6, 2, 0xABC, 0x123),),
)


class Keeping(MetricExporter):
    def __init__(self):
        super().__init__()
        self.sent, self.closed = [], False

    def export(self, metrics_data, timeout_millis=10_000, **options):
        self.sent.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=10_000):
        return True

    def shutdown(self, timeout_millis=30_000, **options):
        self.closed = True


@pytest.mark.parametrize("scope", ["mine", semconv.SCOPE])
def test_gpu_histograms_go_out_with_the_sdks_own_metrics_under_its_resource(scope):
    keeping = Keeping()
    exporter = PrecomputedExporter(keeping, semconv.GPU_KERNEL_DURATION, lambda: [POINT])
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    provider = MeterProvider([reader], resource=Resource({"service.name": "shop"}))
    provider.get_meter(scope).create_counter("orders").add(1)
    provider.shutdown()
    assert keeping.closed
    request = encode_metrics(keeping.sent[-1])
    (resource,) = request.resource_metrics
    assert resource.resource.attributes[0].value.string_value == "shop"
    found = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    assert set(found) == {"orders", "gpu.cuda.kernel.duration"}
    histogram = found["gpu.cuda.kernel.duration"]
    assert histogram.unit == "s"
    (point,) = histogram.histogram.data_points
    assert (point.count, list(point.bucket_counts), list(point.explicit_bounds)) == (60, [40, 20, 0], [1e-6, 1e-5])
    assert (point.sum, point.min, point.max) == (3e-4, 5e-7, 9e-6)
    assert point.exemplars[0].trace_id == (0xABC).to_bytes(16, "big")
    assert point.exemplars[0].span_id == (0x123).to_bytes(8, "big")
    assert histogram.histogram.aggregation_temporality == 2


def test_without_points_the_data_is_left_as_it_is():
    reader = InMemoryMetricReader()
    MeterProvider([reader]).get_meter("mine").create_counter("orders").add(1)
    data = reader.get_metrics_data()
    assert with_histograms(data, semconv.GPU_KERNEL_DURATION, []) is data
    assert with_histograms(None, semconv.GPU_KERNEL_DURATION, []) is None


def test_points_alone_make_a_batch_too():
    data = with_histograms(None, semconv.GPU_KERNEL_DURATION, [POINT])
    assert len(encode_metrics(data).resource_metrics) == 1
