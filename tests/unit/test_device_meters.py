"""Device state through a real SDK meter onto a real /metrics page."""

from __future__ import annotations

import threading

from prometheus_client.parser import text_string_to_metric_families

from pasta_otel import semconv
from pasta_otel.exporters.metrics import build_meter_provider
from pasta_otel.exporters.prometheus import PrometheusReader
from pasta_otel.gpu.device.meters import DeviceMeters
from pasta_otel.gpu.device.model import Snapshot
from pasta_otel.gpu.device.nvml import NvmlSource
from pasta_otel.gpu.device.sampler import DeviceSampler
from pasta_otel.testing.nvml import FakeGpu, FakeNvml, full_gpu


class Page:
    """A /metrics page over one source."""

    def __init__(self, sampler: object) -> None:
        self.reader = PrometheusReader()
        self.provider = build_meter_provider(readers=[self.reader], attributes={"service.name": "t"}, config=None)
        DeviceMeters(self.provider.get_meter("t"), sampler)

    def scrape(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        _, body = self.reader.render()
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if not k.startswith("otel_scope")}
                found.setdefault(sample.name, []).append((labels, sample.value))
        return found


def nvml_page(nvml: FakeNvml, limit_s: float = 5.0) -> Page:
    return Page(DeviceSampler(NvmlSource(nvml), limit_s=limit_s, reuse_ns=0))


def test_the_page_has_otel_names_base_units_and_the_uuid():
    page = Page(DeviceSampler(NvmlSource(FakeNvml(full_gpu("GPU-1"))))).scrape()
    base = {"hw_id": "GPU-1", "hw_type": "gpu", "hw_name": "NVIDIA Test", "hw_vendor": "nvidia"}
    assert (base | {"hw_gpu_task": "general"}, 0.97) in page["hw_gpu_utilization_ratio"]
    assert page["hw_power_watts"] == [(base, 250.5)]
    assert page["hw_energy_joules_total"] == [(base, 12345.678)]
    assert page["hw_gpu_memory_usage_bytes"] == [(base, 20 << 30)]
    assert (base | {"error_type": "corrected"}, 5.0) in page["hw_errors_total"]
    states = {labels["hw_state"]: value for labels, value in page["hw_status"]}
    assert states == {"ok": 1.0, "degraded": 0.0, "failed": 0.0}
    assert page["pasta_gpu_collector_up_ratio"] == [({"source": "nvml"}, 1.0)]


def test_what_a_device_lacks_has_no_series_at_all():
    page = nvml_page(FakeNvml(FakeGpu("GPU-0"))).scrape()
    device = {name for name in page if name.startswith(("hw_", "pasta_gpu"))}
    assert device == {
        "hw_status",
        "pasta_gpu_device_up_ratio",
        "pasta_gpu_device_info_ratio",
        "pasta_gpu_collector_up_ratio",
        "pasta_gpu_collector_duration_seconds",
        "pasta_gpu_blank_values_total",
        "pasta_gpu_parse_errors_total",
    }


def test_values_of_a_hung_driver_leave_the_page_and_come_back():
    nvml = FakeNvml(full_gpu())
    sampler = DeviceSampler(NvmlSource(nvml), limit_s=0.2)
    page = Page(sampler)
    assert "hw_gpu_utilization_ratio" in page.scrape()
    nvml.hang = threading.Event()
    sampler._latest = None  # as if time had passed
    hung = page.scrape()
    assert hung["pasta_gpu_collector_up_ratio"] == [({"source": "nvml", "reason": "timeout"}, 0.0)]
    assert [value for _, value in hung["pasta_gpu_device_up_ratio"]] == [0.0]
    assert not [name for name in hung if name.startswith("hw_")]
    release, nvml.hang = nvml.hang, None
    release.set()
    sampler._call.wait(5)
    sampler._latest = None
    assert page.scrape()["hw_gpu_utilization_ratio"]


def test_blank_values_and_parse_errors_add_up_over_scrapes_once_each():
    class Source:
        def __init__(self) -> None:
            self.now = Snapshot("dcgm", blank_values=7, parse_errors=3)

        def sample(self) -> Snapshot:
            return self.now

    source = Source()
    page = Page(source)
    assert page.scrape()["pasta_gpu_blank_values_total"] == [({"source": "dcgm"}, 7.0)]
    assert page.scrape()["pasta_gpu_blank_values_total"] == [({"source": "dcgm"}, 7.0)]
    source.now = Snapshot("dcgm", blank_values=1)
    again = page.scrape()
    assert again["pasta_gpu_blank_values_total"] == [({"source": "dcgm"}, 8.0)]
    assert again["pasta_gpu_parse_errors_total"] == [({"source": "dcgm"}, 3.0)]


def test_every_device_metric_is_described_and_has_an_observable_instrument():
    assert {semconv.METRICS[name].instrument for name in semconv.DEVICE_METRICS} <= {
        "counter",
        "updowncounter",
        "gauge",
    }
