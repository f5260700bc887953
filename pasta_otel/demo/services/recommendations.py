"""The recommendation dependency: other goods that go with an order. Nobody needs it to sell."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pasta_otel.demo.services.catalogue import PRICES_CENTS
from pasta_otel.demo.services.serving import HEALTH, serve, without_message_spans

USUAL_SECONDS = 0.004
COUNT = 3


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the demo's faults do to this service.

    Attributes:
        slower_seconds_per_second: How fast the answer gets slower, from ``since_monotonic`` on.
        slower_seconds_most: Where that growth ends.
        failing: Answer every request with 503.
        since_monotonic: When the trouble began.
    """

    slower_seconds_per_second: float = 0.0
    slower_seconds_most: float = 0.0
    failing: bool = False
    since_monotonic: float = 0.0

    def delay(self, now_monotonic: float) -> float:
        """Return the extra seconds that an answer takes at ``now_monotonic``."""
        grown = self.slower_seconds_per_second * (now_monotonic - self.since_monotonic)
        return min(grown, self.slower_seconds_most)


async def recommend(request: Request) -> Response:
    """Return goods that are not in the order yet."""
    await asyncio.sleep(USUAL_SECONDS)
    if request.app.state.trouble.failing:
        return JSONResponse({"error": "the recommendation index is not available"}, status_code=503)
    have = set((await request.json())["skus"])
    return JSONResponse({"skus": [sku for sku in PRICES_CENTS if sku not in have][:COUNT]})


async def set_trouble(request: Request) -> Response:
    """Start or end trouble: the demo's faults use this."""
    body = await request.json()
    request.app.state.trouble = Trouble(since_monotonic=time.monotonic(), **body)
    return Response(status_code=204)


class Door:
    """Requests wait here for a free worker, before the application (and its instrumentation) sees them.

    So the wait is in no span of this service: it is the caller's call minus the callee's work, as with a full accept
    queue or a slow network.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait, then hand the request on."""
        if scope["type"] == "http" and scope["path"] == "/recommendations":
            trouble: Trouble = self._app.state.trouble
            await asyncio.sleep(trouble.delay(time.monotonic()))
        await self._app(scope, receive, send)


app = without_message_spans(
    Starlette(
        routes=[
            Route("/recommendations", recommend, methods=["POST"]),
            Route("/control/trouble", set_trouble, methods=["PUT"]),
            HEALTH,
        ]
    )
)
app.state.trouble = Trouble()

if __name__ == "__main__":
    serve(Door(app))
