"""Ranks that compute longer than the others, which then wait for them in every collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pasta_otel.gpu.analysis.groups import split
from pasta_otel.gpu.analysis.intervals import length
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "load_imbalance"


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find jobs whose slowest rank computes much longer than the median one."""
    limits = thresholds(KIND)
    if len(ranks) < 2:
        return
    compute = np.array([_compute_ns(rank) for rank in ranks], np.float64)
    middle = float(np.median(compute))
    if middle <= 0:
        return
    slowest = int(np.argmax(compute))
    excess = float(compute[slowest] / middle - 1)
    if excess < limits["above_median"].value:
        return
    evidence = tuple(
        Evidence("compute", float(ns) / 1e9, "s", f"rank {rank.timeline.rank}")
        for rank, ns in sorted(zip(ranks, compute, strict=True), key=lambda pair: -pair[1])
    )
    yield Finding(
        KIND,
        None,
        float((compute[slowest] - middle) / max(ranks[slowest].window_ns, 1)),
        f"rank {ranks[slowest].timeline.rank} computes {excess:.0%} longer than the median rank",
        evidence,
        "give every rank the same work: balance the shards, bucket by length, pad; if the work is equal, compare clocks"
        " and throttling of that GPU",
        limits,
    )


def _compute_ns(rank: RankTrace) -> int:
    """Return how long the rank's GPUs computed: communication would hide the imbalance, for waiting happens there."""
    compute, _, _ = split(rank.codes)
    total = 0
    for device in np.unique(rank.work["device"]).tolist():
        mine = rank.work[compute & (rank.work["device"] == device)]
        total += length(mine["start"].astype(np.int64), mine["end"].astype(np.int64))
    return total
