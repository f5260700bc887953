"""Is a degraded dependency well again? Answered from the calls that the breaker's probes make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pasta_otel.model import EdgeKey, OperationKey, Samples, TimeWindow
from pasta_otel.slo.actions.state import Degradation
from pasta_otel.slo.policy import ARROW, Policy

SECOND_NS = 1_000_000_000
MIN_CALLS = 3  # as many as a half-open phase of case B01 admits
WINDOW_NS = 60 * SECOND_NS
LOOKBACKS = (4, 2, 1)  # a quarter of the window, half, all of it: the newest that holds enough calls is judged
ENOUGH_CALLS = 10
PRIOR_BAD, PRIOR_CALLS = 1, 100  # what is known of a normal before it was seen: one call in a hundred is bad
MOST_CALLS = 500  # more say nothing more, and the sum below stays exact
CHANCE = 0.05  # a number of bad calls that is normal at least this often speaks for nothing


class DependencyHealth(Protocol):
    """Evidence about a dependency that is degraded."""

    def healthy(self, degradation: Degradation, now_unix_nano: int) -> bool | None:
        """Return True or False by evidence since it was degraded, None when there is none. Never raises."""


class NoEvidence:
    """Know nothing: degradations are then held until ``max_hold_seconds`` after their burn."""

    def healthy(self, degradation: Degradation, now_unix_nano: int) -> bool | None:
        """Return None."""
        del degradation, now_unix_nano
        return None


class EdgeSource(Protocol):
    """The one question asked of the span store (``slo.attribution.ports.SpanStore`` answers it)."""

    def edge_durations(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = 2000
    ) -> Mapping[EdgeKey, Samples]:
        """Return the client span durations per call edge."""


class ProbeHealth:
    """Compare the client spans on the degraded edge with what was normal before the degradation.

    A call is bad if it failed or was slower than the limit: ``healthy_below_seconds`` of the policy, else the geometric
    mean of the attribution's normal and burning medians; where neither is known, errors alone decide. The dependency is
    well when there are at least ``min_calls``, and no more of them bad than the share that was bad in the attribution's
    normal window makes plausible (binomial tail of at least ``CHANCE``). Recent calls decide: the last quarter of
    ``window_ns``, or half, or all of it, whichever first holds ``ENOUGH_CALLS``.

    Args:
        source: The span store.
        policy: Limits of the dependencies.
        min_calls: Calls needed to say anything good; fewer may say the contrary.
        window_ns: How far back to look.
        grace_ns: How late spans may arrive.
    """

    def __init__(
        self,
        source: EdgeSource,
        policy: Policy,
        *,
        min_calls: int = MIN_CALLS,
        window_ns: int = WINDOW_NS,
        grace_ns: int = 0,
    ) -> None:
        self._source, self._policy = source, policy
        self._min_calls, self._window_ns, self._grace_ns = min_calls, window_ns, grace_ns
        self._normal: dict[str, tuple[int, float]] = {}  # flag -> (its degradation's beginning, normal share of bad)

    def healthy(self, degradation: Degradation, now_unix_nano: int) -> bool | None:
        """Return True or False by evidence, None when there are too few calls or the store does not answer."""
        try:
            return self._judge(degradation, now_unix_nano)
        except Exception:  # noqa: BLE001 - a store that fails is no evidence
            return None

    def _judge(self, degradation: Degradation, now_unix_nano: int) -> bool | None:
        recent = self._recent(degradation, now_unix_nano)
        if recent is None or recent.count == 0:
            return None
        calls = min(recent.count, MOST_CALLS)
        bad = round(_bad_share(recent, self._limit_ns(degradation)) * calls)
        if bad and _tail(bad, calls, self._normal_share(degradation)) < CHANCE:
            return False
        return True if recent.count >= self._min_calls else None

    def _recent(self, degradation: Degradation, now_unix_nano: int) -> Samples | None:
        # calls that were under way when the breaker opened end up to one slow call later; probes start after that
        settled = degradation.since_unix_nano + int((degradation.slow_seconds or 0.0) * 2 * SECOND_NS) + self._grace_ns
        samples = None
        for part in LOOKBACKS:
            start = max(settled, now_unix_nano - self._window_ns // part)
            if start < now_unix_nano:
                samples = self._calls(degradation, TimeWindow(start, now_unix_nano))
            if start == settled or (samples is not None and samples.count >= ENOUGH_CALLS):
                break
        return samples

    def _calls(self, degradation: Degradation, window: TimeWindow) -> Samples | None:
        caller, _, callee = degradation.edge.partition(ARROW)
        return self._source.edge_durations(window).get(EdgeKey(caller, callee))

    def _normal_share(self, degradation: Degradation) -> float:
        """Return the share of calls that is normally bad; asked once, because a store forgets."""
        known = self._normal.get(degradation.flag)
        if known is None or known[0] != degradation.since_unix_nano:
            known = self._normal[degradation.flag] = (degradation.since_unix_nano, self._measure_normal(degradation))
        return known[1]

    def _measure_normal(self, degradation: Degradation) -> float:
        start, end = degradation.normal_start_unix_nano, degradation.normal_end_unix_nano
        normal = self._calls(degradation, TimeWindow(start, end)) if start < end else None
        if normal is None or normal.count == 0:
            return PRIOR_BAD / PRIOR_CALLS
        bad = _bad_share(normal, self._limit_ns(degradation)) * normal.count
        return (bad + PRIOR_BAD) / (normal.count + PRIOR_CALLS)

    def _limit_ns(self, degradation: Degradation) -> int | None:
        dependency = self._policy.dependencies.get(degradation.dependency)
        if dependency is not None and dependency.healthy_below_seconds:
            return int(dependency.healthy_below_seconds * SECOND_NS)
        if degradation.normal_seconds and degradation.slow_seconds:
            return int((degradation.normal_seconds * degradation.slow_seconds) ** 0.5 * SECOND_NS)
        return None


def _bad_share(samples: Samples, limit_ns: int | None) -> float:
    """Return the share of calls that failed or were slow.

    Which of the values belong to failed calls is not known: where failures are quick the two add up, where they are
    slow (timeouts) they are the same calls. The larger of the two is never too much.
    """
    values = samples.values_ns
    slow = sum(value > limit_ns for value in values) / len(values) if limit_ns is not None and values else 0.0
    return max(slow, samples.errors / samples.count)


def _tail(bad: int, calls: int, share: float) -> float:
    """Return the chance of at least that many bad ones among the calls (binomial)."""
    if share >= 1.0:
        return 1.0
    term = (1.0 - share) ** calls
    below = 0.0
    for index in range(bad):
        below += term
        term *= (calls - index) / (index + 1) * share / (1.0 - share)
    return 1.0 - below
