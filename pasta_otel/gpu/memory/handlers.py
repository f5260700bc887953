"""Exceptions that the program's own handlers of signals raise while our code happens to run: they are the program's."""

from __future__ import annotations

import functools
import signal
from types import CodeType, TracebackType
from typing import Any


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    method = type(handler).__call__ if callable(handler) else None  # of an object that is called
    codes = (getattr(one, "__code__", None) for one in (handler, getattr(handler, "__func__", None), method))
    return next((code for code in codes if isinstance(code, CodeType)), None)


def from_a_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal raised this, also below other calls of its own."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return not isinstance(error, (Exception, SystemExit))
