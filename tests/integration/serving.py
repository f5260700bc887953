"""A sidecar in this process, for tests: started on free ports, stopped in order."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pasta_otel.app.options import SidecarOptions
from pasta_otel.app.sidecar import Sidecar


def options(**given: Any) -> SidecarOptions:
    free = {"otlp_http_port": 0, "otlp_grpc_port": 0, "api_port": 0, "host_metrics": False, "device_metrics": False}
    return SidecarOptions(**{**free, **given})


@asynccontextmanager
async def running(sidecar: Sidecar) -> AsyncIterator[dict[str, Any]]:
    """Yield the addresses of a running sidecar."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(sidecar.run(stop, lambda event: ready.done() or ready.set_result(event)))
    try:
        await asyncio.wait({task, ready}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield ready.result()
    finally:
        stop.set()
        await task


def ask(url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """Return status and JSON (or bytes) of one request."""
    request = urllib.request.Request(url, body, dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, _read(answer)
    except urllib.error.HTTPError as error:
        return error.code, _read(error)


def _read(answer: Any) -> Any:
    body = answer.read()
    return json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body
