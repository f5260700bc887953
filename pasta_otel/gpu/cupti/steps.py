"""Requests of event loops and worker threads as regions, while a window is near: each step of a task, each function.

A request that starts on the thread that serves it is a region from beginning to end (``requests``). A thread that runs
an event loop serves many requests in turns, and a worker thread serves one that began elsewhere: there a region lasts
as long as a task's step, or as the function that was handed over. The hooks are there only while a window is about to
open, open or being digested, so that an event loop pays nothing in between.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context

from pasta_otel.context import SPAN_KEY
from pasta_otel.publish.others import follow_anyio, follow_uvloop, replace

_EMPTY = Context()


class SpanRegions(Protocol):
    """Told which span each thread is in (``Regions``)."""

    recording: bool

    def enter_again(self, trace_id: int, span_id: int) -> None:
        """Enter a span that may have a region already."""

    def leave(self, span_id: int, /) -> None:
        """Leave it, and everything inside it."""


class _Running(threading.local):
    """What the thread's running step has entered, outermost first; 0 = a context without a span; None = no step."""

    def __init__(self) -> None:
        self.entered: list[int] | None = None


class StepRegions:
    """Installs and removes the hooks.

    Args:
        regions: Told about each step.
        modules: ``sys.modules``.
    """

    def __init__(self, regions: SpanRegions, modules: Mapping[str, ModuleType] = sys.modules) -> None:
        self._regions, self._modules = regions, modules
        self._running = _Running()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Follow steps from now on; does nothing where OpenTelemetry keeps its context in ways of its own."""
        runtime: Any = getattr(context_api, "_RUNTIME_CONTEXT", None)
        variable = getattr(runtime, "_current_context", None)
        if self._undo or not isinstance(variable, contextvars.ContextVar):
            return
        self._undo += [
            replace(runtime, "attach", self._around_attach(runtime.attach)),
            replace(runtime, "detach", self._around_detach(runtime.detach)),
            replace(asyncio.events.Handle, "_run", self._around_handle(asyncio.events.Handle._run, variable)),  # noqa: SLF001 - each step of a task
        ]
        carry = self._carrying(variable)
        loop = asyncio.BaseEventLoop
        self._undo.append(replace(loop, "run_in_executor", carry(loop.run_in_executor)))
        if (uvloop := self._modules.get("uvloop")) is not None and hasattr(uvloop, "Loop"):
            self._undo += follow_uvloop(uvloop, self._follow_step, carry)
        if (anyio := self._modules.get("anyio.to_thread")) is not None:
            self._undo.append(follow_anyio(anyio, self._carrying_current))

    def remove(self) -> None:
        """Put everything back; what is running still leaves what it entered."""
        while self._undo:
            self._undo.pop()()

    # -- one step ------------------------------------------------------------------------------------------------------

    def _inside(self, context: Context, run: Callable[..., Any], *arguments: Any) -> Any:
        running = self._running
        around, running.entered = running.entered, [self._enter(context)]
        try:
            return run(*arguments)
        finally:
            for span_id in reversed(running.entered):
                if span_id:
                    self._regions.leave(span_id)
            running.entered = around

    def _enter(self, context: Context) -> int:
        span = context.get(SPAN_KEY)
        if not self._regions.recording or not isinstance(span, trace.Span):
            return 0
        found = span.get_span_context()
        if not found.is_valid or not found.trace_flags.sampled:
            return 0
        self._regions.enter_again(found.trace_id, found.span_id)
        return found.span_id

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _around_attach(self, attach: Callable[..., Any]) -> Callable[..., Any]:
        def attach_and_enter(context: Context) -> Any:
            token = attach(context)
            if (entered := self._running.entered) is not None:
                entered.append(self._enter(context))
            return token

        return attach_and_enter

    def _around_detach(self, detach: Callable[..., Any]) -> Callable[..., Any]:
        def detach_and_leave(token: Any) -> None:
            try:
                detach(token)
            finally:
                if entered := self._running.entered:
                    left = entered.pop()
                    if left:
                        self._regions.leave(left)
                    if not entered:  # attached in an earlier step of the task: what is current now was around it
                        entered.append(self._enter(context_api.get_current()))

        return detach_and_leave

    def _around_handle(self, run: Any, variable: contextvars.ContextVar[Context]) -> Callable[[Any], None]:
        @functools.wraps(run)
        def run_inside(handle: Any) -> None:
            self._inside(handle._context.get(variable, _EMPTY), run, handle)  # noqa: SLF001 - the task's own context

        return run_inside

    def _follow_step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        return self._inside(context_api.get_current(), step, *arguments)

    def _carrying_current(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._inside, context_api.get_current(), function)

    def _carrying(self, variable: contextvars.ContextVar[Context]) -> Callable[[Any], Any]:
        """Follow worker threads that are given the caller's context (``asyncio.to_thread``)."""

        def wrap(submit: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(submit)
            def run_in_executor(loop: Any, executor: Any, func: Any, *arguments: Any) -> Any:
                carried = getattr(getattr(func, "func", func), "__self__", None)  # Context.run, or a partial of it
                if isinstance(carried, contextvars.Context):
                    func = functools.partial(self._inside, carried.get(variable, _EMPTY), func)
                return submit(loop, executor, func, *arguments)

            return run_in_executor

        return wrap
