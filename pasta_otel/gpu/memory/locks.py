"""A lock that knows whether the calling thread holds it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any


class OwnedLock:
    """A lock for ``with`` alone, not to be taken again by the thread that has it.

    A collection of garbage can begin at nearly any line of Python, also between two lines that hold a lock, and what it
    frees may come back to us from the driver in the same thread, which must not wait for itself; so may a handler of a
    signal. ``threading.RLock`` takes and owns in one step.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    @property
    def mine(self) -> bool:
        """Return whether the calling thread holds it."""
        return bool(self._lock._is_owned())  # noqa: SLF001 - as threading.Condition asks

    def __enter__(self) -> None:
        """Wait for it."""
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self._lock.release()
