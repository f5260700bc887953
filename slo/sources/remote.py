"""Ask a running controller or sidecar how its SLOs stand."""

from __future__ import annotations

from typing import Any

from pasta_otel.errors import InputError, MissingError
from pasta_otel.slo.sources.api import FIELD, call
from pasta_otel.urls import shown

PATH, HISTORY_PATH = "/api/v1/slos", "/api/v1/slos/history"
VERDICTS = ("ok", "burning", "no_data")
NEEDED = frozenset({"name", "service", "objective", "verdict", "reason", "detail", "since", "burn_rates", "budget",
                    "attribution", "annotations"})  # fmt: skip


def fetch_states(server: str, *, timeout_seconds: float = 5.0, token: str | None = None) -> dict[str, Any]:
    """Return the document ``{time, slos}`` of a server.

    Raises:
        InputError: The URL is not http or https, or what answers is not a pasta-otel server.
        MissingError: Nothing answers there.
    """
    document = call(server, PATH, timeout_seconds=timeout_seconds, token=token)
    if not isinstance(document.get("slos"), list) or not all(_is_state(entry) for entry in document["slos"]):
        raise InputError(f"{shown(server)} is not a pasta-otel server: no list of slos", field=FIELD)
    return document


def _is_state(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() >= NEEDED and entry["verdict"] in VERDICTS


def with_remote_history(
    document: dict[str, Any], server: str, *, timeout_seconds: float = 5.0, token: str | None = None
) -> dict[str, Any]:
    """Return the document with what the server has seen of every SLO; one that keeps no history adds nothing."""
    try:
        found = call(server, HISTORY_PATH, timeout_seconds=timeout_seconds, token=token)
    except (InputError, MissingError):
        return document
    by_name = found.get("history")
    by_name = by_name if isinstance(by_name, dict) else {}
    return {**document, "slos": [{**state, "history": by_name.get(state["name"]) or []} for state in document["slos"]]}
