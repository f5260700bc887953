"""Action records as JSON lines, the same in the audit, the API and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pasta_otel.slo.actions.times import to_rfc3339
from pasta_otel.slo.evaluation import ActionRecord


def record_to_json(record: ActionRecord, effect: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an audit line without its number.

    Args:
        record: The record.
        effect: What it changes in the state that survives, or None.
    """
    line = {
        "time": to_rfc3339(record.time_unix_nano),
        "action": record.action,
        "target": record.target,
        "slo": record.slo,
        "outcome": record.outcome,
        "reason": record.reason,
        "cause": record.cause,
        "before": record.before,
        "after": record.after,
        "expires_at": to_rfc3339(record.expires_unix_nano) if record.expires_unix_nano else None,
    }
    return line if effect is None else {**line, "effect": dict(effect)}


def public(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return an audit line as the API shows it: without its effect."""
    return {name: value for name, value in line.items() if name != "effect"}
