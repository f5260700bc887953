"""JSON documents of a file, one after the other: a whole file, or one document a line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pasta_otel.errors import InputError
from pasta_otel.gpu.kineto.source import TraceBytes

MOST_DOCUMENT_BYTES = 64 << 20
"""A document is decoded as a whole, into about ten times its size. A larger export is written one request a line, as
the OpenTelemetry Collector's file exporter does."""


def documents(
    path: Path, progress: Callable[[int], None] | None = None, *, strict: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield line number and value of each JSON document.

    Args:
        path: The file.
        progress: Told how many bytes of the file were read since the last call.
        strict: Refuse bare ``NaN`` and ``Infinity`` and numbers beyond a float, which otherwise are null.

    Raises:
        InputError: One is not JSON, or too large; kinds ``trace_format`` and ``too_large``, with the line.
    """
    source = TraceBytes(path, progress)
    buffer, line = b"", 1
    for piece in source:
        buffer += piece
        at = 0
        while (end := buffer.find(b"\n", at)) >= 0:
            value = _complete(buffer[at:end], strict=strict)
            if value is _NOT_COMPLETE:
                break
            if value is not _BLANK:
                yield line, value
            at, line = end + 1, line + 1
        buffer = buffer[at:]
        if len(buffer) > MOST_DOCUMENT_BYTES:
            what = f"a document above {MOST_DOCUMENT_BYTES >> 20} MiB; write one request a line"
            raise InputError(what, file=str(path), line=line, kind="too_large")
    if source.cut:
        raise InputError("the compressed data is cut off or damaged", file=str(path), line=line, kind="trace_format")
    if buffer.strip():
        yield line, _decode(buffer, str(path), line, strict=strict)


_NOT_COMPLETE, _BLANK = object(), object()


def _complete(text: bytes, *, strict: bool) -> Any:
    """Return the value when a line is a document by itself, as of a file with one document a line."""
    stripped = text.strip()
    if not stripped:
        return _BLANK
    if not stripped.endswith(b"}") or not stripped.startswith(b"{"):
        return _NOT_COMPLETE
    try:
        return _value(stripped, strict=strict)
    except (msgspec.DecodeError, RecursionError):
        return _NOT_COMPLETE


def _decode(text: bytes, file: str, line: int, *, strict: bool) -> Any:
    try:
        return _value(text.decode("utf-8", "replace").removeprefix("\ufeff"), strict=strict)
    except RecursionError as error:
        raise InputError("nested too deeply", file=file, line=line, kind="trace_format") from error
    except msgspec.DecodeError as error:
        raise InputError(f"not valid JSON: {error}", file=file, line=line, kind="trace_format") from error


def _value(text: bytes | str, *, strict: bool) -> Any:
    """Return a document's value; not strictly, with null for numbers that JSON does not have."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        if strict:
            raise
        try:
            return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        except ValueError:
            pass
        raise


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None
