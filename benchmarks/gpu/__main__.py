"""``make bench-gpu``: every GPU benchmark, in calls of under nine minutes each.

``python -m benchmarks.gpu [PART ...]`` runs the parts named, by default all: ``cost`` (a minute), ``decode`` (GPT-2
eager at batch 1 and 32, and as a CUDA graph; seven minutes), ``batch`` (ResNet-50 and training; six minutes).
``PAIRS=40`` makes everything shorter.
"""

from __future__ import annotations

import os
import sys

from benchmarks.gpu.harness import in_own_process

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
}


def main(names: list[str]) -> None:
    """Run the parts."""
    for name in names or list(PARTS):
        for module, *arguments in PARTS[name]:
            in_own_process(module, *arguments, timeout=500)


if __name__ == "__main__":
    main(sys.argv[1:])
