"""Finds the program's TracerProvider, whenever it is set, and gives it a span processor without replacing anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from opentelemetry import trace


class ProviderFollower:
    """Attach a span processor to the global TracerProvider now, or in the moment the program sets one.

    Args:
        processor: Gets the spans; must become inert by itself, because an SDK has no public way to remove one.
        on_bound: Called once with the provider, before its first span.
    """

    def __init__(self, processor: object, on_bound: Callable[[Any], None] = lambda _: None) -> None:
        self._processor, self._on_bound = processor, on_bound
        self._lock = threading.RLock()
        self._bound: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    def start(self, provider: object | None = None) -> None:
        """Bind to a provider, to the global one, or wait for it."""
        found = provider if provider is not None else trace.get_tracer_provider()
        if not self._bind(found):
            self._wait()

    def stop(self) -> None:
        """Take the processor out and stop waiting."""
        self._stop_waiting()
        with self._lock:
            bound, self._bound = self._bound, []
        for provider in bound:
            remove_processor(provider, self._processor)

    def _bind(self, provider: Any) -> bool:
        add = getattr(provider, "add_span_processor", None)
        if not callable(add):
            return False
        with self._lock:
            if provider in self._bound:
                return True
            self._bound.append(provider)
        self._on_bound(provider)
        add(self._processor)
        return True

    def _wait(self) -> None:
        """Wrap what ``set_tracer_provider`` calls (its callers may hold the function itself, imported earlier)."""
        original = getattr(trace, "_set_tracer_provider", None)
        if original is None:
            return

        def set_and_bind(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            current = getattr(trace, "_TRACER_PROVIDER", None)
            if current is not None and self._bind(current):
                self._stop_waiting()

        trace._set_tracer_provider = set_and_bind
        self._undo.append(lambda: _restore(trace, "_set_tracer_provider", set_and_bind, original))

    @property
    def bound(self) -> bool:
        """Whether there is a provider."""
        return bool(self._bound)

    def on_first_span(self, set_up: Callable[[], None]) -> None:
        """Let the proxy tracer ask us once, when a span is about to start and nobody has set a provider."""
        proxy = trace.ProxyTracer
        original = vars(proxy).get("_tracer")
        if not isinstance(original, property) or original.fget is None:
            set_up()
            return
        real_tracer = original.fget
        asked = threading.Lock()

        def tracer(self: Any) -> Any:
            if getattr(trace, "_TRACER_PROVIDER", None) is None and asked.acquire(blocking=False):
                set_up()
            return real_tracer(self)

        watching = property(tracer)
        proxy._tracer = watching  # type: ignore[assignment,method-assign]
        self._undo.append(lambda: _restore(proxy, "_tracer", watching, original))

    def _stop_waiting(self) -> None:
        with self._lock:
            undo, self._undo = self._undo, []
        for restore in undo:
            restore()


def _restore(owner: Any, name: str, ours: object, original: object) -> None:
    if vars(owner).get(name) is ours:
        setattr(owner, name, original)


def remove_processor(provider: Any, processor: object) -> None:
    """Take our processor out of an SDK provider; where its insides look different it stays, and does nothing."""
    active = getattr(provider, "_active_span_processor", None)
    lock, processors = getattr(active, "_lock", None), getattr(active, "_span_processors", None)
    if lock is None or not isinstance(processors, tuple):
        return
    with lock:
        active._span_processors = tuple(one for one in active._span_processors if one is not processor)  # type: ignore[union-attr]
