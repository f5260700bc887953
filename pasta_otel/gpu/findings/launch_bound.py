"""Phases in which the GPU waits for launches; repeated ones are candidates for a CUDA graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.intervals import length
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "launch_bound"


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find ranks whose GPU kernels mostly begin as soon as they are launched, with idle time between."""
    limits = thresholds(KIND)
    for rank in ranks:
        paired = np.flatnonzero(rank.is_kernel & rank.launched_alone)
        if len(paired) < limits["kernels"].value:
            continue
        order = paired[np.argsort(rank.work["start"][paired], kind="stable")]
        waiting = _waiting(rank, order)
        start, end = rank.work["start"][order].astype(np.int64), rank.work["end"][order].astype(np.int64)
        window = int(end.max() - start.min())
        idle = 1 - length(start, end) / window if window else 0.0
        share = float(waiting.mean())
        if share < limits["waiting_share"].value or idle < limits["idle_share"].value:
            continue
        name, repeats = _most_repeated(rank, order)
        evidence = (
            Evidence("waiting_kernels", share, "1", f"{int(waiting.sum())} of {len(order)} found nothing queued"),
            Evidence("idle", idle, "1", "of the time between the first and the last of them"),
            Evidence("repeats", repeats, "{launch}", f"graph candidate: {name}"),
        )
        yield Finding(
            KIND,
            rank.timeline.rank,
            idle,
            f"the GPU waits for launches: {share:.0%} of its kernels found nothing queued, it idles {idle:.0%}",
            evidence,
            "launch less: CUDA graphs or torch.compile(mode='reduce-overhead') for what repeats with equal shapes, or a"
            " larger batch",
            limits,
        )


def _waiting(rank: RankTrace, order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which GPU kernels were launched after everything before them on the device had ended."""
    launched = rank.links.calls["start"][rank.links.call[order]].astype(np.int64)
    ended = np.maximum.accumulate(rank.work["end"][order].astype(np.int64))
    waiting: NDArray[np.bool_] = launched[1:] >= ended[:-1]
    return waiting


def _most_repeated(rank: RankTrace, order: NDArray[np.int64]) -> tuple[str, int]:
    """Return the op that launched most of them, which a graph would replace."""
    ops = rank.links.op[order]
    names = Counter(rank.timeline.names[rank.timeline.ops["name"][op]] for op in ops.tolist() if op >= 0)
    return names.most_common(1)[0] if names else ("unknown op", 0)
