"""Keeps the running thread's slot equal to its current OpenTelemetry context.

Three places tell when the context of a thread changes: attach and detach of OpenTelemetry's runtime context, our own
module hooks, and the callbacks that an asyncio loop runs (each is one step of a task, in the task's own context). What
runs tasks and threads in ways of its own is followed in ``others``.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.context import Context

from pasta_otel import context as own_context
from pasta_otel.context import SPAN_KEY, RowSpan
from pasta_otel.publish.others import follow_anyio, follow_uvloop, replace, when_imported
from pasta_otel.publish.slots import LOW64, RECORD, VALID, SlotTable, unseen_switches

_EMPTY = Context()
_running_loop = asyncio._get_running_loop  # noqa: SLF001 - documented; "for event loop implementers" and fast


class ContextWatcher:
    """Installs and removes the hooks; publishes into a slot table.

    Attributes:
        observed_loops: Event loop types whose steps are seen.
    """

    observed_loops: tuple[type, ...] = (asyncio.BaseEventLoop,)

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._green = unseen_switches()
        self._undo: list[Callable[[], None]] = []
        self._following = False
        self.publish = self._publisher()

    def _publisher(self) -> Callable[[Context], None]:
        """Return the function that writes a context's span into the calling thread's slot, bound for speed."""
        table, observed, green = self._table, self.observed_loops, self._green
        memory, owned, claim, running_loop = table.memory, table.owned, table.offset, _running_loop
        pack = RECORD.pack_into

        # One path, written out: it runs at every attach and detach of the application.
        def publish(context: Context) -> None:
            try:
                offset = owned.offset
                if offset is None:
                    offset = claim()
                if offset < 0:
                    return
                memory[offset + VALID] = 0
                span: Any = context.get(SPAN_KEY)
                if span is None:
                    return
                if type(span) is RowSpan:
                    root = span.local_root
                    trace_id, span_id, flags = root.trace_id, span.span_id, root.trace_flags
                else:
                    trace_id, span_id, _, flags, *_ = span.get_span_context()
                if not trace_id:
                    return
                loop = running_loop()
                unseen = loop is not None and not owned.followed and not isinstance(loop, observed)
                unsure = green or unseen
                pack(memory, offset + 8, trace_id >> 64, trace_id & LOW64, span_id, 1, flags, 0, unsure)
            except Exception:  # noqa: BLE001 - telemetry never breaks the service
                return

        return publish

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Follow every change of context from now on, and publish the calling thread's."""
        self._watch_runtime_context()
        self._watch_own_setter()
        self._watch_loops()
        self._watch_others()
        self.publish_current()

    def publish_current(self) -> None:
        """Publish the calling thread's context."""
        self.publish(context_api.get_current())

    def remove(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def _watch_runtime_context(self) -> None:
        runtime: Any = context_api._RUNTIME_CONTEXT  # noqa: SLF001 - the one object that every attach goes through
        attach, detach, current, publish = runtime.attach, runtime.detach, runtime.get_current, self.publish

        def attach_and_publish(context: Context) -> Any:
            token = attach(context)
            publish(context)
            return token

        def detach_and_publish(token: Any) -> None:
            try:
                detach(token)
            finally:
                publish(current())

        runtime.attach, runtime.detach = attach_and_publish, detach_and_publish

        def undo() -> None:
            if runtime.__dict__.get("attach") is attach_and_publish:
                del runtime.attach, runtime.detach

        self._undo.append(undo)

    def _watch_own_setter(self) -> None:
        self._undo.append(own_context.watch_set(self.publish))

    def _watch_loops(self) -> None:
        runtime = context_api._RUNTIME_CONTEXT  # noqa: SLF001 - as above
        variable = getattr(runtime, "_current_context", None)
        if not isinstance(variable, contextvars.ContextVar):
            self.observed_loops = ()
            self.publish = self._publisher()
            return
        self._undo.append(replace(asyncio.events.Handle, "_run", self._around_handle(variable)))
        carrying = self._carrying(variable)(asyncio.BaseEventLoop.run_in_executor)
        self._undo.append(replace(asyncio.BaseEventLoop, "run_in_executor", carrying))

    def _around_handle(self, variable: contextvars.ContextVar[Context]) -> Callable[..., None]:
        run: Callable[..., None] = asyncio.events.Handle._run  # noqa: SLF001 - each step of a task
        publish = self.publish

        @functools.wraps(run)
        def run_published(handle: Any) -> None:
            publish(handle._context.get(variable, _EMPTY))  # noqa: SLF001 - the task's own context
            try:
                run(handle)
            finally:
                publish(_EMPTY)  # the loop's own waiting belongs to nobody

        return run_published

    def _carrying(self, variable: contextvars.ContextVar[Context]) -> Callable[[Any], Any]:
        """Publish in worker threads that ``asyncio.to_thread`` gives the caller's context to."""
        publishing = self._publishing

        def wrap(submit: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(submit)
            def run_in_executor(loop: Any, executor: Any, func: Any, *args: Any) -> Any:
                carried = getattr(getattr(func, "func", None), "__self__", None)
                if isinstance(carried, contextvars.Context):
                    func = publishing(func, carried.get(variable, _EMPTY))
                return submit(loop, executor, func, *args)

            return run_in_executor

        return wrap

    def _publishing(self, function: Callable[..., Any], context: Context) -> Callable[..., Any]:
        """Return a function that publishes a context while it runs, in a thread that has no other."""
        publish = self.publish

        def call(*arguments: Any) -> Any:
            publish(context)
            try:
                return function(*arguments)
            finally:
                publish(_EMPTY)

        return call

    # -- what is not asyncio's own -------------------------------------------------------------------------------------

    def _watch_others(self) -> None:
        self._following = True
        when_imported("uvloop", self._watch_uvloop)
        when_imported("anyio.to_thread", self._watch_anyio)
        self._undo.append(lambda: setattr(self, "_following", False))

    def _watch_uvloop(self, module: ModuleType) -> None:
        variable = getattr(context_api._RUNTIME_CONTEXT, "_current_context", None)  # noqa: SLF001 - as above
        if self._following and isinstance(variable, contextvars.ContextVar) and hasattr(module, "Loop"):
            self._undo += follow_uvloop(module, self._follow_step, self._carrying(variable))

    def _watch_anyio(self, module: ModuleType) -> None:
        if self._following:
            self._undo.append(
                follow_anyio(module, lambda function: self._publishing(function, context_api.get_current()))
            )

    def _follow_step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step of a task in its own context, and publish that meanwhile."""
        owned, publish = self._table.owned, self.publish
        context, around = context_api.get_current(), owned.followed
        owned.followed = True
        publish(context)
        try:
            return step(*arguments)
        finally:
            publish(context if around else _EMPTY)  # around: an eager task begins within the step that creates it
            owned.followed = around
