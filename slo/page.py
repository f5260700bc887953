"""SLO states as one self-contained HTML page: no script, no request to anywhere, readable without colours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from pasta_otel.slo.plots import budget_bar, burn_rates, over_time

State = dict[str, Any]
ORDER = ("burning", "no_data", "ok")
_CSS = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1c2330;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin:0}a{color:inherit}
section{border:1px solid #d5dae3;border-radius:8px;padding:1rem;margin:1rem 0;break-inside:avoid}
.head{display:flex;gap:.75rem;align-items:baseline;flex-wrap:wrap}
.verdict{border-radius:4px;padding:0 .5rem;font-weight:600;white-space:nowrap}
.ok,.inactive{background:#d9f2e1;color:#11592c}.burning,.firing{background:#fbdcd9;color:#8c1409}
.no_data,.pending{background:#fbeecb;color:#6b4a00}.muted,figcaption{color:#4a5568}
table{border-collapse:collapse;width:100%}p{margin:.6rem 0 .3rem}
td,th{text-align:left;padding:.2rem .8rem .2rem 0;font-variant-numeric:tabular-nums;vertical-align:baseline}
thead th,tr:first-child th{border-bottom:1px solid #d5dae3;font-weight:600}
svg{width:100%;height:auto;display:block;margin:.3rem 0}text{font:11px system-ui,sans-serif;fill:#4a5568}
.plots{display:flex;gap:1.5rem;flex-wrap:wrap}figure{flex:1 1 18rem;margin:.3rem 0}
"""


def page(document: dict[str, Any]) -> str:
    """Return the page for ``{time, slos}``; a state may carry ``history``: ``[{time, remaining, burn}]``."""
    states = sorted(document["slos"], key=lambda state: ORDER.index(state["verdict"]))
    overview = _overview(states) if len(states) > 1 else ""
    sections = "".join(_section(number, state) for number, state in enumerate(states))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Service level objectives</title><style>{_CSS}</style><h1>Service level objectives</h1>"
        f'<p class="muted">As of {_time(document.get("time") or "now")}: {_summary(states)}</p>'
        f"{overview}{sections}</html>\n"
    )


def _summary(states: Sequence[State]) -> str:
    counts = {verdict: sum(state["verdict"] == verdict for state in states) for verdict in ORDER}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none"


def _overview(states: Sequence[State]) -> str:
    rows = "".join(
        f"<tr><td>{escape(state['name'])}</td><td>{escape(state['service'])}</td><td>{_verdict(state)}</td>"
        f"<td>{escape(_left(state['budget']))}</td><td>{escape(_worst(state['burn_rates']))}</td></tr>"
        for state in states
    )
    heads = "".join(f"<th>{name}</th>" for name in ("SLO", "service", "verdict", "budget left", "burn rate"))
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _left(budget: dict[str, Any]) -> str:
    return "no data" if budget["remaining"] is None else f"{budget['remaining'] * 100:.1f} %"


def worst_pair(rates: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the pair that burns, or else is nearest to its factor; None without data."""
    known = [rate for rate in rates if rate["long"] is not None and rate["short"] is not None]
    return max(
        known, key=lambda rate: (rate["active"], min(rate["long"], rate["short"]) / rate["factor"]), default=None
    )


def _worst(rates: Sequence[dict[str, Any]]) -> str:
    rate = worst_pair(rates)
    if rate is None:
        return "no data"
    return f"{rate['long']:.2f} over {rate['long_window']} ({rate['severity']} above {rate['factor']:.4g})"


def _verdict(state: State) -> str:
    verdict = state["verdict"]
    reason = f" ({state['reason']})" if state["reason"] else ""
    return f'<span class="verdict {escape(verdict)}">{escape(verdict + reason)}</span>'


def _section(number: int, state: State) -> str:
    return (
        f'<section id="slo-{number}"><div class="head"><h2>{escape(state["name"])}</h2>'
        f'<span class="muted">{escape(state["service"])}</span>{_verdict(state)}'
        f'<span class="muted">since {_time(state["since"])}, objective {state["objective"] * 100:.10g} %</span></div>'
        f"{_detail(state)}{_budget(state['budget'])}<p>Burn rate</p>{burn_rates(state['burn_rates'])}"
        f"{_history(state.get('history') or [])}{_alerts(state.get('alerts') or [])}{_causes(state)}"
        f"{_people(state['annotations'])}</section>"
    )


def _time(text: object) -> str:
    """Return an RFC 3339 time without its fraction: people read seconds."""
    return escape(re.sub(r"\.\d+Z$", "Z", str(text)))


def _detail(state: State) -> str:
    text = "; ".join(str(part) for part in (state["detail"], state.get("silenced")) if part)
    return f"<p>{escape(text)}</p>" if text else ""


def _budget(budget: dict[str, Any]) -> str:
    left = budget["remaining"]
    if left is None:
        return "<p>Error budget: no data</p>"
    words = f"{left * 100:.1f} % left" if left >= 0 else f"overspent by {-left * 100:.1f} %"
    gone = budget["exhausted_in_seconds"]
    if gone is not None and left > 0:
        words += f", gone in {duration_words(gone)} at this rate"
    if budget["coverage"] < 1:
        words += f"; {budget['coverage'] * 100:.0f} % of the period is covered"
    if budget["degraded"]:
        words += "; the source warned that its answer is partial"
    bad = budget["total"] - budget["good"]
    return (
        f"<p>Error budget: {escape(words)} ({budget['total']:,.0f} events, {bad:,.0f} bad)</p>{budget_bar(left, words)}"
    )


def _history(points: Sequence[dict[str, Any]]) -> str:
    if len(points) < 2:
        return ""
    ends = f"{_time(points[0]['time'])} to {_time(points[-1]['time'])}"
    left = over_time("budget left", points, "remaining", percent=True)
    burn = over_time("burn rate", points, "burn")
    return f'<p>Over time <span class="muted">({ends})</span></p><div class="plots">{left}{burn}</div>'


def _alerts(alerts: Sequence[dict[str, Any]]) -> str:
    if not alerts:
        return ""
    rows = "".join(
        f"<tr><td>{escape(alert['policy'])}</td><td>{escape(alert['severity'])}</td><td>{escape(alert['text'])}</td>"
        f'<td><span class="verdict {escape(alert["state"])}">{escape(alert["state"])}</span></td>'
        f"<td>{_time(alert['since'])}</td>"
        f"<td>{escape(', '.join(target['target'] for target in alert['targets']))} {escape(alert['note'])}</td></tr>"
        for alert in alerts
    )
    heads = "".join(f"<th>{name}</th>" for name in ("policy", "severity", "condition", "state", "since", "tells"))
    return f"<p>Alert policies</p><table><tr>{heads}</tr>{rows}</table>"


def _causes(state: State) -> str:
    causes = (state["attribution"] or {}).get("causes") or []
    if not causes:
        return ""
    rows = "".join(
        f"<tr><td>{escape(cause['kind'])}</td><td>{escape(cause['target'])}</td><td>{cause['score']:.2f}</td>"
        f"<td>{escape(_evidence(cause['evidence']))}</td></tr>"
        for cause in causes
    )
    return f"<p>Why</p><table><tr><th>kind</th><th>target</th><th>score</th><th>evidence</th></tr>{rows}</table>"


def _evidence(evidence: Iterable[dict[str, Any]]) -> str:
    return "; ".join(f"{metric_words(e)} {e['before']:.3g} to {e['after']:.3g} (n={e['n']})" for e in evidence)


def metric_words(evidence: dict[str, Any]) -> str:
    """Return what a piece of evidence compares, and of whom."""
    name = evidence.get("name")  # a server of an earlier version gives none
    return f"{evidence['metric']} of {name}" if name else str(evidence["metric"])


def _people(annotations: dict[str, str]) -> str:
    """Show owner, runbook and dashboard; only http and https become links."""
    parts = []
    for key in ("owner", "runbook", "dashboard"):
        value = annotations.get(key)
        if value:
            safe = escape(value)
            link = f'<a href="{safe}">{safe}</a>' if value.startswith(("https://", "http://")) else safe
            parts.append(f"{key}: {link}")
    return f'<p class="muted">{" · ".join(parts)}</p>' if parts else ""


def duration_words(seconds: float) -> str:
    """Return a time span for people."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
