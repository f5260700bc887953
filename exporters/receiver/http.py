"""OTLP over HTTP: a Starlette app, and uvicorn as its server without touching the process's signals."""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from google.rpc import status_pb2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from pasta_otel.exporters.receiver.compression import decompress, too_large
from pasta_otel.exporters.receiver.config import ReceiverConfig
from pasta_otel.exporters.receiver.intake import Intake, Refused, Reply

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_CODES = {404: 5, 405: 12, 401: 16, 413: 8}  # google.rpc.Code


def otlp_app(intake: Intake, config: ReceiverConfig) -> Starlette:
    """Return the ASGI app that serves ``POST /v1/traces`` and ``POST /v1/metrics``, also with a slash behind."""
    endpoints = {"/v1/traces": intake.traces, "/v1/metrics": intake.metrics}
    app = Starlette(
        routes=[
            Route(path + end, _endpoint(intake, take, config), methods=["POST"])
            for path, take in endpoints.items()
            for end in ("", "/")
        ],
        exception_handlers={HTTPException: _not_served},
    )
    app.router.redirect_slashes = False  # OTLP senders follow no redirect: the spans would be lost
    return app


def _endpoint(
    intake: Intake, take: Callable[..., Reply], config: ReceiverConfig
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        media = _media_type(request)
        try:
            _authorise(request, config.bearer_token)
            _check_media(media)
            body = await _read(request, config.max_request_bytes)
            body = decompress(body, request.headers.get("content-encoding", ""), config.max_request_bytes)
        except Refused as refusal:
            return _refusal(media, intake.refuse(refusal))
        except ClientDisconnect:
            return Response(status_code=400)
        try:
            reply = take(body, is_json=media == JSON)
        except Refused as refusal:
            return _refusal(media, refusal)
        content = json.dumps(reply.json()).encode() if media == JSON else reply.protobuf()
        return Response(content, media_type=media)

    return endpoint


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_media(media: str) -> None:
    if media not in {PROTOBUF, JSON}:
        raise Refused(
            "unsupported_media_type",
            f"Content-Type: expected {PROTOBUF} or {JSON}, got {media[:60]!r}",
            http_status=415,
            grpc_code=3,
        )


def _authorise(request: Request, token: str | None) -> None:
    if token is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Refused("unauthenticated", "a valid bearer token is needed", http_status=401, grpc_code=16)


async def _read(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large(limit)
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > limit:
            raise too_large(limit)
    return bytes(chunks)


def _refusal(media: str, refusal: Refused) -> Response:
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    if refusal.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _status(media, refusal.http_status, refusal.grpc_code, refusal.message, headers)


async def _not_served(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = _CODES.get(error.status_code, 2)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _status(_media_type(request), error.status_code, code, text, dict(error.headers or {}))


def _status(media: str, http_status: int, code: int, message: str, headers: dict[str, str]) -> Response:
    """Return a ``google.rpc.Status`` in the request's content type, or JSON where that is neither of ours."""
    if media == PROTOBUF:
        content = status_pb2.Status(code=code, message=message).SerializeToString()
        return Response(content, http_status, headers, PROTOBUF)
    return Response(json.dumps({"code": code, "message": message}), http_status, headers, JSON)


class EmbeddedServer(uvicorn.Server):
    """Uvicorn inside somebody else's event loop: it installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def server_config(app: Starlette, config: ReceiverConfig) -> uvicorn.Config:
    """Return uvicorn's settings for a receiver."""
    tls: dict[str, Any] = {}
    if config.tls_certificate_file:
        tls = {"ssl_certfile": config.tls_certificate_file, "ssl_keyfile": config.tls_key_file}
        if config.tls_client_ca_file:
            tls |= {"ssl_ca_certs": config.tls_client_ca_file, "ssl_cert_reqs": 2}  # ssl.CERT_REQUIRED
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        **tls,
    )
