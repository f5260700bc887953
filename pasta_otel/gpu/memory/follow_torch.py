"""What PyTorch's caching allocator hands out and takes back.

Its trace (``torch.cuda._gpu_trace``, made for ``torch.cuda._sanitizer``) calls back in the allocating thread, outside
the allocator's lock, after an allocation and before a free. It tells the address alone. The length follows from the
allocator's statistics, where exactly one allocation was counted since we last looked; where threads allocate side by
side, or the allocator keeps no such statistics (cudaMallocAsync), it stays unknown.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pasta_otel.gpu.memory.follower import Follower

TRACE = "torch.cuda._gpu_trace"


class FollowTorch(Follower):
    """The receiver of the allocator's trace."""

    _core: Any
    _seen: dict[int, tuple[int, int]]
    """By device: allocations and bytes counted so far."""

    def start(self) -> None:
        """Begin to follow; a PyTorch without CUDA has nothing to follow."""
        core: Any = getattr(self._modules.get("torch"), "_C", None)
        if not hasattr(core, "_cuda_memoryStats"):
            return
        trace = import_module(TRACE)
        self._core, self._seen = core, {}
        trace.register_callback_for_memory_allocation(self.allocated)
        trace.register_callback_for_memory_deallocation(self.freed)
        core._activate_gpu_trace()

    def allocated(self, address: int) -> None:
        """Note an allocation (the trace's callback)."""
        self.noted(address, self._size)

    def _size(self) -> int:
        """Return the bytes asked for, if one allocation alone was counted since the last look; else 0."""
        device = self._core._cuda_getDevice()  # the allocating thread's: that of the new memory
        stats = self._core._cuda_memoryStats(device)
        size = stats.get("requested_bytes") or stats["allocated_bytes"]
        count, total = stats["allocation"]["all"]["allocated"], size["all"]["allocated"]
        count_before, total_before = self._seen.get(device, (0, 0))
        self._seen[device] = (count, total)
        return max(0, total - total_before) if count == count_before + 1 else 0
