"""Module spans on real torch models, beside a user's own TracerProvider."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from torch import nn
from torch.nn.modules import module as torch_module

import pasta_otel
from pasta_otel import semconv
from pasta_otel.context import current_ids, selected
from tests.instrumented import App, Block

TABLES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


@pytest.fixture
def make_app():
    made = []

    def make(**options):
        made.append(App(**options))
        return made[-1]

    yield make
    for app in made:
        app.close()


@pytest.fixture
def app(make_app):
    return make_app()


def hook_tables():
    return {name: (id(getattr(torch_module, name)), dict(getattr(torch_module, name))) for name in TABLES}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def test_transformer_rows_carry_qualified_paths_and_hang_under_the_request(app):
    model = Classifier()
    with app.request() as span:
        model(torch.randn(1, 3, 8))
    root = app.rows.one("Classifier")
    encoder = app.rows.one("encoder")
    layer = app.rows.one("encoder.layers.3")
    assert root.parent_span_id == span.get_span_context().span_id
    assert (encoder.parent_span_id, layer.parent_span_id) == (root.span_id, encoder.span_id)
    assert app.rows.one("encoder.layers.3.linear1").parent_span_id == layer.span_id
    assert {row.trace_id for row in app.rows} == {span.get_span_context().trace_id}
    assert len(app.rows) == 1 + 1 + 4 * 9 + 1
    for row in app.rows:
        assert row.start_monotonic_ns <= row.end_monotonic_ns
    assert encoder.start_monotonic_ns <= layer.start_monotonic_ns <= layer.end_monotonic_ns <= encoder.end_monotonic_ns


def test_a_row_names_its_class_and_where_its_forward_is_written(app):
    with app.request():
        Block()(torch.ones(1, 4))
    attributes = dict(app.rows.one("Block").site.attributes)
    assert attributes[semconv.MODULE_CLASS] == "Block"
    assert attributes[semconv.MODULE_PATH] == "Block"
    assert attributes[semconv.CODE_FILE_PATH] == Block.forward.__code__.co_filename
    assert attributes[semconv.CODE_LINE_NUMBER] == Block.forward.__code__.co_firstlineno
    assert attributes[semconv.CODE_FUNCTION_NAME].endswith("Block.forward")
    assert app.rows.one("linear").thread_id == threading.get_native_id()


def test_convolutional_network_rows_follow_call_order(app):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, 3))
    with app.request():
        model(torch.randn(2, 1, 8, 8))
    assert app.rows.names() == ["0", "1", "2", "3", "4", "Sequential"]
    starts = [row.start_monotonic_ns for row in app.rows[:-1]]
    assert all(first <= second for first, second in pairwise(starts))


def test_a_module_called_twice_makes_two_rows_with_one_site(app):
    model = Block()
    with app.request():
        model.linear(model(torch.ones(1, 4)))
        model(torch.ones(1, 4))
    first, outside, second = app.rows.named("linear")
    assert first.site is second.site
    assert outside.site == first.site  # called outside its owner it is a root of its own, of the same name
    assert len({first.span_id, outside.span_id, second.span_id}) == 3


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = Block(), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.enc(x))

    def generate(self, x):
        return self.head(self.enc(x))


def test_a_part_that_is_called_by_itself_has_the_path_that_it_has_in_its_model(app):
    model = Pair()
    with app.request():
        model(torch.ones(1, 4))
        model.enc(torch.ones(1, 4))
        model.generate(torch.ones(1, 4))
        model.enc.linear(torch.ones(1, 4))
    assert app.rows.names() == [
        "enc.linear", "enc", "head", "Pair", "enc.linear", "enc", "enc.linear", "enc", "head", "enc.linear",
    ]  # fmt: skip
    assert {row.site.attributes for row in app.rows.named("enc")} == {app.rows.named("enc")[0].site.attributes}


def test_a_part_that_was_called_before_its_model_takes_its_path_from_then_on(app):
    model = Pair()
    with app.request():
        model.enc(torch.ones(1, 4))
        model(torch.ones(1, 4))
        model.enc(torch.ones(1, 4))
    assert app.rows.names() == ["linear", "Block", "enc.linear", "enc", "head", "Pair", "enc.linear", "enc"]


def test_a_model_that_was_given_a_name_names_its_parts_before_it_is_called(make_app):
    model = Pair()
    app = make_app(models={"ranker": model, "other": Pair()})
    with app.request():
        model.enc(torch.ones(1, 4))
        model(torch.ones(1, 4))
    by_itself = ["ranker.enc.linear", "ranker.enc"]
    assert app.rows.names() == [*by_itself, *by_itself, "ranker.head", "ranker"]


def test_a_part_with_a_name_of_its_own_keeps_it_when_called_by_itself(make_app):
    model = Pair()
    app = make_app(models={"encoder": model.enc})
    with app.request():
        model(torch.ones(1, 4))
        model.enc(torch.ones(1, 4))
    assert app.rows.names() == ["enc.linear", "enc", "head", "Pair", "encoder.linear", "encoder"]


def test_a_part_that_is_added_later_and_called_by_itself_is_found_in_its_model(app):
    model = Pair()
    with app.request():
        model(torch.ones(1, 4))
        model.extra = nn.Linear(4, 4)
        model.extra(torch.ones(1, 4))
    assert app.rows.names()[-1] == "extra"


def test_a_part_of_two_models_has_one_path_when_called_by_itself(app):
    shared = Block()
    one, two = nn.Sequential(shared), nn.Sequential(nn.Identity(), shared)
    with app.request():
        one(torch.ones(1, 4))
        two(torch.ones(1, 4))
        shared(torch.ones(1, 4))
        shared(torch.ones(1, 4))
    assert app.rows.names()[-4:] == ["0.linear", "0", "0.linear", "0"]


def test_modules_made_in_every_call_do_not_hide_what_is_added_later(app):
    model = Pair()
    with app.request():
        model(torch.ones(1, 4))
        for _ in range(40):
            nn.Linear(4, 4)(torch.ones(1, 4))
        model.head = nn.Sequential(nn.Linear(4, 4))
        model(torch.ones(1, 4))
    assert app.rows.names()[-3:] == ["head.0", "head", "Pair"]


def test_a_shared_module_is_named_by_where_it_is_called_from(app):
    shared = nn.Linear(4, 4)
    left, right = nn.Sequential(shared), nn.Sequential(nn.Identity(), shared)
    model = nn.Sequential()
    model.add_module("left", left)
    model.add_module("right", right)
    with app.request():
        model(torch.ones(1, 4))
    assert app.rows.names() == ["left.0", "left", "right.0", "right.1", "right", "Sequential"]


def test_a_module_added_later_is_named(app):
    model = nn.Sequential(nn.Linear(4, 4))
    with app.request():
        model(torch.ones(1, 4))
        model.add_module("late", Block())
        model(torch.ones(1, 4))
    assert "late.linear" in app.rows.names()


def test_a_module_that_belongs_to_nobody_is_named_by_its_class(app):
    class Loose(nn.Module):
        def forward(self, x):
            return nn.ReLU()(x)

    model = Loose()
    with app.request():
        for _ in range(50):
            model(torch.ones(1))
    assert app.rows.names()[:2] == ["<ReLU>", "Loose"]
    root = app.running.modules._recorder.names.root(model)
    assert len(root.children) <= 1  # forgotten with the modules


def test_a_module_passed_in_as_an_argument_is_found_where_it_is_registered(app):
    class Decoder(nn.Module):
        def forward(self, x, embedding):
            return embedding(x)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.decoder = nn.Linear(4, 4), Decoder()

        def forward(self, x):
            return self.decoder(x, self.embedding)

    with app.request():
        Tied()(torch.ones(1, 4))
    assert app.rows.names() == ["embedding", "decoder", "Tied"]


def test_a_root_with_its_own_name_prefixes_its_parts(make_app):
    model = Block(Block())
    app = make_app(models={"ranker": model})
    with app.request():
        model(torch.ones(1, 4))
    assert app.rows.names() == ["ranker.linear", "ranker.inner.linear", "ranker.inner", "ranker"]


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.DataParallel(nn.DataParallel(model))])
def test_wrappers_add_nothing_to_the_path(app, wrap):
    model = wrap(Block(Block()))
    with app.request():
        model(torch.ones(1, 4))
    assert app.rows.names()[:4] == ["linear", "inner.linear", "inner", "Block"]
    assert set(app.rows.names()[4:]) == {"DataParallel"}


def test_names_do_not_keep_a_model_alive(app):
    model = Block(Block())
    with app.request():
        model(torch.ones(1, 4))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_an_exception_closes_the_rows_and_names_its_type(app):
    class Fails(nn.Module):
        def forward(self, x):
            raise LookupError(x)

    model = nn.Sequential(nn.Identity(), Fails())
    with app.request(), pytest.raises(LookupError):
        model(torch.ones(1))
    assert [row.status_message for row in app.rows] == [None, "LookupError", "LookupError"]
    with app.request():
        nn.Identity()(torch.ones(1))
    assert app.rows[-1].status_message is None


def test_a_forward_that_returns_none_inside_an_except_block_is_no_error(app):
    class Silent(nn.Module):
        def forward(self):
            return None

    with app.request():
        try:
            int("x")
        except ValueError:
            Silent()()
    assert app.rows.one("Silent").status_message is None


def test_an_exit_from_inside_a_forward_leaves_no_mark_on_the_next_request(app):
    class Stops(nn.Module):
        def forward(self):
            raise KeyboardInterrupt

    model = nn.Sequential(Stops())
    with pytest.raises(KeyboardInterrupt), app.request():
        model[0]()
    with app.request() as span:
        Block()(torch.ones(1, 4))
    assert app.rows.one("Block").parent_span_id == span.get_span_context().span_id
    assert app.rows.names() == ["linear", "Block"]


def test_recursion_into_the_same_module_nests(app):
    class Recursive(nn.Module):
        def forward(self, depth):
            return self(depth - 1) if depth else torch.ones(1)

    with app.request():
        Recursive()(3)
    assert len(app.rows) == 4
    for inner, outer in pairwise(app.rows):
        assert inner.parent_span_id == outer.span_id


def test_user_spans_inside_a_forward_are_children_of_its_row_and_parents_of_what_they_enclose(app):
    class Searches(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = nn.Linear(4, 1)

        def forward(self, x):
            with app.tracer.start_as_current_span("search"):
                return self.score(x)

    with app.request() as request:
        Searches()(torch.ones(1, 4))
        assert current_ids().span_id == request.get_span_context().span_id
    search = app.spans()["search"]
    assert search.parent.span_id == app.rows.one("Searches").span_id
    assert app.rows.one("score").parent_span_id == search.context.span_id


def test_user_spans_inside_a_forward_keep_the_trace_state(app):
    state = trace.TraceState([("ot", "th:8")])
    remote = trace.SpanContext(7, 9, is_remote=True, trace_flags=trace.TraceFlags(1), trace_state=state)

    class Searches(nn.Module):
        def forward(self):
            with app.tracer.start_as_current_span("search"):
                pass

    with app.tracer.start_as_current_span("r", context=trace.set_span_in_context(trace.NonRecordingSpan(remote))):
        Searches()()
    assert app.spans()["search"].context.trace_state.get("ot") == "th:8"


def test_threads_record_when_the_context_travels_with_them_and_not_otherwise(app):
    model = Block()
    with app.request() as request, ThreadPoolExecutor(2) as pool:
        context = contextvars.copy_context()
        pool.submit(context.run, model, torch.ones(1, 4)).result()
        pool.submit(model, torch.ones(1, 4)).result()
    assert app.rows.names() == ["linear", "Block"]
    assert app.rows[1].parent_span_id == request.get_span_context().span_id
    assert app.rows[1].thread_id != threading.get_native_id()


def test_a_thread_started_inside_a_forward_continues_its_path(app):
    class Fans(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            with ThreadPoolExecutor(3) as pool:
                runs = [pool.submit(contextvars.copy_context().run, part, x) for part in self.parts]
            return [run.result() for run in runs]

    with app.request():
        Fans()(torch.ones(1, 4))
    assert sorted(app.rows.names()) == ["Fans", "parts.0", "parts.1", "parts.2"]
    fans = app.rows.one("Fans")
    assert {row.parent_span_id for row in app.rows if row is not fans} == {fans.span_id}


async def test_concurrent_tasks_keep_their_rows_apart(app):
    model = Block(Block())

    async def serve(name):
        with app.request(name) as span:
            for _ in range(5):
                model(torch.ones(1, 4))
                await asyncio.sleep(0)
            return span.get_span_context()

    contexts = await asyncio.gather(*(serve(f"r{i}") for i in range(8)))
    for context in contexts:
        mine = [row for row in app.rows if row.trace_id == context.trace_id]
        assert len(mine) == 5 * 4
        assert sum(row.parent_span_id == context.span_id for row in mine) == 5


def test_concurrent_threads_keep_their_rows_apart(app):
    model = Block(Block())

    def serve(_):
        with app.request() as span:
            for _ in range(20):
                model(torch.ones(1, 4))
        return span.get_span_context()

    with ThreadPoolExecutor(8) as pool:
        contexts = list(pool.map(serve, range(40)))
    for context in contexts:
        mine = [row for row in app.rows if row.trace_id == context.trace_id]
        assert len(mine) == 20 * 4
        assert len({row.span_id for row in mine}) == len(mine)
        assert sum(row.parent_span_id == context.span_id for row in mine) == 20
    assert not app.running.modules.installed


def test_a_models_error_stays_itself_when_the_last_trace_ends_while_it_is_handled(app):
    """Torch walks its hook table while it handles the error, and our hooks leave that table in the middle of the walk."""

    class Fails(nn.Module):
        def forward(self):
            raise LookupError

    others = torch_module.register_module_forward_hook(lambda *_: span.end(), always_call=True)
    span = app.tracer.start_span("request")
    with trace.use_span(span), pytest.raises(LookupError):
        Fails()()
    assert not app.running.modules.installed
    others.remove()
    assert not torch_module._global_forward_hooks


def test_errors_in_one_thread_stay_themselves_while_others_start_and_end_traces(app):
    class Fails(nn.Module):
        def forward(self):
            raise LookupError

    stop, wrong = threading.Event(), []

    def fail():
        model = Fails()
        while not stop.is_set():
            try:
                model()
            except LookupError:
                pass
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=fail) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        with app.request():
            pass
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_generators_that_call_modules_between_yields_record_under_whoever_drives_them(app):
    model = Block()

    def stream():
        for _ in range(3):
            yield model(torch.ones(1, 4))

    with app.request() as span:
        list(stream())
    assert len(app.rows.named("Block")) == 3
    assert {row.parent_span_id for row in app.rows.named("Block")} == {span.get_span_context().span_id}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_results_and_gradients_are_those_of_the_bare_model(app, mode):
    torch.manual_seed(1)
    model, x = Classifier().eval(), torch.randn(1, 3, 8)
    with mode():
        bare = model(x)
        with app.request():
            recorded = model(x)
    assert torch.equal(bare, recorded)
    if mode is torch.enable_grad:
        (bare.sum() + recorded.sum()).backward()
        assert model.head.weight.grad is not None


def test_a_scripted_module_makes_one_row(app):
    with pytest.warns(DeprecationWarning, match="torch.jit") if torch.__version__ >= "2.10" else nullcontext():
        scripted = torch.jit.script(Block())
    with app.request():
        scripted(torch.ones(1, 4))
    assert app.rows.names() == ["Block"]


# -- when hooks are there --------------------------------------------------------------------------------------------


def test_hooks_are_in_torch_only_while_a_selected_trace_is_open(app):
    before = hook_tables()
    with app.request():
        assert len(torch_module._global_forward_pre_hooks) == 1
        assert len(torch_module._global_forward_hooks) == 1
        with app.request("inner"):
            pass
        assert app.running.modules.installed
    assert hook_tables() == before
    Block()(torch.ones(1, 4))
    assert app.rows == []


def test_uninstrument_inside_a_trace_restores_everything(app):
    before = {name: getattr(torch_module, name) for name in (*TABLES, "_has_any_global_hook")}
    processors = app.provider._active_span_processor._span_processors
    with app.request():
        pasta_otel.uninstrument()
        assert not app.running.modules.installed
        for name in TABLES:
            assert getattr(torch_module, name) is before[name]
            assert not getattr(torch_module, name)
        Block()(torch.ones(1, 4))
    assert app.rows == []
    assert len(app.provider._active_span_processor._span_processors) == len(processors) - 1
    pasta_otel.uninstrument()


def test_hooks_that_others_register_survive_ours_and_their_removal_works_at_any_time(app):
    seen = []
    with app.request():
        during = torch_module.register_module_forward_hook(lambda *_: seen.append("during"))
    before = torch_module.register_module_forward_hook(lambda *_: seen.append("before"))
    nn.Identity()(torch.ones(1))
    assert seen == ["during", "before"]
    with app.request():
        nn.Identity()(torch.ones(1))
        during.remove()
        nn.Identity()(torch.ones(1))
        before.remove()
    assert seen == ["during", "before"] * 2 + ["before"]
    assert app.rows.names() == ["Identity", "Identity"]
    assert not torch_module._global_forward_hooks


def test_a_hook_that_its_owner_removes_during_a_request_is_not_called_any_more(app):
    seen = []
    handle = torch_module.register_module_forward_hook(lambda *_: seen.append(1))
    with app.request():
        nn.Identity()(torch.ones(1))
        handle.remove()
        nn.Identity()(torch.ones(1))
    nn.Identity()(torch.ones(1))
    assert seen == [1]
    assert len(app.rows) == 2


def test_a_hook_that_changes_the_output_still_does(app):
    handle = torch_module.register_module_forward_hook(lambda *arguments: arguments[-1] + 1)
    with app.request():
        inside = nn.Identity()(torch.ones(1))
    outside = nn.Identity()(torch.ones(1))
    handle.remove()
    assert inside == outside == 2


def test_unsampled_and_unselected_traces_install_nothing(make_app):
    app = make_app(sampling_rate=0.0)
    with app.request():
        assert not app.running.modules.installed
        Block()(torch.ones(1, 4))
    assert app.rows == []


def test_a_trace_that_the_users_sampler_drops_is_not_recorded(make_app):
    app = make_app(sampler=TraceIdRatioBased(0.0))
    with app.request():
        assert not app.running.modules.installed
        Block()(torch.ones(1, 4))
    assert app.rows == []


def test_a_module_of_an_unselected_trace_makes_no_row_while_another_is_recorded(make_app):
    app = make_app(sampling_rate=0.5)
    ids = {True: None, False: None}
    for trace_id in range(1, 200):
        ids[selected(trace_id, 0.5)] = trace_id
    model = Block()

    def request(trace_id):
        parent = trace.SpanContext(trace_id, 1, is_remote=True, trace_flags=trace.TraceFlags(1))
        return app.tracer.start_as_current_span("r", context=trace.set_span_in_context(trace.NonRecordingSpan(parent)))

    with request(ids[True]):
        with request(ids[False]):
            assert app.running.modules.installed
            model(torch.ones(1, 4))
        assert app.rows == []
        model(torch.ones(1, 4))
    assert {row.trace_id for row in app.rows} == {ids[True]}


def test_rows_beyond_the_limit_are_counted_and_their_parents_stay_right(make_app):
    app = make_app(row_limit=3)
    counted = []
    app.running.pipeline.trace_ended = lambda *counts: counted.append(counts)
    model = Block(Block(Block()))
    with app.request() as span:
        model(torch.ones(1, 4))
        model(torch.ones(1, 4))
    assert len(app.rows) == 3
    assert app.rows.one("Block").parent_span_id == span.get_span_context().span_id
    assert counted == [(12, 3, 0)]


def test_background_work_after_the_request_ended_is_not_recorded_and_breaks_nothing(app):
    model = Block()
    with app.request():
        context = contextvars.copy_context()
    context.run(model, torch.ones(1, 4))
    with app.request("another"):
        context.run(model, torch.ones(1, 4))
    assert app.rows == []


def test_a_trace_that_ends_while_a_module_runs_leaves_no_open_call(app):
    class EndsIt(nn.Module):
        def forward(self):
            span.end()
            return nn.Identity()(torch.ones(1))

    span = app.tracer.start_span("request")
    with trace.use_span(span, end_on_exit=False):
        EndsIt()()
    with app.request() as second:
        Block()(torch.ones(1, 4))
    assert app.rows.named("linear")
    assert app.rows.one("Block").parent_span_id == second.get_span_context().span_id
    assert app.running.modules._recorder._local.state.stack == []


class Calls(nn.Module):
    """Calls its parts in turn, whatever they are."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.parts = list(parts)

    def forward(self):
        for name in self.parts:
            getattr(self, name)()


def test_calls_keep_their_place_when_hooks_were_away_in_between(app):
    switch = app.running.modules._switch
    model = Calls(
        first=Calls(), away=switch.compile_started, unseen=Calls(), back=switch.compile_ended, last=Calls(part=Calls())
    )
    with app.request() as span:
        model()
    assert app.rows.names() == ["first", "last.part", "last", "Calls"]
    assert app.rows.one("last").parent_span_id == app.rows.one("Calls").span_id
    assert app.rows.one("Calls").parent_span_id == span.get_span_context().span_id


def test_a_call_whose_end_went_unseen_is_nobodys_parent_and_counted(app):
    counted = []
    app.running.pipeline.trace_ended = lambda *counts: counted.append(counts)
    switch = app.running.modules._switch
    model = Calls(
        lost=Calls(part=Calls(), away=switch.compile_started), back=switch.compile_ended, last=Calls(part=Calls())
    )
    with app.request():
        model()
        assert current_ids().span_id == trace.get_current_span().get_span_context().span_id
    assert app.rows.names() == ["lost.part", "last.part", "last", "Calls"]
    assert counted == [(5, 2000, 1)]
    assert app.rows.one("last").parent_span_id == app.rows.one("Calls").span_id
    assert app.running.modules._recorder._local.state.stack == []


def test_a_span_that_is_lost_does_not_keep_the_hooks(app):
    span = app.tracer.start_span("lost")
    assert app.running.modules.installed
    del span
    gc.collect()
    with app.request():
        pass
    assert not app.running.modules.installed


def test_a_forked_child_starts_clean_and_records_its_own_traces(app):
    model = Block()
    with app.request():
        model(torch.ones(1, 4))
        parent_ids = {row.span_id for row in app.rows}
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                clean = not app.running.modules.installed and not app.running.modules.active
                app.rows.clear()
                with app.request("child"):
                    model(torch.ones(1, 4))
                row = app.rows.one("Block")
                fresh = row.span_id not in parent_ids and row.thread_id == threading.get_native_id() == os.getpid()
                code = 0 if clean and fresh and not app.running.modules.installed else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert app.running.modules.installed


@settings(max_examples=60, deadline=None)
@given(shape=st.recursive(st.just(()), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8))
def test_rows_form_the_tree_of_calls(shape):
    """For any nesting of modules: one row a call, children inside parents, paths as torch itself names them."""
    app = App()
    try:
        model = _sequential(shape)
        with app.request() as span:
            model(torch.ones(1))
        expected = [name for name, _ in model.named_modules() if name] + [type(model).__name__]
        assert sorted(app.rows.names()) == sorted(expected)
        by_id = {row.span_id: row for row in app.rows}
        for row in app.rows:
            parent = by_id.get(row.parent_span_id)
            if parent is None:
                assert row.parent_span_id == span.get_span_context().span_id
            else:
                prefix = "" if parent.site.name == type(model).__name__ else parent.site.name + "."
                assert row.site.name == prefix + row.site.name.rpartition(".")[2]
    finally:
        app.close()


def _sequential(shape):
    return nn.Sequential(*(_sequential(inner) for inner in shape)) if shape else nn.Identity()
