"""Inline SVG: a heat map, stacked bars and columns over time; every text that is drawn is escaped here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pasta_otel.gpu.memory.hot import Row
from pasta_otel.gpu.memory.words import clip, markup, short_number, size, steps

WIDTH, LEFT, RIGHT = 1100, 390, 20
PLOT = WIDTH - LEFT - RIGHT
ROW, AXIS = 17, 34
LABEL = 54
"""Characters that fit left of the plot."""
CHARACTER = 7
"""Most pixels that a character takes on average at the page's size of letters."""
SHADES = ("#e3eef9", "#c0daef", "#93c1e3", "#5fa2d3", "#337fbf", "#165ba3", "#083a77")
"""One hue from little to much, readable in grey too."""
GOOD, BAD, LINE = "#337fbf", "#d9822b", "#165ba3"


@dataclass(frozen=True, slots=True)
class Axis:
    """What runs from left to right.

    Attributes:
        columns: How many.
        ticks: Columns (fractions count) and what stands below them.
        title: What the columns are, with the unit.
    """

    columns: int
    ticks: Sequence[tuple[float, str]]
    title: str


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One row of a heat map: what it is called, in full, and numbers by column."""

    label: str
    title: str
    row: Row


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar.

    Attributes:
        label: What it is called.
        title: The same in full.
        good: Length of the part that had to be.
        bad: Length of the part that a better layout saves.
        text: What stands behind it.
    """

    label: str
    title: str
    good: int
    bad: int
    text: str


def _svg(height: float, label: str, parts: Iterator[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{markup(label)}">'
    return f"{head}{''.join(parts)}</svg>"


def _text(x: float, y: float, text: str, css: str = "", title: str = "") -> str:
    hint = f"<title>{markup(title)}</title>" if title else ""
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{markup(text)}{hint}</text>'


def heat_map(rows: Sequence[HeatRow], axis: Axis, unit: str) -> str:
    """Return a heat map: rows of cells, shaded by the logarithm of their number, with a legend.

    Args:
        rows: From top to bottom.
        axis: What runs from left to right.
        unit: Of the numbers.
    """
    scale = _Shades(number for one in rows for number in one.row.values())
    bottom = ROW * len(rows)

    def parts() -> Iterator[str]:
        yield f'<rect x="{LEFT}" width="{PLOT}" height="{bottom}" fill="#f6f7f9"/>'
        for number, one in enumerate(rows):
            yield _text(LEFT - 6, ROW * number + 12, clip(one.label, LABEL), "left", one.title)
            yield from _cells(one, ROW * number, axis.columns, scale, unit)
        yield from _ticks(bottom, axis)
        yield from _legend(bottom + AXIS + 14, scale, unit)

    return _svg(bottom + AXIS + 40, f"heat map: {unit} by {axis.title}", parts())


class _Shades:
    """Steps of equal ratio from the greatest number down to the smallest, but of a factor of four at most."""

    def __init__(self, numbers: Iterable[int]) -> None:
        drawn = [number for number in numbers if number > 0] or [1]
        self._most, fewest = max(drawn), min(drawn)
        self._ratio: float = max(1.0001, min(4.0, (self._most / fewest) ** (1 / len(SHADES))))
        self.lightest = self(fewest)

    def __call__(self, number: int) -> int:
        below: float = math.log(self._most / number) / math.log(self._ratio)
        return max(0, len(SHADES) - 1 - int(below))

    def least(self, shade: int) -> int:
        """Return the smallest number that has a shade."""
        return math.floor(self._most / self._ratio ** (len(SHADES) - shade)) + 1


def _cells(one: HeatRow, y: float, columns: int, scale: _Shades, unit: str) -> Iterator[str]:
    width = PLOT / columns
    shades = [(column, scale(number)) for column, number in sorted(one.row.items()) if number]
    # neighbours of one shade are one rectangle
    for (_, shade), run in groupby(enumerate(shades), key=lambda item: (item[1][0] - item[0], item[1][1])):
        cells = [column for _, (column, _) in run]
        total = sum(one.row[column] for column in cells)
        yield (
            f'<rect x="{LEFT + cells[0] * width:.1f}" y="{y + 1}" width="{len(cells) * width:.1f}" height="{ROW - 2}"'
            f' fill="{SHADES[shade]}"><title>{markup(one.title)}: {total:,} {unit}</title></rect>'
        )


def _ticks(bottom: float, axis: Axis) -> Iterator[str]:
    free = float("-inf")
    yield f'<line class="axis" x1="{LEFT}" x2="{LEFT + PLOT}" y1="{bottom}" y2="{bottom}"/>'
    for column, label in axis.ticks:
        x = LEFT + PLOT * column / axis.columns
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        css = "start" if column <= 0 else "end" if column >= axis.columns - 1 else "mid"
        # a label begins, is centred or ends at its mark; one that would lie on its neighbour is left out
        begin = x - {"start": 0.0, "mid": 0.5, "end": 1.0}[css] * CHARACTER * len(label)
        if begin >= free:
            yield _text(x, bottom + 16, label, css)
            free = begin + CHARACTER * (len(label) + 1)
    yield _text(LEFT + PLOT / 2, bottom + AXIS - 2, axis.title, "mid quiet")


def _legend(y: float, scale: _Shades, unit: str) -> Iterator[str]:
    least = [scale.least(shade) for shade in range(len(SHADES))]
    shown = [
        (shade, number)
        for shade, number in enumerate(least)
        if shade >= scale.lightest and (shade == len(least) - 1 or number < least[shade + 1])
    ]
    yield _text(LEFT - 6, y + 11, f"{unit} from", "left quiet")
    for place, (shade, number) in enumerate(shown):
        x = LEFT + 95 * place
        yield f'<rect x="{x}" y="{y}" width="24" height="14" fill="{SHADES[shade]}"/>'
        yield _text(x + 29, y + 11, short_number(number), "start quiet")


def stacked_bars(bars: Sequence[Bar], unit: str, good: str, bad: str) -> str:
    """Return horizontal bars of two parts.

    Args:
        bars: From top to bottom.
        unit: Of their lengths.
        good: What the first part is.
        bad: What the second part is.
    """
    most = max((bar.good + bar.bad for bar in bars), default=1) or 1
    room = PLOT - 190
    bottom = ROW * len(bars)

    def parts() -> Iterator[str]:
        for number, bar in enumerate(bars):
            y = ROW * number
            first, second = room * bar.good / most, room * bar.bad / most
            yield _text(LEFT - 6, y + 12, clip(bar.label, LABEL), "left", bar.title)
            hint = f"<title>{markup(bar.title)}: {bar.good:,} {markup(good)}, {bar.bad:,} {markup(bad)}</title>"
            yield f'<rect x="{LEFT}" y="{y + 2}" width="{first:.1f}" height="{ROW - 4}" fill="{GOOD}">{hint}</rect>'
            yield (
                f'<rect x="{LEFT + first:.1f}" y="{y + 2}" width="{second:.1f}" height="{ROW - 4}" fill="{BAD}">'
                f"{hint}</rect>"
            )
            yield _text(LEFT + first + second + 6, y + 12, bar.text, "start")
        yield f'<line class="axis" x1="{LEFT}" x2="{LEFT + room}" y1="{bottom}" y2="{bottom}"/>'
        for place in steps(most):
            yield _text(LEFT + room * place / most, bottom + 15, short_number(place), "mid")
        yield _text(LEFT + room / 2, bottom + AXIS - 2, unit, "mid quiet")
        for place, (colour, label) in enumerate(((GOOD, good), (BAD, bad))):
            x = LEFT + 250 * place
            yield f'<rect x="{x}" y="{bottom + AXIS + 10}" width="14" height="12" fill="{colour}"/>'
            yield _text(x + 20, bottom + AXIS + 20, label, "start quiet")

    return _svg(bottom + AXIS + 30, f"bars: {unit}", parts())


def columns_over_time(values: Row, axis: Axis, title: str) -> str:
    """Return columns over time.

    Args:
        values: Bytes by column.
        axis: What runs from left to right.
        title: What the vertical axis says.
    """
    height, top = 160, 8
    most = max(values.values())
    unit = next(unit for unit in (1 << 30, 1 << 20, 1 << 10, 1) if most >= unit)
    width = PLOT / axis.columns

    def parts() -> Iterator[str]:
        for value in steps(most, 4, unit):
            y = top + height * (1 - value / most)
            yield f'<line class="grid" x1="{LEFT}" x2="{LEFT + PLOT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(LEFT - 6, y + 4, size(value), "left")
        yield _text(LEFT - 90, top + height / 2, title, "left quiet")
        for column, value in sorted(values.items()):
            tall = height * value / most
            yield (
                f'<rect x="{LEFT + column * width + 0.5:.1f}" y="{top + height - tall:.1f}" width="{width - 1:.1f}"'
                f' height="{tall:.1f}" fill="{LINE}"><title>{size(value)}</title></rect>'
            )
        yield from _ticks(top + height, axis)

    return _svg(top + height + AXIS + 8, f"columns: {title} by {axis.title}", parts())
