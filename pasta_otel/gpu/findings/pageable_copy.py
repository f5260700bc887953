"""Copies from or to pageable host memory, which pass through a staging buffer and make the host wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pasta_otel.gpu.analysis.intervals import length
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "pageable_copy"
WORD = "Pageable"
"""How Kineto names the memory in a copy's name: ``Memcpy HtoD (Pageable -> Device)``."""


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find ranks whose GPU spends a share of its busy time in pageable copies."""
    limits = thresholds(KIND)
    for rank in ranks:
        named = np.array([WORD in name for name in rank.timeline.names], np.bool_)
        rows = np.flatnonzero(named[rank.work["name"]] & ~rank.is_kernel)
        busy_ns = length(rank.work["start"].astype(np.int64), rank.work["end"].astype(np.int64))
        if not len(rows) or not busy_ns:
            continue
        copy_ns, copied = int(rank.duration_ns[rows].sum()), int(rank.work["value"][rows].sum())
        share = copy_ns / busy_ns
        if share < limits["time_share"].value:
            continue
        longest = rows[np.argmax(rank.duration_ns[rows])]
        op = int(rank.links.op[longest])
        where = rank.timeline.names[rank.timeline.ops["name"][op]] if op >= 0 else "unknown op"
        evidence = (
            Evidence("copies", len(rows), "{copy}", rank.name(rank.work[longest])),
            Evidence("copy_time", copy_ns / 1e9, "s", f"the longest in {where}"),
            Evidence("copied", copied, "By", f"{copied / max(copy_ns, 1):.2f} GB/s"),
        )
        yield Finding(
            KIND,
            rank.timeline.rank,
            min(share, 1.0),
            f"{len(rows)} copies use pageable host memory, {share:.0%} of the GPU's busy time",
            evidence,
            "pin the host memory (DataLoader(pin_memory=True), tensor.pin_memory()) and copy with non_blocking=True",
            limits,
        )
