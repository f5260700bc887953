"""Score suspects by how much of the SLO's trouble they explain, and keep those worth a person's time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pasta_otel.model import Cause, SpanSLI
from pasta_otel.slo.attribution.families.errors import extra_errors, worst_operation
from pasta_otel.slo.attribution.finding import Finding
from pasta_otel.slo.attribution.record import Record

HEADROOM_FLOOR = 0.1


@dataclass(frozen=True, slots=True)
class Trouble:
    """What there is to explain.

    Attributes:
        extra_ns: Extra time in an average request.
        extra_bad: Extra bad events in an average request, from errors.
        latency_weight: Share of the trouble that is latency, 0..1.
        error_weight: Share of the trouble that is errors, 0..1.
    """

    extra_ns: float
    extra_bad: float
    latency_weight: float
    error_weight: float


def trouble(record: Record, suspects: Sequence[Finding], sli: Any) -> Trouble:
    """Weigh time against errors, as far as the SLI counts each as bad and the SLO's own requests show it.

    Errors that a fallback keeps from the caller, and growth here that shrinking elsewhere makes up for, are no trouble.
    """
    growth, failed = _net_growth(record), _own_errors(record)
    counted = failed > 0 and (not isinstance(sli, SpanSLI) or sli.good_status)
    extra_bad = max(failed, sum(finding.extra_bad for finding in suspects)) if counted else 0.0
    slower = growth >= record.limits.min_net_growth * record.baseline_ns
    extra_ns = max(growth, sum(finding.extra_ns for finding in suspects)) if slower else 0.0
    latency = _late_share(record, extra_ns, sli, extra_bad)
    total = latency + extra_bad
    return Trouble(extra_ns, extra_bad, latency / total if total else 0.0, extra_bad / total if total else 0.0)


def _net_growth(record: Record) -> float:
    parts = (record.operations, record.gaps, record.modules)
    return sum(s.calls_after * s.mean_after_ns - s.before_ns for part in parts for s in part.values())


def _own_errors(record: Record) -> float:
    shift = worst_operation(record, record.own.service)
    return extra_errors(shift) if shift else 0.0


def _late_share(record: Record, extra_ns: float, sli: Any, errors: float) -> float:
    """Estimate the share of requests that the extra time made bad: extra time over the headroom to the threshold.

    Without a threshold time alone makes no event bad; it is weighed only when no errors explain anything (somebody asks
    "why slower?").
    """
    threshold = sli.threshold_ns if isinstance(sli, SpanSLI) else None
    if extra_ns <= 0:
        return 0.0
    if threshold is None:
        return 0.0 if errors > 0 else 1.0
    headroom = max(threshold - record.baseline_ns, HEADROOM_FLOOR * threshold)
    return min(1.0, extra_ns / headroom)


def rank(record: Record, suspects: Sequence[Finding], sli: Any) -> tuple[Cause, ...]:
    """Return the suspects that matter as causes, best first; ties are broken by kind and target."""
    against = trouble(record, suspects, sli)
    causes = [_cause(finding, against) for finding in suspects if _matters(record, finding, against)]
    causes = [cause for cause in causes if cause.score > 0]
    return tuple(sorted(causes, key=lambda cause: (-cause.score, cause.kind, cause.target, cause.service)))


def _matters(record: Record, finding: Finding, against: Trouble) -> bool:
    limits = record.limits
    slow = finding.extra_ns >= max(limits.min_share * against.extra_ns, limits.min_growth * record.baseline_ns)
    failing = finding.extra_bad >= limits.min_share * against.extra_bad
    return (finding.extra_ns > 0 and slow) or (finding.extra_bad > 0 and failing)


def _cause(finding: Finding, against: Trouble) -> Cause:
    return Cause(
        kind=finding.kind,
        service=finding.service,
        target=finding.target,
        score=min(1.0, max(0.0, _score(finding, against))),
        evidence=finding.evidence,
    )


def _score(finding: Finding, against: Trouble) -> float:
    """Return sqrt(share of the trouble explained) x share of the suspect's own time or errors that is new.

    The square root keeps a suspect that became ten times slower above a busier one that merely drifted. More CPU work
    in the same service is independent evidence: it closes that share of what is missing to 1 in the second factor.
    """
    time = finding.extra_ns / against.extra_ns if against.extra_ns > 0 else 0.0
    bad = finding.extra_bad / against.extra_bad if against.extra_bad > 0 else 0.0
    explained = against.latency_weight * min(1.0, time) + against.error_weight * min(1.0, bad)
    new = 1.0 - (1.0 - finding.attributable) * (1.0 - finding.confirmed)
    return math.sqrt(max(explained, 0.0)) * new
