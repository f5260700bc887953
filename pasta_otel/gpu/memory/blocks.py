"""Parts of a program that are analysed for themselves: ``with pasta_otel.analyze()`` blocks, several at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pasta_otel.gpu.memory.selection import Chooser, Selection
from pasta_otel.gpu.memory.tool import LaunchInfo


class Part:
    """What one block wants, and what it got so far.

    Args:
        selection: Which launches it wants.

    Attributes:
        seen: Launches while it was open.
        skipped: Those of them that are not analysed, by reason.
        launches: Those that are, with the tool's record of each, in the order in which they were read.
    """

    def __init__(self, selection: Selection) -> None:
        self._chooser = Chooser(selection)
        self._waiting: set[int] = set()
        self.seen = 0
        self.skipped: Counter[str] = Counter()
        self.launches: list[tuple[LaunchInfo, Any]] = []

    @property
    def pending(self) -> int:
        """Return how many launches are not in yet: their stream has not passed, or nothing has waited for it."""
        return len(self._waiting)

    @property
    def chooser(self) -> Chooser:
        """Return what chooses its launches."""
        return self._chooser

    @property
    def asks_for_modules(self) -> bool:
        """Return whether the torch module of a launch decides."""
        return self._chooser.asks_for_modules

    def wants(self, number: int, name: str, module: str = "", nodes: int = 0) -> str:
        """Return why this launch (nodes of a graph) is not wanted; empty = it is."""
        self.seen += max(1, nodes)
        reason = self._chooser.refusal(name, module)
        if reason:
            self.skipped[reason] += max(1, nodes)
        else:
            self._waiting.add(number)
        return reason

    def take(self, launch: LaunchInfo, result: Any) -> None:
        """Take a launch that was wanted."""
        self.launches.append((launch, result))
        self._waiting.discard(launch.number)

    def lose(self, number: int, reason: str, nodes: int = 0) -> None:
        """Note that a launch that was wanted will not come."""
        self._waiting.discard(number)
        self._chooser.chosen -= 1
        self.skipped[reason] += max(1, nodes)


class OpenBlocks:
    """The blocks of a process that are open, and the launches that they wait for (``collector.Blocks``).

    A block covers all threads while it is open: PyTorch's backward pass launches from threads of its own.

    Args:
        required: Whether launches outside every block are left alone.
        keep: Whether launches are kept for the process as a whole too.
    """

    def __init__(self, *, required: bool, keep: bool) -> None:
        self._required, self._keep = required, keep
        self._open: tuple[Part, ...] = ()
        self._wanted: dict[int, list[Part]] = {}

    @property
    def active(self) -> bool:
        """Return whether any launch may be analysed now."""
        return bool(self._open) or not self._required

    def open(self, part: Part) -> None:
        """Begin a block; the caller sees to it that nobody else does at this moment."""
        self._open = (*self._open, part)

    def close(self, part: Part) -> None:
        """End a block; launches that it waits for still come to it."""
        at = next(at for at, one in enumerate(self._open) if one is part)
        self._open = (*self._open[:at], *self._open[at + 1 :])

    @property
    def asks_for_modules(self) -> bool:
        """Return whether the torch module of a launch decides for an open block."""
        return any(part.asks_for_modules for part in self._open)

    def refusal(self, number: int, name: str, module: str = "", nodes: int = 0, /) -> str:
        """Return why nobody wants this launch; empty = it is analysed."""
        entered_twice_counts_once = dict.fromkeys(self._open)
        refusals = {part: part.wants(number, name, module, nodes) for part in entered_twice_counts_once}
        wanting = [part for part, reason in refusals.items() if not reason]
        if wanting:
            self._wanted[number] = wanting
        elif self._required:
            return next(reversed(refusals.values()), "inactive")
        return ""

    def analysed(self, launch: LaunchInfo, result: Any, /) -> bool:
        """Hand a launch to the blocks that wanted it; True = it need not be kept otherwise."""
        for part in self._wanted.pop(launch.number, ()):
            part.take(launch, result)
        return not self._keep

    def lost(self, number: int, reason: str, nodes: int = 0, /) -> None:
        """Tell the blocks that wanted it."""
        for part in self._wanted.pop(number, ()):
            part.lose(number, reason, nodes)
