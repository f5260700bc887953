"""Raise the depth of capture while an SLO burns: the value itself bounds it in time, so nobody must lower it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pasta_otel import semconv
from pasta_otel.model import Cause
from pasta_otel.slo.actions.times import to_rfc3339
from pasta_otel.slo.evaluation import ActionOutcome, ActionRecord, SLOState


def capture_value(state: SLOState, cause: Cause | None, tier: int, until_unix_nano: int) -> dict[str, Any]:
    """Return the flag's value: the burning service and, where one is known, the service that the cause sits in."""
    services = {state.service, *({cause.service} if cause else ())}
    targets = [{"service": service, "operation": "*"} for service in sorted(services)]
    return {"tier": tier, "targets": targets, "until": to_rfc3339(until_unix_nano)}


def capture_record(
    held: Mapping[str, Any], now: int, outcome: ActionOutcome, reason: str, normal_tier: int
) -> ActionRecord:
    """Return the record of raising or lowering the tier."""
    raised, normal = f"T{held['value']['tier']}", f"T{normal_tier}"
    before, after = (raised, normal) if outcome == "reverted" else (normal, raised)
    expires = 0 if outcome == "reverted" else held["expires_unix_nano"]
    return ActionRecord(
        now, "capture.raise", semconv.FLAG_CAPTURE, held["slo"], outcome, reason, held["cause"], before, after, expires
    )
