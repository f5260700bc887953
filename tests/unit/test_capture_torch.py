import itertools
import types

import pytest
import torch
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from pasta_otel.gpu.cupti.graphs import GraphRecorder
from pasta_otel.gpu.cupti.torch_watch import TorchWatch, first_by_device
from pasta_otel.gpu.mapping import Region, Regions
from pasta_otel.gpu.torch.names import ModuleNames


class Capture:
    def __init__(self, is_open=True):
        self.is_open, self.log, self.graphs_in_use = is_open, [], False

    def hold(self, who):
        self.log.append(("hold", who))

    def release(self, who, *, idle_subscriber=False):
        self.log.append(("release", who, idle_subscriber))


class Stack:
    def __init__(self):
        self.log = []

    def enter(self, external_id):
        self.log.append(("enter", external_id))

    def leave(self, external_id):
        self.log.append(("leave", external_id))

    def replace(self, external_id):
        self.log.append(("replace", external_id))


@pytest.fixture
def stack():
    return Stack()


@pytest.fixture
def regions(stack):
    found = Regions(stack, lambda: 10**18)
    found.recording = True
    return found


@pytest.fixture
def inside_a_span():
    span = NonRecordingSpan(SpanContext(0xABC, 0x123, is_remote=False, trace_flags=TraceFlags(1)))
    token = context_api.attach(trace.set_span_in_context(span))
    yield
    context_api.detach(token)


@pytest.fixture
def watched(regions):
    capture = Capture()
    watch = TorchWatch(capture, regions)
    assert watch.install()
    yield capture
    watch.uninstall()


def activities(*names):
    return [types.SimpleNamespace(name=name) for name in names]


def test_the_capture_stands_back_while_torch_profiler_records_gpu_activity(regions):
    calls, capture = [], Capture()
    profiler = types.SimpleNamespace(
        _prepare_profiler=lambda config, activities: calls.append("prepare"),
        _enable_profiler=lambda config, activities: calls.append("enable"),
        _disable_profiler=lambda: calls.append("disable") or "results",
    )
    watch = TorchWatch(capture, regions, modules={"torch": torch, "torch.autograd.profiler": profiler})
    watch.install()
    profiler._prepare_profiler(None, activities("CPU", "CUDA"))
    profiler._enable_profiler(None, activities("CPU", "CUDA"))
    assert capture.log == [("hold", "torch.profiler")]
    assert profiler._disable_profiler() == "results"
    assert capture.log[1:] == [("release", "torch.profiler", True)]
    assert calls == ["prepare", "enable", "disable"]
    watch.uninstall()
    profiler._enable_profiler(None, activities("CUDA"))
    assert len(capture.log) == 2


def test_a_profile_of_the_cpu_alone_holds_nobody_back_and_works(watched):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).add(1)
    assert any(event.key == "aten::add" for event in profile.key_averages())
    assert watched.log == []


@pytest.fixture
def on_its_own_thread(monkeypatch):
    """As on a GPU: without one autograd works on the caller's thread."""
    numbers = itertools.count()
    monkeypatch.setattr("pasta_otel.gpu.cupti.torch_watch.get_ident", lambda: next(numbers))


def test_a_backward_pass_on_the_callers_thread_leaves_its_regions_alone(watched, stack, inside_a_span):
    torch.ones(3, requires_grad=True).sum().backward()
    assert stack.log == []


@pytest.mark.usefixtures("on_its_own_thread")
def test_a_backward_pass_puts_its_thread_under_the_current_span_and_ends_it(watched, regions, stack, inside_a_span):
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    ((what, external_id),) = stack.log
    assert what == "replace"
    assert regions.find(external_id) == Region(0xABC, 0x123)
    assert regions.ended_at(external_id) == 10**18
    assert torch.autograd.grad((x * 3).sum(), x)[0].tolist() == [3, 3, 3]
    assert len(stack.log) == 2


@pytest.mark.usefixtures("on_its_own_thread")
def test_a_backward_pass_is_left_alone_without_a_window(watched, regions, stack, inside_a_span):
    regions.recording = False
    torch.ones(3, requires_grad=True).sum().backward()
    assert stack.log == []


@pytest.mark.usefixtures("on_its_own_thread")
def test_a_backward_pass_is_left_alone_without_a_span(watched, stack):
    torch.ones(3, requires_grad=True).sum().backward()
    assert stack.log == []


@pytest.mark.usefixtures("on_its_own_thread")
def test_a_backward_pass_that_ends_after_the_window_is_not_joined_to_later_work(watched, regions, stack, inside_a_span):
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(lambda _: setattr(regions, "recording", False))
    y.backward()
    ((_, external_id),) = stack.log
    assert regions.find(external_id) is None


def test_a_backward_pass_over_two_devices_begins_on_each_devices_thread():
    x = torch.ones(3, requires_grad=True)
    there = (x * 2).to("meta")
    total = (there * 3).sum() + there.sum()
    heads = [total.grad_fn]
    names = [type(node).__name__ for node in first_by_device(heads)]
    assert names == ["AddBackward0", "MulBackward0"]
    one_device = (x * 2).sum() + x.sum()
    assert first_by_device([one_device.grad_fn]) == [one_device.grad_fn]


def test_a_large_autograd_graph_is_looked_at_up_to_a_bound():
    x = torch.ones(1, requires_grad=True)
    far = x.to("meta")
    for _ in range(100):
        far = far * 2
    assert len(first_by_device([far.grad_fn], limit=50)) == 1
    assert len(first_by_device([far.grad_fn], limit=500)) == 2


def test_errors_of_a_backward_pass_are_the_users_own(watched, inside_a_span):
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(3).sum().backward()


def test_uninstalling_puts_torch_back(regions):
    before = torch.autograd._engine_run_backward, torch.autograd.profiler._enable_profiler, torch.cuda.CUDAGraph.replay
    watch = TorchWatch(Capture(), regions)
    watch.install()
    assert torch.autograd._engine_run_backward is not before[0]
    watch.uninstall()
    after = torch.autograd._engine_run_backward, torch.autograd.profiler._enable_profiler, torch.cuda.CUDAGraph.replay
    assert after == before


def test_without_torch_nothing_is_installed(regions):
    assert TorchWatch(Capture(), regions, modules={}).install() is False


class Driver:
    """A stream that captures: model code below adds nodes to it."""

    nodes = 0

    def node_count(self, stream):
        return self.nodes


class Part(torch.nn.Module):
    def __init__(self, driver, adds, *parts):
        super().__init__()
        self.driver, self.adds = driver, adds
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            self.driver.nodes += self.adds  # its own work after each part
        if not self.parts:
            self.driver.nodes += self.adds
        return x


class Graph:
    def capture_begin(self):
        self.capturing = True

    def capture_end(self):
        self.capturing = False

    def replay(self):
        return "replayed"


@pytest.fixture
def graphs():
    driver, names = Driver(), ModuleNames()
    recorder = GraphRecorder(driver, torch.nn.modules.module, lambda: 0, names)
    return driver, recorder, names


def capture(recorder, run):
    class Watched(Graph):
        capture_begin = recorder.wrap_begin(Graph.capture_begin)
        capture_end = recorder.wrap_end(Graph.capture_end)

    graph = Watched()
    graph.capture_begin()
    run()
    graph.capture_end()
    return graph


def test_each_node_of_a_captured_graph_has_the_innermost_module(graphs):
    driver, recorder, names = graphs
    model = Part(driver, 1, Part(driver, 2), Part(driver, 3))
    names.name(model, "model")

    def run():
        driver.nodes += 1  # before any module: nobody's
        model(torch.ones(1))
        driver.nodes += 1

    graph = capture(recorder, run)
    first, second = "model.parts.0", "model.parts.1"
    assert recorder.nodes_of(graph) == {1: first, 2: first, 3: "model", 4: second, 5: second, 6: second, 7: "model"}
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_hooks_are_gone_after_a_capture_and_outside_it_nothing_is_noted(graphs):
    driver, recorder, _names = graphs
    graph = capture(recorder, lambda: None)
    Part(driver, 5)(torch.ones(1))
    assert recorder.nodes_of(graph) is None


def test_a_driver_that_fails_never_breaks_the_capture(graphs):
    driver, recorder, _names = graphs
    driver.node_count = lambda stream: 1 / 0
    graph = capture(recorder, lambda: Part(driver, 1)(torch.ones(1)))
    assert graph.capturing is False
    assert recorder.nodes_of(graph) is None


def test_a_replay_inside_a_span_is_a_region_with_the_nodes_of_its_capture(graphs, regions, stack, inside_a_span):
    driver, recorder, _names = graphs

    class Watched(Graph):
        pass

    modules = {
        "torch": torch,
        "torch.autograd.profiler": types.SimpleNamespace(_enable_profiler=lambda config, activities: None),
        "torch.cuda.graphs": types.SimpleNamespace(CUDAGraph=Watched),
    }
    watched_capture = Capture()
    watch = TorchWatch(watched_capture, regions, recorder, modules)
    watch.install()
    graph = Watched()
    graph.capture_begin()
    Part(driver, 2)(torch.ones(1))
    graph.capture_end()
    assert graph.replay() == "replayed"
    (entered, external_id), left = stack.log
    assert (entered, left) == ("enter", ("leave", external_id))
    assert regions.find(external_id) == Region(0xABC, 0x123, None, {0: "Part", 1: "Part"})
    assert watched_capture.graphs_in_use
    watch.uninstall()
    graph.replay()
    assert len(stack.log) == 2
    assert "replay" not in vars(Watched)
