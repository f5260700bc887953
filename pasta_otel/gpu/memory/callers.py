"""Who launches a GPU kernel: the callback runs in the launching thread, below its frames and in its context."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import FrameType

LIBRARIES = frozenset({"torch", "cupy", "cupyx", "cupy_backends", "triton", "cuda", "functorch", "torchgen"})
"""Packages whose own lines say nothing about the program: their caller is asked for."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_OURS = str(Path(__file__).parents[1]) + os.sep
"""``pasta_otel.gpu``: hooks of torch and CuPy run below the program's frames."""
_GENERATED = ("<frozen", "<eval_with_key", "<__array_function__", _OURS)
"""Beginnings of the names of code that nobody wrote: ``torch.fx`` graphs, NumPy's dispatch; and of ours."""
_COMPILED = "torchinductor_"
"""Folder of the code that torch.compile generates: this, and the user's name."""


@lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Tell whether a source file belongs to us, to one of ``LIBRARIES`` or to the interpreter itself."""
    if file.startswith(_GENERATED):
        return True
    parts = Path(file).parts
    installed = any(folder in _PACKAGES and child in LIBRARIES for folder, child in pairwise(parts))
    return installed or any(folder.startswith(_COMPILED) for folder in parts)


def calling_line() -> str:
    """Return ``file:line function`` of the program's innermost frame; empty in threads without Python."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - inspect.currentframe() is the same, slower
    while frame is not None:
        code = frame.f_code
        if not is_library(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
        frame = frame.f_back
    return ""


def current_span() -> str:
    """Return ``trace id-span id`` of the span that the thread is in, in hexadecimal; empty where there is none.

    OpenTelemetry is not imported here: a program that has no spans may not have it.
    """
    get_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if get_span is None:
        return ""
    context = get_span().get_span_context()
    return f"{context.trace_id:032x}-{context.span_id:016x}" if context.is_valid else ""


@dataclass(frozen=True, slots=True)
class Caller:
    """The launching side of one launch.

    Attributes:
        time_unix_nano: When it was launched.
        source: ``file:line function`` of the program; empty where no Python launched.
        span: ``trace id-span id`` of the span around it; empty where there is none.
        module: Qualified name of the torch module that is running; empty where none is.
    """

    time_unix_nano: int
    source: str = ""
    span: str = ""
    module: str = ""


NOBODY = Caller(0)


def no_module() -> str:
    """Return an empty name: nobody follows torch's modules."""
    return ""


def caller(module: Callable[[], str] = no_module) -> Caller:
    """Return who is launching, in its thread.

    Args:
        module: Says which torch module is running there (``Layers.current``).
    """
    return Caller(time.time_ns(), calling_line(), current_span(), module())
