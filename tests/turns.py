"""Whose turn it is, where several pytest processes share a machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(machine: Path, queue: Path, *, alone: bool) -> Iterator[None]:
    """Share the machine with other processes' tests, or have it alone.

    Both paths are only locked, and stand for the machine and for the end of the queue before it: who waits for the machine
    holds the queue, so that nobody overtakes. What was locked is given back by hand, since a test's forks have the
    descriptors, too.
    """
    places = [os.open(path, os.O_RDONLY) for path in (queue, machine)]
    try:
        fcntl.flock(places[0], fcntl.LOCK_EX)
        fcntl.flock(places[1], fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(places[0], fcntl.LOCK_UN)
        yield
    finally:
        for place in places:
            fcntl.flock(place, fcntl.LOCK_UN)
            os.close(place)
