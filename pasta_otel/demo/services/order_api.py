"""The order API: checks an order, scores its risk, takes the money, and recommends more.

What pasta-otel adds stands in three places: ``slo.breaker`` around the dependency that orders can do without,
``slo.flag`` to forgive it while degraded, and ``@slo.handler`` to hear of the change. SLO and policy live outside.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from opentelemetry import trace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pasta_otel import slo
from pasta_otel.demo.services.catalogue import total_cents
from pasta_otel.demo.services.serving import HEALTH, serve, without_message_spans

TIMEOUT_SECONDS = 10.0
WARM_UP_ORDERS = 30
log = logging.getLogger("order-api")
facts: dict[str, dict[str, float]] = {}
# opened by the SLO, not by its own count; then one call every 10 s tries, and one that takes 0.2 s counts as failed
breaker = slo.breaker(
    "recommendations", open_by_rate=False, slow_call_seconds=0.2, open_seconds=10.0, half_open_max_calls=1
)


class DependencyError(Exception):
    """A dependency did not do its part of an order."""


@slo.handler("recommendations")
def on_degrade(degraded: bool) -> None:
    """Hear that recommendations were switched off, or on again."""
    log.warning("recommendations are %s", "off: the SLO burns because of them" if degraded else "on again")


class Dependencies:
    """HTTP calls to the other services; remembers for each order which of them it made."""

    def __init__(self, client: httpx.AsyncClient, urls: dict[str, str]) -> None:
        self._client, self._urls = client, urls

    async def post(self, calls: list[str], name: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call ``name`` and return its answer.

        Raises:
            DependencyError: It did not answer in time, or not with success.
        """
        calls.append(name)
        try:
            response = await self._client.post(self._urls[name] + path, json=body)
            response.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise DependencyError(f"{name} answered {error.response.status_code}") from error
        except httpx.HTTPError as error:
            raise DependencyError(f"{name}: {type(error).__name__}") from error
        answer: dict[str, Any] = response.json()
        return answer


async def recommend(dependencies: Dependencies, calls: list[str], skus: list[str]) -> list[str] | None:
    """Return recommended skus, or None where an order does without.

    The breaker alone decides whether to call: while it is open, one call now and then finds out how the dependency is.
    """
    body = {"skus": skus}
    try:
        answer = await breaker.acall(dependencies.post, calls, "recommendations", "/recommendations", body)
    except slo.CircuitOpenError:
        return None
    except DependencyError:
        if slo.flag("degrade.recommendations"):  # it was such a call: the order is fine without
            return None
        raise
    recommended: list[str] = answer["skus"]
    return recommended


async def fulfil(dependencies: Dependencies, calls: list[str], order: dict[str, Any]) -> dict[str, Any]:
    """Do an order's work, one dependency after the other."""
    items = [(sku, int(quantity)) for sku, quantity in order["items"]]
    total = total_cents(items)
    risk = await dependencies.post(calls, "model", "/risk", order)
    payment = await dependencies.post(
        calls, "payment", "/authorizations", {"order_id": order["order_id"], "amount_cents": total}
    )
    recommended = await recommend(dependencies, calls, [sku for sku, _ in items])
    return {
        "order_id": order["order_id"],
        "status": "accepted",
        "total_cents": total,
        "risk": risk["risk"],
        "authorization": payment["authorization"],
        "recommendations": recommended or [],
        "degraded": recommended is None,
    }


async def create_order(request: Request) -> Response:
    """Take one order; 422 if it makes no sense, 502 if a dependency failed it."""
    calls: list[str] = []
    try:
        answer, status = await fulfil(request.app.state.dependencies, calls, await request.json()), 201
    except (KeyError, TypeError, ValueError) as error:
        answer, status = {"error": f"not an order: {error!r}"}, 422
    except DependencyError as error:
        answer, status = {"error": str(error)}, 502
    answer["calls"] = calls
    answer["trace_id"] = trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)
    return JSONResponse(answer, status_code=status)


async def warm_up(dependencies: Dependencies) -> dict[str, float]:
    """Send orders through the dependencies, outside any sampled trace, and return how long one takes, in milliseconds.

    Connections, imports and caches are then not at the first customer's expense.
    """
    unsampled = trace.SpanContext(trace_id=1, span_id=1, is_remote=False, trace_flags=trace.TraceFlags.get_default())
    took_ms = []
    with trace.use_span(trace.NonRecordingSpan(unsampled)):
        for number in range(WARM_UP_ORDERS):
            started = time.perf_counter()
            await fulfil(dependencies, [], {"order_id": f"warm-up-{number}", "items": [["penne", 1]]})
            took_ms.append((time.perf_counter() - started) * 1000)
    warm = took_ms[WARM_UP_ORDERS // 3 :]
    return {"median_ms": statistics.median(warm), "fastest_ms": min(warm)}


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Keep one connection pool while the service runs."""
    urls: dict[str, str] = json.loads(os.environ["DEMO_DEPENDENCIES"])
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
        app.state.dependencies = Dependencies(client, urls)
        facts["order"] = await warm_up(app.state.dependencies)
        yield


app = without_message_spans(
    Starlette(routes=[Route("/orders", create_order, methods=["POST"]), HEALTH], lifespan=lifespan)
)

if __name__ == "__main__":
    serve(app, facts)
