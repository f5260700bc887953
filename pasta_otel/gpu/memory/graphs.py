"""CUDA graphs: slots that are reserved for a launch of one, and functions that have a slot since.

A graph's GPU kernels are told of while the driver holds its lock, where Python cannot be asked. So slots are reserved
before, one for each GPU kernel: as many as its last launch had, or ``MOST_KERNELS`` for the first. They are given
natively, to the functions (a slot given to a node's launch is that of the whole graph: Sanitizer 13.0 on an H200).
Afterwards the collector decides which of them count.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pasta_otel.gpu.memory.native import Node
from pasta_otel.gpu.memory.slabs import Slab

MOST_KERNELS = 64
"""Different GPU kernels that the first launch of a graph can have: a decoding step of a transformer has a few dozen."""
MOST_GRAPHS = 4096
"""Graphs whose number of GPU kernels is remembered."""


@dataclass(slots=True)
class Reserved:
    """What one launch of a graph was given.

    Attributes:
        executable: The graph.
        wanted: How many slots it should have.
        slots: Those it got.
        reason: Why it did not get all.
    """

    executable: int
    wanted: int
    slots: list[tuple[Slab, int]] = field(default_factory=list)
    reason: str = ""


class Graphs:
    """Launches of graphs, one a thread at a time."""

    def __init__(self) -> None:
        self._launching: dict[int, Reserved] = {}
        self._sizes: dict[int, int] = {}

    def begin(self, executable: int) -> Reserved:
        """Begin a launch in this thread."""
        reserved = Reserved(executable, self._sizes.get(executable, MOST_KERNELS))
        self._launching[threading.get_ident()] = reserved
        return reserved

    @property
    def here(self) -> Reserved | None:
        """Return what this thread's launch was given; None = it is none of a graph."""
        return self._launching.get(threading.get_ident())

    def end(self, nodes: Sequence[Node]) -> None:
        """End this thread's launch.

        Args:
            nodes: What it launched; none = it failed, and tells nothing about the next launch.
        """
        reserved = self._launching.pop(threading.get_ident(), None)
        if len(self._sizes) >= MOST_GRAPHS:
            self._sizes.clear()
        if nodes and reserved is not None:
            self._sizes[reserved.executable] = len(nodes)
