"""OpenFeature Remote Evaluation Protocol, server side.

Source: open-feature/protocol, service/openapi.yaml. No flag here depends on the evaluation context: any is taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pasta_otel.exporters.api.body import dumps, read_body
from pasta_otel.exporters.api.providers import FlagProvider

MIN_POLL_MS = 500  # what our own client does by default


def routes(flags: FlagProvider) -> list[Route]:
    """Return the three OFREP endpoints over a flag provider."""

    async def evaluate(request: Request) -> Response:
        key = request.path_params["key"]
        problem = await _bad_context(request)
        if problem:
            return _answer({"key": key, **problem}, status=400)
        entry = flags.evaluate(key)
        if entry is None:
            details = f"flag {key!r} is not known here"
            return _answer({"key": key, "errorCode": "FLAG_NOT_FOUND", "errorDetails": details}, status=404)
        return _answer({**entry, "cacheable": False})

    async def evaluate_all(request: Request) -> Response:
        problem = await _bad_context(request)
        if problem:
            return _answer(problem, status=400)
        return _cached(request, {"flags": list(flags.evaluate_all())})

    async def configuration(request: Request) -> Response:
        return _cached(request, CONFIGURATION)

    return [
        Route("/ofrep/v1/evaluate/flags/{key:path}", evaluate, methods=["POST"]),
        Route("/ofrep/v1/evaluate/flags", evaluate_all, methods=["POST"]),
        Route("/ofrep/v1/configuration", configuration, methods=["GET"]),
    ]


CONFIGURATION: Mapping[str, Any] = {
    "name": "pasta-otel",
    "capabilities": {
        "cacheInvalidation": {"polling": {"enabled": True, "minPollingIntervalMs": MIN_POLL_MS}},
        "flagEvaluation": {"supportedTypes": ["boolean", "object"]},
        "caching": {"enabled": False},
    },
}


async def _bad_context(request: Request) -> Mapping[str, str] | None:
    """Return the OFREP error of a request body, or None; a missing body or context is an empty context."""
    body = await read_body(request)
    if not body:
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        return {"errorCode": "PARSE_ERROR", "errorDetails": f"body is not JSON: {error}"}
    if not isinstance(document, dict):
        return {"errorCode": "PARSE_ERROR", "errorDetails": "body: expected an object"}
    if not isinstance(document.get("context", {}), dict):
        return {"errorCode": "INVALID_CONTEXT", "errorDetails": "context: expected an object"}
    return None


def _answer(document: Mapping[str, Any], status: int = 200) -> Response:
    return Response(dumps(document), status_code=status, media_type="application/json")


def _cached(request: Request, document: Mapping[str, Any]) -> Response:
    body = dumps(document)
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    wanted = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if etag in wanted or "*" in wanted:
        return Response(status_code=304, headers={"ETag": etag})
    return Response(body, media_type="application/json", headers={"ETag": etag})
