"""Histories of a service, as increments between samples: one truth to feed every source with and check it against."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

SAMPLES_COARSE_S, SAMPLES_FINE_S, FINE_SECONDS = 300, 60, 12 * 3600
PERIODS_DAYS = (7, 28, 30, 90)
KINDS = ("steady", "spike", "idle", "reset", "no_errors", "no_total", "uneven", "dst_month", "late_start")
END_S = 1_700_000_400  # a whole number of fine and coarse steps


@dataclass(frozen=True, slots=True)
class Scenario:
    """One history.

    Attributes:
        name: Unique.
        kind: One of ``KINDS``.
        period_days: The SLO's period.
        times_s: Sample times in Unix seconds; the first is where counting begins.
        total: Events that ended between the sample before and this one; the first is 0.
        bad: Bad ones among them.
        reset_at: Sample before which the process restarted with its counters at 0, or None.
    """

    name: str
    kind: str
    period_days: int
    times_s: tuple[int, ...]
    total: tuple[int, ...]
    bad: tuple[int, ...]
    reset_at: int | None = None

    @property
    def has_bad_series(self) -> bool:
        """Return whether the counter of bad events exists."""
        return self.kind != "no_errors"

    @property
    def has_total_series(self) -> bool:
        """Return whether the counter of all events exists."""
        return self.kind != "no_total"

    def counter(self, increments: Sequence[int]) -> list[tuple[int, float]]:
        """Return the samples of a counter as a process exposes it, restart included."""
        values = list(accumulate(increments))
        if self.reset_at is not None:
            before = values[self.reset_at - 1]
            values = [value if i < self.reset_at else value - before for i, value in enumerate(values)]
        return [(at, float(value)) for at, value in zip(self.times_s, values, strict=True)]

    def exact(self, start_s: int, end_s: int) -> tuple[int, int]:
        """Return (good, total) events that ended in (start, end], by counting."""
        inside = [i for i, at in enumerate(self.times_s) if start_s < at <= end_s]
        total, bad = sum(self.total[i] for i in inside), sum(self.bad[i] for i in inside)
        return total - bad, total

    def events(self) -> Iterator[tuple[int, bool]]:
        """Yield every event as (end time in ns, good), just before the sample that first shows it."""
        for at, total, bad in zip(self.times_s, self.total, self.bad, strict=True):
            for number in range(total):
                yield at * 1_000_000_000 - 1_000_000 - number, number >= bad


def scenarios(kinds: Sequence[str] = KINDS, periods: Sequence[int] = PERIODS_DAYS, seeds: int = 2) -> list[Scenario]:
    """Return every kind with every period, ``seeds`` times."""
    return [make(kind, days, seed) for kind in kinds for days in periods for seed in range(seeds)]


def make(kind: str, period_days: int, seed: int = 0) -> Scenario:
    """Return one history; the same arguments make the same one."""
    rng = random.Random(f"{kind}/{period_days}/{seed}")  # noqa: S311  # a test's dice
    span_s = period_days * 86_400
    if kind == "late_start":
        span_s = int(span_s * 0.6)
    times = _times(END_S - span_s, END_S)
    rates = [_rate(kind, (at - times[0]) / span_s, rng) for at in times[1:]]
    total = [0, *(events for events, _ in rates)]
    bad = [0, *(0 if kind == "no_errors" else bad for _, bad in rates)]
    reset_at = int(len(times) * rng.uniform(0.3, 0.7)) if kind == "reset" else None
    return Scenario(f"{kind}-{period_days}d-{seed}", kind, period_days, times, tuple(total), tuple(bad), reset_at)


def _times(start_s: int, end_s: int) -> tuple[int, ...]:
    fine = end_s - FINE_SECONDS
    return (*range(start_s, fine, SAMPLES_COARSE_S), *range(fine, end_s + 1, SAMPLES_FINE_S))


def _rate(kind: str, share: float, rng: random.Random) -> tuple[int, int]:
    """Return (total, bad) events of one step at a share of the history."""
    busy = rng.randrange(1, 4)
    if kind == "idle":
        busy = 0 if 0.4 < share < 0.5 or share > 0.97 else busy
    if kind == "uneven":
        busy = 60 if share < 0.01 else rng.randrange(2)
    failing = 0.02
    if kind == "spike":
        failing = 0.6 if 0.985 < share < 0.999 else 0.01
    if kind == "uneven":
        failing = 0.05 if share < 0.01 else 0.0
    return busy, sum(rng.random() < failing for _ in range(busy))
