"""Errors on edges and of a service itself, each with the errors it only passed on taken out."""

from __future__ import annotations

from pasta_otel.model import EdgeKey, Evidence, OperationKey
from pasta_otel.slo.attribution.effect import Shift, proportion_z
from pasta_otel.slo.attribution.finding import Finding, edge_target
from pasta_otel.slo.attribution.record import Record, links


def error_ratios(shift: Shift) -> tuple[float, float]:
    """Return errors / count in both windows."""
    before, after = shift.before, shift.after
    return before.errors / before.count if before.count else 0.0, after.errors / after.count if after.count else 0.0


def extra_errors(shift: Shift) -> float:
    """Return the extra errors in an average request of the SLO (may be negative)."""
    before, after = error_ratios(shift)
    return after * shift.calls_after - before * shift.calls_before


def attributable(shift: Shift) -> float:
    """Return the share of the burning window's errors that the baseline does not account for, 0..1."""
    before, after = error_ratios(shift)
    return max(0.0, 1.0 - before / after) if after else 0.0


def errors_pass(record: Record, shift: Shift) -> bool:
    """Say whether the error ratio rose enough, on enough events, to be no accident."""
    limits = record.limits
    before, after = error_ratios(shift)
    old, new = shift.before, shift.after
    enough = new.count >= limits.min_count and new.errors >= limits.min_errors and new.errors > 0
    seen = old.count >= limits.min_count  # an edge that the baseline never saw is a change of structure
    z = proportion_z(old.errors, old.count, new.errors, new.count)
    return enough and seen and after - before >= limits.min_error_shift and z >= limits.min_z


def edge_errors(record: Record) -> dict[EdgeKey, Finding]:
    """Return one finding for every edge that brought more errors than its callee's own calls explain.

    ``A -> B -> C``: errors that C gave B and B passed on to A are taken out of ``A -> B``.
    """
    failing = {edge: extra_errors(shift) for edge, shift in record.edges.items() if errors_pass(record, shift)}
    found: dict[EdgeKey, Finding] = {}
    for edge, extra in failing.items():
        passed_on = sum(below for other, below in failing.items() if other.caller == edge.callee and other != edge)
        if extra - passed_on >= max(record.limits.min_error_shift, 0.2 * extra):
            found[edge] = _edge_finding(record, edge, extra - passed_on)
    return found


def _edge_finding(record: Record, edge: EdgeKey, extra: float) -> Finding:
    shift = record.edges[edge]
    return Finding(
        kind="edge_errors",
        service=edge.callee,
        target=edge_target(edge),
        strength=attributable(shift),
        evidence=(error_evidence("edge_error_ratio", shift, edge_target(edge)),),
        extra_bad=extra,
        edge=edge,
    )


def error_ratio(record: Record) -> dict[str, Finding]:
    """Return one finding for every service whose own spans fail more than its callees' errors explain."""
    found: dict[str, Finding] = {}
    for service in record.services():
        worst = _worst(record, service)
        if worst is None:
            continue
        key, shift = worst
        passed_on = sum(
            extra_errors(below)
            for edge, below in record.edges.items()
            if edge.caller == service and errors_pass(record, below)
        )
        extra = extra_errors(shift)
        if extra - passed_on >= max(record.limits.min_error_shift, 0.2 * extra):
            found[service] = Finding(
                kind="error_ratio",
                service=service,
                target=service,
                strength=attributable(shift),
                evidence=(error_evidence("error_ratio", shift, key.operation),),
                extra_bad=extra - passed_on,
            )
    return found


def worst_operation(record: Record, service: str) -> Shift | None:
    """Return the service's operation with the most extra errors, if any passes.

    The worst one, not the sum: one failure marks the internal span and the server span around it.
    """
    worst = _worst(record, service)
    return worst[1] if worst else None


def _worst(record: Record, service: str) -> tuple[OperationKey, Shift] | None:
    found = [(k, s) for k, s in record.operations.items() if k.service == service and errors_pass(record, s)]
    return max(found, key=lambda item: extra_errors(item[1]), default=None)


def error_evidence(metric: str, shift: Shift, name: str) -> Evidence:
    """Return an error ratio's rise as evidence; the effect is the difference of the ratios."""
    before, after = error_ratios(shift)
    return Evidence("spans", metric, before, after, after - before, shift.after.count, links(shift), name)
