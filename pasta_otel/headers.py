"""Headers that people configure, as ``OTEL_EXPORTER_OTLP_HEADERS`` writes them.

Our own reader: the SDK's logs an entry that it cannot read, value and all, and goes on without it.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from pasta_otel.errors import InputError

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2: token
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")  # RFC 9110, 5.5


def read_headers(text: str, *, field: str) -> dict[str, str]:
    """Return ``name=value,name=value``, both percent-decoded, names in lower case; of one name the last counts.

    Source: opentelemetry-specification, protocol/exporter.md, "Specifying headers via environment variables".

    Raises:
        InputError: An entry has another form, or no header can carry it; names its place, never its text.
    """
    headers: dict[str, str] = {}
    entries = [entry for entry in text.split(",") if entry.strip()]
    for number, entry in enumerate(entries, 1):
        name, equals, value = (unquote(part).strip() for part in entry.partition("="))
        if not equals or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            what = f"entry {number} of {len(entries)} is not that" if len(entries) > 1 else "this is not that"
            raise InputError(f"expected name=value,name=value: {what}", field=field)
        headers[name.lower()] = value
    return headers
