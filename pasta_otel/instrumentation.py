"""What a program calls, ``instrument()`` and ``uninstrument()``, and what ``opentelemetry-instrument`` loads."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from opentelemetry import metrics, trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # untyped there

from pasta_otel import semconv
from pasta_otel.app import build_row_sink, prepare_app_telemetry, setup_app_telemetry
from pasta_otel.app.at_end import hurry_unheard
from pasta_otel.app.capture_flag import follow_capture_flag
from pasta_otel.app.debug import log_when_debugging
from pasta_otel.app.gpu_capture import GpuInstrumentation, build_gpu_capture
from pasta_otel.arguments import check_model, check_models, check_offers, check_rate, check_row_limit, check_set_up
from pasta_otel.config import load_settings
from pasta_otel.errors import PastaError
from pasta_otel.gpu.torch.annotate import use_provider
from pasta_otel.gpu.torch.modules import ModuleSpans
from pasta_otel.gpu.torch.names import ModuleNames
from pasta_otel.gpu.torch.traces import DEFAULT_ROW_LIMIT
from pasta_otel.pipeline import CaptureSelection, CaptureState, Pipeline, RowSink
from pasta_otel.publish import publish_context, withdraw_context

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_names = ModuleNames()  # names given to models survive uninstrument() and instrument()


class Instrumentation:
    """One running instrumentation.

    Attributes:
        capture: The capture tier; whoever reads the flag ``pasta.capture`` raises it here.
        pipeline: Where rows go.
        modules: The module spans.
        gpu: The GPU capture, once there is a provider; None where it is off or not installed.
    """

    def __init__(self, rate: float, row_limit: int, sink: RowSink | None, meter: metrics.Meter) -> None:
        self.gpu: GpuInstrumentation | None = None
        self._meter = meter
        self.capture = CaptureState()
        self.pipeline = Pipeline(meter, self.capture)
        self._own_sink = sink is None
        self._provider: Any = None
        if sink is not None:
            self.pipeline.connect(sink)
        self.modules = ModuleSpans(self.pipeline, CaptureSelection(self.capture, rate), row_limit, _names)

    def start(self, provider: object | None, *, set_up: bool) -> None:
        """Follow the provider; ``set_up`` lets us make one when a span starts and there is none."""
        use_provider(cast("trace.TracerProvider | None", provider))
        self.modules.start(provider, self._bound)
        if set_up:
            self.allow_set_up()

    def allow_set_up(self) -> None:
        """Set up a provider when a span starts and there is still none."""
        if not self.modules.bound:
            _guarded("no TracerProvider can be set up", prepare_app_telemetry)
            self.modules.on_first_span(lambda: _guarded("no TracerProvider could be set up", setup_app_telemetry))

    def drain(self, timeout_s: float) -> None:
        """Send what is queued before the program ends, ours and the provider's, each for up to ``timeout_s``."""
        _guarded("the wait for a collector is not bounded", hurry_unheard)
        flush_rows = getattr(self.pipeline.sink, "force_flush", None)
        flush_spans = getattr(self._provider, "force_flush", None)
        if callable(flush_spans):
            _guarded("spans could not be flushed", lambda: flush_spans(int(timeout_s * 1000)))
        if callable(flush_rows):
            _guarded("module spans could not be flushed", lambda: flush_rows(timeout_s))

    def stop(self) -> None:
        """Stop recording, and send what is queued."""
        if self.gpu is not None:
            self.gpu.stop()
        self.modules.stop()
        withdraw_context()
        use_provider(None)
        sink = self.pipeline.disconnect()
        shutdown = getattr(sink, "shutdown", None)
        if self._own_sink and callable(shutdown):
            shutdown()

    def _bound(self, provider: Any) -> None:
        self._provider = provider
        resource = getattr(provider, "resource", None)
        if resource is not None:
            self.capture.service = str(resource.attributes.get(semconv.SERVICE_NAME, ""))
            _guarded("the trace context is not published", lambda: _publish(resource.attributes))
        if self._own_sink and self.pipeline.sink is None:
            _guarded("module spans are not exported", lambda: self._connect(provider))
        if self.gpu is None:
            _guarded("no GPU capture", lambda: self._start_gpu(provider))

    def _connect(self, provider: Any) -> None:
        sink = build_row_sink(provider)
        if sink is None:
            self.modules.record_nothing()
            return
        self.pipeline.connect(sink)
        self.modules.flush_with(sink.force_flush)

    def _start_gpu(self, provider: Any) -> None:
        sink: Any = self.pipeline.sink
        self.gpu = build_gpu_capture(
            settings=load_settings(),
            provider=provider,
            sink=sink if callable(getattr(sink, "offer_columns", None)) else None,
            meter=self._meter,
            capture=self.capture,
            names=_names,
        )
        if self.gpu is not None:
            self.gpu.start(self.modules)


_running: Instrumentation | None = None


def _guarded(what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - telemetry never breaks the service
        _log.warning("%s: %s", what, error)


def _publish(resource: Mapping[str, Any]) -> None:
    """Let host probes see which span each thread is in (docs/reference/agent.md)."""
    if load_settings()["PASTA_PUBLISH_CONTEXT"]:
        publish_context(resource)


def _under_opentelemetry_instrument() -> bool:
    return "opentelemetry.instrumentation.auto_instrumentation.sitecustomize" in sys.modules or (
        getattr(sys.modules.get("sitecustomize"), "__file__", None) or ""
    ).endswith("auto_instrumentation/sitecustomize.py")


def instrument(  # noqa: PLR0913 - keyword-only options, each with a default
    *,
    tracer_provider: object | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    sampling_rate: float | None = None,
    row_limit: int = DEFAULT_ROW_LIMIT,
    models: Mapping[str, Any] | None = None,
    sink: RowSink | None = None,
    set_up: bool | None = None,
) -> Instrumentation:
    """Record torch module spans inside the program's own traces. Does nothing new when it is already done.

    The program's TracerProvider, sampler and instrumentations are used as they are, also a provider that is set later.
    One is set up (OTLP, by ``OTEL_*``) only when the first span starts and there is none.

    Args:
        tracer_provider: The program's provider, if it is not the global one.
        meter_provider: Where our counters go; the global one by default.
        sampling_rate: Share of sampled traces that carry module spans, 0..1; ``PASTA_SAMPLING_RATE`` by default.
        row_limit: Most module spans a trace and process; further ones are counted as dropped.
        models: Names for root modules: their parts are then called ``<name>.<path>``.
        sink: Takes the rows instead of OTLP.
        set_up: Whether to set up a provider when there is none; by default not under ``opentelemetry-instrument``.

    Raises:
        InputError: An argument is wrong, or a ``PASTA_*`` setting cannot be read; nothing was done then.
    """
    global _running  # noqa: PLW0603 - one per process, as the hooks it installs are
    sampling_rate, row_limit = check_rate(sampling_rate), check_row_limit(row_limit)
    check_offers(tracer_provider, "get_tracer", "tracer_provider")
    check_offers(meter_provider, "get_meter", "meter_provider")
    check_offers(sink, "offer", "sink")
    check_set_up(set_up)
    named = check_models(models)
    with _lock:
        log_when_debugging()
        for name, model in named.items():
            _names.name(model, name)
        if _running is not None:
            if set_up:
                _running.allow_set_up()
            return _running
        rate = load_settings()["PASTA_SAMPLING_RATE"] if sampling_rate is None else sampling_rate
        meter = metrics.get_meter(semconv.SCOPE, meter_provider=meter_provider)
        running = Instrumentation(rate, row_limit, sink, meter)
        wanted = not _under_opentelemetry_instrument() if set_up is None else set_up
        running.start(tracer_provider, set_up=wanted and tracer_provider is None)
        _guarded("the capture flag is not followed", lambda: follow_capture_flag(running.capture))
        _running = running
        return running


def uninstrument() -> None:
    """Put everything back as it was; does nothing when nothing is instrumented."""
    global _running
    with _lock:
        running, _running = _running, None
        if running is not None:
            running.stop()


def name_model(model: Any, name: str) -> None:
    """Give a root module its own name, for programs that run several models.

    Raises:
        InputError: This is no module, or no name.
    """
    check_model(model, name, "name_model")
    _names.name(model, name)


class PastaInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # as above
    """The entry point that ``opentelemetry-instrument`` loads."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return nothing: torch is used when the program imports it."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        kwargs.setdefault("set_up", False)
        known = {"tracer_provider", "meter_provider", "sampling_rate", "row_limit", "models", "sink", "set_up"}
        try:
            instrument(**{name: value for name, value in kwargs.items() if name in known})
        except PastaError as error:  # raised here, it would keep the instrumentations after ours from loading
            _log.warning("not instrumented: %s", error)

    def _uninstrument(self, **kwargs: Any) -> None:
        del kwargs
        uninstrument()
