"""Numbers and names as people read them, for the text report and the page."""

from __future__ import annotations

from html import escape


def duration(nanoseconds: int) -> str:
    """Return a time with the unit that suits it."""
    for unit, length in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= length:
            return f"{nanoseconds / length:.3g} {unit}"
    return f"{nanoseconds} ns"


def size(count: float) -> str:
    """Return bytes with the unit that suits them."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{count:.0f} B"


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
    """Return a name on one line, and its end alone if it is too long: the end says more than the beginning."""
    text = printable(text)
    return text if len(text) <= length else f"...{text[3 - length :]}"


def markup(text: str) -> str:
    """Return a name as HTML and SVG want it."""
    return escape(printable(text))
