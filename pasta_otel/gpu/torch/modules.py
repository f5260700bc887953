"""Module spans, put together: watch traces, install hooks while one is recorded, count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pasta_otel.gpu.torch.hooks import ModuleObserver, ModuleRecorder
from pasta_otel.gpu.torch.names import ModuleNames
from pasta_otel.gpu.torch.provider import ProviderFollower
from pasta_otel.gpu.torch.switch import HookSwitch
from pasta_otel.gpu.torch.traces import DEFAULT_ROW_LIMIT, ActiveTrace, Selection, TraceWatch
from pasta_otel.model import OpSpan


class RowPipeline(Protocol):
    """Takes rows and counts traces."""

    def offer(self, row: OpSpan, /) -> object:
        """Take one row; must not block."""

    def trace_ended(self, calls: int, limit: int, lost: int) -> None:
        """Count an ended trace."""


class _Listener:
    """Passes what the trace watch says to the switch and to the counters."""

    def __init__(self, pipeline: RowPipeline) -> None:
        self._pipeline = pipeline
        self.switch: HookSwitch | None = None

    def activate(self) -> None:
        if self.switch is not None:
            self.switch.activate()

    def deactivate(self) -> None:
        if self.switch is not None:
            self.switch.deactivate()

    def trace_ended(self, calls: int, limit: int, lost: int) -> None:
        self._pipeline.trace_ended(calls, limit, lost)


class ModuleSpans:
    """Records torch module calls of selected traces.

    Args:
        pipeline: Takes the rows.
        select: Which sampled traces are recorded.
        row_limit: Most rows a trace and process.
        names: Qualified names that outlive this object.
    """

    def __init__(
        self,
        pipeline: RowPipeline,
        select: Selection,
        row_limit: int = DEFAULT_ROW_LIMIT,
        names: ModuleNames | None = None,
    ) -> None:
        listener = _Listener(pipeline)
        self._watch = TraceWatch(select, listener, row_limit)
        self._recorder = ModuleRecorder(self._watch.active, pipeline, names or ModuleNames())
        self._switch = listener.switch = HookSwitch(self._recorder)
        self._follower: ProviderFollower | None = None

    @property
    def installed(self) -> bool:
        """Whether torch's global hook tables hold our hooks now."""
        return self._switch.installed

    @property
    def active(self) -> dict[int, ActiveTrace]:
        """The traces that are being recorded, by trace id."""
        return self._watch.active

    def observe(self, observer: ModuleObserver | None) -> None:
        """Tell an observer which recorded module each thread is in; None ends it."""
        self._recorder.observer = observer

    def start(
        self,
        provider: object | None = None,
        on_bound: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Follow a TracerProvider, by default the global one whenever it is set.

        Args:
            provider: The program's provider, if it is not the global one.
            on_bound: Called with the provider before its first span.
        """
        self._follower = ProviderFollower(self._watch, on_bound)
        self._follower.start(provider)

    def flush_with(self, flush: Callable[[float], object]) -> None:
        """Send rows whenever the program flushes or shuts down its provider.

        Args:
            flush: Sends the rows within so many seconds.
        """
        self._watch.flush = flush

    def record_nothing(self) -> None:
        """Install no hooks: rows would go nowhere."""
        self._watch.close()

    @property
    def bound(self) -> bool:
        """Whether there is a provider."""
        return self._follower is not None and self._follower.bound

    def on_first_span(self, set_up: Callable[[], None]) -> None:
        """Call ``set_up`` when a span is about to start and no provider is set; it may set one."""
        if self._follower is not None:
            self._follower.on_first_span(set_up)

    def stop(self) -> None:
        """Take everything out again."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None
        self._watch.close()
        self._switch.close()
