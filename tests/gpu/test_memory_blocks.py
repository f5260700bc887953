"""``with pasta_otel.analyze()`` on the GPU, in programs that were not started for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "memory_blocks.py"
BLOCKS = 64


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if shutil.which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], check=False).returncode:
        pytest.skip("no NVIDIA GPU")


def blocks(what: str) -> list[dict]:
    """Return what the program's blocks got."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, str(PROGRAM), what]
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_blocks_get_their_own_launches_with_the_counters_of_the_closed_form():
    pytest.importorskip("cupy")
    first, strided, other = blocks("cupy")
    for found, name, launches in ((first, "strided", 1), (strided, "strided", 2), (other, "other", 2)):
        assert (found["available"], found["problem"], found["pending"]) == (True, "", 0)
        (kernel,) = found["gpu_kernels"]
        assert (kernel["symbol"], kernel["launches"]) == (name, launches)
    load = first["gpu_kernels"][0]["global"]["load"]
    assert load == {"requests": BLOCKS, "lanes": 32 * BLOCKS, "sectors": 32 * BLOCKS, "bytes": 128 * BLOCKS}


def test_a_program_with_torch_is_analysed_from_its_first_use_of_cuda_with_its_backward_pass():
    pytest.importorskip("torch")
    (found,) = blocks("torch")
    assert (found["available"], found["problem"], found["pending"]) == (True, "", 0)
    assert found["launches"]["analysed"] == found["launches"]["seen"] > 5


def test_where_cuda_is_in_use_the_program_is_told_how_to_be_started():
    pytest.importorskip("torch")
    (found,) = blocks("late")
    assert not found["available"]
    assert found["problem"].startswith("CUDA was initialised before: start the program by `pasta-otel analyze memory")
