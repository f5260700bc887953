"""instrument() and uninstrument(): the program's own telemetry is used, found late, never replaced, and put back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from torch.nn.modules import module

import pasta_otel
from pasta_otel import instrumentation, semconv
from pasta_otel.errors import InputError
from pasta_otel.instrumentation import PastaInstrumentor
from pasta_otel.pipeline import CaptureState, CaptureTarget, Pipeline
from tests.instrumented import App, Block, Rows


def run_python(code, **env):
    """Run a program of its own: global providers can be set once in a process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PATH": "", "OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", **env},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(autouse=True)
def restore():
    yield
    pasta_otel.uninstrument()


def test_a_provider_that_is_set_later_is_found_and_used_as_it_is():
    out = run_python("""
        from opentelemetry import trace
        from opentelemetry.trace import set_tracer_provider
        tracer = trace.get_tracer("made before")
        import pasta_otel, torch
        from tests.instrumented import Rows, Block
        rows = Rows()
        pasta_otel.instrument(sink=rows)
        from opentelemetry.sdk.trace import TracerProvider
        mine = TracerProvider()
        set_tracer_provider(mine)
        assert trace.get_tracer_provider() is mine
        with tracer.start_as_current_span("r"):
            Block()(torch.ones(1, 4))
        print(len(rows), len(mine._active_span_processor._span_processors))
        pasta_otel.uninstrument()
        print(len(mine._active_span_processor._span_processors))
    """)
    assert out == ["2", "1", "0"]


def test_torch_imported_after_instrument_is_instrumented_and_never_imported_by_us():
    out = run_python("""
        import sys, pasta_otel
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        class Rows(list):
            def offer(self, row): self.append(row)
        rows = Rows()
        pasta_otel.instrument(sink=rows)
        trace.set_tracer_provider(TracerProvider())
        tracer = trace.get_tracer("x")
        with tracer.start_as_current_span("no torch"):
            pass
        print("torch" in sys.modules)
        import torch
        with tracer.start_as_current_span("r"):
            torch.nn.Identity()(torch.ones(1))
        print(len(rows))
    """)
    assert out == ["False", "1"]


def test_without_any_provider_one_is_set_up_when_the_first_span_starts():
    out = run_python(
        """
        from opentelemetry import trace
        tracer = trace.get_tracer("made before")
        import pasta_otel
        running = pasta_otel.instrument()
        print(type(trace.get_tracer_provider()).__name__)
        with tracer.start_as_current_span("r") as span:
            print(span.is_recording())
        print(type(trace.get_tracer_provider()).__name__, type(running.pipeline.sink).__name__)
        print(trace.get_tracer_provider().resource.attributes["service.name"])
    """,
        OTEL_SERVICE_NAME="ranker",
    )
    assert out == ["ProxyTracerProvider", "True", "TracerProvider", "RowExporter", "ranker"]


def test_a_provider_set_before_the_first_span_wins_over_ours():
    out = run_python("""
        import pasta_otel
        pasta_otel.instrument()
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        mine = TracerProvider()
        trace.set_tracer_provider(mine)
        with trace.get_tracer("x").start_as_current_span("r"):
            pass
        print(trace.get_tracer_provider() is mine)
    """)
    assert out == ["True"]


def test_uninstrument_puts_the_api_back():
    before = (trace._set_tracer_provider, trace.ProxyTracer._tracer, vars(trace.ProxyTracer)["_tracer"])
    pasta_otel.instrument(sink=Rows(), set_up=True)
    pasta_otel.uninstrument()
    assert (trace._set_tracer_provider, trace.ProxyTracer._tracer, vars(trace.ProxyTracer)["_tracer"]) == before
    assert [finder for finder in sys.meta_path if type(finder).__module__.startswith("pasta_otel")] == []


def test_instrumenting_twice_changes_nothing():
    app = App()
    again = pasta_otel.instrument(sink=Rows(), tracer_provider=app.provider)
    assert again is app.running
    assert len(app.provider._active_span_processor._span_processors) == 2
    with app.request():
        Block()(torch.ones(1, 4))
    assert app.rows.names() == ["linear", "Block"]
    app.close()
    app.close()


def test_many_threads_may_instrument_and_uninstrument_while_requests_run():
    provider = TracerProvider(shutdown_on_exit=False)
    tracer, model, stop = provider.get_tracer("x"), Block(), threading.Event()

    def serve():
        while not stop.is_set():
            with tracer.start_as_current_span("r"):
                model(torch.ones(1, 4))

    def toggle(_):
        for _ in range(30):
            pasta_otel.instrument(sink=Rows(), tracer_provider=provider)
            pasta_otel.uninstrument()

    with ThreadPoolExecutor(6) as pool:
        serving = [pool.submit(serve) for _ in range(2)]
        list(pool.map(toggle, range(4)))
        stop.set()
        for one in serving:
            one.result()
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks
    assert provider._active_span_processor._span_processors == ()


def test_the_entry_points_class_is_an_instrumentor_that_sets_nothing_up():
    instrumentor = PastaInstrumentor()
    before = vars(trace.ProxyTracer)["_tracer"]
    instrumentor.instrument(sink=Rows(), skip_dep_check=True)
    try:
        assert instrumentor.is_instrumented_by_opentelemetry
        assert vars(trace.ProxyTracer)["_tracer"] is before
    finally:
        instrumentor.uninstrument()


def test_the_entry_point_is_declared():
    (point,) = entry_points(group="opentelemetry_instrumentor", name="pasta_otel")
    assert point.load() is PastaInstrumentor


def test_a_bad_sampling_rate_is_named(monkeypatch):
    monkeypatch.setenv("PASTA_SAMPLING_RATE", "2")
    with pytest.raises(InputError, match="PASTA_SAMPLING_RATE"):
        pasta_otel.instrument()


def test_traces_and_spans_are_counted_and_nothing_is_lost_silently():
    reader = InMemoryMetricReader()
    app = App(row_limit=3, meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    for _ in range(2):
        with app.request():
            Block(Block())(torch.ones(1, 4))
    app.running.pipeline.disconnect()
    with app.request():
        Block()(torch.ones(1, 4))
    points = {}
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            points[(metric.name, point.attributes.get("reason"))] = point.value
    assert points == {
        (semconv.MODULE_SPANS, None): 6,
        (semconv.MODULE_SPANS_DROPPED, "trace_limit"): 2,
        (semconv.MODULE_SPANS_DROPPED, "no_sink"): 2,
        (semconv.TRACES_RECORDED, None): 3,
        (semconv.CAPTURE_TIER, None): 2,
    }
    app.close()


def test_a_sink_that_raises_does_not_reach_the_model(caplog):
    class Broken:
        def offer(self, row):
            raise OSError(row)

    app = App()
    app.running.pipeline.connect(Broken())
    with app.request():
        for _ in range(3):
            Block()(torch.ones(1, 4))
    assert len([record for record in caplog.records if "module span" in record.message]) == 1
    app.close()


def test_a_raised_tier_records_every_trace_of_its_operations_until_the_deadline():
    app = App(sampling_rate=0.0)
    now = [0]
    capture = app.running.capture
    capture._unix_nano = lambda: now[0]
    capture.raise_to(3, 100, [CaptureTarget(operation="slow")])
    for operation in ("slow", "fast"):
        with app.request(operation):
            torch.nn.Identity()(torch.ones(1))
    assert len(app.rows) == 1
    now[0] = 100
    with app.request("slow"):
        torch.nn.Identity()(torch.ones(1))
    assert len(app.rows) == 1
    assert capture.tier("slow") == 2
    app.close()


def test_a_tier_for_another_service_is_not_ours():
    capture = CaptureState("ranker", unix_nano=lambda: 0)
    capture.raise_to(4, 10, [CaptureTarget("orders", None)])
    assert capture.tier() == 2
    capture.raise_to(4, 10, [CaptureTarget("ranker", None)])
    assert capture.tier("anything") == 4
    capture.lower()
    assert capture.tier() == 2
    with pytest.raises(ValueError, match="0 to 4"):
        capture.raise_to(5, 10)


@pytest.mark.parametrize(
    ("flag", "tier"),
    [
        (None, 2),
        ({"tier": None}, 2),
        ({"tier": 3}, 3),
        ({"tier": 3, "until": "1970-01-01T00:00:01Z"}, 2),
        ({"tier": 3, "until": "1970-01-01T00:00:03+00:00"}, 3),
        ({"tier": 2, "targets": [], "until": ""}, 2),
        ({"tier": 1, "targets": [], "until": ""}, 1),
        ({"tier": 0, "targets": [{"service": "ranker", "operation": "slow"}]}, 0),
        ({"tier": 3, "targets": [{"service": "ranker", "operation": "fast"}]}, 2),
        ({"tier": 3, "targets": [{"service": "orders"}]}, 2),
    ],
)
def test_the_capture_flag_sets_the_tier(flag, tier):
    capture = CaptureState("ranker", unix_nano=lambda: 2_000_000_000)
    capture.raise_to(4, 10**18)
    capture.apply(flag)
    assert capture.tier("slow") == tier


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ({"tier": 5}, "pasta.capture.tier"),
        ({"tier": "three"}, "pasta.capture.tier"),
        ({"tier": True}, "pasta.capture.tier"),
        ({"tier": 3, "until": "tomorrow"}, "pasta.capture.until"),
        ({"tier": 3, "until": "2026-01-01T00:00:00"}, "pasta.capture.until"),
    ],
)
def test_a_capture_flag_that_cannot_be_read_changes_nothing(flag, field):
    capture = CaptureState(unix_nano=lambda: 0)
    capture.raise_to(4, 10)
    with pytest.raises(InputError) as raised:
        capture.apply(flag)
    assert raised.value.field == field
    assert capture.tier() == 4


def test_tier_below_two_records_no_modules():
    app = App()
    app.running.capture.default_tier = 1
    with app.request():
        torch.nn.Identity()(torch.ones(1))
    assert app.rows == []
    app.close()


def test_rows_reach_a_sink_that_is_connected_late():
    pipeline, rows = Pipeline(), Rows()
    pipeline.connect(rows)
    pipeline.offer("row")
    assert rows == ["row"]
    assert pipeline.disconnect() is rows


class Slotted:
    __slots__ = ("_modules",)

    def __init__(self):
        self._modules = {}


MODEL = Block()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("sampling_rate", bad) for bad in ("x", "0.5", float("nan"), float("inf"), 5, -1, True, object(), [0.1])),
        *(("row_limit", bad) for bad in (-1, 1.5, "2000", None, True)),
        *(("tracer_provider", bad) for bad in (5, "otlp", object(), TracerProvider)),
        *(("meter_provider", bad) for bad in (5, object(), MeterProvider)),
        *(("sink", bad) for bad in (5, object(), print, Rows)),
        *(("set_up", bad) for bad in (1, "no")),
        *(("models", bad) for bad in ({"": MODEL}, {" ": MODEL}, {5: MODEL}, {"a": MODEL, "b": MODEL}, [MODEL], MODEL)),
        *(("models", {"x": bad}) for bad in (5, None, "model", object(), Block, Slotted())),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_at_the_call_and_nothing_is_instrumented(argument, value):
    with pytest.raises(InputError, match=f"^{argument}: ") as raised:
        pasta_otel.instrument(**{argument: value})
    assert raised.value.field == argument
    assert instrumentation._running is None


def test_a_wrong_argument_is_named_also_when_it_is_already_instrumented():
    app = App()
    with pytest.raises(InputError, match=r"^sampling_rate: "):
        pasta_otel.instrument(sampling_rate=float("nan"))
    app.close()


@pytest.mark.parametrize(("model", "name"), [(5, "x"), (MODEL, ""), (MODEL, None)])
def test_a_wrong_name_of_a_model_is_refused(model, name):
    with pytest.raises(InputError, match=r"^name_model: "):
        pasta_otel.name_model(model, name)


@pytest.mark.parametrize("rate", [0, 1, 0.0, 1.0, 0.25, np.float32(0.5), np.float64(0.5)])
def test_every_real_share_is_taken(rate):
    app = App(sampling_rate=rate, row_limit=0, models={"ranker": Block()})
    with app.request():
        Block()(torch.ones(1, 4))
    app.close()


def test_whatever_fails_in_the_selection_does_not_reach_the_request_and_is_said_once(caplog):
    def choose(trace_id, operation):
        raise ValueError("cannot choose")

    app = App()
    app.running.modules._watch._select = choose
    for _ in range(3):
        with app.request():
            Block()(torch.ones(1, 4))
    assert [span.name for span in app.exporter.get_finished_spans()] == ["request"] * 3
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]
    app.close()
