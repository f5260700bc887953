"""Self time per (service, operation): the work a service does itself, its callees taken out."""

from __future__ import annotations

from pasta_otel.slo.attribution.finding import Finding
from pasta_otel.slo.attribution.record import Record, shift_evidence

MAX_EVIDENCE = 3


def self_time(record: Record) -> dict[str, Finding]:
    """Return one finding for every service some of whose operations got slower themselves."""
    found = {service: _service(record, service) for service in record.services()}
    return {service: finding for service, finding in found.items() if finding}


def _service(record: Record, service: str) -> Finding | None:
    shifted = [
        (key, shift)
        for key, shift in record.operations.items()
        if key.service == service and shift.slower_ns > 0 and shift.passes(record.limits)
    ]
    if not shifted:
        return None
    shifted.sort(key=lambda item: (-item[1].slower_ns, item[0]))
    extra = sum(shift.slower_ns for _, shift in shifted)
    return Finding(
        kind="self_time",
        service=service,
        target=service,
        strength=sum(shift.slower_ns * shift.strength for _, shift in shifted) / extra,
        evidence=tuple(
            shift_evidence("spans", "self_time_seconds", shift, key.operation) for key, shift in shifted[:MAX_EVIDENCE]
        ),
        extra_ns=extra,
        base_ns=sum(shift.base_ns for _, shift in shifted),
    )
