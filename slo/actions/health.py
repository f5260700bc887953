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
    """Judge the client spans on the degraded edge that ended since the degradation began.

    Healthy: at least ``min_calls`` of them in the last ``window_ns``, none failed, none slower than the limit. That is
    ``healthy_below_seconds`` of the policy, else the geometric mean of the attribution's normal and burning medians;
    where neither is known, errors alone decide.

    Args:
        source: The span store.
        policy: Limits of the dependencies.
        min_calls: Calls needed to say anything good; one bad call is enough for the contrary.
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

    def healthy(self, degradation: Degradation, now_unix_nano: int) -> bool | None:
        """Return True or False by evidence, None when there are too few calls or the store does not answer."""
        # calls that were under way when the breaker opened end up to one slow call later; probes start after that
        settled = degradation.since_unix_nano + int((degradation.slow_seconds or 0.0) * 2 * SECOND_NS) + self._grace_ns
        window = TimeWindow(max(settled, now_unix_nano - self._window_ns), now_unix_nano)
        if window.start_unix_nano >= window.end_unix_nano:
            return None
        try:
            durations = self._source.edge_durations(window)
        except Exception:  # noqa: BLE001 - a store that fails is no evidence
            return None
        caller, _, callee = degradation.edge.partition(ARROW)
        samples = durations.get(EdgeKey(caller, callee))
        return None if samples is None or samples.count == 0 else self._judge(samples, degradation)

    def _judge(self, samples: Samples, degradation: Degradation) -> bool | None:
        limit_ns = self._limit_ns(degradation)
        if samples.errors or (limit_ns is not None and any(value > limit_ns for value in samples.values_ns)):
            return False
        return True if samples.count >= self._min_calls else None

    def _limit_ns(self, degradation: Degradation) -> int | None:
        dependency = self._policy.dependencies.get(degradation.dependency)
        if dependency is not None and dependency.healthy_below_seconds:
            return int(dependency.healthy_below_seconds * SECOND_NS)
        if degradation.normal_seconds and degradation.slow_seconds:
            return int((degradation.normal_seconds * degradation.slow_seconds) ** 0.5 * SECOND_NS)
        return None
