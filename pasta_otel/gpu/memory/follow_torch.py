"""What PyTorch's caching allocator hands out and takes back.

Its trace (``torch.cuda._gpu_trace``, made for ``torch.cuda._sanitizer``) calls back in the allocating thread, outside
the allocator's lock, after an allocation and before a free. It tells the address alone. The length follows from the
allocator's statistics, where exactly one allocation was counted since we last looked; where threads allocate side by
side, or the allocator keeps no such statistics (cudaMallocAsync), it stays unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

TRACE = "torch.cuda._gpu_trace"


class Allocations(Protocol):
    """Is told of tensors."""

    def allocated(self, address: int, size: int, *, source: str = "", module: str = "") -> None:
        """Take note of a new one."""

    def freed(self, address: int) -> None:
        """Take note of its end."""


class FollowTorch:
    """The receiver of the allocator's trace.

    Args:
        tensors: Is told.
        place: Says in the allocating thread: line of the program, module that is running.
        report: Is told what goes wrong.
        modules: ``sys.modules``.
    """

    def __init__(
        self,
        tensors: Allocations,
        place: Callable[[], tuple[str, str]],
        report: Callable[[object], None],
        modules: dict[str, ModuleType] | None = None,
    ) -> None:
        self._tensors, self._place, self._report = tensors, place, report
        self._modules = sys.modules if modules is None else modules
        self._core: Any = None
        self._seen: dict[int, tuple[int, int]] = {}

    def start(self) -> None:
        """Begin to follow; a PyTorch without CUDA has nothing to follow."""
        core: Any = getattr(self._modules.get("torch"), "_C", None)
        if not hasattr(core, "_cuda_memoryStats"):
            return
        trace = import_module(TRACE)
        self._core = core
        trace.register_callback_for_memory_allocation(self.allocated)
        trace.register_callback_for_memory_deallocation(self.freed)
        core._activate_gpu_trace()

    def allocated(self, address: int) -> None:
        """Note an allocation (the trace's callback)."""
        try:
            source, module = self._place()
            self._tensors.allocated(address, self._size(), source=source, module=module)
        except Exception as error:  # noqa: BLE001 - the program goes on
            self._report(error)

    def freed(self, address: int) -> None:
        """Note a free (the trace's callback)."""
        try:
            self._tensors.freed(address)
        except Exception as error:  # noqa: BLE001 - as above
            self._report(error)

    def _size(self) -> int:
        """Return the bytes asked for, if one allocation alone was counted since the last look; else 0."""
        device = self._core._cuda_getDevice()  # the allocating thread's: that of the new memory
        stats = self._core._cuda_memoryStats(device)
        size = stats.get("requested_bytes") or stats["allocated_bytes"]
        count, total = stats["allocation"]["all"]["allocated"], size["all"]["allocated"]
        count_before, total_before = self._seen.get(device, (0, 0))
        self._seen[device] = (count, total)
        return max(0, total - total_before) if count == count_before + 1 else 0
