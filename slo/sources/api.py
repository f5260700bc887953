"""One question to the API of a running sidecar or controller; what it answers, or why it does not, in words."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from pasta_otel.errors import InputError, MissingError
from pasta_otel.urls import read_url, shown

ANSWER_LIMIT = 64 * 1024 * 1024
FIELD = "--server"


def call(  # noqa: PLR0913 - keyword-only but for what to ask whom
    server: str,
    path: str,
    question: Any = None,
    *,
    timeout_seconds: float,
    token: str | None = None,
    how: str = "start pasta-otel sidecar or controller, or name it with --server",
) -> dict[str, Any]:
    """Return the JSON object that a server answers; a question is sent by POST.

    Args:
        server: Base URL; user and password in it are sent as basic authentication where there is no token.
        path: Which part of the API.
        question: Any JSON value; None = GET.
        timeout_seconds: Limit for each step.
        token: Bearer token.
        how: What to do when nothing answers.

    Raises:
        InputError: The URL is none, the server refuses (its words are kept), or it is no pasta-otel server.
        MissingError: Nothing answers there.
    """
    url = read_url(server, field=FIELD, expected="a URL with http:// or https://")
    where = shown(url.plain.rstrip("/") + path)
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token or url.authorization:
        headers["Authorization"] = f"Bearer {token}" if token else url.authorization
    body = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url.plain.rstrip("/") + path, body, headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:  # noqa: S310 - checked above
            text = answer.read(ANSWER_LIMIT)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(where, error.code, error.read(ANSWER_LIMIT), asked_with=token) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise MissingError(f"nothing answers at {where}: {getattr(error, 'reason', error)}", how=how) from error
    return _document(text, where)


def _refusal(where: str, status: int, body: bytes, *, asked_with: str | None) -> InputError:
    if status in {401, 403}:
        what = "does not take the token of PASTA_API_TOKEN" if asked_with else "wants a token: set PASTA_API_TOKEN"
        return InputError(f"{where} {what} (HTTP {status})", field=FIELD)
    try:
        words = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        words = ""
    if status == http.client.NOT_FOUND and words in {"", "Not Found"}:  # not our own words about what was asked for
        what = "is not there: no pasta-otel server, or one without --slo"
        return InputError(f"{where} {what} (HTTP 404)", field=FIELD)
    return InputError(words) if words else InputError(f"{where} answered HTTP {status}", field=FIELD)


def _document(body: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} did not answer JSON", field=FIELD) from error
    if not isinstance(document, dict):
        raise InputError(f"{where} is not a pasta-otel server: no JSON object", field=FIELD)
    return document
