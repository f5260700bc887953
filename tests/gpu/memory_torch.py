"""Operations of PyTorch whose GPU kernels are analysed and then profiled by ncu: the same launches in both."""

import sys

import torch

torch.manual_seed(0)
x = torch.arange(2048 * 1024, device="cuda", dtype=torch.float32).reshape(2048, 1024) / 1e6
torch.cuda.synchronize()
x.t().contiguous()
torch.softmax(x, dim=1)
torch.nn.functional.layer_norm(x, (1024,))
x + x
x.sum()
torch.mm(x, x[:1024])
half = x.half()
torch.mm(half, half[:1024])
torch.nn.functional.scaled_dot_product_attention(*[half.reshape(1, 16, 2048, 64)] * 3)
torch.cuda.synchronize()
sys.stdout.write("operations done\n")
