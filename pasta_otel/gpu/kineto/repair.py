"""Lenient reading of one event: the faults that real writers of traces make, mended where the meaning is certain."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from pasta_otel.gpu.kineto.events import EVENT, Args, Event

_STRING_OR_NON_FINITE = re.compile(
    rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|(?<![\w.])-?(?:inf(?:inity)?|nan)(?![\w.])', re.IGNORECASE | re.DOTALL
)  # an unclosed string is taken to the end: what is scanned once is not scanned again
_BAD_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
MALFORMED = (msgspec.DecodeError, msgspec.ValidationError, RecursionError)
"""What the decoder raises for text that is not right."""
TRUNCATED = "Input data was truncated"
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


def trailing(error: Exception) -> int:
    """Return the place of what follows the decoded value, when the error is that something does; else 0."""
    found = _TRAILING.search(str(error))
    return int(found[1]) - 1 if found else 0  # the decoder counts from 1


class Mended(NamedTuple):
    """An event read from damaged text."""

    event: Event
    text: bytes
    non_finite: int


def null_non_finite(text: bytes) -> tuple[bytes, int]:
    """Replace bare ``inf`` and ``NaN`` tokens by null (absent, not 0); strings are left alone.

    Returns:
        The text, and how many tokens there were.
    """
    count = 0

    def replace(match: re.Match[bytes]) -> bytes:
        nonlocal count
        if match[0].startswith(b'"'):
            return match[0]
        count += 1
        return b"null"

    return _STRING_OR_NON_FINITE.sub(replace, text), count


def mend_text(text: bytes) -> bytes:
    """Make strings valid: unknown escapes, bytes that are not UTF-8, raw line breaks."""
    text = _BAD_ESCAPE.sub(lambda match: match[0] if match[1] else rb"\\", text)
    return _CONTROL.sub(b" ", text.decode("utf-8", "replace").encode())


def mend(text: bytes) -> Mended | None:
    """Read one event from damaged text; None when nothing certain can be read."""
    text, non_finite = null_non_finite(text)
    for candidate in (text, mend_text(text)):
        try:
            return Mended(EVENT.decode(candidate), candidate, non_finite)
        except MALFORMED:
            pass
    try:
        fields = msgspec.json.decode(candidate)
        return Mended(_from_fields(fields), candidate, non_finite) if isinstance(fields, dict) else None
    except MALFORMED:
        return None


def _from_fields(fields: dict[str, Any]) -> Event:
    """Return the event without the fields that have a wrong type."""
    args = fields.get("args")
    known = {key: value for key, value in fields.items() if key in _SCALARS and isinstance(value, str | int | float)}
    return Event(**known, args=_args(args) if isinstance(args, dict) else None)


def _args(fields: dict[str, Any]) -> Args:
    return Args(
        **{_ARGS[key]: value for key, value in fields.items() if key in _ARGS and isinstance(value, str | int | float)}
    )


_SCALARS = frozenset(Event.__struct_fields__) - {"args"}
_ARGS = dict(zip(Args.__struct_encode_fields__, Args.__struct_fields__, strict=True))
