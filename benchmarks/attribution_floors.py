"""Simple methods to be beaten, re-implemented: each returns services, most suspect first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from pasta_otel.model import EdgeKey, OperationKey, Samples, TimeWindow
from pasta_otel.slo.attribution.effect import robust_z, sorted_values
from pasta_otel.testing.spans import MemorySpan, MemorySpanStore

Scores = Mapping[str, float]


def ranking(scores: Scores) -> list[str]:
    return sorted(scores, key=lambda name: (-scores[name], name))


def ks_statistic(before: np.ndarray, after: np.ndarray) -> float:
    """Return the two-sample Kolmogorov-Smirnov statistic."""
    points = np.concatenate([before, after])
    a, b = np.searchsorted(before, points, "right") / len(before), np.searchsorted(after, points, "right") / len(after)
    return float(np.abs(a - b).max())


def duration_ks(normal: list[MemorySpan], burning: list[MemorySpan]) -> Scores:
    """Largest KS statistic of a service's span durations."""

    def durations(spans: list[MemorySpan]) -> dict[OperationKey, list[int]]:
        found: dict[OperationKey, list[int]] = defaultdict(list)
        for span in spans:
            found[OperationKey(span.service, span.operation)].append(span.duration_ns)
        return found

    return _best(durations(normal), durations(burning), ks_statistic, lambda key: [key.service])


def self_time_robust_z(store: MemorySpanStore, before: TimeWindow, after: TimeWindow) -> Scores:
    """Largest (mean - median) / IQR of a service's operations."""
    old, new = store.operation_self_times(before), store.operation_self_times(after)
    return _best(_values(old), _values(new), robust_z, lambda key: [key.service])


def edge_gap_robust_z(store: MemorySpanStore, before: TimeWindow, after: TimeWindow) -> Scores:
    """Median over a service's edges of the robust z of client minus server."""
    old, new = _values(store.edge_gaps(before)), _values(store.edge_gaps(after))
    found: dict[str, list[float]] = defaultdict(list)
    for edge, values in new.items():
        if edge in old:
            z = robust_z(sorted_values(old[edge]), sorted_values(values))
            for service in EdgeKey(*edge):
                found[service].append(z)
    return {service: float(np.median(zs)) for service, zs in found.items()}


def _values(samples: Mapping) -> dict:
    return {key: list(value.values_ns) for key, value in samples.items() if isinstance(value, Samples)}


def _best(old: Mapping, new: Mapping, score: Callable[..., float], owners: Callable) -> Scores:
    found: dict[str, float] = {}
    for key in new:
        if key in old:
            value = score(sorted_values(old[key]), sorted_values(new[key]))
            for owner in owners(key):
                found[owner] = max(found.get(owner, -1e300), value)
    return found


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the rank correlation of two series where both have values; 0 with fewer than five or no spread."""
    both = ~np.isnan(a) & ~np.isnan(b)
    if both.sum() < 5:
        return 0.0
    x, y = _ranks(a[both]), _ranks(b[both])
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Average ranks, ties shared."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]
