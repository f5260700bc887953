"""A real service: starlette and httpx instrumentation, a model that calls a dependency, over real HTTP."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest
import torch
import uvicorn
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
from opentelemetry.instrumentation.starlette import StarletteInstrumentor
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import nn

from pasta_otel import annotate
from tests.instrumented import App, Block
from tests.support import wait_for


class Retriever(nn.Module):
    """A module whose forward asks a dependency, as retrieval models do."""

    def __init__(self, client, url):
        super().__init__()
        self.client, self.url, self.score = client, url, nn.Linear(4, 1)

    def forward(self, x):
        self.client.get(self.url)
        return self.score(x)


@pytest.fixture
def app():
    made = App()
    yield made
    made.close()


@pytest.fixture
def client(app):
    with httpx.Client(timeout=10) as made:
        HTTPXClientInstrumentor().instrument_client(made, tracer_provider=app.provider)
        yield made


@pytest.fixture
def service(app, client):
    """Serve two models: one run on the event loop, one in the thread pool by a sync endpoint."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    model, retriever = Block(Block()), nn.Sequential(Retriever(client, f"{base}/dependency"))

    async def predict(request):
        with annotate("preprocess"):
            x = torch.ones(1, 4)
        return JSONResponse(model(x).tolist())

    async def retrieve(request):
        return JSONResponse((await run_in_threadpool(retriever, torch.ones(1, 4))).tolist())

    def fail(request):
        model(torch.ones(1, 5))

    routes = [
        Route("/predict", predict),
        Route("/retrieve", retrieve),
        Route("/fail", fail),
        Route("/dependency", lambda request: JSONResponse({})),
    ]
    asgi = Starlette(routes=routes)
    StarletteInstrumentor.instrument_app(asgi, tracer_provider=app.provider)
    server = uvicorn.Server(uvicorn.Config(asgi, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_for(lambda: server.started)
    yield base
    server.should_exit = True
    thread.join()
    listener.close()


def spans_of(app, kind):
    return [span for span in app.exporter.get_finished_spans() if span.kind.name == kind]


def settled(app):
    """Wait until the server side has ended its spans too: the client may see the answer first."""
    wait_for(lambda: not app.running.modules.active)


def test_module_rows_hang_under_the_server_span(app, service):
    httpx.get(f"{service}/predict")
    settled(app)
    (server,) = spans_of(app, "SERVER")
    assert app.spans()["preprocess"].parent.span_id == server.context.span_id
    assert app.rows.names() == ["linear", "inner.linear", "inner", "Block"]
    assert app.rows.one("Block").parent_span_id == server.context.span_id
    assert {row.trace_id for row in app.rows} == {server.context.trace_id}


def test_the_callers_trace_goes_through_client_server_module_and_dependency(app, service, client):
    with app.request("caller"):
        client.get(f"{service}/retrieve")
    settled(app)
    spans = {span.context.span_id: span for span in app.exporter.get_finished_spans()}
    assert len({span.context.trace_id for span in spans.values()}) == 1
    retriever = app.rows.one("0")
    dependency = next(span for span in spans.values() if span.parent and span.parent.span_id == retriever.span_id)
    assert dependency.kind.name == "CLIENT"
    server = spans[app.rows.one("Sequential").parent_span_id]
    assert server.kind.name == "SERVER"
    assert spans[server.parent.span_id].kind.name == "CLIENT"
    assert len(spans_of(app, "SERVER")) == 2


def test_a_failing_model_marks_its_rows_and_the_service_answers_as_before(app, service):
    assert httpx.get(f"{service}/fail").status_code == 500
    settled(app)
    assert [(row.site.name, row.status_message) for row in app.rows] == [
        ("linear", "RuntimeError"),
        ("Block", "RuntimeError"),
    ]


def test_many_clients_at_once_get_their_own_rows(app, service):
    def ask(_):
        assert httpx.get(f"{service}/predict").status_code == 200

    threads = [threading.Thread(target=lambda: [ask(i) for i in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settled(app)
    assert len(app.rows) == 4 * 20
    servers = {span.context.span_id: span.context.trace_id for span in spans_of(app, "SERVER")}
    for row in app.rows.named("Block"):
        assert servers[row.parent_span_id] == row.trace_id
    assert not app.running.modules.installed
