"""Ask a running sidecar or controller why something burns."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from pasta_otel.errors import InputError, MissingError

PATH = "/api/v1/attribute"
ANSWER_LIMIT = 16 * 1024 * 1024


def ask(
    server: str, question: Mapping[str, Any], *, timeout_seconds: float = 15.0, token: str | None = None
) -> dict[str, Any]:
    """Return the answer to ``POST /api/v1/attribute``.

    Raises:
        InputError: The URL is not http or https, the server refuses the question (its words are kept), or what
            answers is not a pasta-otel server.
        MissingError: Nothing answers there.
    """
    url = server.rstrip("/") + PATH
    if not url.startswith(("http://", "https://")):
        raise InputError("expected a URL with http:// or https://", field="--server")
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(question).encode(), headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:  # noqa: S310 - checked above
            body = answer.read(ANSWER_LIMIT)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error.code, error.read(ANSWER_LIMIT)) from error
    except OSError as error:
        raise MissingError(
            f"nothing answers at {url}: {getattr(error, 'reason', error)}",
            how="start pasta-otel sidecar or controller, name it with --server, or open a file with --store",
        ) from error
    return _document(body, url)


def _refusal(url: str, status: int, body: bytes) -> InputError:
    try:
        return InputError(str(json.loads(body)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return InputError(f"{url} answered HTTP {status}", field="--server")


def _document(body: bytes, url: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as error:
        raise InputError(f"{url} did not answer JSON", field="--server") from error
    if not isinstance(document, dict) or not isinstance(document.get("causes"), list):
        raise InputError(f"{url} is not a pasta-otel server: no list of causes", field="--server")
    return document
