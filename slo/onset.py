"""When did the burn begin? The split of recent slices that best explains their error counts.

Two error ratios, one before and one after, against a single one: the split with the greatest log-likelihood gain of a
binomial model (a standard single change-point estimate), among those where the ratio rises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pasta_otel.model import EventCounts, TimeWindow

HISTORY_LONG_WINDOWS = 4
MAX_SLICES = 60


@dataclass(frozen=True, slots=True)
class Burn:
    """A normal window and a burning one; the slice in which the burn began belongs to neither for sure, so to none."""

    baseline: TimeWindow
    window: TimeWindow


def slices(end_unix_nano: int, long_ns: int, short_ns: int) -> list[TimeWindow]:
    """Return adjoining slices of recent history, oldest first, the last one ending now."""
    count = min(MAX_SLICES, max(4, HISTORY_LONG_WINDOWS * long_ns // short_ns))
    first = end_unix_nano - count * short_ns
    return [TimeWindow(first + i * short_ns, first + (i + 1) * short_ns) for i in range(count)]


def locate(windows: Sequence[TimeWindow], counts: Sequence[EventCounts]) -> Burn:
    """Return where normal ended and the burn began.

    Without a rise in the history (it has burned for all of it) the first half stands in for normal: whoever compares
    the two finds little, which is the truth.
    """
    seen = [i for i, count in enumerate(counts) if count.no_data is None and count.total > 0]
    first = seen[0] if seen else 0
    at = _best_split(counts, first)
    if at is None:
        at = (first + len(windows)) // 2
        return _burn(windows, first, at, at)
    return _burn(windows, first, at - 1 if at - 1 > first else at, at)


def _burn(windows: Sequence[TimeWindow], first: int, baseline_end: int, at: int) -> Burn:
    start = windows[first].start_unix_nano
    onset = windows[at].start_unix_nano if at < len(windows) else windows[-1].start_unix_nano
    end = windows[baseline_end].start_unix_nano if baseline_end < len(windows) else onset
    return Burn(TimeWindow(start, max(start, end)), TimeWindow(onset, windows[-1].end_unix_nano))


def _best_split(counts: Sequence[EventCounts], first: int) -> int | None:
    best, best_gain = None, 0.0
    usable = [count if count.no_data is None else EventCounts(0.0, 0.0) for count in counts]
    whole = _likelihood(usable[first:])
    for at in range(first + 1, len(usable)):
        before, after = usable[first:at], usable[at:]
        if _ratio(after) <= _ratio(before):
            continue
        gain = _likelihood(before) + _likelihood(after) - whole
        if gain > best_gain:
            best, best_gain = at, gain
    return best


def _ratio(counts: Sequence[EventCounts]) -> float:
    total = sum(count.total for count in counts)
    return sum(count.bad for count in counts) / total if total else 0.0


def _likelihood(counts: Sequence[EventCounts]) -> float:
    total, bad = sum(count.total for count in counts), sum(count.bad for count in counts)
    return _x_log(bad, total) + _x_log(total - bad, total)


def _x_log(part: float, total: float) -> float:
    return part * math.log(part / total) if part > 0 and total > 0 else 0.0
