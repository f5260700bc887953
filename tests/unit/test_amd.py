"""The AMD back end against a double of amdsmi's documented structures; it has never run on an AMD card."""

from __future__ import annotations

from pathlib import Path

import pytest

from pasta_otel.errors import MissingError
from pasta_otel.gpu.device import amd
from pasta_otel.gpu.device.amd import AmdSource, amd_source, number
from pasta_otel.gpu.device.model import DeviceReading, Snapshot, SourceDownError
from pasta_otel.testing.amdsmi import NA, FakeAmdGpu, FakeAmdSmi, full_amd_gpu


def values(read: DeviceReading) -> dict[tuple[str, ...], float]:
    return {(r.metric, *(str(v) for _, v in r.labels)): r.value for r in read.readings}


def only(snapshot: Snapshot) -> DeviceReading:
    (device,) = snapshot.devices
    return device


def test_every_field_arrives_in_base_units_under_the_same_names_as_nvidias():
    read = only(AmdSource(FakeAmdSmi(full_amd_gpu())).read())
    assert read.device.labels() == {
        "hw.id": "a1ff74a1-0000-1000-8000-000000000001",
        "hw.type": "gpu",
        "hw.name": "AMD Instinct MI300X",
        "hw.vendor": "amd",
    }
    assert dict(read.device.info) == {"hw.driver_version": "6.8.5", "hw.serial_number": "0x01"}
    assert values(read) == {
        ("hw.gpu.utilization", "general"): 0.83,
        ("pasta.gpu.memory.activity",): 0.12,
        ("hw.gpu.memory.limit",): 196592 << 20,
        ("hw.gpu.memory.usage",): 49148 << 20,
        ("hw.gpu.memory.utilization",): 0.25,
        ("hw.power",): 420,
        ("pasta.gpu.power.limit",): 750,
        ("hw.energy",): 15.25,
        ("hw.temperature", "edge"): 45,
        ("hw.temperature", "hotspot"): 61,
        ("hw.temperature", "memory"): 52,
        ("pasta.gpu.clock.frequency", "graphics"): 2.1e9,
        ("pasta.gpu.clock.frequency", "memory"): 1.3e9,
        ("pasta.gpu.clock.frequency", "video"): 2.9e7,
        ("hw.errors", "corrected"): 4,
        ("hw.errors", "uncorrected"): 0,
        ("hw.errors", "deferred"): 1,
        ("pasta.gpu.pcie.throughput",): 1e8,
        ("hw.errors", "pcie_replay"): 2,
        ("pasta.gpu.throttled", "sw_power_cap"): 1,
        ("pasta.gpu.throttled", "hw_thermal"): 0,
        ("pasta.gpu.process.memory.usage", "77"): 1 << 30,
    }


@pytest.mark.parametrize("function", sorted(full_amd_gpu().answers))
def test_without_one_function_all_other_values_stay(function: str):
    full = values(only(AmdSource(FakeAmdSmi(full_amd_gpu())).read()))
    read = only(AmdSource(FakeAmdSmi(full_amd_gpu(**{function: None}))).read())
    assert values(read).items() <= full.items()
    assert (read.down, read.state) == ("", "ok")


def test_a_device_that_supports_nothing_has_no_value_and_is_up():
    read = only(AmdSource(FakeAmdSmi(FakeAmdGpu())).read())
    assert (read.device.id, read.readings, read.down) == ("index:0", (), "")


@pytest.mark.parametrize("value", [NA, 0xFFFF, 0xFFFFFFFF, 2**64 - 1, None, True, "12"])
def test_what_stands_for_none_is_never_a_number(value: object):
    assert number(value) is None


def test_a_zero_is_a_number():
    assert number(0) == 0.0


def test_older_names_and_the_documented_millidegrees_are_read_too():
    gpu = full_amd_gpu(
        get_energy_count={"power": 2_000_000, "counter_resolution": 15.3},
        get_power_info={"current_socket_power": 0xFFFF, "average_socket_power": 210},
        get_clock_info=lambda kind: {"cur_clk": 500},
        get_temp_metric=lambda sensor, metric: 45000,
    )
    found = values(only(AmdSource(FakeAmdSmi(gpu)).read()))
    assert found["hw.energy",] == pytest.approx(30.6)
    assert found["hw.power",] == 210
    assert found["pasta.gpu.clock.frequency", "memory"] == 5e8
    assert found["hw.temperature", "edge"] == 45


def test_a_board_that_protects_itself_is_degraded():
    gpu = full_amd_gpu(get_violation_status={"active_hbm_thrm": True})
    assert only(AmdSource(FakeAmdSmi(gpu)).read()).state == "degraded"


def test_a_lost_gpu_keeps_its_name_and_the_others_go_on():
    lost = full_amd_gpu()
    source = AmdSource(FakeAmdSmi(lost, full_amd_gpu(get_gpu_device_uuid="b")))
    source.read()
    lost.error = 31
    first, second = source.read().devices
    assert (first.device.name, first.down, first.state, first.readings) == ("AMD Instinct MI300X", "lost", "failed", ())
    assert second.down == ""


def test_a_gpu_that_is_no_longer_listed_is_gone():
    smi = FakeAmdSmi(full_amd_gpu(), full_amd_gpu(get_gpu_device_uuid="b"))
    source = AmdSource(smi)
    source.read()
    smi.gpus.pop(0)
    there, gone = source.read().devices
    assert (there.device.id, there.down) == ("b", "")
    assert (gone.device.name, gone.down, gone.state) == ("AMD Instinct MI300X", "gone", "failed")


@pytest.mark.parametrize(
    ("code", "reason"), [(34, "no_driver"), (10, "no_permission"), (8, "timeout"), (99, "amdsmi_99")]
)
def test_a_driver_that_does_not_start_is_a_state_and_the_next_read_tries_again(code: int, reason: str):
    smi = FakeAmdSmi(full_amd_gpu())
    smi.init_error = code
    source = AmdSource(smi)
    with pytest.raises(SourceDownError) as caught:
        source.read()
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)
    smi.init_error = None
    assert only(source.read()).readings
    assert smi.sessions == 1


def test_processes_carry_container_and_pod():
    read = only(AmdSource(FakeAmdSmi(full_amd_gpu()), lambda pid: {"container.id": f"c{pid}"}).read())
    assert ("pasta.gpu.process.memory.usage", "77", "c77") in values(read)


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "amdsmi", None)
    with pytest.raises(MissingError, match="amd-smi-lib"):
        amd_source()


def test_the_back_end_stays_small_and_says_that_it_never_ran_on_amd():
    text = Path(amd.__file__).read_text()
    assert text.count("\n") < 800
    assert "NEVER RUN ON AMD" in text
