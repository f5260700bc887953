"""Calls per request: a loop that calls a dependency more often, a lost cache, a new dependency."""

from __future__ import annotations

import math

from pasta_otel.model import EdgeKey, Evidence
from pasta_otel.slo.attribution.effect import Shift
from pasta_otel.slo.attribution.finding import Finding, edge_target
from pasta_otel.slo.attribution.record import Record, links


def call_structure(record: Record) -> dict[EdgeKey, Finding]:
    """Return one finding for every edge that is called more often for each time its caller is called."""
    found: dict[EdgeKey, Finding] = {}
    for edge, shift in record.edges.items():
        before, after = _calls_each(record, edge, shift)
        enough = shift.after.count >= record.limits.min_count
        grew = after >= before * record.limits.calls_ratio and shift.more_calls_ns > 0
        if enough and grew and _rate_z(record, shift) >= record.limits.min_z:
            found[edge] = Finding(
                kind="call_structure",
                service=edge.caller,
                target=edge_target(edge),
                strength=1.0 - before / after if after else 0.0,
                evidence=(_evidence(edge, shift, before, after),),
                extra_ns=shift.more_calls_ns,
                base_ns=shift.before_ns,
                edge=edge,
            )
    return found


def _evidence(edge: EdgeKey, shift: Shift, before: float, after: float) -> Evidence:
    grown, count = after - before, shift.after.count
    return Evidence("spans", "calls_per_request", before, after, grown, count, links(shift), edge_target(edge))


def _calls_each(record: Record, edge: EdgeKey, shift: Shift) -> tuple[float, float]:
    """Return calls on the edge for each call of its caller, so that the place where the growth begins is found."""
    into = [record.edges[e] for e in record.callers(edge.caller) if e != edge]
    if edge.caller == record.own.service or not into:
        return shift.calls_before, shift.calls_after
    before, after = sum(s.calls_before for s in into), sum(s.calls_after for s in into)
    return (shift.calls_before / before if before else 0.0), (shift.calls_after / after if after else 0.0)


def _rate_z(record: Record, shift: Shift) -> float:
    """Return the z of the difference of two Poisson rates."""
    n, m = record.requests_before, record.requests_after
    if not n or not m:
        return 0.0
    spread = math.sqrt(shift.before.count / n**2 + shift.after.count / m**2)
    return (shift.calls_after - shift.calls_before) / spread if spread else 0.0
