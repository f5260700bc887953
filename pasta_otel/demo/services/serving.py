"""How the demo's services listen: a loopback port that the system chooses, told on stdout, and an orderly stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp


async def healthz(request: Request) -> Response:
    """Answer that the service is up."""
    del request
    return JSONResponse({"status": "ok"})


def without_message_spans(app: Starlette) -> Starlette:
    """Keep the standard instrumentation from making a span of every ASGI message (``http send``, ``http receive``)."""
    for middleware in app.user_middleware:
        if getattr(middleware.cls, "__name__", "") == OpenTelemetryMiddleware.__name__:
            middleware.kwargs["exclude_spans"] = ["receive", "send"]
    return app


HEALTH = Route("/healthz", healthz)


class _Server(uvicorn.Server):
    """Tells where it listens once the application has started."""

    def __init__(self, config: uvicorn.Config, facts: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._facts = facts

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        sys.stdout.write(json.dumps({"event": "ready", "port": port, **self._facts}) + "\n")
        sys.stdout.flush()


def serve(app: ASGIApp, facts: Mapping[str, Any] | None = None) -> None:
    """Serve ``app`` on loopback until SIGTERM or SIGINT.

    Args:
        app: The application.
        facts: Told on stdout with the port (``PORT``, or a free one) once the application has started.
    """
    # uvicorn raises SIGTERM again once it has stopped; exiting instead of dying lets telemetry flush
    signal.signal(signal.SIGTERM, _exit)
    port = int(os.environ.get("PORT", "0"))
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False, lifespan="on")
    _Server(config, {} if facts is None else facts).run()


def _exit(*_: Any) -> None:
    sys.exit(0)
