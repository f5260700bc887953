"""Drawings for the status page: plain SVG, text beside every shape, nothing that only a colour says."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

WIDTH, BAR, PAIR = 620, 13, 42
LEFT, RIGHT = 44, 240  # room for the window's name, and for numbers
GREEN, RED, BLUE, GREY = "#2a7f4f", "#b3261e", "#4667a5", "#d5dae3"
PLOT_HEIGHT, PLOT_WIDTH = 130, 400


def budget_bar(share: float, words: str) -> str:
    """Draw what is left of a budget; a share outside 0..1 is said in words, a bar cannot be longer than itself."""
    shown = min(1.0, max(0.0, share))
    return (
        f'<svg viewBox="0 0 {WIDTH} 12" role="img" aria-label="error budget {escape(words)}">'
        f'<rect width="{WIDTH}" height="12" rx="3" fill="#e6e9ef"/>'
        f'<rect width="{WIDTH * shown:.1f}" height="12" rx="3" fill="{GREEN if share > 0 else RED}"/></svg>'
    )


def burn_rates(rates: Sequence[dict[str, Any]]) -> str:
    """Draw every pair's two burn rates, with the factor that both must exceed as a line across them."""
    tops = [value for rate in rates for value in (rate["long"], rate["short"], rate["factor"]) if value]
    scale = (WIDTH - LEFT - RIGHT) / max([2.0, *tops])
    rows = "".join(_pair(row * PAIR, rate, scale) for row, rate in enumerate(rates))
    height = max(1, len(rates) * PAIR)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="burn rates">{rows}</svg>'


def _pair(y: int, rate: dict[str, Any], scale: float) -> str:
    factor, at = rate["factor"], LEFT + scale * rate["factor"]
    bars = "".join(
        _bar(y + 2 + part * (BAR + 3), rate[f"{name}_window"], rate[name], factor, scale)
        for part, name in enumerate(("long", "short"))
    )
    state = ", burning" if rate["active"] else ""
    return (
        f'{bars}<line x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 2 * BAR + 7}" stroke="#1c2330"'
        f' stroke-dasharray="3 2"/><text x="{WIDTH - RIGHT + 70}" y="{y + 21}">{escape(rate["severity"])} above'
        f" {factor:.4g}{state}</text>"
    )


def _bar(y: int, window: str, value: float | None, factor: float, scale: float) -> str:
    shown = "no data" if value is None else f"{value:.2f}"
    width = max(0.0, scale * (value or 0.0))
    return (
        f'<text x="0" y="{y + 11}">{escape(window)}</text>'
        f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" fill="#f2f4f8"/>'
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{RED if (value or 0) > factor else BLUE}"/>'
        f'<text x="{WIDTH - RIGHT + 60}" y="{y + 11}" text-anchor="end">{shown}</text>'
    )


def over_time(title: str, points: Sequence[dict[str, Any]], key: str, *, percent: bool = False) -> str:
    """Draw one number over time; a gap in the data is a gap in the line."""
    times = [datetime.fromisoformat(point["time"]).timestamp() for point in points]
    values = [point[key] for point in points]
    known = [value for value in values if value is not None]
    if not known or times[-1] <= times[0]:
        return f"<figure><figcaption>{escape(title)}: no data</figcaption></figure>"
    low, high = min(0.0, *known), max(1.0, *known)
    last = known[-1]
    now = f"{last * 100:.1f} %" if percent else f"{last:.2f}"
    return (
        f"<figure><figcaption>{escape(title)}: {now} now</figcaption>"
        f'<svg viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" role="img" aria-label="{escape(title)} over time">'
        f"{_grid(low, high, percent=percent)}"
        f'<path d="{_path(times, values, low, high)}" fill="none" stroke="{GREEN if percent else BLUE}"'
        f' stroke-width="2" stroke-linejoin="round"/>{_ends(times)}</svg></figure>'
    )


def _y(value: float, low: float, high: float) -> float:
    return 8 + (PLOT_HEIGHT - 30) * (high - value) / (high - low)


def _grid(low: float, high: float, *, percent: bool) -> str:
    lines = []
    for value in sorted({low, 0.0, 1.0, high}):
        y = _y(value, low, high)
        text = f"{value * 100:.0f} %" if percent else f"{value:.3g}"
        lines.append(f'<line x1="44" x2="{PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GREY}"/>')
        if value in {low, high} or min(abs(y - _y(other, low, high)) for other in (low, high)) > 12:
            lines.append(f'<text x="40" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return "".join(lines)


def _path(times: Sequence[float], values: Sequence[float | None], low: float, high: float) -> str:
    first, span = times[0], times[-1] - times[0]
    steps, joined = [], False
    for at, value in zip(times, values, strict=True):
        if value is not None:
            x = 44 + (PLOT_WIDTH - 46) * (at - first) / span
            lone = "" if joined else "h.01"  # a point between two gaps is a dot
            steps.append(f"{'L' if joined else 'M'}{x:.1f} {_y(value, low, high):.1f}{lone}")
        joined = value is not None
    return " ".join(steps)


def _ends(times: Sequence[float]) -> str:
    form = "%H:%M:%S" if times[-1] - times[0] < 7200 else "%d %b %H:%M"
    texts = [datetime.fromtimestamp(at, UTC).strftime(form) for at in (times[0], times[-1])]
    return (
        f'<text x="44" y="{PLOT_HEIGHT - 4}">{texts[0]}</text>'
        f'<text x="{PLOT_WIDTH}" y="{PLOT_HEIGHT - 4}" text-anchor="end">{texts[1]} UTC</text>'
    )
