"""Which torch module a thread works for: forward, backward, compiled, in several threads; and names of parameters."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pasta_otel.gpu.memory.callers import caller
from pasta_otel.gpu.memory.layers import Layers, _Steps
from pasta_otel.gpu.torch.switch import HookSwitch


class Names:
    """Takes names of tensors."""

    def __init__(self) -> None:
        self.given: list[tuple[int, str]] = []

    def name(self, address: int, name: str) -> None:
        self.given.append((address, name))


@pytest.fixture
def names():
    return Names()


@pytest.fixture
def layers(names):
    made = Layers(names, device_type="cpu")
    made.bind(torch)
    switch = HookSwitch(made)
    switch.activate()
    made.switch = switch
    yield made
    switch.close()
    assert made.problems == set()


class Probe(nn.Module):
    """Says which module runs, as a launch inside it would."""

    def __init__(self, layers: Layers, seen: list[str]) -> None:
        super().__init__()
        self.layers, self.seen = layers, seen

    def forward(self, x):
        self.seen.append(self.layers.current())
        return x


class Program(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential()
        for name, part in zip(("first", "second", "third"), parts, strict=False):
            self.net.add_module(name, part)

    def forward(self, x):
        return self.net(x)


def test_the_innermost_module_is_named_by_its_place(layers):
    seen: list[str] = []
    program = Program(Probe(layers, seen), nn.Linear(2, 2), Probe(layers, seen))
    program(torch.ones(2))
    assert seen == ["net.first", "net.third"]
    assert layers.current() == ""


def test_a_module_that_nothing_encloses_has_its_class_name(layers):
    seen: list[str] = []
    Probe(layers, seen)(torch.ones(2))
    assert seen == ["Probe"]


def test_an_exception_leaves_nothing_behind(layers):
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError(x)

    with pytest.raises(ValueError, match="tensor"):
        Program(Failing())(torch.ones(2))
    assert layers.current() == ""


def test_a_swallowed_exception_returns_to_the_module_around_it(layers):
    seen: list[str] = []

    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError(x)

    class Tolerant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Failing()

        def forward(self, x):
            with pytest.raises(ValueError, match="tensor"):
                self.part(x)
            seen.append(layers.current())
            return x

    Program(Tolerant())(torch.ones(2))
    assert seen == ["net.first"]


def test_each_thread_is_in_its_own_module(layers):
    inside, checked = threading.Barrier(2), threading.Barrier(2)
    seen: list[str] = []

    class Waiting(nn.Module):
        def forward(self, x):
            inside.wait(10)
            seen.append(layers.current())
            checked.wait(10)
            return x

    one, other = Program(Waiting()), Program(nn.Identity(), Waiting())
    workers = [threading.Thread(target=model, args=(torch.ones(1),)) for model in (one, other)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(seen) == ["net.first", "net.second"]


def test_a_launch_knows_its_module(layers):
    seen: list[str] = []

    class Launching(nn.Module):
        def forward(self, x):
            seen.append(caller(layers.current).module)
            return x

    Program(Launching())(torch.ones(1))
    assert seen == ["net.first"]
    assert caller().module == ""


def test_hooks_that_were_away_while_calls_ended_leave_no_stale_module(layers):
    seen: list[str] = []

    class Compiling(nn.Module):
        def forward(self, x):
            layers.switch.compile_started()
            return x

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.probe = Compiling(), Probe(layers, seen)

        def forward(self, x):
            self.part(x)
            layers.switch.compile_ended()
            seen.append(layers.current())
            return self.probe(x)

    Program(Around())(torch.ones(1))
    assert seen == ["net.first", "net.first.probe"]
    assert layers.current() == ""


def test_a_module_that_calls_itself_is_left_as_often_as_it_is_entered(layers):
    seen: list[str] = []

    class Again(nn.Module):
        def forward(self, x, times):
            if times:
                self(x, times - 1)
            seen.append(layers.current())
            return x

    Again()(torch.ones(1), 2)
    assert len(seen) == 3
    assert layers.current() == ""


def backward_names(layers, module):
    """Have a tensor's node say which module it belongs to as its backward pass runs."""
    seen: list[str] = []
    module.register_forward_hook(
        lambda _module, _arguments, result: (
            result.grad_fn.register_hook(lambda *_: seen.append(layers.current())) and None
        )
    )
    return seen


def test_a_node_of_the_backward_pass_belongs_to_the_module_of_its_forward_pass(layers):
    program = Program(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    seen = [backward_names(layers, part) for part in (*program.net[1], program.net.first, program.net.third)]
    loss = program(torch.ones(2)).sum()
    outside: list[str] = []
    loss.grad_fn.register_hook(lambda *_: outside.append(layers.current()))
    loss.backward()
    assert seen == [["net.second.0"], ["net.second.1"], ["net.first"], ["net.third"]]
    assert outside == [""]
    assert layers.current() == ""


def test_the_backward_pass_may_run_in_another_thread(layers):
    program = Program(nn.Linear(2, 2))
    seen = backward_names(layers, program.net.first)
    worker = threading.Thread(target=program(torch.ones(2)).sum().backward)
    worker.start()
    worker.join()
    assert seen == ["net.first"]


def test_nodes_inside_of_a_module_belong_to_it_too(layers):
    seen: list[str] = []

    class Several(nn.Module):
        def forward(self, x):
            y = x * 2
            y.grad_fn.register_hook(lambda *_: seen.append(layers.current()))
            return y.exp().sin()

    Program(nn.Linear(2, 2), Several())(torch.ones(2)).sum().backward()
    assert seen == ["net.second"]


def test_a_function_of_the_user_has_its_module(layers):
    seen: list[str] = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(layers.current())
            return gradient

    class Applies(nn.Module):
        def forward(self, x):
            return Function.apply(x)

    Program(nn.Linear(2, 2), Applies())(torch.ones(2)).sum().backward()
    assert seen == ["net.second"]


def test_a_gradient_that_is_added_up_belongs_to_the_parameters_module(layers):
    program, seen = Program(nn.Linear(2, 2)), []
    program.net.first.weight.register_post_accumulate_grad_hook(lambda _: seen.append(layers.current()))
    program(torch.ones(2)).sum().backward()
    assert seen == ["net.first"]


def test_a_forward_pass_that_is_run_again_within_the_backward_pass_has_its_own_modules(layers):
    seen: list[str] = []

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Probe(layers, seen), nn.Linear(2, 2))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    Program(nn.Linear(2, 2), Checkpointed())(torch.ones(2)).sum().backward()
    assert seen == ["net.second.inner.0", "net.second.inner.0"]  # the second time no module encloses it


def test_where_two_threads_may_have_made_a_node_no_module_is_guessed(layers):
    one, other = Program(nn.Linear(2, 2)), Program(nn.Identity(), nn.Linear(2, 2))
    seen = backward_names(layers, one.net.first)

    def of_a_new_thread(work):
        results = []
        worker = threading.Thread(target=lambda: results.append(work()))
        worker.start()
        worker.join()
        return results[0]

    loss = of_a_new_thread(lambda: one(torch.ones(2)).sum())
    loss.backward(retain_graph=True)
    of_a_new_thread(lambda: other(torch.ones(2)).sum())  # its nodes have the same numbers
    loss.backward()
    assert seen[1] == ""
    assert seen[0] in ("net.first", "")  # the test's main thread has numbers of its own, by now perhaps these


def test_steps_answer_for_every_number_that_was_given():
    steps = _Steps()
    for number, name in ((3, "a"), (5, "a.c"), (9, "a"), (10, "")):
        steps.add(number, name)
    assert [steps.at(number) for number in range(12)] == [*[""] * 3, "a", "a", *["a.c"] * 4, "a", None, None]


def test_steps_are_bounded_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr("pasta_otel.gpu.memory.layers.MOST_STEPS", 10)
    steps = _Steps()
    for number in range(100):
        steps.add(number, str(number))
        assert len(steps.numbers) <= 10
        assert len(steps.names) == len(steps.numbers) + 1
    assert steps.at(98) == "98"
    assert steps.at(50) == ""


def test_inference_makes_no_steps(layers):
    program = Program(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        program(torch.ones(2))
        before = len(layers._local.thread.steps.numbers)
        for _ in range(10):
            program(torch.ones(2))
    assert len(layers._local.thread.steps.numbers) == before


def test_threads_that_end_are_bounded(layers, monkeypatch):
    monkeypatch.setattr("pasta_otel.gpu.memory.layers.MOST_THREADS", 3)
    program = Program(nn.Linear(2, 2))
    for _ in range(8):
        worker = threading.Thread(target=program, args=(torch.ones(2),))
        worker.start()
        worker.join()
    assert len(layers._threads) == 3


def test_parameters_and_buffers_are_named_when_the_model_first_runs(layers, names):
    program = Program(nn.Linear(2, 3), nn.BatchNorm1d(3))
    program.eval()
    program(torch.ones(4, 2))
    expected = {f"net.{name}": value for name, value in program.net.state_dict(keep_vars=True).items()}
    assert {name: address for address, name in names.given} == {
        name: tensor.data_ptr() for name, tensor in expected.items()
    }


def test_they_are_named_again_when_one_has_moved_only(layers, names):
    program = Program(nn.Linear(2, 3))
    for _ in range(3):
        program(torch.ones(4, 2))
    assert len(names.given) == 2
    program.double()
    program(torch.ones(4, 2, dtype=torch.double))
    weight, bias = program.net.first.weight, program.net.first.bias
    assert names.given[2:] == [(weight.data_ptr(), "net.first.weight"), (bias.data_ptr(), "net.first.bias")]
    program.net.first.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.double))
    del weight
    program(torch.ones(4, 2, dtype=torch.double))
    assert names.given[4] == (program.net.first.weight.data_ptr(), "net.first.weight")


def test_parameters_elsewhere_are_not_named(names):
    made = Layers(names, device_type="cuda")
    made.bind(torch)
    switch = HookSwitch(made)
    switch.activate()
    try:
        Program(nn.Linear(2, 3))(torch.ones(4, 2))
        Program(nn.LazyLinear(3))(torch.ones(4, 2))
    finally:
        switch.close()
    assert names.given == []
    assert made.problems == set()


def test_a_lazy_parameter_is_named_when_it_is_there(layers, names):
    program = Program(nn.LazyLinear(3))
    program(torch.ones(4, 2))
    program(torch.ones(4, 2))
    assert (program.net.first.weight.data_ptr(), "net.first.weight") in names.given


def test_wrappers_add_nothing_to_names(layers, names):
    program = torch.nn.DataParallel(Program(nn.Linear(2, 3)))
    program(torch.ones(4, 2))
    assert {name for _, name in names.given} == {"net.first.weight", "net.first.bias"}


def test_models_are_not_kept_alive(layers):
    import gc
    import weakref

    program = Program(nn.Linear(2, 3))
    program(torch.ones(4, 2)).sum().backward()
    gone = [weakref.ref(program), weakref.ref(program.net.first.weight)]
    del program
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert layers._parameters._roots == layers._parameters._owners == {}


@torch.library.custom_op("pasta_test::probe", mutates_args=())
def probe(x: torch.Tensor) -> torch.Tensor:
    """Run Python when compiled code runs, as a launch's callback does."""
    for tell in PROBED:
        tell()
    return x.clone()


@probe.register_fake
def _(x):
    return torch.empty_like(x)


PROBED: list = []


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return probe(self.linear(x))


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    PROBED.clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_compiled_module_is_compiled_once_and_has_the_name_of_its_place(layers, compiler, forgotten):
    seen: list[str] = []
    PROBED.append(lambda: seen.append(layers.current()))
    layers.switch.activate()  # asks dynamo to tell when it compiles
    if forgotten:
        torch._dynamo.reset()
    with torch.no_grad():
        program = Program(nn.Linear(2, 2), torch.compile(Compiled(), backend="eager", fullgraph=True))
        for _ in range(4):
            program(torch.ones(2))
    assert compiler() == 1
    assert seen == ["net.second"] * 4
    assert layers.current() == ""


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_compiled_function_is_compiled_once(layers, compiler, forgotten):
    model = Compiled()
    layers.switch.activate()
    if forgotten:
        torch._dynamo.reset()
    function = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    for _ in range(3):
        function(torch.ones(2))
    assert compiler() == 1


def test_a_scripted_module_runs_as_before(layers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert Program(scripted)(torch.ones(2)).shape == (2,)
    assert layers.current() == ""


FOLLOWED = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ImportError(name)

sys.meta_path.insert(0, Without())
from pasta_otel.gpu.memory.follow import follow
from pasta_otel.gpu.memory.tensors import Tensors

layers = follow(Tensors())
assert "torch" not in sys.modules
import torch

class Probe(torch.nn.Module):
    def forward(self, x):
        sys.stdout.write(layers.current())
        return x

torch.nn.Sequential(Probe())(torch.ones(1))
assert not layers.problems, layers.problems
"""


def test_a_program_is_followed_from_its_import_of_torch_on_and_needs_no_opentelemetry():
    done = subprocess.run([sys.executable, "-c", FOLLOWED], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("0", 0), done.stderr
