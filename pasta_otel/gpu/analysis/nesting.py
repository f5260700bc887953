"""How host regions contain each other: by thread and time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.timeline import Ops


def parents_by_nesting(ops: Ops) -> NDArray[np.int64]:
    """Return for each host region the row of the one around it on its thread; -1 = none."""
    parents = np.full(len(ops), -1, np.int64)
    order = np.lexsort((-ops["end"].astype(np.int64), ops["start"], ops["thread"]))
    starts, ends = ops["start"].tolist(), ops["end"].tolist()
    threads = ops["thread"].tolist()
    stack: list[int] = []
    for row in order.tolist():
        while stack and (
            threads[stack[-1]] != threads[row] or ends[stack[-1]] < ends[row] or ends[stack[-1]] <= starts[row]
        ):
            stack.pop()
        if stack:
            parents[row] = stack[-1]
        stack.append(row)
    return parents


def self_times_ns(ops: Ops, parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the part of each region that lies in none of its children."""
    duration = (ops["end"] - ops["start"]).astype(np.int64)
    inside = np.zeros(len(ops), np.int64)
    np.add.at(inside, parents[parents >= 0], duration[parents >= 0])
    own: NDArray[np.int64] = np.maximum(duration - inside, 0)
    return own
