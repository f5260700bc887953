"""A program whose tensors are known: PyTorch's, in threads or not, or CuPy's, by its one argument; it prints where they lay."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import OrderedDict

ROWS, COLUMNS = 512, 1024
SMALL = 1024
FORGOTTEN = 4096
THREADS, TURNS = 4, 40
FACTS: dict[str, list[int]] = {}


def note(name, array, size):
    FACTS[name] = [array, size]


def torch_program():
    import torch
    from torch import nn

    def place(name, tensor):
        note(name, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return tensor

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(COLUMNS))

        def forward(self, x):
            return x + self.weight

    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = (("first", Shift()), ("second", nn.Linear(COLUMNS, 256)), ("third", nn.LayerNorm(256)))
            self.net = nn.Sequential(OrderedDict(parts))
            self.table = nn.Embedding(ROWS, COLUMNS)

        def forward(self, numbers):
            return self.net(self.table(numbers))

    def share(one, other):
        return one + other

    def double_and_forget():
        gone = place("gone", torch.full((FORGOTTEN,), 3.0, device="cuda"))
        return place("doubled", gone * 2)

    def come_after():
        return place("after", torch.full((FORGOTTEN,), 4.0, device="cuda"))

    torch.manual_seed(0)
    program = Program().cuda()
    numbers = torch.arange(ROWS, device="cuda")
    x = place("x", torch.ones(ROWS, COLUMNS, device="cuda"))
    with torch.no_grad():
        place("shifted", program.net.first(x))
    one, other = (place(name, torch.ones(SMALL, device="cuda")) for name in ("one", "other"))
    place("both", share(one, other))
    doubled = double_and_forget()
    after = come_after()
    program(numbers).square().sum().backward()
    torch.cuda.synchronize()
    assert float(doubled.sum()) == 6.0 * FORGOTTEN
    assert float(after.sum()) == 4.0 * FORGOTTEN
    begin = time.perf_counter_ns()
    for _ in range(1000):
        torch._C._cuda_memoryStats(0)
    note("nanoseconds of statistics", (time.perf_counter_ns() - begin) // 1000, 0)
    for name, parameter in program.named_parameters():
        assert parameter.grad is not None, name
        place(name, parameter.data)


def threads_program():
    """Allocate and free in threads side by side, so that their calls into the allocator wait for each other."""
    import torch

    def shift(x, weight):
        return x + weight

    def work(number, x, weight):
        stream = torch.cuda.Stream()
        started.wait()
        with torch.cuda.stream(stream):
            for turn in range(TURNS):
                shift(x[: ROWS - turn - number * TURNS], weight)
                # ever larger: the driver allocates, while other threads free
                torch.empty((turn + 1) * (number + 1) << 20, dtype=torch.uint8, device="cuda")
        stream.synchronize()

    started = threading.Barrier(THREADS)
    x, weight = torch.ones(ROWS, COLUMNS, device="cuda"), torch.ones(COLUMNS, device="cuda")
    torch.cuda.synchronize()
    workers = [threading.Thread(target=work, args=(number, x, weight)) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.cuda.synchronize()


SOURCE = r"""
extern "C" __global__ void tensor_add(const float* one, const float* other, float* sum, int count)
{
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) sum[at] = one[at] + other[at];
}
extern "C" __global__ void tensor_pages(float* to, int step)
{
  to[(size_t)step * (blockIdx.x * blockDim.x + threadIdx.x)] = 1.0f;
}
extern "C" __global__ void tensor_raw(float* to) { to[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f; }
extern "C" __global__ void tensor_thread(float* to) { to[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f; }
"""
COUNT, PAGES, STEP = 1 << 18, 256, 1024


def cupy_program():
    import cupy as cp

    module = cp.RawModule(code=SOURCE)

    def place(name, array):
        note(name, array.data.ptr, array.nbytes)
        return array

    def add(one, other):
        total = place("total", cp.empty(COUNT, cp.float32))
        module.get_function("tensor_add")((COUNT // 256,), (256,), (one, other, total, COUNT))
        return total

    def pages():
        spread = place("spread", cp.empty(PAGES * STEP, cp.float32))
        module.get_function("tensor_pages")((PAGES // 32,), (32,), (spread, STEP))

    def raw():
        memory = cp.cuda.Memory(4 * COUNT)
        array = place("raw", cp.ndarray(COUNT, cp.float32, cp.cuda.MemoryPointer(memory, 0)))
        module.get_function("tensor_raw")((COUNT // 256,), (256,), (array,))
        cp.cuda.get_current_stream().synchronize()

    def thread():
        array = place("thread", cp.empty(COUNT, cp.float32))
        module.get_function("tensor_thread")((COUNT // 256,), (256,), (array,))
        cp.cuda.get_current_stream().synchronize()

    one, other = (place(name, cp.ones(COUNT, cp.float32)) for name in ("one", "other"))
    total = add(one, other)
    assert float(total.sum()) == 2.0 * COUNT
    pages()
    raw()
    worker = threading.Thread(target=thread)
    worker.start()
    worker.join()
    cp.cuda.Device().synchronize()


if __name__ == "__main__":
    {"torch": torch_program, "threads": threads_program, "cupy": cupy_program}[sys.argv[1]]()
    sys.stdout.write(json.dumps(FACTS) + "\ntensors done\n")
