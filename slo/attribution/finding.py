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
        base_ns: Time that the same number of observations would have taken as they were before.
        extra_bad: Extra bad events in an average request of the SLO.
        edge: The edge, when it sits on one.
        confirmed: How strongly independent evidence agrees, 0..1.
    """

    kind: CauseKind
    service: str
    target: str
    strength: float
    evidence: tuple[Evidence, ...]
    extra_ns: float = 0.0
    base_ns: float = 0.0
    extra_bad: float = 0.0
    edge: EdgeKey | None = None
    confirmed: float = 0.0

    @property
    def attributable(self) -> float:
        """Return the share of its own time, or errors, that is new, 0..1: 0.5 = twice as slow as before."""
        if self.extra_ns <= 0:
            return self.strength  # for errors the strength is that share
        return self.extra_ns / (self.extra_ns + max(self.base_ns, 0.0))


def edge_target(edge: EdgeKey) -> str:
    """Return an edge as causes name it."""
    return f"{edge.caller} -> {edge.callee}"
