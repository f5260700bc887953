"""The ``traceEvents`` array as a stream: cut between events, decode a few megabytes at a time, never the whole file.

Where to cut is guessed by a pattern and proved by the decoder: a text that decodes as an array of events was cut
between events. Memory is bounded by one chunk, whatever the file's size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from pasta_otel.errors import InputError
from pasta_otel.gpu.kineto.events import EVENTS, Event
from pasta_otel.gpu.kineto.repair import MALFORMED, TRUNCATED, mend_text, null_non_finite, trailing
from pasta_otel.gpu.kineto.salvage import BOUNDARY, salvage

CHUNK_BYTES = 4 << 20
LARGEST_EVENT_BYTES = 64 << 20
"""An event, or the part of the file around the events, may not be larger: memory stays bounded on hostile input."""
CUTS_TRIED = 8

_TRACE_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT_BOUNDARY = re.compile(rb'\}\s*(,)\s*\{\s*"(?:ph|name|cat|pid|tid|id|ts|dur|bp|s|args)"')
_BYTE = re.compile(r"\(byte (\d+)\)")


@dataclass(slots=True)
class ScanNotes:
    """What was seen on the way.

    Attributes:
        header: The document's fields beside ``traceEvents``.
        bare: The file is the array alone, which may legally lack its end.
        truncated: The file ends before the document does.
        partial: Events cut off at the end.
        skipped: Events that could not be read.
        non_finite: Bare inf and NaN tokens, read as absent.
        remarks: Sentences for the user.
    """

    header: dict[str, Any] = field(default_factory=dict)
    bare: bool = False
    truncated: bool = False
    partial: int = 0
    skipped: int = 0
    non_finite: int = 0
    remarks: list[str] = field(default_factory=list)


class Batch(NamedTuple):
    """Events with their text, which a file with absolute times is read again from."""

    events: list[Event]
    text: bytes


class EventScanner:
    """Iterate over batches of events.

    Args:
        pieces: The file's bytes.
        file: Its name, for errors.
        strict: Refuse the file at its first fault instead of skipping what is damaged.
    """

    def __init__(self, pieces: Iterator[bytes], file: str, *, strict: bool = False) -> None:
        self._pieces, self._file, self._strict = pieces, file, strict
        self._text, self._line, self._ended = b"", 1, False
        self.notes = ScanNotes()

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches.

        Raises:
            InputError: kind ``trace_format``; strict: with the line of the first fault.
        """
        self._header()
        while not self._ended:
            at_end = not self._fill(CHUNK_BYTES)
            yield from self._last() if at_end else self._chunk()
        self._trailer()

    def _fill(self, wanted: int) -> bool:
        """Read on until so many bytes are there; False at the end of the file."""
        parts, length = [self._text], len(self._text)
        while length < wanted:
            piece = next(self._pieces, None)
            if piece is None:
                self._text = b"".join(parts)
                return False
            parts.append(piece)
            length += len(piece)
        self._text = b"".join(parts)
        return True

    def _header(self) -> None:
        wanted = 1 << 16
        while True:
            more = self._fill(wanted)
            start = self._text.removeprefix(b"\xef\xbb\xbf").lstrip()
            if start.startswith(b"["):
                self.notes.bare = True
                return self._begin(self._text.index(b"[") + 1)
            if not start.startswith(b"{"):
                raise self._error("empty file" if not start else "neither a JSON object nor an array")
            if found := _TRACE_EVENTS.search(self._text):
                head = self._text[self._text.index(b"{") : found.start()]
                self.notes.header = self._fields(head.rstrip().rstrip(b",") + b"}")
                return self._begin(found.end())
            if not more or wanted > LARGEST_EVENT_BYTES:
                raise self._error("no traceEvents in it: not a trace of the PyTorch profiler")
            wanted *= 4

    def _begin(self, at: int) -> None:
        self._consume(at)
        if re.match(rb"\s*\[", self._text):
            raise self._error("an array of arrays, not of events")

    def _fields(self, text: bytes) -> dict[str, Any]:
        for candidate in (text, mend_text(null_non_finite(text)[0])):
            try:
                fields = msgspec.json.decode(candidate)
                return fields if isinstance(fields, dict) else {}
            except MALFORMED as error:
                if self._strict:
                    raise self._fault(text, error) from error
        self.notes.remarks.append("the part beside traceEvents could not be read")
        return {}

    def _chunk(self) -> Iterator[Batch]:
        cuts = self._cuts()
        for cut in cuts:
            text = self._text[:cut]
            try:
                events = EVENTS.decode(b"[" + text + b"]")
            except MALFORMED as error:
                if end := trailing(error):
                    yield from self._end(end - 1)
                    return
                if not _incomplete(error, len(text)):
                    yield from self._salvage(cuts[0])
                    return
            else:
                self._consume(cut + 1)
                yield Batch(events, text)
                return
        yield from self._grow(cuts)

    def _grow(self, cuts: list[int]) -> Iterator[Batch]:
        """Read on when no place to cut lies between two events: one of them is longer than the chunk."""
        if len(self._text) <= LARGEST_EVENT_BYTES:
            if not self._fill(2 * len(self._text)):
                yield from self._last()
        elif cuts:
            yield from self._salvage(cuts[0])
        else:
            raise self._error(f"no end of an event within {LARGEST_EVENT_BYTES >> 20} MiB")

    def _cuts(self) -> list[int]:
        """Return places of commas between events, last first."""
        for pattern in (_EVENT_BOUNDARY, BOUNDARY):
            for window in (1 << 16, len(self._text)):
                start = max(0, len(self._text) - window)
                found = [match.start(1) for match in pattern.finditer(self._text, start)]
                if found:
                    return found[: -CUTS_TRIED - 1 : -1]
        return []

    def _last(self) -> Iterator[Batch]:
        """Decode what is left at the end of the file."""
        self._ended = True
        text = self._text
        for candidate, whole in ((text, True), (text.rstrip().rstrip(b",") + b"]", False)):
            try:
                events = EVENTS.decode(b"[" + candidate)
            except MALFORMED as error:
                if whole and (end := trailing(error)):
                    yield from self._end(end - 1)
                    return
                continue
            self.notes.truncated |= not self.notes.bare
            if self._strict and self.notes.truncated:
                raise self._error("cut off: the file ends before traceEvents does", at=len(text))
            self._text = b""
            yield Batch(events, candidate.rstrip()[:-1])
            return
        yield from self._salvage(len(text), final=True)

    def _end(self, at: int) -> Iterator[Batch]:
        """Decode up to the array's closing bracket, which ends at ``at``."""
        self._ended = True
        body = self._text[:at]
        try:
            yield Batch(EVENTS.decode(b"[" + body), body.rstrip()[:-1])
            self._consume(at)
        except MALFORMED:
            yield from self._salvage(len(self._text), final=True)

    def _salvage(self, stop: int, *, final: bool = False) -> Iterator[Batch]:
        """Read event by event what does not decode as a whole; strict: say where it is wrong."""
        if self._strict:
            raise self._first_fault(self._text[:stop])
        found = salvage(self._text[:stop], final=final)
        self.notes.skipped += found.skipped
        self.notes.partial += found.partial
        self.notes.non_finite += found.non_finite
        after = self._text[stop:]
        if found.tail is None:
            self._consume(stop + 1)
            self.notes.truncated |= final and (found.partial > 0 or not self.notes.bare)
        else:
            self._ended = True
            self._text = found.tail + after
        yield Batch(found.events, b",".join(found.texts))

    def _consume(self, count: int) -> None:
        self._line += self._text.count(b"\n", 0, count)
        self._text = self._text[count:]

    def _trailer(self) -> None:
        """Read the document's fields behind the array."""
        if self._fill(LARGEST_EVENT_BYTES):
            raise self._error(f"more than {LARGEST_EVENT_BYTES >> 20} MiB behind traceEvents")
        text = self._text.strip()
        if self.notes.bare or not text:
            return
        fields = text.lstrip(b",").strip()
        if not fields.endswith(b"}"):
            self.notes.truncated = True
            return
        self.notes.header |= self._fields(b"{" + fields)

    def _first_fault(self, text: bytes) -> InputError:
        try:
            EVENTS.decode(b"[" + text)
        except MALFORMED as error:
            return self._fault(b"[" + text, error)
        return self._error("malformed")

    def _fault(self, text: bytes, error: Exception) -> InputError:
        """Return the error with the line that the decoder points at."""
        if "UTF-8" in str(error):
            at = _first_not_utf8(text)
        else:
            found = _BYTE.search(str(error))
            at = int(found[1]) if found else len(text)
        message = "nested too deeply" if isinstance(error, RecursionError) else _BYTE.sub("", str(error)).strip()
        return self._error(message, at=at, text=text)

    def _error(self, message: str, *, at: int = 0, text: bytes | None = None) -> InputError:
        line = self._line + (self._text if text is None else text).count(b"\n", 0, at)
        known_line = line if self._strict or at else None
        return InputError(message, file=self._file, line=known_line, kind="trace_format")


def _incomplete(error: Exception, length: int) -> bool:
    """Return whether the text was right as far as it goes: the cut lies inside an event."""
    found = _BYTE.search(str(error))
    return str(error) == TRUNCATED or (found is not None and int(found[1]) > length)


def _first_not_utf8(text: bytes) -> int:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0
