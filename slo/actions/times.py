"""Wall time between nanoseconds and RFC 3339 text in UTC, which is what JSON carries."""

from __future__ import annotations

from datetime import UTC, datetime

SECOND_NS = 1_000_000_000


def to_rfc3339(unix_nano: int) -> str:
    """Return the time as RFC 3339 in UTC with microseconds, which is as much as ``datetime`` reads back."""
    seconds, rest = divmod(unix_nano, SECOND_NS)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest // 1000:06d}Z"


def from_rfc3339(text: str) -> int:
    """Return nanoseconds since the epoch.

    Raises:
        ValueError: Not RFC 3339, or without a zone.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"time without a zone: {text!r}")
    delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (delta.days * 86_400 + delta.seconds) * SECOND_NS + delta.microseconds * 1000
