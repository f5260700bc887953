import asyncio
import contextvars
import random
import threading

import pytest
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from pasta_otel.gpu.cupti.requests import RequestRegions
from pasta_otel.gpu.cupti.steps import StepRegions
from pasta_otel.gpu.mapping import Regions


class Stacks(threading.local):
    """As the extension keeps them: a stack a thread, left down to the innermost region of that id."""

    def __init__(self):
        self.ids = []

    def enter(self, external_id):
        self.ids.append(external_id)

    def leave(self, external_id):
        if external_id in self.ids:
            while self.ids.pop() != external_id:
                pass

    def replace(self, external_id):
        self.ids = [external_id]

    @property
    def top(self):
        return self.ids[-1] if self.ids else None


@pytest.fixture
def stacks():
    return Stacks()


@pytest.fixture
def regions(stacks):
    found = Regions(stacks, lambda: 10**18)
    found.recording = True
    return found


@pytest.fixture
def steps(regions):
    followed = StepRegions(regions)
    followed.install()
    yield followed
    followed.remove()


@pytest.fixture
def tracer(regions):
    provider = TracerProvider()
    provider.add_span_processor(RequestRegions(regions))
    return provider.get_tracer("test")


def current():
    context = trace.get_current_span().get_span_context()
    return context.span_id if context.is_valid else None


@pytest.mark.usefixtures("steps")
def test_each_step_of_each_task_is_inside_its_own_current_span(tracer, stacks, regions):
    rng, seen = random.Random(7), []

    def check():
        seen.append((stacks.top, current()))

    async def request(depth):
        with tracer.start_as_current_span("request") as span:
            check()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(rng.random() / 500)
                check()
                if depth:
                    await request(depth - 1)
                    check()
            assert regions.find(span.get_span_context().span_id).trace_id == span.get_span_context().trace_id
        check()

    async def server():
        await asyncio.gather(*(request(rng.randrange(3)) for _ in range(30)))
        check()

    asyncio.run(server())
    assert len(seen) > 100
    assert all(top == span for top, span in seen), seen
    assert stacks.ids == []


@pytest.mark.usefixtures("steps")
def test_a_span_that_was_attached_in_an_earlier_step_is_left_where_it_is_detached(tracer, stacks):
    async def handler():
        with tracer.start_as_current_span("outer") as outer:
            token = context_api.attach(trace.set_span_in_context(tracer.start_span("inner")))
            inner = stacks.top
            await asyncio.sleep(0)
            assert stacks.top == inner
            context_api.detach(token)
            assert stacks.top == outer.get_span_context().span_id != inner

    asyncio.run(handler())
    assert stacks.ids == []


@pytest.mark.usefixtures("steps")
def test_worker_threads_are_inside_the_request_that_they_work_for(tracer, stacks):
    def work():
        inside = stacks.top
        with tracer.start_as_current_span("in the worker"):
            assert stacks.top == current()
        assert stacks.top == inside
        return inside

    def after():
        return list(stacks.ids)

    async def handler():
        with tracer.start_as_current_span("request") as span:
            found = await asyncio.to_thread(work)
            assert found == span.get_span_context().span_id
            assert await asyncio.get_running_loop().run_in_executor(None, after) == []
            with_context = contextvars.copy_context()
            assert await asyncio.get_running_loop().run_in_executor(None, with_context.run, work) == found

    asyncio.run(handler())


@pytest.mark.usefixtures("steps")
def test_anyios_worker_threads_are_inside_the_request_too(tracer, stacks, regions):
    to_thread = pytest.importorskip("anyio.to_thread")
    followed = StepRegions(regions)
    followed.install()

    async def handler():
        with tracer.start_as_current_span("request") as span:
            assert await to_thread.run_sync(lambda: stacks.top) == span.get_span_context().span_id
        assert await to_thread.run_sync(lambda: stacks.top) is None

    asyncio.run(handler())
    followed.remove()


@pytest.mark.usefixtures("steps")
def test_traces_that_are_not_sampled_are_no_regions(stacks):
    quiet = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test")

    async def handler():
        with quiet.start_as_current_span("request"):
            await asyncio.sleep(0)
            assert stacks.ids == []

    asyncio.run(handler())


def test_steps_and_threads_outlive_the_hooks_without_leaving_anything(tracer, stacks, regions):
    followed = StepRegions(regions)

    async def handler():
        with tracer.start_as_current_span("request") as span:
            followed.install()
            await asyncio.sleep(0)
            assert stacks.top == span.get_span_context().span_id
            followed.remove()
            regions.recording = False
            await asyncio.sleep(0)
            assert stacks.ids == []

    asyncio.run(handler())
    assert stacks.ids == []


def test_removing_puts_everything_back(regions):
    runtime = context_api._RUNTIME_CONTEXT
    before = runtime.attach, runtime.detach, asyncio.events.Handle._run, asyncio.BaseEventLoop.run_in_executor
    followed = StepRegions(regions)
    followed.install()
    followed.install()
    assert runtime.attach != before[0]
    followed.remove()
    after = runtime.attach, runtime.detach, asyncio.events.Handle._run, asyncio.BaseEventLoop.run_in_executor
    assert after == before


@pytest.mark.usefixtures("steps")
def test_a_thread_without_an_event_loop_is_left_to_the_requests(tracer, stacks):
    with tracer.start_as_current_span("request") as span, tracer.start_as_current_span("inner"):
        assert stacks.ids == [span.get_span_context().span_id]
    assert stacks.ids == []
