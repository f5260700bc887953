"""What a trace says to change: one file a finding, and an entry point group for everybody else's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points

from pasta_otel.gpu.analysis.timeline import Timeline
from pasta_otel.gpu.findings import (
    batchnorm_sync,
    fp64,
    idle_gap,
    launch_bound,
    load_imbalance,
    pageable_copy,
    small_kernels,
    sync_stall,
    tensor_cores_missed,
)
from pasta_otel.gpu.findings.model import Evidence, Finder, Finding, RankTrace, Threshold, rank_trace, thresholds

GROUP = "pasta_otel.findings"
OUR_FINDERS: tuple[Finder, ...] = (
    sync_stall.find,
    launch_bound.find,
    tensor_cores_missed.find,
    pageable_copy.find,
    small_kernels.find,
    idle_gap.find,
    batchnorm_sync.find,
    fp64.find,
    load_imbalance.find,
)

_logger = logging.getLogger(__name__)


def find(timelines: Sequence[Timeline], finders: Iterable[Finder] | None = None) -> list[Finding]:
    """Return all findings of a job, the largest share first.

    Args:
        timelines: One a rank.
        finders: What looks; by default ours and those of the entry point group ``pasta_otel.findings``. One that
            raises is logged and passed over: it must not cost the others' findings.
    """
    ranks = [rank_trace(timeline) for timeline in timelines]
    found: list[Finding] = []
    for finder in (*OUR_FINDERS, *plugins()) if finders is None else finders:
        try:
            found.extend(finder(ranks))
        except Exception:
            _logger.exception("finding %s failed", getattr(finder, "__module__", finder))
    return sorted(found, key=lambda finding: -finding.share)


def plugins() -> list[Finder]:
    """Return the finders that other distributions register; one that cannot be imported is logged."""
    loaded: list[Finder] = []
    for point in entry_points(group=GROUP):
        try:
            loaded.append(point.load())
        except Exception:
            _logger.exception("finding %s cannot be loaded", point.name)
    return loaded


__all__ = ["GROUP", "Evidence", "Finder", "Finding", "RankTrace", "Threshold", "find", "plugins", "thresholds"]
