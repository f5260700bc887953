"""One controller acts, others watch: a lock behind a Protocol.

A lock is not a fence: a leader that is stopped for long (SIGSTOP, a paused machine) may act once more when it wakes.
Actions therefore expire by themselves and are keyed by the burn they answer.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol


class Leader(Protocol):
    """Says whether this process is the one that acts."""

    def lead(self) -> bool:
        """Return whether we lead, taking the lead when it is free; never blocks."""

    def release(self) -> None:
        """Give the lead up."""


class FileLeader:
    """Lead by ``flock`` on a file of one machine: the kernel frees it when the process ends, ``kill -9`` included.

    Args:
        path: The lock file; it holds the leader's process id, for people.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._descriptor: int | None = None

    def lead(self) -> bool:
        """Return whether we hold the lock, or could take it now."""
        if self._descriptor is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give the lock up; another process may take it at once."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
