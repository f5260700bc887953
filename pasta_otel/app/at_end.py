"""What runs when this process ends, also where it is a child that ``multiprocessing`` started.

Such a child leaves by ``os._exit``: ``atexit`` never runs in it, but ``multiprocessing``'s own finalizers do.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

UNHEARD_SECONDS = 2.0  # how long a program's end waits for a collector that never took anything
LAST = -100  # priority among multiprocessing's finalizers: its queues' are -5 and above


def hurry_unheard() -> None:
    """Before what is queued is sent for the last time: bound the wait for a collector that was never there."""
    from pasta_otel.exporters.otlp.sender import limit_unheard  # noqa: PLC0415 - 100 ms of imports, when needed

    limit_unheard(UNHEARD_SECONDS)


class AtEnd:
    """Call something once when this process ends, and once in each forked child when that ends.

    Args:
        end: What to call.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        self._end, self._ended_pid = end, 0
        atexit.register(self)  # keeps it alive, too
        self._finalize()
        os.register_at_fork(after_in_child=self._after_fork)

    def __call__(self) -> None:
        """Call it, unless this process did so before."""
        if self._ended_pid != os.getpid():
            self._ended_pid = os.getpid()
            hurry_unheard()
            self._end()

    def _after_fork(self) -> None:
        """In a child: multiprocessing, if it is who forked, forgets all finalizers next and then asks who renews."""
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, AtEnd._finalize)

    def _finalize(self) -> None:
        process: Any = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            from multiprocessing.util import Finalize  # noqa: PLC0415 - only where multiprocessing is in use

            Finalize(None, self, exitpriority=LAST)


def at_exit(shutdown: Callable[[], object]) -> None:
    """Shut something down when the program ends; all of it together waits ``UNHEARD_SECONDS`` for who is not there."""
    AtEnd(shutdown)
