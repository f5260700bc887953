"""Inline SVG line and dot plots over time; colours are CSS variables of the page, so light and dark both work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 920, 300
LEFT, RIGHT, TOP, BOTTOM = 68, 16, 66, 30
LABEL_ROW = 15


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a label: something happened.

    Attributes:
        x: Seconds.
        label: In a word or two.
        kind: CSS class suffix: ``fault``, ``good`` or ``neutral``.
    """

    x: float
    label: str
    kind: str = "neutral"


@dataclass(frozen=True, slots=True)
class Dot:
    """One observation."""

    x: float
    y: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points in order; None breaks it."""

    points: Sequence[tuple[float, float | None]]
    css: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A vertical axis.

    Attributes:
        low: Smallest value shown.
        high: Greatest value shown.
        ticks: Values with a grid line.
        unit: Appended to the tick labels.
        logarithmic: Log scale; ``low`` is then above 0.
    """

    low: float
    high: float
    ticks: Sequence[float]
    unit: str = ""
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies, 0 at the bottom and 1 at the top, cut at both ends."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot over time.

    Attributes:
        label: What it shows, for people who do not see it.
        x_low: First second shown.
        x_high: Last second shown.
        axis: Vertical axis.
        limit: A horizontal threshold and its label, or None.
    """

    label: str
    x_low: float
    x_high: float
    axis: Axis
    limit: tuple[float, str] | None = None

    def render(self, marks: Sequence[Mark], dots: Iterable[Dot] = (), lines: Iterable[Line] = ()) -> str:
        """Return the SVG element."""
        parts = [
            *self._grid(),
            *(self._mark(mark, row) for row, mark in enumerate(marks)),
            self._limit(),
            *(self._line(line) for line in lines),
            *(self._dot(dot) for dot in dots),
        ]
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.label, quote=True)}">'
            + "".join(parts)
            + "</svg>"
        )

    def _x(self, seconds: float) -> float:
        return LEFT + (seconds - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.axis.share(value) * (HEIGHT - TOP - BOTTOM)

    def _grid(self) -> list[str]:
        floor = HEIGHT - BOTTOM
        rows = [self._row(tick, self._y(tick)) for tick in self.axis.ticks]
        step = 10 if self.x_high - self.x_low <= 90 else 20
        first = math.ceil(self.x_low / step)
        columns = [
            f'<text x="{self._x(n * step):.1f}" y="{floor + 20}" text-anchor="middle">{n * step:+d} s</text>'
            for n in range(first, math.floor(self.x_high / step) + 1)
        ]
        return [*rows, *(text.replace("+0 s", "0 s") for text in columns)]

    def _row(self, tick: float, y: float) -> str:
        return (
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}{self.axis.unit}</text>'
        )

    def _mark(self, mark: Mark, row: int) -> str:
        x, y = self._x(mark.x), LABEL_ROW * (row % 4 + 1) - 3
        flip = x > WIDTH - 150
        anchor, dx = ("end", -5) if flip else ("start", 5)
        return (
            f'<g class="mark {mark.kind}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 9}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{x + dx:.1f}" y="{y}" text-anchor="{anchor}">{escape(mark.label)}</text></g>'
        )

    def _limit(self) -> str:
        if self.limit is None:
            return ""
        y = self._y(self.limit[0])
        return (
            f'<g class="limit"><line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT + 6}" y="{y - 5:.1f}">{escape(self.limit[1])}</text></g>'
        )

    def _line(self, line: Line) -> str:
        path, pen_down = [], False
        for x, y in line.points:
            if y is not None:
                path.append(f"{'L' if pen_down else 'M'}{self._x(x):.1f} {self._y(y):.1f}")
            pen_down = y is not None
        return f'<path class="line {line.css}" d="{" ".join(path)}"/>'

    def _dot(self, dot: Dot) -> str:
        return (
            f'<circle class="dot {dot.kind}" cx="{self._x(dot.x):.1f}" cy="{self._y(dot.y):.1f}" r="3.2">'
            f"<title>{escape(dot.title)}</title></circle>"
        )


def log_axis(values: Sequence[float], unit: str) -> Axis:
    """Return a logarithmic axis from a power of ten (or 2 or 5 times one) below the values to one above."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    ticks = [t for t in _one_two_five() if low / 2.6 <= t <= high * 2.6]
    below = [t for t in ticks if t <= low] or ticks[:1]
    above = [t for t in ticks if t >= high and t > below[-1]] or ticks[-1:]
    return Axis(below[-1], above[0], [t for t in ticks if below[-1] <= t <= above[0]], unit, logarithmic=True)


def linear_axis(high: float, steps: int = 5) -> Axis:
    """Return an axis from 0 to a round number at or above ``high``."""
    step = next((t for t in _one_two_five() if t * steps >= high), high / steps)
    return Axis(0.0, step * steps, [step * n for n in range(steps + 1)])


def _one_two_five() -> list[float]:
    scale: Callable[[int], float] = lambda power: 10.0**power  # noqa: E731 - a word for the comprehension
    return [factor * scale(power) for power in range(-2, 6) for factor in (1, 2, 5)]
