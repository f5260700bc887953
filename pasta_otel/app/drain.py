"""The end of a process, bounded as a whole: every step gets what is left, and one that hangs is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

EXIT_SECONDS, EXIT_SHARE = 1.0, 0.1  # threads that were left behind and files take their time, too
LEAST_SECONDS = 0.05  # of a step when no time is left: what would end at once ends in order
log = logging.getLogger(__name__)


class Drain:
    """A budget of time.

    Args:
        seconds: For all steps together and the end of the process itself, which gets a tenth of it, 1 s at most.
        now: Monotonic seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + seconds - min(EXIT_SECONDS, EXIT_SHARE * seconds)

    def left(self, share: float = 1.0) -> float:
        """Return a share of the seconds that are left."""
        return max(LEAST_SECONDS, share * (self._end - self._now()))

    async def step(self, name: str, call: Callable[[], object], share: float = 1.0) -> bool:
        """Call from a thread of its own and wait for it within a share of what is left; False = it was left behind.

        Not ``asyncio.to_thread``: the interpreter waits for that one's threads at exit, however long they hang.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - the other steps must come
                log.error("stop of %s: %s: %s", name, type(error).__name__, error)  # noqa: TRY400 - one line is enough
            with contextlib.suppress(RuntimeError):  # it was left behind, and the loop is closed
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=run, name=f"drain-{name}", daemon=True).start()
        try:
            await asyncio.wait_for(ended.wait(), self.left(share))
        except TimeoutError:
            log.warning("stop: %s did not end in time and is left behind", name)
        return ended.is_set()
