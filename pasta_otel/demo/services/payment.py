"""The payment dependency: authorises an amount, and refuses nonsense."""

from __future__ import annotations

import hashlib

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pasta_otel.demo.services.serving import HEALTH, serve, without_message_spans


async def authorise(request: Request) -> Response:
    """Return an authorisation for ``amount_cents``."""
    body = await request.json()
    amount = body["amount_cents"]
    if not isinstance(amount, int) or amount <= 0:
        return JSONResponse({"error": "amount_cents must be a positive integer"}, status_code=422)
    reference = hashlib.sha256(f"{body['order_id']}:{amount}".encode()).hexdigest()[:16]
    return JSONResponse({"authorization": reference, "amount_cents": amount})


app = without_message_spans(Starlette(routes=[Route("/authorizations", authorise, methods=["POST"]), HEALTH]))

if __name__ == "__main__":
    serve(app)
