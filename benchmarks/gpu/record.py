"""Record activity buffers for the tests that run without a GPU: ``python -m benchmarks.gpu.record OUT_DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.gpu.harness import capture_of
from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti.library import loaded_libraries
from pasta_otel.gpu.cupti.recording import Recording, split_buffers, write_recording


def main() -> None:
    capture = capture_of(detach=False)
    block = [torch.nn.LayerNorm(256), torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    model = torch.nn.Sequential(*block).cuda().half()
    x = torch.randn(32, 256, device="cuda", dtype=torch.half)
    for _ in range(3):
        model(x).float().mean().backward()
    with torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
    torch.cuda.synchronize()
    _cupti.record(4 << 20)
    capture.open()
    for number in range(8):
        _cupti.enter(1000 + number)
        loss = model(x).float().mean()
        loss.grad_fn.register_prehook(lambda _, number=number: _cupti.replace(2000 + number))
        loss.backward()
        loss.item()
        _cupti.leave(1000 + number)
    _cupti.enter(5000)
    graph.replay()
    _cupti.leave(5000)
    torch.cuda.synchronize()
    capture.close()
    version = _cupti.load(loaded_libraries()[0])
    buffers = tuple(split_buffers(_cupti.recorded()))
    write_recording(Path(sys.argv[1]) / "h200-t2.cupti.gz", Recording(version, capture.ring.name_pointers(), buffers))
    print(version, [len(buffer) for buffer in buffers], capture.stats())


if __name__ == "__main__":
    main()
