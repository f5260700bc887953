"""A lock that knows whether the calling thread holds it."""

from __future__ import annotations

import threading
from types import TracebackType


class OwnedLock:
    """Like ``threading.Lock``, for ``with`` alone.

    A collection of garbage can begin at nearly any line of Python, also between two lines that hold a lock, and what it
    frees may come back to us from the driver in the same thread, which must not wait for itself.
    """

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0

    @property
    def mine(self) -> bool:
        """Return whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        """Wait for it."""
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self._owner = 0
        self._lock.release()
