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
from pasta_otel.slo.attribution.families.call_structure import call_structure
from pasta_otel.slo.attribution.families.edge_latency import edge_latency
from pasta_otel.slo.attribution.families.errors import edge_errors, error_ratio, extra_errors, worst_operation
from pasta_otel.slo.attribution.families.host import HostPressure, host_pressure
from pasta_otel.slo.attribution.families.module_time import ModuleGrowth, module_growth
from pasta_otel.slo.attribution.families.self_time import self_time
from pasta_otel.slo.attribution.finding import Finding, edge_target
from pasta_otel.slo.attribution.record import Record, shift_evidence

MAX_EVIDENCE = 6
_NO_MODULES = ModuleGrowth(1.0, 0.0, (), 0.0)
_Named = tuple[str, str, Shift]  # family, metric, what shifted


@dataclass(frozen=True, slots=True)
class _Site:
    """Everything that grew in one service and on the edges into it."""

    service: str
    own: Finding | None
    modules: ModuleGrowth
    gaps: tuple[Finding, ...]
    pressure: HostPressure | None

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
    gaps, errors = edge_latency(record), edge_errors(record)
    suspects = [suspect for site in _sites(record, gaps) for suspect in _explain_site(record, site)]
    suspects = _name_endpoints(record, suspects)
    suspects += [finding for edge, finding in call_structure(record).items() if edge not in errors]
    suspects = _give_timeouts(record, suspects, errors)
    return suspects + [_name_failing(record, finding, errors) for finding in error_ratio(record).values()]


def _sites(record: Record, gaps: Mapping[EdgeKey, Finding]) -> list[_Site]:
    own, modules, pressure = self_time(record), module_growth(record), host_pressure(record)
    services = sorted(
        {*record.services(), *(edge.callee for edge in record.edges), *(edge.callee for edge in record.gaps)}
    )
    return [
        _Site(
            service=service,
            own=own.get(service),
            modules=modules.get(service, _NO_MODULES),
            gaps=tuple(finding for edge, finding in gaps.items() if edge.callee == service),
            pressure=pressure.get(service),
        )
        for service in services
    ]


def _explain_site(record: Record, site: _Site) -> list[Finding]:
    deepest = _leading_modules(record, site)
    if deepest:
        return _modules_first(record, site, deepest)
    if site.pressure is not None:
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
        _, shifts = _ungated_growth(record, site.service)
        found.append(_from_pressure(site, site.pressure, even, shifts))
    return found


def _host_first(record: Record, site: _Site, pressure: HostPressure) -> list[Finding]:
    total, shifts = _ungated_growth(record, site.service)
    if total <= 0 or not shifts:
        return []
    return [_from_pressure(site, pressure, total, shifts)]


def _from_pressure(site: _Site, pressure: HostPressure, extra_ns: float, shifts: Sequence[_Named]) -> Finding:
    seen = [shift_evidence(family, metric, shift) for family, metric, shift in shifts]
    return Finding(
        kind=pressure.kind,
        service=site.service,
        target=site.service,
        strength=max((pressure.strength, *(shift.strength for _, _, shift in shifts))),
        evidence=(*pressure.evidence, *seen)[:MAX_EVIDENCE],
        extra_ns=extra_ns,
    )


def _ungated_growth(record: Record, service: str) -> tuple[float, list[_Named]]:
    """Return all growth in and at the door of a service, and its shifts that pass, clearest first.

    A stalled process delays few calls of each operation for long: one key may not pass where the sum is plain.
    """
    operations = [("spans", "self_time_seconds", s) for k, s in record.operations.items() if k.service == service]
    modules = [("modules", "module_self_time_seconds", s) for k, s in record.modules.items() if k.service == service]
    door = [("spans", "edge_gap_seconds", s) for edge, s in record.gaps.items() if edge.callee == service]
    whole = [("spans", "edge_duration_seconds", s) for edge, s in record.edges.items() if edge.callee == service]
    named = [*whole, *operations, *door, *modules]
    passing = [item for item in named if item[2].slower_ns > 0 and item[2].passes(record.limits)]
    growth = sum(shift.slower_ns for _, _, shift in (*operations, *modules, *door))
    return growth, sorted(passing, key=lambda item: -item[2].strength)


def _inside(site: _Site) -> Finding | None:
    """Return the service's own growth, modules included that no single one of them explains."""
    spread = site.modules.uniform_ns + sum(finding.extra_ns for finding in site.modules.excess)
    evidence = tuple(e for finding in site.modules.excess[:2] for e in finding.evidence)
    if site.own is not None:
        return replace(site.own, extra_ns=site.own_ns + spread, evidence=site.own.evidence + evidence)
    if spread <= 0 or site.modules.strength <= 0 or not site.modules.excess:
        return None
    return Finding("self_time", site.service, site.service, site.modules.strength, evidence, extra_ns=spread)


def _by_edge(record: Record, site: _Site, inside: Finding | None) -> list[Finding]:
    """Name a called service's own growth by the edges that felt it, in proportion to how much they did."""
    felt = {
        edge: record.edges[edge].slower_ns
        for edge in record.callers(site.service)
        if record.edges[edge].slower_ns > 0 and record.edges[edge].passes(record.limits)
    }
    gaps = {finding.edge: finding for finding in site.gaps}
    if inside is None or not felt or site.service == record.own.service:
        return [*site.gaps, *([inside] if inside else [])]
    total = sum(felt.values())
    named = [_edge_of(record, edge, inside, share / total, gaps.get(edge)) for edge, share in felt.items()]
    return named + [gap for edge, gap in gaps.items() if edge not in felt]


def _edge_of(record: Record, edge: EdgeKey, inside: Finding, share: float, gap: Finding | None) -> Finding:
    duration = shift_evidence("spans", "edge_duration_seconds", record.edges[edge])
    extra = inside.extra_ns * share + (gap.extra_ns if gap else 0.0)
    return Finding(
        kind="edge_latency",
        service=edge.callee,
        target=edge_target(edge),
        strength=max(inside.strength, gap.strength if gap else 0.0),
        evidence=(duration, *inside.evidence, *(gap.evidence[:1] if gap else ()))[:MAX_EVIDENCE],
        extra_ns=extra,
        edge=edge,
    )


def _name_endpoints(record: Record, suspects: Sequence[Finding]) -> list[Finding]:
    """Move edges whose only growth is the gap to the endpoint whose edges grew most completely, as one suspect.

    One slow network card delays all calls of its host and no others: the endpoint with the larger share of grown edges
    is the common reason; with equal shares, the one with more of them.
    """
    pure = {f.edge: f for f in suspects if f.edge and f.kind == "edge_latency" and not _callee_slower(f)}
    others = [finding for finding in suspects if finding.edge not in pure or finding.kind != "edge_latency"]
    groups: dict[str, list[Finding]] = {}
    for edge, finding in pure.items():
        groups.setdefault(_endpoint(record, edge, pure), []).append(finding)
    return others + [_merged(service, group) for service, group in sorted(groups.items())]


def _callee_slower(finding: Finding) -> bool:
    return any(e.metric in {"self_time_seconds", "module_self_time_seconds"} for e in finding.evidence)


def _endpoint(record: Record, edge: EdgeKey, grown: Mapping[EdgeKey, Finding]) -> str:
    def completeness(service: str) -> tuple[float, int, bool]:
        touching = [e for e in record.gaps if service in e]
        hit = [e for e in touching if e in grown]
        return len(hit) / len(touching), len(hit), service == edge.callee

    return max((edge.caller, edge.callee), key=completeness)


def _merged(service: str, group: Sequence[Finding]) -> Finding:
    largest = max(group, key=lambda finding: (finding.extra_ns, finding.target))
    rest = [e for finding in group if finding is not largest for e in finding.evidence[:1]]
    extra = sum(finding.extra_ns for finding in group)
    return replace(largest, service=service, extra_ns=extra, evidence=(*largest.evidence, *rest)[:MAX_EVIDENCE])


def _give_timeouts(record: Record, suspects: Sequence[Finding], errors: Mapping[EdgeKey, Finding]) -> list[Finding]:
    """Give errors that the callee's own spans do not show to what made the callee slow; keep the others."""
    result = list(suspects)
    for edge, finding in errors.items():
        slow = [i for i, f in enumerate(result) if f.extra_ns > 0 and (f.edge == edge or _inside_of(f, edge.callee))]
        if slow and _only_timeouts(record, edge):
            most = max(slow, key=lambda i: result[i].extra_ns)
            evidence: tuple[Evidence, ...] = (*result[most].evidence, *finding.evidence)
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
    return inside is None or extra_errors(inside) < 0.5 * extra_errors(shift)


def _name_failing(record: Record, finding: Finding, errors: Mapping[EdgeKey, Finding]) -> Finding:
    """Name a failing callee by its edge: the same events seen from the caller, so they are not counted twice."""
    into = [edge for edge in errors if edge.callee == finding.service]
    if finding.service == record.own.service or not into:
        return finding
    return replace(finding, extra_bad=0.0)
