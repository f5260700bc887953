"""A compiled region is one span: no hook inside, no graph break, and never compiled again because of hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pasta_otel
from pasta_otel import semconv
from tests.instrumented import App, Block


@pytest.fixture
def app():
    made = App()
    with torch.no_grad():  # dynamo reads .grad of intermediate tensors, and torch warns of that
        yield made
    made.close()


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def compiled_models():
    whole, inplace = Block(Block()), Block(Block())
    inplace.compile(backend="eager", fullgraph=True)
    return {
        "wrapper": torch.compile(whole, backend="eager", fullgraph=True),
        "in place": inplace,
        "wrapper of a builtin": torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager", fullgraph=True),
    }


@pytest.mark.parametrize("kind", ["wrapper", "in place", "wrapper of a builtin"])
@pytest.mark.parametrize("first", ["inside a request", "outside"])
def test_a_compiled_region_is_one_row_and_never_compiled_again(app, compiler, kind, first):
    model = compiled_models()[kind]
    if first == "outside":
        model(torch.ones(1, 4))
    with app.request():
        model(torch.ones(1, 4))
        model(torch.ones(1, 4))
        assert app.running.modules.installed
    model(torch.ones(1, 4))
    with app.request():
        model(torch.ones(1, 4))
    assert compiler() == 1
    expected = "Sequential" if "builtin" in kind else "Block"
    assert set(app.rows.names()) <= {expected}
    assert len(app.rows) >= 3


def test_a_compiled_part_is_one_row_at_its_place(app, compiler):
    model = Block(torch.compile(Block(Block()), backend="eager"))
    with app.request():
        model(torch.ones(1, 4))
    assert app.rows.names() == ["linear", "inner", "Block"]
    assert dict(app.rows.one("inner").site.attributes)[semconv.MODULE_CLASS] == "Block"
    assert compiler() == 1


def test_a_compiled_function_is_not_disturbed(app, compiler):
    model = Block(Block())
    function = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    with app.request():
        function(torch.ones(1, 4))
    function(torch.ones(1, 4))
    with app.request():
        function(torch.ones(1, 4))
    assert compiler() == 1


def test_a_loaded_compiler_forgets_us_after_uninstrument(app, compiler):
    with app.request():
        torch.compile(Block(), backend="eager")(torch.ones(1, 4))
    handler = torch._dynamo.callback.callback_handler
    assert handler.start_callbacks
    pasta_otel.uninstrument()
    assert handler.start_callbacks == handler.end_callbacks == []
