"""Record one training step with SyncBatchNorm on two GPUs, for the finding's test.

usage: ``torchrun --nproc-per-node 2 -m benchmarks.gpu.sync_batchnorm OUT_DIR``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm2d(16), torch.nn.ReLU()).cuda()
    model = DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[rank])
    images = torch.randn(8, 3, 64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, schedule=schedule(wait=1, warmup=3, active=1)) as profiler:
        for _ in range(5):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
            profiler.step()
    profiler.export_chrome_trace(str(out / f"sync_batchnorm_rank{rank}.json.gz"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
