"""GPU kernels so short that launching them costs the host more than they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pasta_otel.gpu.classes import CLASSES
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "small_kernels"
TOP = 3


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find ranks most of whose GPU kernels are small, and dearer to launch than to run."""
    limits = thresholds(KIND)
    for rank in ranks:
        eager = rank.is_kernel & rank.launched_alone
        small = eager & (rank.duration_ns < limits["duration_ns"].value)
        if small.sum() < limits["kernels"].value or small.sum() < limits["count_share"].value * eager.sum():
            continue
        limit_us = limits["duration_ns"].value / 1000
        calls = rank.links.calls[rank.links.call[small]]
        launch_ns, work_ns = int((calls["end"] - calls["start"]).sum()), int(rank.duration_ns[small].sum())
        if not work_ns or launch_ns / work_ns < limits["launch_to_work"].value:
            continue
        classes = np.bincount(rank.codes[small], minlength=len(CLASSES))
        top = ", ".join(f"{classes[code]} {CLASSES[code]}" for code in np.argsort(-classes)[:TOP] if classes[code])
        evidence = (
            Evidence("small_kernels", int(small.sum()), "{kernel}", f"of {int(eager.sum())}: {top}"),
            Evidence("launch_time", launch_ns / 1e9, "s", "of the host, in their launch calls"),
            Evidence("work_time", work_ns / 1e9, "s", "on the GPU"),
        )
        yield Finding(
            KIND,
            rank.timeline.rank,
            min(launch_ns / rank.window_ns, 1.0),
            f"{int(small.sum())} GPU kernels run less than {limit_us:.0f} us: launching them takes"
            f" {launch_ns / work_ns:.1f} times as long",
            evidence,
            "fuse them: torch.compile, fused optimizers (foreach=True, fused=True), fused norm and attention modules",
            limits,
        )
