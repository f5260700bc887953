"""Ask a running controller or sidecar how its SLOs stand."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from pasta_otel.errors import InputError, MissingError

PATH = "/api/v1/slos"
ANSWER_LIMIT = 64 * 1024 * 1024


def fetch_states(server: str, *, timeout_seconds: float = 5.0, token: str | None = None) -> dict[str, Any]:
    """Return the document ``{time, slos}`` of a server.

    Raises:
        InputError: The URL is not http or https, or what answers is not a pasta-otel server.
        MissingError: Nothing answers there.
    """
    url = server.rstrip("/") + PATH
    if not url.startswith(("http://", "https://")):
        raise InputError("expected a URL with http:// or https://", field="--server")
    request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310  # checked above
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:  # noqa: S310
            body = answer.read(ANSWER_LIMIT)
    except urllib.error.HTTPError as error:
        raise InputError(f"{url} answered HTTP {error.code}", field="--server") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise MissingError(
            f"nothing answers at {url}: {reason}",
            how="start pasta-otel sidecar or controller, or name it with --server",
        ) from error
    return _document(body, url)


def _document(body: bytes, url: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as error:
        raise InputError(f"{url} did not answer JSON", field="--server") from error
    if not isinstance(document, dict) or not isinstance(document.get("slos"), list):
        raise InputError(f"{url} is not a pasta-otel server: no list of slos", field="--server")
    return document
