"""Numbers and names as people read them, for the text report and the page."""

from __future__ import annotations

import math
import re
from html import escape

_DIRECTORIES = re.compile(r"(?<![^\s(])[^\s()]*/(?=[^/\s]+:\d+ )")


def duration(nanoseconds: float) -> str:
    """Return a time with the unit that suits it."""
    for unit, length in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= length:
            return f"{nanoseconds / length:.3g} {unit}"
    return f"{nanoseconds:.0f} ns" if nanoseconds else "0"


def size(count: float) -> str:
    """Return bytes with the unit that suits them."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            return f"{_three(count / length)} {unit}"
    return f"{count:.0f} B"


def _three(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def steps(most: float, about: int = 6, unit: float = 1.0) -> list[float]:
    """Return round numbers from 0 up to at most ``most``: 1, 2 or 5 times a power of ten, of a unit.

    Args:
        most: The end of the axis.
        about: How many steps there may be.
        unit: What the numbers are round in: 1024 ** 2 for MiB.
    """
    if most <= 0:
        return [0.0]
    least = most / unit / about
    power = 10.0 ** math.floor(math.log10(least))
    step = unit * next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= least)
    return [number * step for number in range(math.floor(most / step * (1 + 1e-9)) + 1)]


def short_number(number: float) -> str:
    """Return a number with at most three digits and the letter of its size."""
    for letter, length in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= length:
            return f"{number / length:.3g} {letter}"
    return f"{number:.3g}"


def printable(text: str) -> str:
    """Return a name on one line: it comes from the program, and may hold anything."""
    return "".join(character if character.isprintable() else "?" for character in text)


def clip(text: str, length: int) -> str:
    """Return a name on one line, if need be without directories and its middle."""
    text = printable(text)
    if len(text) > length:
        text = _DIRECTORIES.sub("", text)
    if len(text) <= length:
        return text
    head = (length - 3) // 3
    return f"{text[:head]}...{text[head + 3 - length :]}"


def markup(text: str) -> str:
    """Return a name as HTML and SVG want it."""
    return escape(printable(text))
