import asyncio
import sys
import threading
import time

import pytest
import torch
from opentelemetry import trace
from opentelemetry.metrics import NoOpMeter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanContext, TraceFlags, set_span_in_context

from pasta_otel.app.gpu_capture import HistogramPush, build_gpu_capture
from pasta_otel.config import load_settings
from pasta_otel.gpu.cupti.requests import RequestRegions
from pasta_otel.gpu.cupti.start import CaptureOptions, GpuCaptureStarter, cuda_is_loaded
from pasta_otel.gpu.mapping import Region, Regions
from pasta_otel.gpu.torch.modules import ModuleSpans
from pasta_otel.instrumentation import instrument, uninstrument
from pasta_otel.model import HistogramPoint
from pasta_otel.pipeline import CaptureState


class Stack:
    def __init__(self):
        self.log = []

    def enter(self, external_id):
        self.log.append(("enter", external_id, threading.get_ident()))

    def leave(self, external_id):
        self.log.append(("leave", external_id, threading.get_ident()))

    def replace(self, external_id):
        self.log.append(("replace", external_id, threading.get_ident()))


@pytest.fixture
def stack():
    return Stack()


@pytest.fixture
def regions(stack):
    found = Regions(stack, lambda: 10**18)
    found.recording = True
    return found


@pytest.fixture
def tracer(regions):
    provider = TracerProvider()
    provider.add_span_processor(RequestRegions(regions))
    return provider.get_tracer("test")


def test_a_local_root_span_is_a_region_of_its_thread_and_ends(tracer, regions, stack):
    with tracer.start_as_current_span("request") as span, tracer.start_as_current_span("inner"):
        pass
    context = span.get_span_context()
    assert [entry[:2] for entry in stack.log] == [("enter", context.span_id), ("leave", context.span_id)]
    assert regions.find(context.span_id) == Region(context.trace_id, context.span_id)
    assert regions.ended_at(context.span_id) == 10**18


def test_a_span_with_a_remote_parent_is_a_local_root(tracer, stack):
    remote = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(1))
    with tracer.start_as_current_span("request", set_span_in_context(trace.NonRecordingSpan(remote))):
        pass
    assert len(stack.log) == 2


def test_traces_that_are_not_sampled_are_no_regions(regions, stack):
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(RequestRegions(regions))
    with provider.get_tracer("test").start_as_current_span("request"):
        pass
    assert stack.log == []


def test_a_thread_that_runs_an_event_loop_is_never_inside_one_request(tracer, stack):
    async def handler():
        with tracer.start_as_current_span("request"):
            await asyncio.sleep(0)

    async def server():
        await asyncio.gather(handler(), handler())

    asyncio.run(server())
    assert not any(what == "enter" for what, *_ in stack.log)


def test_module_hooks_tell_the_observer_which_span_each_thread_is_in(regions, stack):
    rows = []

    class Pipeline:
        def offer(self, row):
            rows.append(row)

        def trace_ended(self, calls, limit, lost):
            pass

    provider = TracerProvider()
    modules = ModuleSpans(Pipeline(), lambda trace_id, operation: True)
    modules.start(provider)
    modules.observe(regions)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    try:
        with provider.get_tracer("test").start_as_current_span("request") as span:
            model(torch.ones(1, 2))
        modules.observe(None)
        with provider.get_tracer("test").start_as_current_span("request"):
            model(torch.ones(1, 2))
    finally:
        modules.stop()
    assert len(rows) == 6
    told = [(what, external_id) for what, external_id, _ in stack.log]
    outer, first, second = rows[2], rows[0], rows[1]
    assert told == [
        ("enter", outer.span_id),
        ("enter", first.span_id),
        ("leave", first.span_id),
        ("enter", second.span_id),
        ("leave", second.span_id),
        ("leave", outer.span_id),
    ]
    assert regions.find(first.span_id) == Region(span.get_span_context().trace_id, first.span_id, "0")


def test_a_program_without_cuda_never_gets_a_capture(monkeypatch):
    monkeypatch.setattr("pasta_otel.gpu.cupti.start.LOOK_S", 0.01)
    starter = GpuCaptureStarter(CaptureOptions())
    starter.start()
    time.sleep(0.1)
    starter.stop()
    assert starter.service is None
    assert starter.missing is None
    assert starter.points() == []


def test_cuda_without_a_usable_libcupti_is_said_and_nothing_breaks(monkeypatch, caplog):
    monkeypatch.setattr("pasta_otel.gpu.cupti.start.LOOK_S", 0.01)
    monkeypatch.setenv("PASTA_CUPTI_LIBRARY", "/nowhere/libcupti.so.13")
    starter = GpuCaptureStarter(CaptureOptions(), uses_cuda=lambda: True)
    starter.start()
    deadline = time.monotonic() + 20
    while starter.missing is None and time.monotonic() < deadline:
        time.sleep(0.01)
    starter.stop()
    assert "/nowhere/libcupti.so.13" in starter.missing
    assert "PASTA_CUPTI_LIBRARY" in starter.missing
    assert "no GPU capture" in caplog.text


def test_the_cuda_driver_is_seen_in_the_maps_of_a_process(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 0    /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04\n")
    assert cuda_is_loaded(maps)
    assert not cuda_is_loaded(tmp_path / "none")


def build(settings, **options):
    provider = TracerProvider(resource=Resource({"service.name": "shop"}))
    return build_gpu_capture(
        settings=settings, provider=provider, sink=None, meter=NoOpMeter("test"), capture=CaptureState(), **options
    )


def test_the_application_builds_a_capture_from_its_settings(monkeypatch):
    assert build(load_settings({})) is not None
    assert build(load_settings({"PASTA_GPU_CAPTURE": "false"})) is None
    assert build(load_settings({"PASTA_OVERHEAD_BUDGET": "0"})) is None
    monkeypatch.setitem(sys.modules, "pasta_otel.gpu.cupti.start", None)
    assert build(load_settings({})) is None


def test_histograms_are_pushed_with_the_providers_resource_and_once_more_at_the_end():
    class Keeping:
        sent, closed = [], False

        def export(self, data):
            self.sent.append(data)

        def shutdown(self):
            self.closed = True

    keeping = Keeping()
    point = HistogramPoint({"gpu.kernel.class": "gemm"}, (1e-6,), (1, 2), 1e-5, 1e-7, 9e-6, 1, 2)
    points = []
    provider = TracerProvider(resource=Resource({"service.name": "shop"}))
    push = HistogramPush(lambda: points, provider, lambda: keeping, interval_s=0.01)
    push.start()
    time.sleep(0.05)
    assert keeping.sent == []  # nothing was counted: nothing is sent
    points.append(point)
    push.stop()
    assert keeping.closed
    (group,) = keeping.sent[-1].resource_metrics
    assert group.resource.attributes["service.name"] == "shop"
    assert group.scope_metrics[0].metrics[0].name == "gpu.cuda.kernel.duration"


def test_an_instrumented_program_without_cuda_runs_as_without_a_capture():
    provider = TracerProvider()
    running = instrument(tracer_provider=provider, sampling_rate=1.0, sink=Sink(), set_up=False)
    try:
        starter = running.gpu.starter
        assert running.modules._recorder.observer is None
        assert starter.requests not in provider._active_span_processor._span_processors
        assert starter._thread.is_alive()
    finally:
        uninstrument()
    assert not starter._thread.is_alive()


def test_once_cuda_is_used_requests_and_modules_are_followed_and_then_everything_is_put_back():
    provider = TracerProvider()
    running = instrument(tracer_provider=provider, sampling_rate=1.0, sink=Sink(), set_up=False)
    starter = running.gpu.starter
    try:
        starter.on_started()
        assert running.modules._recorder.observer is starter.observer
        with provider.get_tracer("test").start_as_current_span("request") as span:
            assert starter.regions.find(span.get_span_context().span_id) is not None
        assert not starter.regions._young
    finally:
        uninstrument()
    assert running.modules._recorder.observer is None
    assert starter.requests not in provider._active_span_processor._span_processors


class Sink:
    def offer(self, row): ...


def test_requests_that_end_well_are_told_with_their_times(regions):
    ended = []
    provider = TracerProvider()
    provider.add_span_processor(RequestRegions(regions, lambda *request: ended.append(request)))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("order") as span, tracer.start_as_current_span("inner"):
        pass
    with pytest.raises(ValueError, match="no"), tracer.start_as_current_span("order"):
        raise ValueError("no")
    assert ended == [("order", span.start_time, span.end_time)]
