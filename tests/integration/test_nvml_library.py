"""The real NVML binding over a small shared library: hangs, losses and functions that an old driver does not have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "fixtures" / "nvml" / "fake_nvml.c"
PROGRAM = """
import json, pathlib, sys, threading, time
from pasta_otel.gpu.device.nvml import nvml_source
from pasta_otel.gpu.device.sampler import DeviceSampler

state = pathlib.Path(sys.argv[1])
sampler = DeviceSampler(nvml_source(), limit_s=0.3, reuse_ns=0)

def look(says):
    state.write_text(says)
    began = time.monotonic()
    found = sampler.sample()
    values = {r.metric + "".join(f",{v}" for _, v in r.labels): r.value for d in found.devices for r in d.readings}
    return {"down": found.down, "values": values, "took": time.monotonic() - began,
            "devices": [[d.device.id, d.down, d.state] for d in found.devices],
            "calls": sum(t.name.startswith("pasta-device") for t in threading.enumerate())}

def settle():
    while any(t.name.startswith("pasta-device") for t in threading.enumerate()):
        time.sleep(0.01)

seen = {"ok": look("ok"), "hang": look("hang"), "still": look("hang"), "again": look("hang")}
state.write_text("ok"); settle()
seen["recovered"] = look("ok")
seen["lost"] = look("lost")
seen["found"] = look("ok")
sampler.close()
state.write_text("mismatch")
seen["mismatch"] = DeviceSampler(nvml_source(), reuse_ns=0).sample().down
state.write_text("hang")
DeviceSampler(nvml_source(), limit_s=0.1).sample()
print(json.dumps(seen), flush=True)  # and the process ends, though a driver call hangs in it
"""
VALUES = {
    "hw.gpu.utilization,general": 0.55,
    "pasta.gpu.memory.activity": 0.07,
    "hw.gpu.memory.limit": 100,
    "hw.gpu.memory.usage": 25,
    "hw.gpu.memory.utilization": 0.25,
    "hw.power": 250.5,
    "pasta.gpu.process.memory.usage,4711": 64,
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    state = folder / "state"
    state.write_text("ok")
    environ = os.environ | {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML_STATE": str(state)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(state)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_functions_that_the_library_lacks_are_absent_values(seen: dict):
    assert (seen["ok"]["down"], seen["ok"]["values"]) == ("", VALUES)


def test_a_call_that_hangs_in_the_library_leaves_no_value_and_stays_the_only_one(seen: dict):
    for moment in ("hang", "still", "again"):
        assert (seen[moment]["down"], seen[moment]["values"], seen[moment]["calls"]) == ("timeout", {}, 1)
        assert seen[moment]["devices"] == [["GPU-fake", "timeout", None]]
    assert seen["hang"]["took"] < 5 > seen["still"]["took"]


def test_values_come_back_when_the_call_ends(seen: dict):
    assert (seen["recovered"]["down"], seen["recovered"]["values"]) == ("", VALUES)


def test_a_lost_gpu_is_a_state_and_comes_back(seen: dict):
    assert (seen["lost"]["down"], seen["lost"]["values"]) == ("", {})
    assert seen["lost"]["devices"] == [["GPU-fake", "lost", "failed"]]
    assert seen["found"]["values"] == VALUES


def test_a_library_that_does_not_fit_the_driver_is_a_state(seen: dict):
    assert seen["mismatch"] == "version_mismatch"
