"""What happens when a torch module call begins and ends inside a recorded trace: one row, on the request's own thread.

Written for speed (``benchmarks/modules.py`` keeps the numbers): the hooks are closures, calls are plain tuples, and an
OpenTelemetry context is attached only where code that could use it may run.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from opentelemetry.context import Context

from pasta_otel.context import SPAN_KEY, RowSpan, SpanIds, current_context, set_current_context
from pasta_otel.gpu.torch.frames import running_modules
from pasta_otel.gpu.torch.names import ModuleNames, ModuleNode
from pasta_otel.gpu.torch.traces import ActiveTrace
from pasta_otel.model import OpSpan

_log = logging.getLogger(__name__)

Before = Callable[[Any, Any], None]
After = Callable[[Any, Any, Any], None]

# A module call that has begun: module, node and trace (None where it belongs to no recorded trace), parent span id,
# span id (0: it makes no row and only keeps its place), start, the context to restore (None: nothing attached), epoch.
_Call = tuple[Any, ...]
_MODULE, _TRACE, _SPAN_ID, _OUTER, _EPOCH = 0, 2, 4, 6, 7
_UNSEEN: _Call = (None, None, None, 0, 0, 0, None, 0)  # the hooks were installed after this call had begun


class RowSink(Protocol):
    """Takes finished rows; must not block and must not raise."""

    def offer(self, row: OpSpan, /) -> object:
        """Take one row."""


class ModuleObserver(Protocol):
    """Wants to know, on the thread that runs the module, which span it is in; must not block and must not raise."""

    def enter(self, trace_id: int, span_id: int, module: str | None = None, /) -> None:
        """Note that this thread is inside the module's span from here on."""

    def leave(self, span_id: int, /) -> None:
        """Note that it no longer is."""


class _ThreadState:
    """The module calls that are open on a thread, innermost last, and the kernel's id of that thread."""

    __slots__ = ("stack", "thread_id")

    def __init__(self) -> None:
        self.stack: list[_Call] = []
        self.thread_id = threading.get_native_id()


class _Local(threading.local):
    """This thread's state: one slow look-up for all of it."""

    def __init__(self) -> None:
        self.state = _ThreadState()


class ModuleRecorder:
    """The pair of hooks and what they share.

    Args:
        traces: The open selected traces by trace id (``TraceWatch.active``: shared, never copied).
        sink: Takes the rows.
        names: Qualified names.

    Attributes:
        before: Forward pre-hook for ``torch.nn.modules.module.register_module_forward_pre_hook``.
        after: Forward hook, to be registered with ``always_call=True``.
        observer: Told when this thread enters and leaves a recorded module: GPU capture joins launches by it.
        epoch: Raised whenever the hooks were away for a while, so that calls whose end went unseen are found out.
    """

    def __init__(self, traces: dict[int, ActiveTrace], sink: RowSink, names: ModuleNames) -> None:
        self.names, self.epoch = names, 0
        self.observer: ModuleObserver | None = None
        self._local = _Local()
        self._failed = False
        self.before: Before = _make_before(self, self._local, traces)
        self.after: After = _make_after(self, self._local, sink)
        if hasattr(os, "register_at_fork"):
            own = weakref.WeakMethod(self._after_fork)
            os.register_at_fork(after_in_child=lambda: (method := own()) and method())

    def failed(self) -> None:
        """Note an error of our own: logged once, never shown to the model."""
        if not self._failed:
            self._failed = True
            _log.warning("a module span could not be recorded; further ones stay silent", exc_info=True)

    def recover(self, stack: list[_Call], popped: _Call, module: Any) -> _Call:
        """Find the begun call of a module whose end was seen out of order; calls above it never ended."""
        for index in range(len(stack) - 1, -1, -1):
            if stack[index][_MODULE] is module:
                call = stack[index]
                _count_lost([*stack[index + 1 :], popped])
                del stack[index:]
                return call
        stack.append(popped)
        return _UNSEEN

    def prune(self, stack: list[_Call], hook: FrameType) -> None:
        """Drop calls that ended while the hooks were away: those that no frame of this thread is running any more."""
        running = running_modules(hook)[:-1]  # the innermost one just begins
        kept: list[_Call] = []
        for module in running:
            if len(kept) < len(stack) and stack[len(kept)][_MODULE] is module:
                kept.append(stack[len(kept)])
        gone = stack[len(kept) :]
        _count_lost(gone)
        outer = next((call[_OUTER] for call in gone if call[_OUTER] is not None), None)
        if outer is not None and type(current_context().get(SPAN_KEY)) is RowSpan:
            set_current_context(outer)
        stack[:] = [(*call[:_EPOCH], self.epoch) for call in kept]

    def _after_fork(self) -> None:
        self._local.state = _ThreadState()


def _make_before(  # noqa: C901 - see its inner function
    recorder: ModuleRecorder, local: _Local, traces: dict[int, ActiveTrace]
) -> Before:
    get_trace, random_bits, root = traces.get, SpanIds().bits, recorder.names.root
    now, get_context, set_context = time.monotonic_ns, current_context, set_current_context

    # One path, written out: a call of a helper costs what five of these branches cost.
    def before(module: Any, _arguments: Any) -> None:  # noqa: C901, PLR0912 - see the line above
        stack = local.state.stack
        context = get_context()
        span: Any = context.get(SPAN_KEY)
        if span is None and not stack:
            return
        try:
            if stack and stack[-1][7] != recorder.epoch:
                recorder.prune(stack, sys._getframe(1))
                context = get_context()
                span = context.get(SPAN_KEY)
            nested = type(span) is RowSpan
            trace = None
            if nested:
                if span.trace.open_roots:  # else it is over, and only this context still remembers it
                    trace, parent = span.trace, span.span_id
            elif span is not None:
                identity = span.get_span_context()
                trace, parent = get_trace(identity.trace_id), identity.span_id
            if trace is None:
                if stack:
                    stack.append((module, None, None, 0, 0, 0, None, recorder.epoch))
                return
            outside: ModuleNode | None = None
            if stack and stack[-1][2] is trace:
                outside = stack[-1][1]
            elif nested:
                outside = span.node
            if outside is None:
                node = root(module)
            else:
                found = outside.children.get(id(module))
                node = found if found is not None and found.module() is module else outside.add(module)
            if not node.recorded or next(trace.position) >= trace.limit:
                stack.append((module, node, trace, 0, 0, 0, None, recorder.epoch))
                return
            span_id = random_bits(64) or 1
            if node.has_code:
                set_context(Context({**context, SPAN_KEY: RowSpan(trace.local_root, span_id, trace, node)}))
                stack.append((module, node, trace, parent, span_id, now(), context, recorder.epoch))
            else:
                stack.append((module, node, trace, parent, span_id, now(), None, recorder.epoch))
            if recorder.observer is not None:
                recorder.observer.enter(trace.local_root.trace_id, span_id, node.site.name)
        except Exception:  # noqa: BLE001 - telemetry never breaks the model
            recorder.failed()

    return before


def _make_after(recorder: ModuleRecorder, local: _Local, sink: RowSink) -> After:
    now, set_context, make = time.monotonic_ns, set_current_context, tuple.__new__

    def after(module: Any, _arguments: Any, result: Any) -> None:
        end = now()
        state = local.state
        stack = state.stack
        if not stack:
            return
        call = stack.pop()
        if call[0] is not module:
            call = recorder.recover(stack, call, module)
        _, node, trace, parent, span_id, start, outer, _ = call
        if not span_id:
            return
        if outer is not None:
            set_context(outer)
        status = None if result is not None else _raised(sys._getframe(1))
        trace_id = trace.local_root.trace_id
        try:
            if recorder.observer is not None:
                recorder.observer.leave(span_id)
            sink.offer(make(OpSpan, (trace_id, span_id, parent, start, end, state.thread_id, node.site, status)))
        except Exception:  # noqa: BLE001 - telemetry never breaks the model
            recorder.failed()

    return after


def _raised(caller: FrameType) -> str | None:
    """Return the type name of the exception that ``Module._call_impl`` itself is handling, if it is."""
    error = sys.exc_info()[1]
    if error is None or error.__traceback__ is None or error.__traceback__.tb_frame is not caller:
        return None
    return type(error).__qualname__


def _count_lost(calls: list[_Call]) -> None:
    for call in calls:
        if call[_SPAN_ID]:
            call[_TRACE].lost += 1
