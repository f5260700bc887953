"""Ask a running sidecar or controller why something burns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pasta_otel.errors import InputError
from pasta_otel.slo.sources.api import FIELD, call
from pasta_otel.urls import shown

PATH = "/api/v1/attribute"


def ask(
    server: str, question: Mapping[str, Any], *, timeout_seconds: float = 15.0, token: str | None = None
) -> dict[str, Any]:
    """Return the answer to ``POST /api/v1/attribute``.

    Raises:
        InputError: The URL is not http or https, the server refuses the question (its words are kept), or what
            answers is not a pasta-otel server.
        MissingError: Nothing answers there.
    """
    how = "start pasta-otel sidecar or controller, name it with --server, or open a file with --store"
    document = call(server, PATH, dict(question), timeout_seconds=timeout_seconds, token=token, how=how)
    if not isinstance(document.get("causes"), list):
        raise InputError(f"{shown(server)} is not a pasta-otel server: no list of causes", field=FIELD)
    return document
