"""SIGTERM: what is pending is finished first, and the program still ends by the signal, within a time."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, ModuleType

_log = logging.getLogger(__name__)
Finish = Callable[[float], None]
"""Finishes what is pending; gets the time that it may take, in seconds."""


class Termination:
    """The end of a process by SIGTERM, after each of some functions has run once.

    They run in a thread of their own: the signal may have interrupted somebody who holds a lock that they need, and
    the main thread may be in a C call. If that keeps the interpreter, ``_deadline`` ends the process at the limit.

    Args:
        limit_s: Longest time between the signal and the end.
        deadline: ``_deadline``; None where the package was built without a compiler. Then the main thread must come
            back to Python code before anything happens.
    """

    def __init__(self, limit_s: float, deadline: ModuleType | None) -> None:
        self._limit_s, self._deadline = limit_s, deadline
        self._finishes: list[Finish] = []
        self._watcher: threading.Thread | None = None
        self._reset()

    def add(self, finish: Finish) -> None:
        """Run this at the end too, in the order of adding."""
        self._finishes.append(finish)

    def install(self) -> None:
        """Handle SIGTERM from now on, and in forked children. A handler that the program sets takes its place."""
        signal.signal(signal.SIGTERM, self._on_signal)
        if self._deadline is None:
            return
        try:
            self._deadline.install(self._limit_s)
        except OSError:  # no timer left for this user: the handler alone does what it can
            self._deadline = None
            return
        self._watch()
        os.register_at_fork(after_in_child=self._in_child)

    def _reset(self) -> None:
        self._claim, self._ended = threading.Lock(), threading.Event()

    def _in_child(self) -> None:
        self._reset()
        if self._deadline is not None and signal.getsignal(signal.SIGTERM) == self._on_signal:
            try:
                self._deadline.renew()
            except OSError:
                self._deadline = None
            else:
                self._watch()

    def _watch(self) -> None:
        self._watcher = threading.Thread(target=self._wait_and_end, name="pasta-sigterm", daemon=True)
        self._watcher.start()

    def _wait_and_end(self) -> None:
        if self._deadline is not None:
            self._deadline.wait()
            self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Keep the main thread from going on; where nobody else is awake, do what there is to do."""
        del frame
        until = time.monotonic() + self._limit_s
        if self._deadline is None:
            signal.signal(number, signal.SIG_DFL)
        else:
            self._deadline.begin()  # a server with its own handler raises the signal again through this one alone
        if self._watcher is None or not self._watcher.is_alive():
            threading.Thread(target=self._end, daemon=True).start()
        self._ended.wait(max(0.0, until - time.monotonic()))
        self._kill()

    def _end(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        until = time.monotonic() + (self._deadline.left() if self._deadline is not None else self._limit_s)
        try:
            for finish in tuple(self._finishes):
                _guarded(finish, max(0.0, until - time.monotonic()))
        finally:
            self._kill()
            self._ended.set()  # reached by process 1 alone, which the signal's default action does not end

    def _kill(self) -> None:
        if self._deadline is not None:
            self._deadline.end()
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def _guarded(finish: Finish, seconds: float) -> None:
    try:
        finish(seconds)
    except Exception as error:  # noqa: BLE001 - the others come all the same, and the end
        _log.warning("not finished before the end by SIGTERM: %s", error)


_installed: Termination | None = None


def at_sigterm(finish: Finish, limit_s: float) -> None:
    """Run a function before SIGTERM ends a program that has no handler; it still ends by the signal.

    Servers that do have one (uvicorn) raise the signal again for the handler that was there before them: ours.
    Does nothing in a program that handles or ignores SIGTERM, and in any thread but the main one.

    Args:
        finish: Gets the time that it may take, in seconds.
        limit_s: Longest delay of the end in seconds, whatever ``finish`` and the program are doing; the first caller's
            holds.
    """
    global _installed  # noqa: PLW0603 - one signal, one process
    if _installed is not None:
        _installed.add(finish)
        return
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    installed = Termination(limit_s, _native())
    installed.add(finish)
    installed.install()
    _installed = installed


def _native() -> ModuleType | None:
    try:
        from pasta_otel.termination import _deadline  # noqa: PLC0415 - not there in a build without a compiler
    except ImportError:
        return None
    return _deadline
