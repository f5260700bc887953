"""Where the host's time went, by op and by module: what a trace without GPU work still says.

Each moment of a thread belongs to the innermost op, annotation or module frame around it (other Python frames are
passed over), so that the parts add up to the time in which the threads were in any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.modules import MODULE_PREFIX
from pasta_otel.gpu.analysis.nesting import parents_by_nesting, self_times_ns
from pasta_otel.gpu.analysis.timeline import NO_SEQUENCE, STEP_PREFIX, OpKind, Ops, Timeline

UNKNOWN = 0
"""The number of the empty text."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Self time of one op or module.

    Attributes:
        name: Op or annotation name, or module; "" = in no module that is known.
        count: Regions.
        self_ns: Their time without what lies within them, summed over threads.
    """

    name: str
    count: int
    self_ns: int


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Times of the host's threads.

    Attributes:
        threads: Threads with at least one region.
        busy_ns: Time within any region, summed over threads.
        ops: By op and annotation, longest self time first; steps together as ``ProfilerStep``.
        modules: By torch module, longest first; self time of its frames and of the ops in them.
    """

    threads: int
    busy_ns: int
    ops: Sequence[HostTime]
    modules: Sequence[HostTime]


def host_times(timeline: Timeline) -> HostTimes:
    """Return where the host's time went."""
    names = timeline.names
    module_names = np.array([name.startswith(MODULE_PREFIX) for name in names] or [False], np.bool_)
    every = timeline.ops
    is_frame = (every["kind"] == OpKind.PYTHON) & module_names[every["name"]]
    kept = ~every["unfinished"] & (is_frame | (every["kind"] != OpKind.PYTHON))
    ops, is_frame = every[kept], is_frame[kept]
    parents = parents_by_nesting(ops)
    own = self_times_ns(ops, parents)
    return HostTimes(
        threads=len(np.unique(ops["thread"])),
        busy_ns=int(own.sum()),
        ops=_sums(names, ops["name"][~is_frame], own[~is_frame]),
        modules=_sums(names, _owners(ops, parents, is_frame), own),
    )


def _owners(ops: Ops, parents: NDArray[np.int64], is_frame: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return each region's module: its own, else that of what is around it, else that of its forward op."""
    own = np.where(is_frame, ops["name"], ops["module"]).astype(np.int64).tolist()
    around, sequence = parents.tolist(), ops["sequence"].tolist()
    backward, is_op = ops["backward"].tolist(), (ops["kind"] == OpKind.OP).tolist()
    forward: dict[int, int] = {}
    for row in np.lexsort((-ops["end"].astype(np.int64), ops["start"])).tolist():  # what is around comes first
        numbered = is_op[row] and sequence[row] != NO_SEQUENCE
        if own[row] == UNKNOWN and around[row] >= 0:
            own[row] = own[around[row]]
        if own[row] == UNKNOWN and numbered and backward[row]:
            own[row] = forward.get(sequence[row], UNKNOWN)
        elif numbered and not backward[row]:
            forward[sequence[row]] = own[row]
    return np.array(own, np.int64)


def _sums(names: Sequence[str], codes: NDArray[np.int64], own: NDArray[np.int64]) -> list[HostTime]:
    totals: dict[str, list[int]] = {}
    distinct, inverse = np.unique(codes, return_inverse=True)
    times = np.zeros(len(distinct), np.int64)
    np.add.at(times, inverse, own)
    counts = np.bincount(inverse, minlength=len(distinct))
    for code, count, self_ns in zip(distinct.tolist(), counts.tolist(), times.tolist(), strict=True):
        name = names[code].removeprefix(MODULE_PREFIX)
        entry = totals.setdefault(STEP_PREFIX[:-1] if name.startswith(STEP_PREFIX) else name, [0, 0])
        entry[0] += count
        entry[1] += self_ns
    found = [HostTime(name, count, self_ns) for name, (count, self_ns) in totals.items()]
    return sorted(found, key=lambda entry: -entry.self_ns)
