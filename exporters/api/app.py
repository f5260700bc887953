"""One Starlette application from whatever the process can answer; a part that is not there answers 404."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pasta_otel.errors import InputError, MissingError, PastaError
from pasta_otel.exporters.api import ofrep
from pasta_otel.exporters.api.body import dumps, read_object
from pasta_otel.exporters.api.providers import (
    ById,
    Documents,
    FlagProvider,
    Health,
    MetricsRenderer,
    OneDocument,
    Question,
    RecentDocuments,
)

TRACE_ID = re.compile(r"[0-9a-f]{32}")
DEFAULT_LIMIT = 100
MAX_LIMIT = 10_000
OPEN_PATHS = frozenset({"/healthz"})  # probes of an orchestrator carry no token
STATUS_BY_KIND = {"not_found": 404, "conflict": 409}
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ApiProviders:
    """What the process can answer; None = that endpoint is not there.

    Attributes:
        flags: OFREP and pins.
        slos: ``GET /api/v1/slos``: the states, or the whole document ``{time, slos}``.
        slo_history: ``GET /api/v1/slos/history``: ``{history: {slo: [{time, remaining, burn}]}}``.
        actions: ``GET /api/v1/actions?limit=``, newest last.
        ledger: ``GET /api/v1/ledger``: spans received, rejected and per sink.
        trace: ``GET /api/v1/traces/{id}``; None from it means no such trace.
        attribute: ``POST /api/v1/attribute``.
        metrics: ``GET /metrics``.
        health: ``GET /healthz``: (healthy, details).
    """

    flags: FlagProvider | None = None
    slos: Documents | OneDocument | None = None
    slo_history: OneDocument | None = None
    actions: RecentDocuments | None = None
    ledger: OneDocument | None = None
    trace: ById | None = None
    attribute: Question | None = None
    metrics: MetricsRenderer | None = None
    health: Health = lambda: (True, {})


def create_app(providers: ApiProviders, *, token: str = "") -> Starlette:
    """Build the application.

    Args:
        providers: Who answers.
        token: Bearer token that every path but ``/healthz`` then needs; empty = none (loopback).
    """
    routes: list[BaseRoute] = [
        *_state_routes(providers),
        *(_flag_routes(providers.flags) if providers.flags else ()),
        Route("/healthz", _healthz(providers.health), methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={PastaError: _on_error, HTTPException: _on_http_error, OSError: _on_os_error},  # type: ignore[dict-item]  # narrower argument than Starlette's type
    )
    if token:
        app.add_middleware(BearerAuth, token=token)
    return app


class BearerAuth:
    """Refuse requests without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it carries the token, compared in constant time."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._carries(scope):
            await self._app(scope, receive, send)
            return
        response = _json({"error": {"message": "bearer token needed"}}, 401)
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _carries(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


def _state_routes(providers: ApiProviders) -> list[Route]:
    table: tuple[tuple[str, str, Any, Callable[[Any], Endpoint]], ...] = (
        ("GET", "/api/v1/slos", providers.slos, _slos),
        ("GET", "/api/v1/slos/history", providers.slo_history, _ledger),
        ("GET", "/api/v1/actions", providers.actions, _actions),
        ("GET", "/api/v1/ledger", providers.ledger, _ledger),
        ("GET", "/api/v1/traces/{id}", providers.trace, _trace),
        ("POST", "/api/v1/attribute", providers.attribute, _attribute),
        ("GET", "/metrics", providers.metrics, _metrics),
    )
    return [Route(path, make(provider), methods=[method]) for method, path, provider, make in table if provider]


def _flag_routes(flags: FlagProvider) -> list[Route]:
    async def pin(request: Request) -> Response:
        document = await read_object(request)
        if "value" not in document:
            raise InputError("missing", field="value")
        by, reason = _text(document, "by"), _text(document, "reason")
        key = request.path_params["key"]
        return _json(await run_in_threadpool(flags.pin, key, document["value"], by, reason))

    async def unpin(request: Request) -> Response:
        document = await read_object(request)
        return _json(await run_in_threadpool(flags.unpin, request.path_params["key"], _text(document, "by")))

    return [
        *ofrep.routes(flags),
        Route("/api/v1/flags/{key}/pin", pin, methods=["PUT"]),
        Route("/api/v1/flags/{key}/pin", unpin, methods=["DELETE"]),
    ]


def _slos(provider: Documents | OneDocument) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        found = await run_in_threadpool(provider)
        return _json(found if isinstance(found, Mapping) else {"slos": list(found)})

    return endpoint


def _actions(provider: RecentDocuments) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        text = request.query_params.get("limit", str(DEFAULT_LIMIT))
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LIMIT):
            raise InputError(f"expected a whole number from 1 to {MAX_LIMIT}, got {text[:40]!r}", field="limit")
        return _json({"actions": list(await run_in_threadpool(provider, int(text)))})

    return endpoint


def _ledger(provider: OneDocument) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return _json(await run_in_threadpool(provider))

    return endpoint


def _trace(provider: ById) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        trace_id = request.path_params["id"].lower()
        if not TRACE_ID.fullmatch(trace_id):
            raise InputError("expected 32 hexadecimal digits", field="trace id")
        document = await run_in_threadpool(provider, trace_id)
        if document is None:
            raise InputError("no such trace in the store", field=trace_id, kind="not_found")
        return _json(document)

    return endpoint


def _attribute(provider: Question) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return _json(await run_in_threadpool(provider, await read_object(request)))

    return endpoint


def _metrics(render: MetricsRenderer) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        content_type, body = await run_in_threadpool(render, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return endpoint


def _healthz(health: Health) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        healthy, details = await run_in_threadpool(health)
        return _json({"status": "ok" if healthy else "failing", **details}, 200 if healthy else 503)

    return endpoint


def _text(document: Mapping[str, Any], field: str) -> str:
    value = document.get(field, "")
    if not isinstance(value, str) or len(value) > 200:
        raise InputError("expected text of at most 200 characters", field=field)
    return value


def _json(document: Any, status: int = 200) -> Response:
    return Response(dumps(document), status_code=status, media_type="application/json")


async def _on_error(_: Request, error: PastaError) -> Response:
    described: dict[str, Any] = {"message": str(error)}
    if isinstance(error, InputError):
        described |= {"field": error.field, "kind": error.kind}
        return _json({"error": described}, STATUS_BY_KIND.get(error.kind, 400))
    return _json({"error": described}, 503 if isinstance(error, MissingError) else 409)


async def _on_os_error(_: Request, error: OSError) -> Response:
    return _json({"error": {"message": f"not done: {error.strerror or type(error).__name__}"}}, 503)


async def _on_http_error(_: Request, error: HTTPException) -> Response:
    return _json({"error": {"message": error.detail}}, error.status_code)
