"""Callbacks on flag changes, on a thread of their own so that a slow one delays neither requests nor polls."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

SECOND_NS = 1_000_000_000
_log = logging.getLogger(__name__)
Callback = Callable[[Any], Any]


class FlagView(Protocol):
    """What the dispatcher asks of the flags."""

    def get(self, name: str, default: Any) -> Any:
        """Return the value now, or the default."""

    def next_expiry_ns(self) -> int:
        """Return the monotonic time at which the next value expires."""


@dataclass(slots=True)
class _Handler:
    flag: str
    callback: Callback
    default: Any
    last: Any
    loop: asyncio.AbstractEventLoop | None


class HandlerDispatcher:
    """Call each handler once per change of its flag, with the new value; the latest value wins over missed ones.

    Args:
        view: The flags.
        monotonic_ns: The clock on which ``next_expiry_ns`` runs.
    """

    def __init__(self, view: FlagView, monotonic_ns: Callable[[], int]) -> None:
        self._view, self._monotonic_ns = view, monotonic_ns
        self._handlers: list[_Handler] = []
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def register(self, flag: str, callback: Callback, default: Any = False) -> None:
        """Register a callback; a coroutine function runs on the loop that runs now, else on one made for the call."""
        self._handlers = [*self._handlers, _Handler(flag, callback, default, default, _running_loop())]
        self.start()
        self.wake()

    def unregister(self, callback: Callback) -> None:
        """Forget a callback."""
        self._handlers = [handler for handler in self._handlers if handler.callback is not callback]

    def adopt(self, before: HandlerDispatcher) -> None:
        """Take over the handlers of a dispatcher that was stopped, with the values they were last told."""
        self._handlers = [*before._handlers, *self._handlers]

    def wake(self) -> None:
        """Look for changes soon; called after every poll."""
        self._wake.set()

    def start(self) -> None:
        """Start the thread if there is anything to call and it does not run."""
        if self._thread is None and self._handlers and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="pasta-flag-handlers", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop calling."""
        self._stopped = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def restart_after_fork(self) -> None:
        """Start the child's own thread."""
        self._wake, self._thread = threading.Event(), None
        self.start()

    def dispatch(self) -> int:
        """Call the handlers whose value changed; returns how many were called."""
        called = 0
        for handler in self._handlers:
            value = self._view.get(handler.flag, handler.default)
            if value != handler.last:
                handler.last = value
                called += 1
                _call(handler, value)
        return called

    def _run(self) -> None:
        while not self._stopped:
            wait_ns = self._view.next_expiry_ns() - self._monotonic_ns()
            self._wake.wait(max(0.001, min(wait_ns / SECOND_NS, 60.0)))
            self._wake.clear()
            if not self._stopped:
                self.dispatch()


def _call(handler: _Handler, value: Any) -> None:
    try:
        result = handler.callback(value)
        if inspect.isawaitable(result):
            _finish(result, handler)
    except Exception:  # noqa: BLE001 - the application's own code: reported, never passed on to the other handlers
        _log.exception("handler for %s failed", handler.flag)


def _finish(awaitable: Any, handler: _Handler) -> None:
    async def run() -> None:
        try:
            await awaitable
        except Exception:  # noqa: BLE001 - as below
            _log.exception("handler for %s failed", handler.flag)

    if handler.loop is not None and handler.loop.is_running():
        asyncio.run_coroutine_threadsafe(run(), handler.loop)
    else:
        asyncio.run(run())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
