"""Which torch modules a thread is inside of, read from its frames."""

from __future__ import annotations

from types import FrameType
from typing import Any


def running_modules(frame: FrameType | None) -> list[Any]:
    """Return the modules whose calls enclose a frame, outermost first."""
    running: list[Any] = []
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and "self" in frame.f_locals:
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    return running[::-1]
