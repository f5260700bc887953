"""Renew objects in forked children."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something that must not go on in a child as the parent left it."""

    def after_fork(self) -> None:
        """Replace locks, threads, queues and connections, in the child."""


def renew_in_children(owner: Renewable) -> None:
    """Call ``owner.after_fork()`` in every later child, without keeping the owner alive for that."""
    reference = weakref.ref(owner)

    def renew() -> None:
        alive = reference()
        if alive is not None:
            alive.after_fork()

    os.register_at_fork(after_in_child=renew)
