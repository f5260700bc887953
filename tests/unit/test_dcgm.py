"""Third-party GPU pages: DCGM's blanks (handed case G03), texts for numbers (P06), pods that share a device."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pasta_otel import semconv
from pasta_otel.app.devices import DeviceWatch
from pasta_otel.gpu.device.dcgm import FB_PARTS, FB_USED, FIELDS, DcgmSource, is_blank, without_blanks
from pasta_otel.gpu.device.model import DeviceReading
from pasta_otel.slo.sources.textpage import read_page

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = FIXTURES / "cases"


def values(read: DeviceReading) -> dict[tuple[str, ...], float]:
    return {(r.metric, *(str(v) for _, v in r.labels)): r.value for r in read.readings}


@pytest.mark.case("G03")
def test_blank_numbers_are_dropped_and_counted_and_plausible_ones_kept():
    want = json.loads((CASES / "G03" / "expected.json").read_text())
    page = read_page((CASES / "G03" / "dcgm.prom").read_text())
    kept, dropped = without_blanks(page.samples)
    assert (len(kept), dropped) == (want["kept"], want["dropped"])
    assert {(s.name, dict(s.labels)["gpu"], s.value) for s in kept} == {
        ("DCGM_FI_DEV_GPU_UTIL", "0", 83.0),
        ("DCGM_FI_DEV_MEMORY_TEMP", "2", 0.0),
        ("DCGM_FI_PROF_SM_ACTIVE", "0", 0.41),
        ("DCGM_FI_DEV_FB_USED", "0", 2147483647.0),
        ("DCGM_FI_PROF_PCIE_TX_BYTES", "1", 51234567890.0),
    }


@pytest.mark.case("G03")
def test_a_blank_field_is_no_reading_of_its_device():
    snapshot = DcgmSource(lambda: read_page((CASES / "G03" / "dcgm.prom").read_text())).read()
    assert snapshot.blank_values == 7
    assert {d.device.id: values(d) for d in snapshot.devices} == {
        "0": {
            ("hw.gpu.utilization", "general"): 0.83,
            ("hw.gpu.memory.usage",): 2147483647 * 2**20,
            ("pasta.gpu.unit.activity", "sm"): 0.41,
        },
        "1": {("pasta.gpu.pcie.throughput", "transmit"): 51234567890.0},
        "2": {("hw.temperature", "memory"): 0.0},
    }


@pytest.mark.case("G03")
def test_every_kept_sample_becomes_a_series_of_the_devices_metrics():
    text = (CASES / "G03" / "dcgm.prom").read_text()
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    watch = DeviceWatch(provider.get_meter("t"), [DcgmSource(lambda: read_page(text))])
    data = reader.get_metrics_data()
    watch.close()
    provider.shutdown()
    metrics = [metric for scope in data.resource_metrics[0].scope_metrics for metric in scope.metrics]
    found = {
        (metric.name, point.attributes["hw.id"]): point.value
        for metric in metrics
        for point in metric.data.data_points
        if metric.name in {field.metric for field in FIELDS.values()} | {semconv.HW_GPU_MEMORY_USAGE}
    }
    assert len(found) == json.loads((CASES / "G03" / "expected.json").read_text())["kept"]
    assert found == {
        (semconv.HW_GPU_UTILIZATION, "0"): 0.83,
        (semconv.GPU_UNIT_ACTIVITY, "0"): 0.41,
        (semconv.HW_GPU_MEMORY_USAGE, "0"): 2147483647 * 2**20,
        (semconv.GPU_PCIE_THROUGHPUT, "1"): 51234567890.0,
        (semconv.HW_TEMPERATURE, "2"): 0.0,
    }


def test_the_documentation_lists_every_field_that_is_taken_and_what_becomes_of_it():
    listed = (FIXTURES.parents[1] / "docs" / "reference" / "devices.md").read_text()
    rows = dict(re.findall(r"^\| `(DCGM_\w+)` \| `([^`]+)` \|", listed, re.MULTILINE))
    wanted = {name: field.metric for name, field in FIELDS.items()} | {FB_USED: semconv.HW_GPU_MEMORY_USAGE}
    assert rows == wanted | dict.fromkeys(FB_PARTS[1:], semconv.HW_GPU_MEMORY_LIMIT)
    labels = {name: [str(value) for _, value in field.labels] for name, field in FIELDS.items()}
    for name, values_of in labels.items():
        (row,) = re.findall(rf"^\| `{name}` .*$", listed, re.MULTILINE)
        assert all(f"={value}" in row for value in values_of)


def test_profiling_fields_are_shares_and_rates_as_they_stand():
    lines = {"GR_ENGINE_ACTIVE": 0.5, "SM_OCCUPANCY": 0.25, "PIPE_TENSOR_ACTIVE": 0.125, "DRAM_ACTIVE": 0,
             "PCIE_RX_BYTES": 7, "NVLINK_TX_BYTES": 8, "NVLINK_RX_BYTES": 9}  # fmt: skip
    text = "\n".join(f'DCGM_FI_PROF_{name}{{gpu="0",UUID="GPU-1"}} {value}' for name, value in lines.items())
    (device,) = DcgmSource(lambda: read_page(text)).read().devices
    assert values(device) == {
        ("pasta.gpu.unit.activity", "engine"): 0.5,
        ("pasta.gpu.sm.occupancy",): 0.25,
        ("pasta.gpu.unit.activity", "tensor"): 0.125,
        ("pasta.gpu.unit.activity", "memory"): 0,
        ("pasta.gpu.pcie.throughput", "receive"): 7,
        ("pasta.gpu.nvlink.throughput", "transmit"): 8,
        ("pasta.gpu.nvlink.throughput", "receive"): 9,
    }


@pytest.mark.case("P06")
def test_lines_with_texts_for_numbers_are_counted_and_become_nothing():
    snapshot = DcgmSource(lambda: read_page((CASES / "P06" / "third_party.prom").read_text())).read()
    assert (snapshot.parse_errors, snapshot.devices) == (3, ())


def test_the_page_in_the_exporters_own_readme_has_a_blank_temperature():
    text = (FIXTURES / "samples" / "NVIDIA+dcgm-exporter" / "readme_sample_1.prom").read_text()
    snapshot = DcgmSource(lambda: read_page(text)).read()
    (device,) = snapshot.devices
    assert device.device.id == "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
    assert values(device) == {
        ("pasta.gpu.clock.frequency", "sm"): 1.39e8,
        ("pasta.gpu.clock.frequency", "memory"): 4.05e8,
    }
    assert (snapshot.blank_values, snapshot.parse_errors) == (1, 0)


def test_units_become_base_units_and_memory_adds_up():
    lines = {
        "ENC_UTIL": 50, "POWER_USAGE": 250.5, "TOTAL_ENERGY_CONSUMPTION": 5000, "FB_USED": 100, "FB_FREE": 290,
        "FB_RESERVED": 10, "PCIE_REPLAY_COUNTER": 3, "GPU_TEMP": 40,
    }  # fmt: skip
    text = "\n".join(
        f'DCGM_FI_DEV_{name}{{gpu="0",UUID="GPU-1",modelName="M"}} {value}' for name, value in lines.items()
    )
    (device,) = DcgmSource(lambda: read_page(text)).read().devices
    assert device.device.labels()["hw.name"] == "M"
    assert values(device) == {
        ("hw.gpu.utilization", "encoder"): 0.5,
        ("hw.power",): 250.5,
        ("hw.energy",): 5.0,
        ("hw.gpu.memory.usage",): 100 * 2**20,
        ("hw.gpu.memory.limit",): 400 * 2**20,
        ("hw.gpu.memory.utilization",): 0.25,
        ("hw.errors", "pcie_replay"): 3,
        ("hw.temperature", "gpu"): 40,
    }


def test_a_device_shared_by_pods_counts_once_and_mig_instances_apart():
    text = (
        'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",pod="a"} 99\nDCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",pod="b"} 99\n'
        'DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1",GPU_I_PROFILE="1g.18gb",GPU_I_ID="7"} 5\n'
    )
    whole, part = DcgmSource(lambda: read_page(text)).read().devices
    assert values(whole) == {("hw.gpu.utilization", "general"): 0.99}
    assert part.device.labels()["hw.parent"] == "GPU-1"
    assert values(part) == {("hw.gpu.memory.usage",): 5 * 2**20}


@given(st.integers(0, 2**31 - 17) | st.integers(2**31 - 12, 2**47 - 1) | st.integers(2**47 + 4, 2**62))
def test_no_count_outside_the_blanks_is_dropped(value: int):
    assert not is_blank("DCGM_FI_DEV_FB_USED", float(value)) or float(value) != value


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 2.0**63, 9223372036854775792.0, 2147483632, 2147483635, 2.0**47 + 3]
)
def test_every_kind_of_blank_is_seen(value: float):
    assert is_blank("DCGM_FI_DEV_FB_USED", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DCGM_FI_DEV_GPU_UTIL", 101),
        ("DCGM_FI_DEV_GPU_UTIL", -1),
        ("DCGM_FI_PROF_DRAM_ACTIVE", 1.5),
        ("DCGM_FI_PROF_SM_OCCUPANCY", 140737488355328 * 100),
    ],
)
def test_a_share_outside_its_range_is_no_share(name: str, value: float):
    assert is_blank(name, value)
