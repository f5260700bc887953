"""A lock that knows whether the calling thread holds it."""

from __future__ import annotations

from _thread import RLock


class OwnedLock(RLock):  # type: ignore[misc]  # typeshed has it final; it is not: threading.Condition's users do this
    """A lock for ``with`` alone, not to be taken again by the thread that has it.

    A collection of garbage can begin at nearly any line of Python, also between two lines that hold a lock, and what it
    frees may come back to us from the driver in the same thread, which must not wait for itself; so may a handler of a
    signal. ``threading.RLock`` takes and owns in one step, and enters and leaves ``with`` in C: a handler that raises
    never leaves it taken.
    """

    @property
    def mine(self) -> bool:
        """Return whether the calling thread holds it."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks
