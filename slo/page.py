"""SLO states as one self-contained HTML page: no script, no request to anywhere, readable without colours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

State = dict[str, Any]
WIDTH, HEIGHT, ROW = 560, 110, 54
_CSS = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1c2330;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin:0}
section{border:1px solid #d5dae3;border-radius:8px;padding:1rem;margin:1rem 0}
.head{display:flex;gap:.75rem;align-items:baseline;flex-wrap:wrap}
.verdict{border-radius:4px;padding:0 .5rem;font-weight:600}
.ok{background:#d9f2e1;color:#11592c}.burning{background:#fbdcd9;color:#8c1409}
.no_data{background:#fbeecb;color:#6b4a00}.muted{color:#4a5568}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.15rem .6rem .15rem 0;font-variant-numeric:tabular-nums}
svg{width:100%;height:auto;display:block;margin:.5rem 0}text{font:11px system-ui,sans-serif;fill:#4a5568}
"""


def page(document: dict[str, Any]) -> str:
    """Return the page for ``{time, slos}``; a state may carry ``history``: ``[{time, remaining, burn}]``."""
    states = sorted(document["slos"], key=lambda state: ("burning", "no_data", "ok").index(state["verdict"]))
    sections = "".join(_section(state) for state in states)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Service level objectives</title><style>{_CSS}</style><h1>Service level objectives</h1>"
        f'<p class="muted">As of {_time(document.get("time") or "now")}: {_summary(states)}</p>{sections}</html>\n'
    )


def _summary(states: Sequence[State]) -> str:
    counts = {verdict: sum(state["verdict"] == verdict for state in states) for verdict in ("burning", "no_data", "ok")}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none"


def _section(state: State) -> str:
    verdict = state["verdict"]
    reason = f" ({state['reason']})" if state["reason"] else ""
    return (
        f'<section><div class="head"><h2>{escape(state["name"])}</h2>'
        f'<span class="muted">{escape(state["service"])}</span>'
        f'<span class="verdict {escape(verdict)}">{escape(verdict + reason)}</span>'
        f'<span class="muted">since {_time(state["since"])}, objective {state["objective"] * 100:g} %</span></div>'
        f"{_detail(state)}{_budget(state['budget'])}{_burn_rates(state['burn_rates'])}"
        f"{_history(state.get('history') or [])}{_causes(state)}{_people(state['annotations'])}</section>"
    )


def _time(text: object) -> str:
    """Return an RFC 3339 time without its fraction: people read seconds."""
    return escape(re.sub(r"\.\d+Z$", "Z", str(text)))


def _detail(state: State) -> str:
    text = "; ".join(str(part) for part in (state["detail"], state.get("silenced")) if part)
    return f"<p>{escape(text)}</p>" if text else ""


def _budget(budget: dict[str, Any]) -> str:
    """Draw what is left of the budget; overspent is said in words, because a bar cannot be longer than itself."""
    left = budget["remaining"]
    if left is None:
        return "<p>Error budget: no data</p>"
    share = min(1.0, max(0.0, left))
    words = f"{left * 100:.1f} % left" if left >= 0 else f"overspent by {-left * 100:.1f} %"
    gone = budget["exhausted_in_seconds"]
    if gone is not None and left > 0:
        words += f", gone in {duration_words(gone)} at this rate"
    if budget["coverage"] < 1:
        words += f"; {budget['coverage'] * 100:.0f} % of the period is covered"
    return (
        f"<p>Error budget: {escape(words)} ({budget['total']:g} events, {budget['total'] - budget['good']:g} bad)</p>"
        f'<svg viewBox="0 0 {WIDTH} 16" role="img" aria-label="error budget {escape(words)}">'
        f'<rect width="{WIDTH}" height="16" rx="3" fill="#e6e9ef"/>'
        f'<rect width="{WIDTH * share:.1f}" height="16" rx="3" fill="{"#2a7f4f" if left > 0 else "#b3261e"}"/></svg>'
    )


def _burn_rates(rates: Sequence[dict[str, Any]]) -> str:
    """Draw every window's burn rate beside the factor that its pair must exceed."""
    bars = []
    top = max([2.0, *(value for rate in rates for value in (rate["long"], rate["short"], rate["factor"]) if value)])
    for row, rate in enumerate(rates):
        for part, (window, value) in enumerate(
            ((rate["long_window"], rate["long"]), (rate["short_window"], rate["short"]))
        ):
            y = row * ROW + part * 18
            width = 0.0 if value is None else (WIDTH - 190) * value / top
            shown = "no data" if value is None else f"{value:.2f}"
            colour = "#b3261e" if value is not None and value > rate["factor"] else "#4667a5"
            bars.append(
                f'<text x="0" y="{y + 12}">{escape(window)}</text>'
                f'<rect x="40" y="{y + 2}" width="{width:.1f}" height="13" fill="{colour}"/>'
                f'<text x="{46 + width:.1f}" y="{y + 12}">{shown}</text>'
            )
        x = 40 + (WIDTH - 190) * rate["factor"] / top
        bars.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{row * ROW}" y2="{row * ROW + 46}" stroke="#1c2330"'
            ' stroke-dasharray="3 2"/>'
            f'<text x="{x + 3:.1f}" y="{row * ROW + 48}">{escape(rate["severity"])} above {rate["factor"]:g}</text>'
        )
    height = max(1, len(rates) * ROW)
    return (
        f'<p>Burn rate</p><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="burn rates">{"".join(bars)}</svg>'
    )


def _history(points: Sequence[dict[str, Any]]) -> str:
    remaining = [(i, point["remaining"]) for i, point in enumerate(points) if point["remaining"] is not None]
    burn = [(i, point["burn"]) for i, point in enumerate(points) if point["burn"] is not None]
    if len(points) < 2:
        return ""
    ends = f"{_time(points[0]['time'])} to {_time(points[-1]['time'])}"
    return (
        f'<p>Over time <span class="muted">({ends})</span></p>'
        + _line("budget left", remaining, len(points), "#2a7f4f")
        + _line("burn rate", burn, len(points), "#4667a5")
    )


def _line(title: str, values: Sequence[tuple[int, float]], count: int, colour: str) -> str:
    """Draw a line; a gap in the data is a gap in the line."""
    if not values:
        return f"<p>{escape(title)}: no data</p>"
    low, high = min(0.0, *(v for _, v in values)), max(1.0, *(v for _, v in values))
    paths, last = [], -2
    for i, value in values:
        x, y = i * (WIDTH - 60) / (count - 1), 10 + (HEIGHT - 20) * (high - value) / (high - low)
        paths.append(f"{'L' if i == last + 1 else 'M'}{x:.1f} {y:.1f}")
        last = i
    zero = 10 + (HEIGHT - 20) * high / (high - low)
    return (
        f'<p class="muted">{escape(title)}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over time">'
        f'<line x1="0" x2="{WIDTH - 60}" y1="{zero:.1f}" y2="{zero:.1f}" stroke="#d5dae3"/>'
        f'<path d="{" ".join(paths)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        f'<text x="{WIDTH - 55}" y="14">{high:.3g}</text><text x="{WIDTH - 55}" y="{HEIGHT - 6}">{low:.3g}</text>'
        "</svg>"
    )


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
    return "; ".join(f"{e['metric']} {e['before']:.3g} to {e['after']:.3g} (n={e['n']})" for e in evidence)


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
