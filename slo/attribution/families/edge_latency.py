"""Edge gap: client span minus server span, i.e. network, queues and whatever no server span covers."""

from __future__ import annotations

from pasta_otel.model import EdgeKey
from pasta_otel.slo.attribution.finding import Finding, edge_target
from pasta_otel.slo.attribution.record import Record, shift_evidence


def edge_latency(record: Record) -> dict[EdgeKey, Finding]:
    """Return one finding for every edge whose gap grew."""
    return {edge: _edge(record, edge) for edge in grown_gaps(record)}


def grown_gaps(record: Record) -> list[EdgeKey]:
    """Return the edges whose gap grew and passes."""
    return [edge for edge, gap in record.gaps.items() if gap.slower_ns > 0 and gap.passes(record.limits)]


def _edge(record: Record, edge: EdgeKey) -> Finding:
    gap, duration = record.gaps[edge], record.edges.get(edge)
    evidence = [shift_evidence("spans", "edge_gap_seconds", gap, edge_target(edge))]
    if duration is not None:
        evidence.append(shift_evidence("spans", "edge_duration_seconds", duration, edge_target(edge)))
    return Finding(
        kind="edge_latency",
        service=edge.callee,
        target=edge_target(edge),
        strength=gap.strength,
        evidence=tuple(evidence),
        extra_ns=gap.slower_ns,
        base_ns=gap.base_ns,
        edge=edge,
    )
