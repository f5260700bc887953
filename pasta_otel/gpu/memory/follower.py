"""What the followers of PyTorch's and CuPy's allocators share: they tell of tensors, and never stop the program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

from pasta_otel.gpu.memory.handlers import from_a_handler


class Allocations(Protocol):
    """Is told of tensors."""

    def allocated(self, address: int, size: int, *, source: str = "", module: str = "") -> None:
        """Take note of a new one."""

    def freed(self, address: int) -> None:
        """Take note of its end."""


class Follower:
    """Tells of tensors what an allocator does.

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

    def noted(self, address: int, size: Callable[[], int]) -> None:
        """Note an allocation, in its thread."""
        try:
            source, module = self._place()
            self._tensors.allocated(address, size(), source=source, module=module)
        except Exception as error:
            if from_a_handler(error):
                raise
            self._report(error)

    def freed(self, address: int) -> None:
        """Note a free."""
        try:
            self._tensors.freed(address)
        except Exception as error:
            if from_a_handler(error):
                raise
            self._report(error)
