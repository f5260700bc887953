"""Regions of host code that launch the same GPU kernels in the same order again and again."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from pasta_otel.gpu.analysis.modules import MODULE_PREFIX
from pasta_otel.gpu.analysis.timeline import OpKind
from pasta_otel.gpu.findings.model import RankTrace

FEWEST_KERNELS, FEWEST_REPEATS, MOST = 8, 2, 3
MOST_REGIONS = 20_000
"""Regions looked at, longest first: shorter ones launch little."""


class Repeated(NamedTuple):
    """A region: what it is called, how many GPU kernels it launches, and how often it did exactly that."""

    name: str
    kernels: int
    repeats: int


def repeated_regions(rank: RankTrace) -> list[Repeated]:
    """Return the annotations, modules and ops that repeat exactly, those that launch most first."""
    launched = np.flatnonzero(rank.is_kernel & rank.launched_alone)
    calls = rank.links.calls[rank.links.call[launched]]
    by_thread = {}
    for thread in np.unique(calls["thread"]).tolist():
        mine = np.flatnonzero(calls["thread"] == thread)
        mine = mine[np.argsort(calls["start"][mine], kind="stable")]
        by_thread[thread] = (calls["start"][mine], rank.work["name"][launched[mine]])
    counts: Counter[tuple[str, bytes]] = Counter()
    for name, thread, start, end in _regions(rank):
        if thread in by_thread:
            starts, names = by_thread[thread]
            low, high = np.searchsorted(starts, [start, end])
            if high - low >= FEWEST_KERNELS:
                counts[name, names[low:high].tobytes()] += 1
    found = [Repeated(name, len(key) // 4, n) for (name, key), n in counts.items() if n >= FEWEST_REPEATS]
    return sorted(found, key=lambda region: (-region.kernels * region.repeats, -region.kernels))[:MOST]


def _regions(rank: RankTrace) -> list[tuple[str, int, int, int]]:
    names, ops = rank.timeline.names, rank.timeline.ops
    is_module = np.array([name.startswith(MODULE_PREFIX) for name in names], np.bool_)[ops["name"]]
    chosen = np.flatnonzero(((ops["kind"] != OpKind.PYTHON) | is_module) & ~ops["unfinished"])
    longest = chosen[np.argsort(-(ops["end"] - ops["start"])[chosen].astype(np.int64), kind="stable")][:MOST_REGIONS]
    return [
        (_without_number(names[op["name"]]), int(op["thread"]), int(op["start"]), int(op["end"])) for op in ops[longest]
    ]


def _without_number(name: str) -> str:
    """Return a step's or module instance's name without its number: ``ProfilerStep#7``, ``nn.Module: Linear_3``."""
    return name.removeprefix(MODULE_PREFIX).rstrip("0123456789").rstrip("#_")
