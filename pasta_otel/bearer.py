"""What may be a bearer token; apart from ``config``, so that whoever has one need not load YAML for it."""

from __future__ import annotations


def checked_token(text: str) -> str:
    """Return a bearer token without the line end that files and secrets often carry; empty = none.

    Raises:
        ValueError: It holds what an HTTP header cannot carry; the text does not name the value.
    """
    token = text.strip()
    if not token.isascii() or any(not "!" <= letter <= "~" for letter in token):
        msg = "holds no token: expected printable ASCII without spaces"
        raise ValueError(msg)
    return token
