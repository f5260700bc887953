"""What CuPy's memory pools hand out and take back.

CuPy keeps memory hooks for each thread by itself. Ours is put into the thread that imports CuPy, and into every one
that ``threading`` starts from then on: by a profile function that takes itself out at the first call.
Pools that sit on cudaMallocAsync call no hooks.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

from pasta_otel.gpu.memory.follower import Follower

HOOKS = "cupy.cuda.memory_hook"
NAME = "pasta_otel"


class FollowCupy(Follower):
    """Installs a memory hook in every thread."""

    _hook: Any

    def start(self) -> None:
        """Begin to follow, in this thread and in those yet to be started."""
        hooks: Any = self._modules.get(HOOKS) or import_module(HOOKS)
        self._hook = _hook_class(hooks.MemoryHook)(self)
        self.follow_thread()
        if threading.getprofile() is None:  # else somebody else needs that place: their threads are not followed
            threading.setprofile(self._thread_begins)
        else:
            self._report("CuPy's memory is followed in one thread only: there is another profile function")

    def follow_thread(self) -> None:
        """Put the hook into the calling thread, to stay there."""
        with suppress(KeyError):  # it is there
            self._hook.__enter__()

    def _thread_begins(self, *_: object) -> None:
        sys.setprofile(None)
        try:
            self.follow_thread()
        except Exception as error:  # noqa: BLE001 - the program goes on
            self._report(error)


def _hook_class(base: Any) -> Any:
    class Hook(base):  # type: ignore[misc]  # CuPy's own class
        """Tells tensors what CuPy tells of its pools."""

        name = NAME

        def __init__(self, follower: Follower) -> None:
            self._follower = follower

        def malloc_postprocess(self, *, size: int, mem_ptr: int, **_: object) -> None:
            """Note an allocation."""
            self._follower.noted(mem_ptr, lambda: size)

        def free_preprocess(self, *, mem_ptr: int, **_: object) -> None:
            """Note a free, before another thread can have the memory."""
            self._follower.freed(mem_ptr)

    return Hook
