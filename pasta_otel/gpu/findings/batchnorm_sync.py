"""Batch-norm statistics gathered from all ranks: a small collective in every such layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from pasta_otel.gpu.analysis.groups import COLLECTIVE
from pasta_otel.gpu.analysis.link import innermost
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "batchnorm_sync"
SYNC_BATCH_NORM = re.compile(r"SyncBatchNorm")
"""``torch.nn.SyncBatchNorm`` as autograd function (SyncBatchNorm, SyncBatchNormBackward) and as module."""


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find ranks where SyncBatchNorm takes a share of the communication."""
    limits = thresholds(KIND)
    for rank in ranks:
        collective = np.flatnonzero(rank.codes == COLLECTIVE)
        ops, names = rank.timeline.ops, rank.timeline.names
        matching = np.array([SYNC_BATCH_NORM.search(name) is not None for name in names], np.bool_)
        regions = matching[ops["name"]] if len(ops) else np.empty(0, np.bool_)
        launched = collective[rank.links.call[collective] >= 0]
        if not regions.any() or not len(launched):
            continue
        calls = rank.links.calls[rank.links.call[launched]]
        inside = launched[innermost(ops, calls["thread"], calls["start"], regions) >= 0]
        sync_ns, total_ns = int(rank.duration_ns[inside].sum()), int(rank.duration_ns[collective].sum())
        if not total_ns or sync_ns / total_ns < limits["communication_share"].value:
            continue
        evidence = (
            Evidence("collectives", len(inside), "{collective}", "launched by SyncBatchNorm"),
            Evidence("collective_time", sync_ns / 1e9, "s", f"{sync_ns / total_ns:.0%} of all communication"),
        )
        yield Finding(
            KIND,
            rank.timeline.rank,
            sync_ns / rank.window_ns,
            f"SyncBatchNorm makes {len(inside)} collectives, {sync_ns / total_ns:.0%} of the communication time",
            evidence,
            "use local BatchNorm where the batch of one rank is large enough (about 16 samples), or GroupNorm; or"
            " synchronise within a smaller process group",
            limits,
        )
