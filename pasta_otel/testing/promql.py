"""Prometheus 2.x's ``increase`` again, in plain Python: the oracle for what the real engine answers.

Follows ``extrapolatedRate`` of Prometheus 2.42 (promql/functions.go): the window is closed on both sides, a drop means
the counter restarted at 0, and the sampled interval is extended to the window's edges by at most 1.1 average intervals,
else by half of one, and to the left never below the time at which the counter would have been 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Sample = tuple[int, float]
"""(time in ms, value)."""


@dataclass(frozen=True, slots=True)
class Increase:
    """What ``increase`` answers, and how much of it is extrapolation.

    Attributes:
        value: The answer.
        counted: Growth between the first and the last sample in the window, resets counted whole.
        resets: Number of resets.
    """

    value: float
    counted: float
    resets: int


def increase(samples: Sequence[Sample], start_ms: int, end_ms: int) -> Increase | None:
    """Return ``increase`` over [start, end], or None with fewer than two samples.

    Args:
        samples: Sorted by time.
        start_ms: Evaluation time minus the range.
        end_ms: Evaluation time.
    """
    inside = [sample for sample in samples if start_ms <= sample[0] <= end_ms]
    if len(inside) < 2:
        return None
    counted, resets = _growth(inside)
    sampled = (inside[-1][0] - inside[0][0]) / 1000
    average = sampled / (len(inside) - 1)
    to_start, to_end = (inside[0][0] - start_ms) / 1000, (end_ms - inside[-1][0]) / 1000
    if counted > 0 and inside[0][1] >= 0:
        to_start = min(to_start, sampled * (inside[0][1] / counted))
    extended = sampled + sum(gap if gap < average * 1.1 else average / 2 for gap in (to_start, to_end))
    return Increase(counted * (extended / sampled), counted, resets)


def _growth(samples: Sequence[Sample]) -> tuple[float, int]:
    total, resets = samples[-1][1] - samples[0][1], 0
    for (_, before), (_, after) in pairwise(samples):
        if after < before:
            total, resets = total + before, resets + 1
    return total, resets
