"""What the demo asks of ``pasta-otel sidecar``, over its HTTP API, as any other client would."""

from __future__ import annotations

from typing import Any

import httpx

from pasta_otel.config import load_settings
from pasta_otel.demo.processes import DemoError

TIMEOUT_SECONDS = 5.0
ACTIONS_MOST = 1000


class Sidecar:
    """A client of one sidecar.

    Args:
        url: Base URL of its API.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        token = load_settings()["PASTA_API_TOKEN"]  # the sidecar, our child, asks for the same
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False, headers=headers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def slos(self) -> list[dict[str, Any]]:
        """Return the state of every SLO."""
        states: list[dict[str, Any]] = self._get("/api/v1/slos")["slos"]
        return states

    def actions(self) -> list[dict[str, Any]]:
        """Return what was done, undone or refused, oldest first."""
        actions: list[dict[str, Any]] = self._get(f"/api/v1/actions?limit={ACTIONS_MOST}")["actions"]
        return actions

    def ledger(self) -> dict[str, Any]:
        """Return the account of spans."""
        return self._get("/api/v1/ledger")

    def trace(self, trace_id: str) -> dict[str, Any] | None:
        """Return one trace, or None if the store does not have it."""
        try:
            return self._get(f"/api/v1/traces/{trace_id}")
        except DemoError:
            return None

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._client.get(path)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise DemoError(f"the sidecar did not answer GET {path}: {error}") from error
        document: dict[str, Any] = response.json()
        return document
