"""SLO states as JSON, the same on the server, in files and on the command line: times are RFC 3339 UTC."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pasta_otel.model import Attribution, Cause, Evidence, TimeWindow
from pasta_otel.slo.alerts import AlertState, condition_text
from pasta_otel.slo.evaluation import BurnRate, Evaluation, SLOState
from pasta_otel.slo.windows import duration_text


def rfc3339(unix_nano: int) -> str:
    """Return a time as RFC 3339 UTC with microseconds."""
    moment = datetime.fromtimestamp(unix_nano // 1_000_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{unix_nano % 1_000_000_000 // 1000:06d}Z"


def evaluation_to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return what ``GET /api/v1/slos`` answers."""
    return states_to_json(evaluation.states, evaluation.now_unix_nano)


def states_to_json(states: Sequence[SLOState], now_unix_nano: int) -> dict[str, Any]:
    """Return the document ``{time, slos}``."""
    return {"time": rfc3339(now_unix_nano), "slos": [state_to_json(state) for state in states]}


def state_to_json(state: SLOState) -> dict[str, Any]:
    """Return one SLO's state; absent numbers are null, so that strict JSON holds."""
    burn = state.burn_since_unix_nano
    return {
        "name": state.name,
        "service": state.service,
        "objective": state.objective,
        "verdict": state.verdict,
        "reason": state.reason,
        "detail": state.detail,
        "since": rfc3339(state.since_unix_nano),
        "burn_since": None if burn is None else rfc3339(burn),
        "silenced": state.silenced or None,
        "burn_rates": [_burn_rate(rate) for rate in state.burn_rates],
        "budget": {
            "remaining": state.budget_remaining,
            "good": state.good,
            "total": state.total,
            "coverage": state.coverage,
            "period": None if state.period is None else _window(state.period),
            "exhausted_in_seconds": None if state.exhausted_in_ns is None else state.exhausted_in_ns / 1e9,
            "degraded": state.degraded,
        },
        "alerts": [_alert(alert) for alert in state.alerts],
        "attribution": None if state.attribution is None else attribution_to_json(state.attribution),
        "annotations": dict(state.annotations),
    }


def _alert(alert: AlertState) -> dict[str, Any]:
    rule = alert.rule
    return {
        "policy": rule.policy,
        "condition": rule.condition,
        "severity": rule.severity,
        "text": condition_text(rule),
        "state": alert.phase,
        "since": rfc3339(alert.since_unix_nano),
        "burn": alert.burn,
        "reason": alert.reason,
        "note": alert.note,
        "targets": [{"name": name, "target": target} for name, target in rule.targets],
    }


def _burn_rate(rate: BurnRate) -> dict[str, Any]:
    return {
        "severity": rate.severity,
        "long_window": duration_text(rate.long_window_ns),
        "short_window": duration_text(rate.short_window_ns),
        "factor": rate.factor,
        "long": rate.long,
        "short": rate.short,
        "exceeded": rate.exceeded,
        "active": rate.active,
        "events": rate.events,
        "bad_events": rate.bad_events,
        "note": rate.note,
    }


def attribution_to_json(attribution: Attribution) -> dict[str, Any]:
    """Return the causes as design section 13 names them, with the windows compared."""
    return {
        "causes": [cause_to_json(cause) for cause in attribution.causes],
        "baseline": _window(attribution.baseline),
        "window": _window(attribution.window),
        "took_seconds": attribution.took_ns / 1e9,
        "incomplete": attribution.incomplete,
    }


def cause_to_json(cause: Cause) -> dict[str, Any]:
    """Return one cause with its evidence."""
    return {
        "kind": cause.kind,
        "service": cause.service,
        "target": cause.target,
        "score": cause.score,
        "evidence": [_evidence(evidence) for evidence in cause.evidence],
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "family": evidence.family,
        "metric": evidence.metric,
        "name": evidence.name,
        "before": evidence.before,
        "after": evidence.after,
        "effect": evidence.effect,
        "n": evidence.n,
        "links": [{"trace_id": ref.trace_id, "span_id": ref.span_id} for ref in evidence.links],
    }


def _window(window: TimeWindow) -> dict[str, str]:
    return {"start": rfc3339(window.start_unix_nano), "end": rfc3339(window.end_unix_nano)}
