"""annotate: a region as a span, in every kind of function."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch
from opentelemetry import trace
from opentelemetry.trace import StatusCode

import pasta_otel
from pasta_otel import annotate
from pasta_otel.context import current_context, current_ids
from tests.instrumented import App, Block


@pytest.fixture
def app():
    made = App()
    yield made
    made.close()


def test_a_region_is_a_child_of_the_current_span(app):
    with app.request() as request, annotate("rerank", batch=4):
        assert current_ids().span_id != request.get_span_context().span_id
    span = app.spans()["rerank"]
    assert span.parent.span_id == request.get_span_context().span_id
    assert span.attributes["batch"] == 4
    assert span.status.status_code is StatusCode.UNSET


def test_without_a_recording_span_nothing_happens(app):
    before = current_context()
    with annotate("idle"):
        assert current_context() is before
    assert app.exporter.get_finished_spans() == ()


def test_modules_inside_a_region_are_its_children_and_regions_inside_a_module_are_the_modules(app):
    class Marked(Block):
        @annotate("inside")
        def forward(self, x):
            return super().forward(x)

    with app.request(), annotate("around"):
        Marked()(torch.ones(1, 4))
    spans = app.spans()
    assert app.rows.one("Marked").parent_span_id == spans["around"].context.span_id
    assert spans["inside"].parent.span_id == app.rows.one("Marked").span_id
    assert app.rows.one("linear").parent_span_id == spans["inside"].context.span_id


def test_an_exception_passes_through_and_is_noted(app):
    with app.request(), pytest.raises(LookupError), annotate("fails"):
        raise LookupError("gone")
    span = app.spans()["fails"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "LookupError"
    assert span.events[0].name == "exception"


def test_one_annotation_may_be_entered_again_and_again(app):
    mark = annotate("again")
    with app.request():
        with mark, mark:
            pass
        with mark:
            pass
    outer, inner = sorted(
        (s for s in app.exporter.get_finished_spans() if s.name == "again"), key=lambda s: s.start_time
    )[:2]
    assert inner.parent.span_id == outer.context.span_id
    assert len([s for s in app.exporter.get_finished_spans() if s.name == "again"]) == 3


def test_functions_keep_their_nature_name_and_result(app):
    @annotate("plain")
    def plain(x, *, y=1):
        """Doc."""
        return x + y

    @annotate("coroutine")
    async def coroutine():
        return 3

    @annotate("generator")
    def generator():
        yield 1

    @annotate("async generator")
    async def async_generator():
        yield 1

    with app.request():
        assert plain(1, y=2) == 3
    assert (plain.__name__, plain.__doc__) == ("plain", "Doc.")
    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(generator)
    assert inspect.isasyncgenfunction(async_generator)
    assert [s.name for s in app.exporter.get_finished_spans()] == ["plain", "request"]


def test_methods_and_recursion(app):
    class Tree:
        @annotate("walk")
        def walk(self, depth):
            return 1 + self.walk(depth - 1) if depth else 1

    with app.request():
        assert Tree().walk(2) == 3
    assert [s.name for s in app.exporter.get_finished_spans()] == ["walk"] * 3 + ["request"]


async def test_concurrent_coroutines_keep_their_regions_apart(app):
    @annotate("work")
    async def work():
        await asyncio.sleep(0)
        return current_ids()

    async def serve():
        with app.request() as span:
            async with annotate("outer"):
                ids = await work()
            return span.get_span_context().trace_id, ids.trace_id

    for expected, found in await asyncio.gather(*(serve() for _ in range(10))):
        assert expected == found
    assert len(app.exporter.get_finished_spans()) == 30


def test_a_generator_is_current_only_while_it_runs_itself(app):
    inside = []

    @annotate("stream")
    def stream():
        inside.append(current_ids().span_id)
        received = yield 1
        inside.append(current_ids().span_id)
        yield received
        return "done"

    def delegate():
        inside.append((yield from stream()))

    with app.request() as request:
        steps = delegate()
        assert next(steps) == 1
        assert current_ids().span_id == request.get_span_context().span_id
        assert steps.send(7) == 7
        with pytest.raises(StopIteration):
            next(steps)
    span = app.spans()["stream"]
    assert inside == [span.context.span_id, span.context.span_id, "done"]


@pytest.mark.parametrize("end", ["close", "throw", "catch", "drop"])
def test_a_generator_ends_its_span_however_it_ends(app, end):
    log = []

    @annotate("stream")
    def stream():
        try:
            yield 1
        except KeyError:
            log.append("caught")
            if end == "throw":
                raise
            yield 2
        finally:
            log.append("finally")

    with app.request():
        steps = stream()
        next(steps)
        if end == "close":
            steps.close()
        elif end == "throw":
            with pytest.raises(KeyError):
                steps.throw(KeyError("k"))
        elif end == "catch":
            assert steps.throw(KeyError("k")) == 2
            assert list(steps) == []
        else:
            del steps
    span = app.spans()["stream"]
    assert (span.status.status_code is StatusCode.ERROR) == (end == "throw")
    assert log == (["finally"] if end in {"close", "drop"} else ["caught", "finally"])


async def test_an_async_generator_ends_its_span_however_it_ends(app):
    @annotate("stream")
    async def stream(fail):
        yield current_ids().span_id
        if fail:
            raise LookupError
        yield current_ids().span_id

    with app.request() as request:
        seen = set()
        async for span_id in stream(fail=False):
            assert current_ids().span_id == request.get_span_context().span_id
            seen.add(span_id)
        with pytest.raises(LookupError):
            [_ async for _ in stream(fail=True)]
        closed = stream(fail=False)
        await anext(closed)
        await closed.aclose()
    spans = [s for s in app.exporter.get_finished_spans() if s.name == "stream"]
    assert seen == {spans[0].context.span_id}
    assert [s.status.status_code for s in spans] == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.UNSET]


def test_a_cancelled_task_is_no_failure_of_the_region(app):
    async def cancelled():
        with app.request():
            task = asyncio.ensure_future(asyncio.sleep(10))
            asyncio.get_running_loop().call_soon(task.cancel)
            with annotate("wait"):
                await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert app.spans()["wait"].status.status_code is StatusCode.UNSET


def test_it_works_without_instrument_on_the_global_provider(app, monkeypatch):
    pasta_otel.uninstrument()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", app.provider)
    with app.request(), annotate("alone"):
        pass
    assert "alone" in app.spans()
