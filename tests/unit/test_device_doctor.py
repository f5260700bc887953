"""What the doctor says about GPUs."""

from __future__ import annotations

import threading

import pytest

from pasta_otel.cli.probes import describe_devices
from pasta_otel.gpu.device.nvml import NvmlSource
from pasta_otel.gpu.device.sampler import DeviceSampler
from pasta_otel.testing.nvml import FakeNvml, full_gpu


def examined(nvml: FakeNvml, limit_s: float = 5.0):
    return describe_devices(DeviceSampler(NvmlSource(nvml), limit_s=limit_s).sample())


def test_devices_are_named_with_their_driver():
    found = examined(FakeNvml(full_gpu("GPU-1"), full_gpu("GPU-2")))
    assert (found.state, found.detail) == ("there", "NVIDIA Test, NVIDIA Test; driver 999.01")


def test_a_lost_gpu_beside_a_good_one_is_named_as_lost():
    lost = full_gpu("GPU-1")
    lost.error = 15
    found = examined(FakeNvml(lost, full_gpu("GPU-2")))
    assert (found.state, found.detail) == ("there", "index:0 (lost), NVIDIA Test; driver 999.01")


def test_only_lost_gpus_are_missing():
    lost = full_gpu()
    lost.error = 15
    found = examined(FakeNvml(lost))
    assert (found.state, found.how) != ("there", "")
    assert "XID" in found.how


@pytest.mark.parametrize(("code", "word"), [(18, "reboot"), (4, "/dev/nvidia"), (9, "nvidia-smi")])
def test_a_driver_in_trouble_gets_its_own_advice(code: int, word: str):
    nvml = FakeNvml(full_gpu())
    nvml.init_error = code
    found = examined(nvml)
    assert found.state == "missing"
    assert word in found.how


def test_a_hung_driver_does_not_hang_the_doctor():
    nvml = FakeNvml(full_gpu())
    nvml.hang = threading.Event()
    found = examined(nvml, limit_s=0.1)
    assert (found.state, "timeout" in found.detail) == ("missing", True)
    nvml.hang.set()


def test_no_device_is_missing():
    assert examined(FakeNvml()).state == "missing"
