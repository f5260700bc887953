"""From findings to suspects: the deepest explanation takes over the growth that follows from it.

Rules, in order, for the extra time that sits in or at one service (``docs/reference/attribution.md`` says why):

1. A module that grew beyond its siblings explains its service: what else grew there is queueing behind it.
2. Otherwise throttling or run delay of the service's processes explains everything that grew in them and at their door.
3. Otherwise a service that others call is named by the edge: that is where a caller can act.
4. Otherwise its own self time.

Errors that a callee's spans do not show are timeouts, and belong to whatever made that callee slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pasta_otel.model import EdgeKey, Evidence
from pasta_otel.slo.attribution.effect import Shift
from pasta_otel.slo.attribution.endpoints import assign_gaps
from pasta_otel.slo.attribution.families.call_structure import call_structure
from pasta_otel.slo.attribution.families.edge_latency import edge_latency
from pasta_otel.slo.attribution.families.errors import edge_errors, error_ratio, extra_errors, worst_operation
from pasta_otel.slo.attribution.families.host import HostPressure, cpu_growth, host_pressure
from pasta_otel.slo.attribution.families.module_time import ModuleGrowth, module_growth
from pasta_otel.slo.attribution.families.self_time import self_time
from pasta_otel.slo.attribution.finding import Finding, edge_target
from pasta_otel.slo.attribution.record import Record, shift_evidence

MAX_EVIDENCE = 6
PASSED_ON = 0.5  # of a caller's extra errors: below it the callee's own errors do not account for them
_NO_MODULES = ModuleGrowth(1.0, 0.0, (), 0.0, 0.0)
_Named = tuple[str, str, Shift, str]  # family, metric, what shifted, its name


@dataclass(frozen=True, slots=True)
class _Site:
    """Everything that grew in one service, and the gaps of edges at its door."""

    service: str
    own: Finding | None
    modules: ModuleGrowth
    gaps: tuple[Finding, ...]
    pressure: HostPressure | None
    cpu: Evidence | None

    @property
    def own_ns(self) -> float:
        return self.own.extra_ns if self.own else 0.0

    @property
    def gap_ns(self) -> float:
        return sum(gap.extra_ns for gap in self.gaps)

    @property
    def total_ns(self) -> float:
        return self.own_ns + self.gap_ns + self.modules.uniform_ns + sum(f.extra_ns for f in self.modules.excess)


def explain(record: Record) -> list[Finding]:
    """Return every suspect with the extra time and bad events that it explains."""
    errors = edge_errors(record)
    suspects = [_confirm(site, suspect) for site in _sites(record) for suspect in _explain_site(record, site)]
    suspects += [finding for edge, finding in call_structure(record).items() if edge not in errors]
    suspects = _give_timeouts(record, suspects, errors)
    return suspects + [_name_failing(record, finding, errors) for finding in error_ratio(record).values()]


def _sites(record: Record) -> list[_Site]:
    own, modules = self_time(record), module_growth(record)
    pressure, cpu = host_pressure(record), cpu_growth(record)
    gaps = assign_gaps(record, edge_latency(record))
    return [
        _Site(
            service=service,
            own=own.get(service),
            modules=modules.get(service, _NO_MODULES),
            gaps=tuple(gaps.get(service, ())),
            pressure=pressure.get(service),
            cpu=cpu.get(service),
        )
        for service in sorted({*record.services(), *gaps})
    ]


def _confirm(site: _Site, suspect: Finding) -> Finding:
    """Add that the service works more, not only longer."""
    if site.cpu is None:
        return suspect
    return replace(suspect, confirmed=site.cpu.effect, evidence=(*suspect.evidence, site.cpu))


def _explain_site(record: Record, site: _Site) -> list[Finding]:
    deepest = _leading_modules(record, site)
    if deepest:
        return _modules_first(record, site, deepest)
    if site.pressure is not None and site.pressure.explains(record, site.total_ns):
        return _host_first(record, site, site.pressure)
    return _by_edge(record, site, _inside(site))


def _leading_modules(record: Record, site: _Site) -> list[Finding]:
    need = record.limits.module_share * site.total_ns
    return [finding for finding in site.modules.excess if finding.extra_ns >= need and finding.extra_ns > 0]


def _modules_first(record: Record, site: _Site, modules: Sequence[Finding]) -> list[Finding]:
    """Share out to the slow modules what grew around them; with pressure on the host, the even part is the host's."""
    carried = sum(finding.extra_ns for finding in modules)
    even = site.modules.uniform_ns if site.pressure else 0.0
    rest = site.total_ns - carried - even
    found = [replace(f, extra_ns=f.extra_ns + rest * f.extra_ns / carried) for f in modules]
    if site.pressure and even > 0:
        _, shifts = _ungated_growth(record, site)
        found.append(replace(_from_pressure(site, site.pressure, shifts), extra_ns=even, base_ns=site.modules.base_ns))
    return found


def _host_first(record: Record, site: _Site, pressure: HostPressure) -> list[Finding]:
    grown, passing = _ungated_growth(record, site)
    extra = sum(shift.slower_ns for shift in grown)
    if extra <= 0 or not passing:
        return []
    base = sum(shift.base_ns for shift in grown)
    return [replace(_from_pressure(site, pressure, passing), extra_ns=extra, base_ns=base)]


def _from_pressure(site: _Site, pressure: HostPressure, shifts: Sequence[_Named]) -> Finding:
    seen = [shift_evidence(*shift) for shift in shifts]
    return Finding(
        kind=pressure.kind,
        service=site.service,
        target=site.service,
        strength=max((pressure.strength, *(shift.strength for _, _, shift, _ in shifts))),
        evidence=(*pressure.evidence, *seen)[:MAX_EVIDENCE],
    )


def _ungated_growth(record: Record, site: _Site) -> tuple[list[Shift], list[_Named]]:
    """Return all that adds up in and at the door of a service, and what of it passes, clearest first.

    A stalled process delays few calls of each operation for long: one key may not pass where the sum is plain.
    """
    service, assigned = site.service, {gap.edge for gap in site.gaps}
    own, inner = "self_time_seconds", "module_self_time_seconds"
    operations = [("spans", own, s, k.operation) for k, s in record.operations.items() if k.service == service]
    modules = [("modules", inner, s, k.module) for k, s in record.modules.items() if k.service == service]
    at = [(e, s) for e, s in record.gaps.items() if e.callee == service or e in assigned]
    door = [("spans", "edge_gap_seconds", s, edge_target(e)) for e, s in at]
    into = [(e, s) for e, s in record.edges.items() if e.callee == service]
    whole = [("spans", "edge_duration_seconds", s, edge_target(e)) for e, s in into]
    named = [*whole, *operations, *door, *modules]
    passing = [item for item in named if item[2].slower_ns > 0 and item[2].passes(record.limits)]
    parts = [shift for _, _, shift, _ in (*operations, *modules, *door)]
    return parts, sorted(passing, key=lambda item: -item[2].strength)


def _inside(site: _Site) -> Finding | None:
    """Return the service's own growth, modules included that no single one of them explains."""
    spread = site.modules.uniform_ns + sum(finding.extra_ns for finding in site.modules.excess)
    evidence = tuple(e for finding in site.modules.excess[:2] for e in finding.evidence)
    base = site.modules.base_ns if spread > 0 else 0.0
    if site.own is not None:
        whole = site.own.evidence + evidence
        return replace(site.own, extra_ns=site.own_ns + spread, base_ns=site.own.base_ns + base, evidence=whole)
    if spread <= 0 or not site.modules.excess:
        return None
    strength = site.modules.strength
    return Finding("self_time", site.service, site.service, strength, evidence, extra_ns=spread, base_ns=base)


def _by_edge(record: Record, site: _Site, inside: Finding | None) -> list[Finding]:
    """Name a called service's own growth by the edges that felt it, in proportion to how much they did."""
    if inside is None:
        return [_merged(site.service, site.gaps)] if site.gaps else []
    whole = _with_gaps(inside, site.gaps)
    felt = {
        edge: record.edges[edge].slower_ns
        for edge in record.callers(site.service)
        if record.edges[edge].slower_ns > 0 and record.edges[edge].passes(record.limits)
    }
    if not felt or site.service == record.own.service:
        return [whole]
    total = sum(felt.values())
    return [_edge_of(record, edge, whole, share / total) for edge, share in felt.items()]


def _with_gaps(inside: Finding, gaps: Sequence[Finding]) -> Finding:
    return replace(
        inside,
        strength=max((inside.strength, *(gap.strength for gap in gaps))),
        extra_ns=inside.extra_ns + sum(gap.extra_ns for gap in gaps),
        base_ns=inside.base_ns + sum(gap.base_ns for gap in gaps),
        evidence=(*inside.evidence, *(e for gap in gaps for e in gap.evidence[:1]))[:MAX_EVIDENCE],
    )


def _edge_of(record: Record, edge: EdgeKey, whole: Finding, share: float) -> Finding:
    duration = shift_evidence("spans", "edge_duration_seconds", record.edges[edge], edge_target(edge))
    return Finding(
        kind="edge_latency",
        service=edge.callee,
        target=edge_target(edge),
        strength=whole.strength,
        evidence=(duration, *whole.evidence)[:MAX_EVIDENCE],
        extra_ns=whole.extra_ns * share,
        base_ns=whole.base_ns * share,
        edge=edge,
    )


def _merged(service: str, gaps: Sequence[Finding]) -> Finding:
    """Return gaps with one common reason as one suspect, named by the edge that grew most."""
    largest = max(gaps, key=lambda finding: (finding.extra_ns, finding.target))
    rest = [e for finding in gaps if finding is not largest for e in finding.evidence[:1]]
    return replace(
        largest,
        service=service,
        extra_ns=sum(finding.extra_ns for finding in gaps),
        base_ns=sum(finding.base_ns for finding in gaps),
        evidence=(*largest.evidence, *rest)[:MAX_EVIDENCE],
    )


def _give_timeouts(record: Record, suspects: Sequence[Finding], errors: Mapping[EdgeKey, Finding]) -> list[Finding]:
    """Give errors that the callee's own spans do not show to what made the callee slow; keep the others."""
    result = list(suspects)
    for edge, finding in errors.items():
        slow = [i for i, f in enumerate(result) if f.extra_ns > 0 and (f.edge == edge or _inside_of(f, edge.callee))]
        if slow and _only_timeouts(record, edge):
            most = max(slow, key=lambda i: result[i].extra_ns)
            evidence = (*result[most].evidence, *finding.evidence)
            result[most] = replace(
                result[most], extra_bad=result[most].extra_bad + finding.extra_bad, evidence=evidence
            )
        else:
            result.append(finding)
    return result


def _inside_of(finding: Finding, service: str) -> bool:
    return finding.service == service and (finding.edge is None or finding.edge.callee == service)


def _only_timeouts(record: Record, edge: EdgeKey) -> bool:
    """Say whether the calls got slower and most of the caller's extra errors have no error in the callee."""
    shift = record.edges[edge]
    if shift.slower_ns <= 0 or not shift.passes(record.limits):
        return False
    inside = worst_operation(record, edge.callee)
    return inside is None or extra_errors(inside) < PASSED_ON * extra_errors(shift)


def _name_failing(record: Record, finding: Finding, errors: Mapping[EdgeKey, Finding]) -> Finding:
    """Drop the count of a failing callee that an edge names already: they are the same events."""
    into = [edge for edge in errors if edge.callee == finding.service]
    if finding.service == record.own.service or not into:
        return finding
    return replace(finding, extra_bad=0.0)
