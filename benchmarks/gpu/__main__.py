"""``make bench-gpu``: every GPU benchmark, in calls of under nine minutes each.

``python -m benchmarks.gpu [PART ...]`` runs the parts named, by default all: ``cost`` (a minute), ``decode`` (GPT-2
eager at batch 1 and 32, and as a CUDA graph; seven minutes), ``batch`` (ResNet-50 and training; six minutes),
``clocks`` (five and a half minutes), ``memory`` (memory analysis; two minutes). ``PAIRS=40`` shortens decode and batch.
Exits with 1 when a part failed.
"""

from __future__ import annotations

import os
import sys

from benchmarks.gpu.harness import FAILED, in_own_process

PAIRS, GRAPH_PAIRS = int(os.environ.get("PAIRS", "400")), 40
PARTS = {
    "cost": [("benchmarks.gpu.launch_cost",)],
    "decode": [
        ("benchmarks.gpu.overhead", "gpt2-decode-graph", str(min(PAIRS, GRAPH_PAIRS))),
        ("benchmarks.gpu.overhead", "gpt2-decode-b1", str(PAIRS)),
        ("benchmarks.gpu.overhead", "gpt2-decode-b32", str(PAIRS)),
    ],
    "batch": [
        ("benchmarks.gpu.overhead", "resnet50-fp16", str(PAIRS)),
        ("benchmarks.gpu.overhead", "train-step", str(PAIRS)),
    ],
    "clocks": [("benchmarks.gpu.clocks",)],
    "memory": [("benchmarks.gpu.memory",)],
}


def main(names: list[str]) -> int:
    """Run the parts; returns the exit status."""
    runs = [run for name in names or list(PARTS) for run in PARTS[name]]
    outputs = [in_own_process(module, *arguments, timeout=500) for module, *arguments in runs]
    return int(any(FAILED in output or "FAIL" in output for output in outputs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
