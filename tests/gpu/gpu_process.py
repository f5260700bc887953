"""Runs a program on the GPU machine in a process of its own, because a process has one CUPTI state for its life."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PREAMBLE = """
import json, os, sys, threading, time
from collections import Counter
import numpy as np
import torch
from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti import library
from pasta_otel.gpu.cupti.capture import Capture, T2_WINDOW, T3_WINDOW
from pasta_otel.gpu.cupti.rows import Kind, is_kind
from pasta_otel.gpu.mapping import Joiner, Region, Regions
torch.ones(1, device="cuda")
library.load()
x, y = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
def capture_of(**options): return Capture(_cupti.Ring(8192, 256), **options)
def while_running(action, program=lambda: x.add_(y)):
    result = []
    thread = threading.Thread(target=lambda: result.append(action())); thread.start()
    while thread.is_alive(): program()
    return result[0]
def gpu_kernels(rows): return rows[is_kind(rows, (3, 10))]
def gathered(capture):
    blocks = capture.drain()
    return np.concatenate(blocks) if blocks else np.empty(0)
def regions_of():
    regions = Regions(_cupti, time.time_ns)
    regions.recording = True
    return regions
facts = {}
"""
FACTS = "FACTS "


def gpu_count() -> int:
    """Return how many NVIDIA GPUs a CUDA program would see here."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    listed = sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed if visible is None else min(listed, len([entry for entry in visible.split(",") if entry.strip()]))


def skip_without(gpus: int = 1) -> None:
    """Skip the test, with the reason, where there are fewer GPUs."""
    found = gpu_count()
    if found < gpus:
        pytest.skip("no NVIDIA GPU" if not found else f"needs {gpus} NVIDIA GPUs, {found} here")


def start(body: str, preamble: str = PREAMBLE, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a program; what it leaves in ``facts`` is read by ``facts_of``."""
    text = preamble + textwrap.dedent(body) + f"\nprint({FACTS!r} + json.dumps(facts, default=float), flush=True)\n"
    program = Path(tempfile.mkdtemp(prefix="pasta-gpu-"), "gpu_program.py")  # a file: torch reads the lines of frames
    program.write_text(text, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def facts_of(process: subprocess.Popen[str], timeout_s: float) -> dict:
    """Wait for a program, and return its facts.

    Raises:
        AssertionError: It failed or took too long; says its output.
    """
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        raise AssertionError(f"took more than {timeout_s} s\n{out[-2000:]}{errors[-4000:]}") from None
    assert process.returncode == 0, f"exit {process.returncode}\n{out[-2000:]}{errors[-4000:]}"
    facts = next(json.loads(line[len(FACTS) :]) for line in out.splitlines() if line.startswith(FACTS))
    sys.stdout.write(f"{facts}\n")  # shown with -rA: what was measured
    return facts


def run(body: str, timeout_s: float = 120, gpus: int = 1, preamble: str = PREAMBLE) -> dict:
    """Run a program, and return its facts; skips where there are fewer GPUs."""
    skip_without(gpus)
    return facts_of(start(body, preamble), timeout_s)
