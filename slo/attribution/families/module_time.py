"""Torch module self time: which module grew beyond the pace of its siblings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pasta_otel.model import ModuleKey
from pasta_otel.slo.attribution.effect import Shift
from pasta_otel.slo.attribution.finding import Finding
from pasta_otel.slo.attribution.record import Record, shift_evidence

MAX_WEIGHT = 0.25  # of one module in the median pace: the largest module must not be its own yardstick


@dataclass(frozen=True, slots=True)
class ModuleGrowth:
    """How a service's modules grew.

    Attributes:
        pace: The factor by which its modules typically grew, at least 1.
        uniform_ns: Extra time in a request had every module grown at that pace.
        excess: Findings for modules that grew beyond it, largest first.
        strength: Mean shift of the modules, weighted by their growth.
        base_ns: Time of all modules in an average baseline request.
    """

    pace: float
    uniform_ns: float
    excess: tuple[Finding, ...]
    strength: float
    base_ns: float


def module_growth(record: Record) -> dict[str, ModuleGrowth]:
    """Return every service's module growth."""
    services = sorted({key.service for key in record.modules})
    return {service: _service(record, service) for service in services}


def _service(record: Record, service: str) -> ModuleGrowth:
    known = {k: s for k, s in record.modules.items() if k.service == service and s.before.count and s.after.count}
    shifts = list(known.values())
    pace = _pace(shifts)
    weight = sum(max(shift.slower_ns, 0.0) for shift in shifts)
    strength = sum(max(shift.slower_ns, 0.0) * shift.strength for shift in shifts) / weight if weight else 0.0
    base = sum(shift.before_ns for shift in shifts)
    return ModuleGrowth(pace, (pace - 1.0) * base, _excess(record, known, pace), strength, base)


def _excess(record: Record, modules: Mapping[ModuleKey, Shift], pace: float) -> tuple[Finding, ...]:
    found = [
        Finding(
            kind="module_time",
            service=key.service,
            target=key.module,
            strength=shift.strength,
            evidence=(shift_evidence("modules", "module_self_time_seconds", shift, key.module),),
            extra_ns=shift.calls_after * shift.mean_after_ns - pace * shift.before_ns,
            base_ns=pace * shift.before_ns,
        )
        for key, shift in modules.items()
        if shift.passes(record.limits) and shift.delta >= record.limits.module_delta
    ]
    found = [finding for finding in found if finding.extra_ns > 0]
    return tuple(sorted(found, key=lambda finding: (-finding.extra_ns, finding.target)))


def _pace(shifts: Sequence[Shift]) -> float:
    """Return the weighted median growth factor of the modules, at least 1.

    Time is the weight because a stalled process loses it in proportion to time; a cap keeps one large module from
    deciding alone.
    """
    total = sum(shift.before_ns for shift in shifts)
    if total <= 0:
        return 1.0
    cap = MAX_WEIGHT * total
    ratios = sorted(
        (s.calls_after * s.mean_after_ns / s.before_ns, min(s.before_ns, cap)) for s in shifts if s.before_ns
    )
    half, seen = sum(weight for _, weight in ratios) / 2, 0.0
    for ratio, weight in ratios:
        seen += weight
        if seen >= half:
            return max(1.0, ratio)
    return 1.0
