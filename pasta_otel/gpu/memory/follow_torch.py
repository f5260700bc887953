"""What PyTorch's caching allocator hands out and takes back.

Its trace (``torch.cuda._gpu_trace``, made for ``torch.cuda._sanitizer``) calls back in the allocating thread, outside
the allocator's lock, after an allocation and before a free. It tells the address alone. The length follows from the
allocator's statistics, where exactly one allocation was counted that we have not been told of; where threads allocate
side by side, or the allocator keeps no such statistics (cudaMallocAsync), it stays unknown.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pasta_otel.gpu.memory.follower import Follower

TRACE = "torch.cuda._gpu_trace"


@dataclass(slots=True)
class Counted:
    """What a device's statistics said when we last looked, and how often we did: once for each allocation.

    Attributes:
        allocations: Counted then.
        total: Bytes counted then.
        looks: How often we looked.
        ahead: The least that the count was ahead of our looks: more than that are allocations yet to be told of.
    """

    allocations: int = 0
    total: int = 0
    looks: int = 0
    ahead: int = 0

    def look(self, allocations: int, total: int) -> int:
        """Return the bytes of the allocation that is being told of; 0 where it may be another thread's."""
        self.looks += 1
        self.ahead = min(self.ahead, allocations - self.looks)
        alone = allocations - self.looks == self.ahead and allocations == self.allocations + 1
        size = total - self.total if alone else 0
        self.allocations, self.total = allocations, total
        return max(0, size)


class FollowTorch(Follower):
    """The receiver of the allocator's trace."""

    _core: Any
    _counted: dict[int, Counted]
    """By device."""
    _looking: threading.RLock
    """Around a look: another thread's may not come between reading and comparing. No lock is ever waited for by one
    who has the allocator's."""

    def start(self) -> None:
        """Begin to follow; a PyTorch without CUDA has nothing to follow."""
        core: Any = getattr(self._modules.get("torch"), "_C", None)
        if not hasattr(core, "_cuda_memoryStats"):
            return
        trace = import_module(TRACE)
        self._core, self._counted, self._looking = core, {}, threading.RLock()
        trace.register_callback_for_memory_allocation(self.allocated)
        trace.register_callback_for_memory_deallocation(self.freed)
        core._activate_gpu_trace()

    def allocated(self, address: int) -> None:
        """Note an allocation (the trace's callback)."""
        self.noted(address, self._size)

    def _make_streams(self, device: int) -> None:
        """Have PyTorch make a device's streams now, which it does at once for all, when the first is asked for.

        While it does, it tells the trace of each, and so waits for Python's interpreter lock; a thread that has that
        lock and asks for a stream too waits for the first one: both for ever (PyTorch 2.11). A program's first
        allocation is early, and seldom in several threads.
        """
        self._modules["torch"].cuda.Stream(device)

    def _size(self) -> int:
        """Return the bytes asked for, if one allocation alone was counted that we had not been told of; else 0."""
        device = self._core._cuda_getDevice()  # the allocating thread's: that of the new memory
        with self._looking:
            if device not in self._counted:
                self._counted[device] = Counted()
                self._make_streams(device)
            stats = self._core._cuda_memoryStats(device)
            size = stats.get("requested_bytes") or stats["allocated_bytes"]
            return self._counted[device].look(stats["allocation"]["all"]["allocated"], size["all"]["allocated"])
