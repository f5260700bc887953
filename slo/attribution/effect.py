"""Effect sizes between two windows: how large a shift is, how sure, and how much of a request it makes up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pasta_otel.model import Samples
from pasta_otel.slo.attribution.thresholds import Thresholds

TAIL_QUANTILE = 0.95
_EMPTY = Samples((), 0)


def sorted_values(values: Sequence[int] | Sequence[float]) -> NDArray[np.float64]:
    """Return the values sorted as float64; sorted sums make every result independent of the order of arrival."""
    return np.sort(np.asarray(values, dtype=np.float64))


def cliffs_delta(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """Return P(after > before) - P(after < before) over all pairs, -1..1 (Cliff 1993); 0 if either is empty.

    Both must be sorted; O(n log m).
    """
    if not len(before) or not len(after):
        return 0.0
    below = np.searchsorted(before, after, side="left")
    not_above = np.searchsorted(before, after, side="right")
    above = len(before) - not_above
    return float((below - above).sum() / (len(before) * len(after)))


def rank_z(delta: float, n: int, m: int) -> float:
    """Return the Mann-Whitney z that belongs to a Cliff's delta of n and m observations (no tie correction).

    U = n m (delta + 1) / 2 has mean n m / 2 and variance n m (n + m + 1) / 12 under equality; ties make the true
    variance smaller, so this z errs on the careful side.
    """
    return delta * math.sqrt(3.0 * n * m / (n + m + 1.0)) if n and m else 0.0


def proportion_z(bad_before: float, n: float, bad_after: float, m: float) -> float:
    """Return the pooled two-proportion z of bad_after / m against bad_before / n."""
    if n <= 0 or m <= 0:
        return 0.0
    pooled = (bad_before + bad_after) / (n + m)
    spread = math.sqrt(max(pooled * (1.0 - pooled), 0.0) * (1.0 / n + 1.0 / m))
    return (bad_after / m - bad_before / n) / spread if spread else 0.0


def robust_z(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """Return (mean of after - median of before) / interquartile range of before: the robust scaling of BARO.

    The range is floored at 1 % of the median, so that a constant baseline does not make every change infinite.
    """
    if not len(before) or not len(after):
        return 0.0
    q25, median, q75 = (float(q) for q in np.quantile(before, (0.25, 0.5, 0.75)))
    return (float(after.mean()) - median) / max(q75 - q25, abs(median) * 0.01, 1e-9)


@dataclass(frozen=True, slots=True)
class Shift:
    """One key in both windows.

    Attributes:
        before: Baseline samples.
        after: Samples of the burning window.
        median_before_ns: Median of the baseline.
        median_after_ns: Median of the burning window.
        mean_before_ns: Mean of the baseline.
        mean_after_ns: Mean of the burning window.
        delta: Cliff's delta.
        tail: Extra share of observations above the baseline's 95th percentile.
        z: The larger of the Mann-Whitney z and the two-proportion z of the tail.
        calls_before: Observations a request in the baseline.
        calls_after: Observations a request in the burning window.
    """

    before: Samples
    after: Samples
    median_before_ns: float
    median_after_ns: float
    mean_before_ns: float
    mean_after_ns: float
    delta: float
    tail: float
    z: float
    calls_before: float
    calls_after: float

    @property
    def before_ns(self) -> float:
        """Return the key's time in an average baseline request."""
        return self.calls_before * self.mean_before_ns

    @property
    def slower_ns(self) -> float:
        """Return the extra time in a request because each observation got slower (may be negative)."""
        return self.calls_after * (self.mean_after_ns - self.mean_before_ns) if self.before.count else 0.0

    @property
    def base_ns(self) -> float:
        """Return the time in a request of as many observations as now, each as slow as before."""
        return self.calls_after * self.mean_before_ns

    @property
    def more_calls_ns(self) -> float:
        """Return the extra time in a request because there are more observations, each as slow as before."""
        mean = self.mean_before_ns if self.before.count else self.mean_after_ns
        return (self.calls_after - self.calls_before) * mean

    @property
    def strength(self) -> float:
        """Return how clearly the distribution moved up, 0..1: the larger of Cliff's delta and the tail excess."""
        return min(1.0, max(self.delta, self.tail, 0.0))

    def passes(self, limits: Thresholds) -> bool:
        """Say whether there are enough observations and the shift is both significant and not small."""
        enough = min(len(self.before.values_ns), len(self.after.values_ns)) >= limits.min_count
        large = self.delta >= limits.min_delta or self.tail >= limits.min_tail
        return enough and large and self.z >= limits.min_z


def compare(before: Samples | None, after: Samples | None, requests_before: float, requests_after: float) -> Shift:
    """Compare one key's samples of two windows; a missing side counts as no observation."""
    old, new = before or _EMPTY, after or _EMPTY
    a, b = sorted_values(old.values_ns), sorted_values(new.values_ns)
    delta, tail = cliffs_delta(a, b), _tail_excess(a, b)
    return Shift(
        before=old,
        after=new,
        median_before_ns=_median(a),
        median_after_ns=_median(b),
        mean_before_ns=_mean(a),
        mean_after_ns=_mean(b),
        delta=delta,
        tail=tail,
        z=max(rank_z(delta, len(a), len(b)), _tail_z(a, b)),
        calls_before=old.count / requests_before if requests_before else 0.0,
        calls_after=new.count / requests_after if requests_after else 0.0,
    )


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _exceeding(before: NDArray[np.float64], after: NDArray[np.float64]) -> tuple[int, int]:
    cut = float(np.quantile(before, TAIL_QUANTILE))
    return int((before > cut).sum()), int((after > cut).sum())


def _tail_excess(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    if not len(before) or not len(after):
        return 0.0
    old, new = _exceeding(before, after)
    return new / len(after) - old / len(before)


def _tail_z(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    if not len(before) or not len(after):
        return 0.0
    old, new = _exceeding(before, after)
    return proportion_z(old, len(before), new, len(after))
