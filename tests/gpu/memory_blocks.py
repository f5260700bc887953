"""Blocks of a program that was not started for it: ``python memory_blocks.py cupy|torch|late``."""

import asyncio
import json
import sys

import pasta_otel

SOURCE = """extern "C" __global__ void strided(const unsigned* a, unsigned* o) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; o[i] = a[(long long)i * 8] * 2; }
extern "C" __global__ void other(unsigned* o) { o[blockIdx.x * blockDim.x + threadIdx.x] = 1; }"""
BLOCKS, WARP = 64, 32


def show(analysis):
    """Print what a block got, as one line of JSON."""
    sys.stdout.write(json.dumps({**analysis.as_dict(), "problem": analysis.problem}) + "\n")


def with_cupy():
    """One block, then launches outside, then two blocks in tasks that take turns."""
    import cupy as cp

    with pasta_otel.analyze(kernels="strided") as analysis:
        module = cp.RawModule(code=SOURCE)
        a, o = cp.zeros(BLOCKS * WARP * 8, dtype=cp.uint32), cp.zeros(BLOCKS * WARP, dtype=cp.uint32)
        strided, other = module.get_function("strided"), module.get_function("other")
        strided((BLOCKS,), (WARP,), (a, o))
    strided((BLOCKS,), (WARP,), (a, o))
    cp.cuda.Device().synchronize()
    show(analysis)

    async def request(name, function, arguments):
        with pasta_otel.analyze(kernels=name) as mine:
            function((BLOCKS,), (WARP,), arguments)
            await asyncio.sleep(0.05)
            function((BLOCKS,), (WARP,), arguments)
        return mine

    async def requests():
        return await asyncio.gather(request("strided", strided, (a, o)), request("other", other, (o,)))

    found = asyncio.run(requests())
    cp.cuda.Device().synchronize()
    for one in found:
        show(one)


def with_torch():
    """PyTorch is imported, which maps libcupti, and CUDA is first used in the block; a backward pass."""
    import torch

    with pasta_otel.analyze() as analysis:
        layer = torch.nn.Linear(256, 256, device="cuda")
        layer(torch.ones(64, 256, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    show(analysis)


def late():
    """CUDA is in use before the block."""
    import torch

    torch.ones(1, device="cuda")
    with pasta_otel.analyze() as analysis:
        torch.ones(1, device="cuda").add_(1)
    show(analysis)


if __name__ == "__main__":
    {"cupy": with_cupy, "torch": with_torch, "late": late}[sys.argv[1]]()
