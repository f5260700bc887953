"""Events out of damaged text, one by one: a damaged one is mended or left out, its neighbours are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pasta_otel.gpu.kineto.events import EVENT, Event
from pasta_otel.gpu.kineto.repair import MALFORMED, TRUNCATED, Mended, mend, trailing

BOUNDARY = re.compile(rb"\}\s*(,)\s*\{")
"""A comma that may stand between two events (or inside one, between objects of its own)."""
MOST_MERGES = 64
_EVENT_START = re.compile(rb'\s*\{\s*"(?:ph|cat)"')
_ARRAY_END = re.compile(rb"\}\s*(\])\s*(?:\}|,\s*\"|\Z)")
_NOTHING = b" \t\r\n,]}"


@dataclass(slots=True)
class Salvaged:
    """What could be read.

    Attributes:
        events: The events.
        texts: Their text, mended.
        skipped: Damaged events left out.
        partial: 1 when the text ends within an event.
        non_finite: Bare inf and NaN tokens, read as absent.
        tail: What follows the array's end; None when the end is not in the text.
    """

    events: list[Event] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    skipped: int = 0
    partial: int = 0
    non_finite: int = 0
    tail: bytes | None = None

    def keep(self, mended: Mended) -> None:
        """Add an event."""
        self.events.append(mended.event)
        self.texts.append(mended.text)
        self.non_finite += mended.non_finite


def salvage(text: bytes, *, final: bool) -> Salvaged:
    """Read what can be read of a part of the array.

    Args:
        text: Events with commas between, perhaps the array's end and what follows it.
        final: The file ends with this text: an unreadable last event is one cut off, not one damaged.
    """
    found, pieces, at = Salvaged(), _split(text), 0
    while at < len(pieces) and found.tail is None:
        taken, piece = _merge(pieces, at)
        at += taken
        mended, tail = _read(piece)
        if tail is not None:
            found.tail = b",".join([tail, *pieces[at:]])
        if mended is not None:
            found.keep(mended)
        elif piece.strip(_NOTHING):
            cut_off = final and at >= len(pieces)
            found.partial += cut_off
            found.skipped += not cut_off
    return found


def _split(text: bytes) -> list[bytes]:
    """Return the texts between the places that look like boundaries of events."""
    pieces, start = [], 0
    for match in BOUNDARY.finditer(text):
        pieces.append(text[start : match.start(1)])
        start = match.start(1) + 1
    return [*pieces, text[start:]]


def _merge(pieces: list[bytes], at: int) -> tuple[int, bytes]:
    """Return a piece with those after it that complete it: a boundary may lie inside an event's own arrays."""
    piece = pieces[at]
    for taken in range(1, MOST_MERGES):
        try:
            EVENT.decode(piece)
        except MALFORMED as error:
            if str(error) != TRUNCATED:
                return taken, piece
        else:
            return taken, piece
        if at + taken >= len(pieces) or _EVENT_START.match(pieces[at + taken]):
            break
        piece += b"," + pieces[at + taken]
    return 1, pieces[at]


def _read(piece: bytes) -> tuple[Mended | None, bytes | None]:
    """Return an event, and what follows it when the array ends there."""
    try:
        return Mended(EVENT.decode(piece), piece, 0), None
    except MALFORMED as error:
        end = trailing(error)
        if end and piece[end:].lstrip().startswith(b"]"):
            return _read(piece[:end])[0], piece[end:].lstrip()[1:]
    if (mended := mend(piece)) is not None:
        return mended, None
    closed = _ARRAY_END.search(piece)
    if closed is None:
        return (None, piece.lstrip()[1:]) if piece.lstrip().startswith(b"]") else (None, None)
    return mend(piece[: closed.start(1)]), piece[closed.end(1) :]
