"""``analyze memory`` over all kinds of programs: other languages, interpreters that cannot be followed, missing parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.sanitizer import build

PROGRAM = """
import ctypes, os, sys
fake = ctypes.CDLL(os.environ["FAKE_SANITIZER"])
context = ctypes.c_void_p(16)
def launch(name, warps=1, stride=1, base=0x7f0000000000):
    address = ctypes.c_ulonglong(base)
    fake.fake_launch_at(context, ctypes.c_void_p(1), name.encode(), warps, stride, address)
fake.fake_module(context, b"", ctypes.c_size_t(0))
"""
NOBODY = (
    "no Python was reached (only Python programs are analysed, only those that heed PYTHONPATH: not with -I, -E or -S)"
)


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return str(build("fake", tmp_path_factory.mktemp("fake"), driver=True))


@pytest.fixture
def analyze(fake, tmp_path):
    patch = tmp_path / "patch.fatbin"
    patch.touch()
    script = tmp_path / "program.py"

    def run(*command, options=(), program="", **environ):
        script.write_text(PROGRAM + program)
        words = [sys.executable, "-m", "pasta_otel", "analyze", "memory", *options, "--"]
        words += [str(script) if word == "PROGRAM" else word for word in command]
        settings = {"PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": str(patch), "FAKE_SANITIZER": fake}
        environment = {**os.environ, **settings, **environ}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.mark.parametrize(("code", "expected"), [(0, 3), (4, 4)])
def test_a_program_in_another_language_runs_and_is_said_not_to_be_analysed(analyze, code, expected):
    done = analyze("sh", "-c", f"echo ran; exit {code}")
    assert (done.returncode, done.stdout) == (expected, "ran\n")
    assert done.stderr == f"pasta-otel: memory not analysed: {NOBODY}\n"


def test_a_python_that_another_program_starts_is_analysed(analyze, tmp_path):
    words = ["sh", "-c", f"cd / && {sys.executable} {tmp_path}/program.py; exit 5"]
    done = analyze(*words, program='launch("k", 3)', options=["--json"])
    assert done.returncode == 5
    assert json.loads(done.stdout)["gpu_kernels"][0]["global"]["load"]["requests"] == 3


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_an_interpreter_that_ignores_our_folder_runs_and_is_said_not_to_be_analysed(analyze, option):
    done = analyze(sys.executable, option, "PROGRAM", program='launch("k"); print("ran")')
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert NOBODY in done.stderr


def test_a_program_that_cannot_be_executed_is_named(analyze):
    done = analyze("/nonexistent/program")
    assert done.returncode == 2
    assert "/nonexistent/program" in done.stderr


def test_without_numpy_it_is_said_what_to_install(analyze, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "numpy.py").write_text('raise ModuleNotFoundError("No module named numpy", name="numpy")\n')
    done = analyze(sys.executable, "-c", "print('ran')", PYTHONPATH=str(folder))
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert done.stderr.count("pasta-otel:") == 1
    assert "numpy is not installed; pip install 'pasta-otel[gpu]'" in done.stderr


def test_a_child_without_numpy_runs_and_is_named(analyze, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "numpy.py").write_text('raise ModuleNotFoundError("No module named numpy", name="numpy")\n')
    words = ["sh", "-c", f"PYTHONPATH=$PYTHONPATH:{folder} {sys.executable} -c 'print(\"ran\")'"]
    done = analyze(*words)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "numpy is not installed; pip install 'pasta-otel[gpu]'" in done.stderr


def test_hotness_can_be_left_out(analyze):
    program = 'launch("k", 4, 8)'
    (with_it,) = json.loads(analyze(sys.executable, "PROGRAM", program=program, options=["--json"]).stdout)[
        "gpu_kernels"
    ]
    done = analyze(sys.executable, "PROGRAM", program=program, options=["--json", "--no-hotness"])
    (without,) = json.loads(done.stdout)["gpu_kernels"]
    assert with_it["working_set"] == 4096
    assert without["working_set"] is None
    assert without["global"] == with_it["global"]


def test_device_memory_that_the_driver_hands_out_is_a_tensor(analyze):
    program = """
base = 0x7f0000000000
fake.fake_memory(context, ctypes.c_uint64(base), ctypes.c_uint64(1 << 20))
launch("k", 2, 1, base)
"""
    report = json.loads(analyze(sys.executable, "PROGRAM", program=program, options=["--json"]).stdout)
    (tensor,) = report["tensors"]
    assert (tensor["accesses"], tensor["bytes"]) == (64, 1 << 20)


def test_the_layer_and_line_of_a_torch_module_are_reported(analyze):
    pytest.importorskip("torch")
    program = """
import torch
class Norm(torch.nn.Module):
    def forward(self, x):
        launch("norm")
        return x
torch.nn.Sequential(torch.nn.Identity(), Norm())(torch.ones(1))
"""
    report = json.loads(analyze(sys.executable, "PROGRAM", program=program, options=["--json"]).stdout)
    (kernel,) = report["gpu_kernels"]
    assert kernel["modules"] == [{"module": "1", "launches": 1}]
