"""Which end of an edge a grown gap belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from pasta_otel.model import EdgeKey
from pasta_otel.slo.attribution.finding import Finding
from pasta_otel.slo.attribution.record import Record

COMPARABLE = 0.25  # of an edge's growth a call: an edge that grew less does not share its reason


def assign_gaps(record: Record, grown: Mapping[EdgeKey, Finding]) -> dict[str, list[Finding]]:
    """Return the grown gaps by the service at whose door they most likely arise.

    One slow network card, or one starved process, delays all calls into and out of its host, and no others: the end
    with the larger share of comparably grown edges is the common reason; with equal shares, the end with more of them;
    then the callee.
    """
    found: dict[str, list[Finding]] = {}
    for edge, finding in grown.items():
        found.setdefault(_end(record, edge, grown), []).append(finding)
    return found


def _end(record: Record, edge: EdgeKey, grown: Mapping[EdgeKey, Finding]) -> str:
    need = COMPARABLE * _each_ns(record, edge)

    def completeness(service: str) -> tuple[float, int, bool]:
        touching = [other for other in record.gaps if service in other]
        hit = [other for other in touching if other in grown and _each_ns(record, other) >= need]
        return len(hit) / len(touching), len(hit), service == edge.callee

    return max((edge.caller, edge.callee), key=completeness)


def _each_ns(record: Record, edge: EdgeKey) -> float:
    return record.gaps[edge].mean_after_ns - record.gaps[edge].mean_before_ns
