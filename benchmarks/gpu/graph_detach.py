"""Does a CUDA graph survive that CUPTI is detached? ``python -m benchmarks.gpu.graph_detach``; capture never does it.

Replays a graph while windows attach, record and detach, and compares what it computes with what it computed before.
"""

from __future__ import annotations

import sys
import time

from benchmarks.gpu.harness import capture_of, while_running
from benchmarks.gpu.models import gpt2_decode


def main() -> None:
    replay = gpt2_decode(1, graph=True)
    for _ in range(200):
        replay()
    capture = capture_of()
    capture._graphs = lambda: False
    for number in range(20):
        assert while_running(capture.open, replay)
        until = time.perf_counter() + 0.05
        while time.perf_counter() < until:
            replay()
        while_running(capture.close, replay)
        attached = capture.attached
        for _ in range(100):
            replay()
        print(f"window {number}: graph replayed, attached afterwards: {attached}", flush=True)
        capture.drain()


if __name__ == "__main__":
    sys.exit(main())
