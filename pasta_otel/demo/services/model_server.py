"""The model service: scores an order's risk with a transformer on CUDA, or on the CPU."""

from __future__ import annotations

import os

import anyio
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import pasta_otel
from pasta_otel.demo.services import encoder
from pasta_otel.demo.services.serving import HEALTH, serve, without_message_spans

pasta_otel.instrument()  # module spans for torch, in the traces that already exist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def score(model: encoder.RiskModel, text: str) -> float:
    """Return the risk of one order."""
    with torch.inference_mode():
        tokens = torch.tensor([encoder.tokenize(text)], device=DEVICE)
        return float(model(tokens))


async def risk(request: Request) -> Response:
    """Score the order in the body."""
    text = (await request.body()).decode()
    state = request.app.state
    value = await anyio.to_thread.run_sync(score, state.model, text, limiter=state.one_at_a_time)
    return JSONResponse({"risk": value})


async def set_inspection(request: Request) -> Response:
    """Turn the inspection of activations on in one layer (``{"module": "encoder.layers.3"}``), or off (null).

    The demo's ``model-sync`` fault: a debugging aid that somebody left on.
    """
    module = (await request.json())["module"]
    for index, layer in enumerate(request.app.state.model.encoder.layers):
        layer.inspect_values = module == f"encoder.layers.{index}"
    return Response(status_code=204)


def create_app(seed: int) -> Starlette:
    """Return the service with weights drawn from ``seed``."""
    torch.set_num_threads(1)  # one core serves one request in a few milliseconds
    routes = [
        Route("/risk", risk, methods=["POST"]),
        Route("/control/inspection", set_inspection, methods=["PUT"]),
        HEALTH,
    ]
    app = without_message_spans(Starlette(routes=routes))
    app.state.model = encoder.build(seed, DEVICE)
    app.state.one_at_a_time = anyio.CapacityLimiter(1)
    score(app.state.model, "warm-up")
    return app


if __name__ == "__main__":
    serve(create_app(int(os.environ.get("DEMO_SEED", "0"))), {"device": DEVICE})
