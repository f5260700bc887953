"""Set-up, timing and statistics shared by the GPU benchmarks."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti import library
from pasta_otel.gpu.cupti.capture import Capture

RESULTS = Path(__file__).parents[1] / "results"
FAILED = "ended with exit status"


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": gpu,
        "cpu_count": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(name: str, answer: dict[str, Any], out: Path | None = None) -> Path:
    """Write a result file; all windows are in it."""
    folder = out or Path(os.environ.get("OUT", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{name}.json"
    path.write_text(json.dumps({"machine": machine(), **answer}, indent=None, default=float))
    return path


def capture_of(*, detach: bool = True):
    """Load CUPTI and return the capture of this process."""
    torch.ones(1, device="cuda")
    library.load()
    return Capture(_cupti.Ring(8192, 256), detach=detach)


def while_running(action: Callable[[], Any], program: Callable[[], object]) -> Any:
    """Run an action on another thread while the program goes on (a detachment happens inside one of its calls)."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(action()))
    thread.start()
    while thread.is_alive():
        program()
    thread.join()
    return result[0] if result else None


def bootstrap_ratio(on: np.ndarray, off: np.ndarray, rounds: int = 4000, seed: int = 0) -> dict[str, float]:
    """Return the relative overhead of paired blocks with a 95 % bootstrap interval over pairs.

    Args:
        on: Shape (pairs, 2): seconds and steps of each block with capture.
        off: The same without.
    """
    rng = np.random.default_rng(seed)
    pick = rng.integers(0, len(on), (rounds, len(on)))

    def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a[..., 0].sum(-1) / a[..., 1].sum(-1)) / (b[..., 0].sum(-1) / b[..., 1].sum(-1)) - 1

    draws = ratio(on[pick], off[pick])
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": float(ratio(on, off)), "low": float(low), "high": float(high)}


def abba(pairs: int, seed: int = 1) -> list[bool]:
    """Return the randomised order: each four blocks are ABBA or BAAB; True = with capture."""
    rng, order = random.Random(seed), []
    for _ in range((pairs + 1) // 2):
        first = rng.random() < 0.5
        order += [first, not first, not first, first]
    return order


def in_own_process(module: str, *arguments: str, timeout: float) -> str:
    """Run a benchmark in a process of its own, because a process has one CUPTI for its life; returns its output."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    sys.stdout.write(done.stdout[-4000:])
    if done.returncode == 0:
        return done.stdout
    failure = f"{module} {' '.join(arguments)}: {FAILED} {done.returncode}\n{done.stderr[-3000:]}\n"
    sys.stdout.write(failure)
    return done.stdout + failure
