"""NVML's answers, units and errors, through pynvml's own structures."""

from __future__ import annotations

import pytest

from pasta_otel.clock import SystemClock
from pasta_otel.gpu.device.model import DeviceReading, Snapshot, SourceDownError
from pasta_otel.gpu.device.nvml import RESTART_NS, NvmlSource
from pasta_otel.testing.nvml import FakeGpu, FakeNvml, full_gpu, memory, process

Values = dict[tuple[str, ...], float]


def values(read: DeviceReading) -> Values:
    return {(r.metric, *(str(v) for _, v in r.labels)): r.value for r in read.readings}


def only(snapshot: Snapshot) -> DeviceReading:
    (device,) = snapshot.devices
    return device


def test_every_field_arrives_in_base_units():
    assert values(only(NvmlSource(FakeNvml(full_gpu())).read())) == {
        ("hw.gpu.utilization", "general"): 0.97,
        ("hw.gpu.utilization", "encoder"): 0.1,
        ("hw.gpu.utilization", "decoder"): 0.0,
        ("pasta.gpu.memory.activity",): 0.4,
        ("hw.gpu.memory.limit",): 80 << 30,
        ("hw.gpu.memory.usage",): 20 << 30,
        ("hw.gpu.memory.utilization",): 0.25,
        ("hw.power",): 250.5,
        ("pasta.gpu.power.limit",): 700.0,
        ("hw.energy",): pytest.approx(12345.678),
        ("hw.temperature", "gpu"): 61,
        ("hw.temperature", "memory"): 70,
        ("hw.fan.speed_ratio",): 0.3,
        ("hw.errors", "corrected"): 5,
        ("hw.errors", "uncorrected"): 0,
        ("hw.errors", "pcie_replay"): 2,
        ("pasta.gpu.clock.frequency", "graphics"): 1.98e9,
        ("pasta.gpu.clock.frequency", "sm"): 1.98e9,
        ("pasta.gpu.clock.frequency", "memory"): 3.201e9,
        ("pasta.gpu.clock.frequency", "video"): 1.545e9,
        ("pasta.gpu.throttled", "sw_power_cap"): 1,
        ("pasta.gpu.throttled", "hw_slowdown"): 0,
        ("pasta.gpu.throttled", "sync_boost"): 0,
        ("pasta.gpu.throttled", "sw_thermal"): 0,
        ("pasta.gpu.throttled", "hw_thermal"): 0,
        ("pasta.gpu.throttled", "hw_power_brake"): 0,
        ("pasta.gpu.throttled.time", "sw_power_cap"): 1.5,
        ("pasta.gpu.throttled.time", "sw_thermal"): 0,
        ("pasta.gpu.pcie.throughput", "transmit"): 1.5e6,
        ("pasta.gpu.pcie.throughput", "receive"): 2.5e6,
        ("hw.gpu.io", "transmit", "nvlink"): 1024000,
        ("hw.gpu.io", "receive", "nvlink"): 2048000,
        ("pasta.gpu.process.memory.usage", "4711"): 1 << 30,
    }


def test_a_device_that_supports_nothing_has_no_value_and_is_up():
    read = only(NvmlSource(FakeNvml(FakeGpu("GPU-0"))).read())
    assert (read.readings, read.down, read.state) == ((), "", "ok")


@pytest.mark.parametrize("function", sorted(full_gpu().answers))
def test_without_one_function_all_other_values_stay_and_none_becomes_zero(function: str):
    full = values(only(NvmlSource(FakeNvml(full_gpu())).read()))
    less = values(only(NvmlSource(FakeNvml(full_gpu(**{function: None}))).read()))
    assert less.items() <= full.items()


def test_the_device_says_who_it_is():
    device = only(NvmlSource(FakeNvml(full_gpu("GPU-7"))).read()).device
    assert device.labels() == {"hw.id": "GPU-7", "hw.type": "gpu", "hw.name": "NVIDIA Test", "hw.vendor": "nvidia"}
    assert dict(device.info) == {
        "hw.driver_version": "999.01",
        "hw.serial_number": "123",
        "gpu.mig.mode": "disabled",
    }


def test_older_drivers_answer_by_the_older_names():
    gpu = full_gpu(nvmlDeviceGetTemperatureV=None, nvmlDeviceGetCurrentClocksEventReasons=None)
    gpu.answers |= {
        "nvmlDeviceGetTemperature": lambda sensor: 55,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x20,
        "nvmlDeviceGetMemoryInfo": lambda *version: None if version else memory(10, 5),
    }
    found = values(only(NvmlSource(FakeNvml(gpu)).read()))
    assert found["hw.temperature", "gpu"] == 55
    assert found["pasta.gpu.throttled", "sw_thermal"] == 1
    assert found["hw.gpu.memory.utilization",] == 0.5


@pytest.mark.parametrize(
    ("code", "reason"),
    [(12, "no_driver"), (9, "no_driver"), (18, "version_mismatch"), (4, "no_permission"), (999, "nvml_999")],
)
def test_a_driver_that_does_not_start_is_a_state_and_the_next_read_tries_again(code: int, reason: str):
    nvml = FakeNvml(full_gpu())
    nvml.init_error = code
    source = NvmlSource(nvml)
    with pytest.raises(SourceDownError) as caught:
        source.read()
    assert caught.value.reason == reason
    nvml.init_error = None
    assert only(source.read()).down == ""


def test_a_driver_that_goes_away_is_started_again():
    nvml = FakeNvml(full_gpu())
    source = NvmlSource(nvml)
    source.read()
    nvml.open = False  # the driver was reloaded under us
    with pytest.raises(SourceDownError, match="Uninitialized"):
        source.read()
    assert only(source.read()).readings
    assert nvml.sessions == 2


def test_a_lost_gpu_is_down_and_failed_and_the_others_go_on():
    lost, well = full_gpu("GPU-1"), full_gpu("GPU-2")
    source = NvmlSource(FakeNvml(lost, well))
    source.read()
    lost.error = 15
    first, second = source.read().devices
    assert (first.device.id, first.device.name) == ("GPU-1", "NVIDIA Test")
    assert (first.down, first.state, first.readings) == ("lost", "failed", ())
    assert (second.down, second.state) == ("", "ok")


def test_a_gpu_lost_from_the_start_is_known_by_its_index():
    lost = full_gpu()
    lost.error = 15
    read = only(NvmlSource(FakeNvml(lost)).read())
    assert (read.device.id, read.down) == ("index:0", "lost")


def test_a_gpu_that_is_lost_in_the_middle_of_a_reading_shows_no_half_values():
    def gone() -> None:
        raise FakeNvml.NVMLError(15)

    read = only(NvmlSource(FakeNvml(full_gpu(nvmlDeviceGetPowerUsage=gone))).read())
    assert (read.down, read.readings) == ("lost", ())


def test_a_gpu_that_is_no_longer_enumerated_is_gone_not_forgotten():
    nvml = FakeNvml(full_gpu("GPU-1"), full_gpu("GPU-2"))
    source = NvmlSource(nvml)
    source.read()
    nvml.gpus.pop(0)
    there, gone = source.read().devices
    assert (there.device.id, there.down) == ("GPU-2", "")
    assert (gone.device.id, gone.down, gone.state) == ("GPU-1", "gone", "failed")


def test_after_a_loss_nvml_is_started_again_at_most_once_a_minute():
    class Clock(SystemClock):
        now = 0

        def monotonic_ns(self) -> int:
            return self.now

    gpu, clock = full_gpu(), Clock()
    nvml = FakeNvml(gpu)
    source = NvmlSource(nvml, clock=clock)
    source.read()
    gpu.error = 15
    source.read()
    source.read()
    assert nvml.sessions == 1
    gpu.error, clock.now = None, RESTART_NS + 1
    assert only(source.read()).down == ""
    assert nvml.sessions == 2
    clock.now *= 3
    source.read()
    assert nvml.sessions == 2  # all is well: nothing to look for


def test_a_gpu_that_answers_again_after_its_xid_79_is_ok_with_the_next_session():
    class Clock(SystemClock):
        now = 0

        def monotonic_ns(self) -> int:
            return self.now

    gpu, clock = full_gpu(), Clock()
    nvml = FakeNvml(gpu)
    source = NvmlSource(nvml, clock=clock)
    source.read()
    nvml.waiting.append((gpu, 79))
    assert only(source.read()).state == "failed"
    clock.now = RESTART_NS + 1
    again = only(source.read())
    assert again.state == "ok"
    assert values(again)["hw.errors", "xid", "79"] == 1


def test_xids_are_counted_by_code_and_outlive_the_loss():
    gpu = full_gpu("GPU-1")
    nvml = FakeNvml(gpu)
    source = NvmlSource(nvml)
    assert not any("xid" in key for key in values(only(source.read())))
    nvml.waiting.extend([(gpu, 43), (gpu, 43), (gpu, 79)])
    found = only(source.read())
    assert values(found)["hw.errors", "xid", "43"] == 2
    assert found.state == "failed"  # XID 79: it fell off the bus
    gpu.error = 15
    lost = only(source.read())
    assert values(lost) == {("hw.errors", "xid", "43"): 2, ("hw.errors", "xid", "79"): 1}


def test_an_xid_of_a_gpu_that_is_lost_at_once_still_counts():
    gpu = full_gpu("GPU-1")
    nvml = FakeNvml(gpu)
    source = NvmlSource(nvml)
    source.read()
    gpu.error = 15
    nvml.waiting.append((gpu, 79))
    assert values(only(source.read())) == {("hw.errors", "xid", "79"): 1}


def test_without_event_support_there_is_no_xid_and_no_error():
    nvml = FakeNvml(full_gpu())
    nvml.events = False
    assert only(NvmlSource(nvml).read()).down == ""


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x40}, "degraded"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x4}, "ok"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 0, 1)}, "degraded"),
    ],
)
def test_the_state_follows_what_the_board_does(answers: dict, state: str):
    assert only(NvmlSource(FakeNvml(full_gpu(**answers))).read()).state == state


def test_mig_instances_are_devices_with_their_own_memory_and_processes():
    slice_ = FakeGpu(
        "MIG-a",
        {
            "nvmlDeviceGetMemoryInfo": lambda version=None: memory(10 << 30, 1 << 30),
            "nvmlDeviceGetComputeRunningProcesses": [process(12, 1 << 20)],
        },
    )
    gpu = full_gpu("GPU-1", nvmlDeviceGetMigMode=[1, 1])
    gpu.instances = [None, slice_]
    whole, part = NvmlSource(FakeNvml(gpu)).read().devices
    assert dict(whole.device.info)["gpu.mig.mode"] == "enabled"
    assert not any(r.metric == "pasta.gpu.process.memory.usage" for r in whole.readings)
    assert part.device.labels() == {"hw.id": "MIG-a", "hw.type": "gpu", "hw.vendor": "nvidia", "hw.parent": "GPU-1"}
    assert values(part)["pasta.gpu.process.memory.usage", "12"] == 1 << 20
    assert values(part)["hw.gpu.memory.utilization",] == pytest.approx(0.1)


def test_processes_carry_container_and_pod_and_an_untold_size_is_no_value():
    gpu = full_gpu(
        nvmlDeviceGetComputeRunningProcesses=[process(1, 100), process(2, None)],
        nvmlDeviceGetGraphicsRunningProcesses=[process(1, 100), process(3, 7)],
    )
    owner = {1: {"container.id": "c" * 64, "k8s.pod.uid": "u"}}
    read = only(NvmlSource(FakeNvml(gpu), lambda pid: owner.get(pid, {})).read())
    found = [(dict(r.labels), r.value) for r in read.readings if r.metric == "pasta.gpu.process.memory.usage"]
    assert found == [
        ({"process.pid": 1, "container.id": "c" * 64, "k8s.pod.uid": "u"}, 100),
        ({"process.pid": 3}, 7),
    ]
