"""A CUDA graph of PyTorch, captured once and replayed: ``python memory_graph.py``, run under the analysis."""

import sys

import torch

REPLAYS, NUMBERS = 3, 1 << 20

x = torch.zeros(NUMBERS, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(2):
        x.add_(1)
torch.cuda.synchronize()
x.zero_()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(35):
        x.add_(2)
        torch.neg_(x)  # another GPU kernel
        torch.neg_(x)
torch.cuda.synchronize()
assert float(x[0]) == 0, "a capture launches nothing"
for _ in range(REPLAYS):
    graph.replay()
torch.cuda.synchronize()
assert bool((x == 70 * REPLAYS).all()), float(x[0])
sys.stdout.write("graph done\n")
