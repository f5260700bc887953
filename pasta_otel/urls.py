"""URLs that people configure: read once, with their credentials apart, and shown without them.

A URL may hold a password before its host or a token in its query, also one that is mistyped. So no message shows a URL
as it was given, nor the words of the standard library, which quote parts of it: ``shown`` says what may be printed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pasta_otel.errors import InputError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NOT_IN_A_URL = re.compile(r"[\s\x00-\x1f\x7f]")
_SAFE_WORDS = re.compile(r"Port out of range 0-65535|Port could not be cast to integer|Invalid IPv6 URL")
HTTP_SCHEMES = ("http", "https")
HIDDEN = "***"


class Url(NamedTuple):
    """A URL in its parts.

    Attributes:
        plain: All of it without user and password: what a client may be given.
        scheme: In lower case; empty where there is none.
        host: Name or address, IPv6 without brackets.
        port: None where it names none.
        path: As it was written, perhaps empty.
        query: Without the question mark.
        authorization: ``Basic ...`` of user and password; empty without them. Never logged.
    """

    plain: str
    scheme: str
    host: str
    port: int | None
    path: str
    query: str
    authorization: str

    @property
    def default_port(self) -> int:
        """Return the port, or the scheme's own; without a scheme that of TLS, as gRPC means it."""
        return self.port or (80 if self.scheme == "http" else 443)


def shown(text: str) -> str:
    """Return what of a URL may be printed: no user, password, query or fragment, however malformed it is."""
    scheme = _SCHEME.match(text)
    lead = scheme[0] if scheme else ""
    before, at, rest = text[len(lead) :].rpartition("@")
    if at and re.search(r"[?#]", before):  # the "@" may stand in a query as well as behind a password
        return lead + HIDDEN
    return lead + re.split(r"[?#]", rest, maxsplit=1)[0]


def read_url(text: str, *, field: str, schemes: Collection[str] = HTTP_SCHEMES, expected: str = "") -> Url:
    """Return a URL's parts.

    Args:
        text: As the user gave it.
        field: What an error names: the variable or option.
        schemes: Those that will do; an empty one admits ``host:port``.
        expected: What an error asks for.

    Raises:
        InputError: Another scheme, no host, or a port that is no number up to 65535; shows no credentials.
    """
    expected = expected or "an http or https URL with a host, as http://127.0.0.1:4318"
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        host, port, user, password = parts.hostname, parts.port, parts.username, parts.password
    except ValueError as error:
        said = _SAFE_WORDS.match(str(error))  # the rest of it quotes what cannot be read
        why = said[0] if said else "host or port cannot be read"
        raise InputError(f"{why}; expected {expected}", field=field) from None
    if parts.scheme not in schemes or not host or _NOT_IN_A_URL.search(text):
        raise InputError(f"expected {expected}, got {shown(text)!r}", field=field)
    authorization = "" if user is None else _basic(unquote(user), unquote(password or ""))
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return Url(
        plain if "//" in text else plain.removeprefix("//"),
        parts.scheme,
        host,
        port,
        parts.path,
        parts.query,
        authorization,
    )


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
