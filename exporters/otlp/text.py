"""Text that protobuf accepts: OTLP strings are UTF-8, what kernels, file systems and cut strings give often is not."""

from __future__ import annotations

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def clean_utf8(value: str | bytes, byte_limit: int | None = None) -> str:
    """Return valid text, at most ``byte_limit`` bytes long in UTF-8.

    A cut never splits a character, and bad bytes or lone surrogates become U+FFFD instead of an error in the export
    thread (one bad byte once cost a whole batch: opentelemetry-go#3021).

    Args:
        value: Text, or bytes that ought to be UTF-8.
        byte_limit: Greatest length in bytes; None = unlimited.
    """
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    raw = _utf8(text)
    if byte_limit is None or len(raw) <= byte_limit:
        return raw.decode("utf-8")
    return raw[: max(byte_limit, 0)].decode("utf-8", "ignore")


def is_clean(text: str) -> bool:
    """Return whether protobuf takes this text as it is (false for lone surrogates)."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return "".join(REPLACEMENT if "\ud800" <= char <= "\udfff" else char for char in text).encode("utf-8")
