"""Ask a running controller or sidecar how its SLOs stand."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from pasta_otel.errors import InputError, MissingError

PATH, HISTORY_PATH = "/api/v1/slos", "/api/v1/slos/history"
VERDICTS = ("ok", "burning", "no_data")
NEEDED = frozenset({"name", "service", "objective", "verdict", "reason", "detail", "since", "burn_rates", "budget",
                    "attribution", "annotations"})  # fmt: skip
ANSWER_LIMIT = 64 * 1024 * 1024


def fetch_states(server: str, *, timeout_seconds: float = 5.0, token: str | None = None) -> dict[str, Any]:
    """Return the document ``{time, slos}`` of a server.

    Raises:
        InputError: The URL is not http or https, or what answers is not a pasta-otel server.
        MissingError: Nothing answers there.
    """
    document = _get(server, PATH, timeout_seconds, token)
    if not isinstance(document.get("slos"), list) or not all(_is_state(entry) for entry in document["slos"]):
        raise InputError(f"{server} is not a pasta-otel server: no list of slos", field="--server")
    return document


def _is_state(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() >= NEEDED and entry["verdict"] in VERDICTS


def _get(server: str, path: str, timeout_seconds: float, token: str | None) -> dict[str, Any]:
    url = server.rstrip("/") + path
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
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise MissingError(
            f"nothing answers at {url}: {reason}",
            how="start pasta-otel sidecar or controller, or name it with --server",
        ) from error
    return _document(body, url)


def with_remote_history(
    document: dict[str, Any], server: str, *, timeout_seconds: float = 5.0, token: str | None = None
) -> dict[str, Any]:
    """Return the document with what the server has seen of every SLO; one that keeps no history adds nothing."""
    try:
        found = _get(server, HISTORY_PATH, timeout_seconds, token)
    except (InputError, MissingError):
        return document
    by_name = found.get("history")
    by_name = by_name if isinstance(by_name, dict) else {}
    return {**document, "slos": [{**state, "history": by_name.get(state["name"]) or []} for state in document["slos"]]}


def _document(body: bytes, url: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as error:
        raise InputError(f"{url} did not answer JSON", field="--server") from error
    if not isinstance(document, dict):
        raise InputError(f"{url} is not a pasta-otel server: no JSON object", field="--server")
    return document
