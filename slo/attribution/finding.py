"""What a family hands on: one shift that passed its gates, before anything is ranked."""

from __future__ import annotations

from dataclasses import dataclass

from pasta_otel.model import CauseKind, EdgeKey, Evidence


@dataclass(frozen=True, slots=True)
class Finding:
    """One shifted signal.

    Attributes:
        kind: The cause it would be.
        service: The service it sits in.
        target: Service, ``caller -> callee`` or module path.
        strength: How clearly it shifted, 0..1.
        evidence: What was compared.
        extra_ns: Extra time in an average request of the SLO.
        extra_bad: Extra bad events in an average request of the SLO.
        edge: The edge, when it sits on one.
    """

    kind: CauseKind
    service: str
    target: str
    strength: float
    evidence: tuple[Evidence, ...]
    extra_ns: float = 0.0
    extra_bad: float = 0.0
    edge: EdgeKey | None = None


def edge_target(edge: EdgeKey) -> str:
    """Return an edge as causes name it."""
    return f"{edge.caller} -> {edge.callee}"
