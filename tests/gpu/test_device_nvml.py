"""Device state on a real NVIDIA GPU: plausible, and the same as nvidia-smi, CUDA and physics say."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time

import pytest

from pasta_otel.gpu.cupti.devices import device_uuid
from pasta_otel.gpu.device.model import DeviceReading, Snapshot
from pasta_otel.gpu.device.sampler import LIMIT_S, DeviceSampler
from pasta_otel.gpu.device.smi import smi_source

pytestmark = pytest.mark.gpu
pytest.importorskip("pynvml")

if (
    shutil.which("nvidia-smi") is None
    or subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode
):
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

Values = dict[tuple[str, ...], float]
BUSY_S = 4.0


@pytest.fixture(scope="module")
def source():
    from pasta_otel.gpu.device.nvml import nvml_source

    found = nvml_source()
    yield found
    found.close()


def values(read: DeviceReading) -> Values:
    return {(r.metric, *(str(v) for _, v in r.labels)): r.value for r in read.readings}


def tell(*words: object) -> None:
    """Leave the numbers in pytest's captured output (-rP shows it)."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def keep_busy(seconds: float) -> None:
    """Multiply matrices on device 0 for a while."""
    import torch

    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()


def test_every_device_answers_with_plausible_values(source):
    snapshot = source.read()
    assert (snapshot.down, bool(snapshot.devices)) == ("", True)
    for read in snapshot.devices:
        found = values(read)
        tell(read.device, *(f"\n  {' '.join(key)} = {value}" for key, value in sorted(found.items())))
        assert read.device.id.startswith(("GPU-", "MIG-"))
        if read.device.parent:
            continue
        assert (read.down, read.state in {"ok", "degraded"}) == ("", True)
        assert 10 < found["hw.power",] < 1500
        assert 5 < found["hw.temperature", "gpu"] < 110
        assert found["hw.gpu.memory.limit",] > 2**30
        assert 0 <= found["hw.gpu.memory.utilization",] <= 1
        assert found["pasta.gpu.clock.frequency", "sm"] > 1e8
        assert all(0 <= value <= 1 for key, value in found.items() if key[0] == "hw.gpu.utilization")


def test_nvml_and_nvidia_smi_say_the_same(source):
    by_nvml = {read.device.id: read for read in source.read().devices if not read.device.parent}
    by_smi = {read.device.id: read for read in smi_source().read().devices}
    assert by_nvml.keys() == by_smi.keys()
    for key, read in by_smi.items():
        theirs, ours = values(read), values(by_nvml[key])
        alone = {key[0] for key in theirs.keys() - ours.keys()}
        assert alone <= {"pasta.gpu.encoder.frame_rate", "pasta.gpu.throttled.time"}
        for one in (key for key in theirs.keys() & ours.keys() if key[0] == "pasta.gpu.throttled.time"):
            tell("throttled", one, theirs[one], ours[one])
            assert theirs[one] == pytest.approx(ours[one], rel=0.05, abs=5)
        assert theirs["hw.gpu.memory.limit",] == pytest.approx(ours["hw.gpu.memory.limit",], abs=2**20)
        assert theirs["hw.temperature", "gpu"] == pytest.approx(ours["hw.temperature", "gpu"], abs=10)
        assert theirs["hw.power",] == pytest.approx(ours["hw.power",], rel=0.5)
        assert read.device.name == by_nvml[key].device.name


def test_the_id_is_the_one_that_captured_kernels_carry(source):
    import torch

    torch.cuda.init()  # the driver names its devices from then on
    assert device_uuid(0) in {read.device.id for read in source.read().devices}


def test_energy_over_time_is_power_and_work_shows(source):
    keep_busy(1.0)  # warm
    key = device_uuid(0)
    before, began = device(source.read(), key), time.monotonic()
    keep_busy(BUSY_S)
    after, took = device(source.read(), key), time.monotonic() - began
    if ("hw.energy",) not in before:
        pytest.skip("this device tells no energy")
    watts = (after["hw.energy",] - before["hw.energy",]) / took
    tell(
        "energy over time",
        watts,
        "W; power",
        after["hw.power",],
        "W; utilization",
        after.get(("hw.gpu.utilization", "general")),
    )
    assert watts == pytest.approx(after["hw.power",], rel=0.4)
    assert after.get(("hw.gpu.utilization", "general"), 1.0) > 0.5


def device(snapshot: Snapshot, key: str) -> Values:
    return next(values(read) for read in snapshot.devices if read.device.id == key)


def test_a_process_is_told_with_at_least_the_memory_that_it_took(source):
    import torch

    held = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    told = {key[1]: value for key, value in device(source.read(), device_uuid(0)).items() if "process" in key[0]}
    tell("processes", told, "own pid", os.getpid())
    if str(os.getpid()) not in told:
        pytest.skip("the driver tells no process ids in this pid namespace")
    assert told[str(os.getpid())] >= held.numel()


def test_a_reading_stays_far_below_its_limit(source):
    source.read()
    took = []
    for _ in range(20):
        began = time.monotonic()
        assert source.read().down == ""
        took.append(time.monotonic() - began)
    tell("one reading", statistics.median(took), "s median", max(took), "s longest")
    assert statistics.median(took) < LIMIT_S / 2


def test_the_sampler_gives_the_same_devices(source):
    sampled = DeviceSampler(source).sample()
    assert sampled.down == ""
    assert sampled.duration_ns > 0
