"""GPU time by torch module: from the op's own module path, else from the ``nn.Module`` frames around its launch.

Backward work has no such frames: it gets the module of the forward op that autograd numbered alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.link import Links, innermost
from pasta_otel.gpu.analysis.timeline import NO_SEQUENCE, OpKind, Ops, Timeline

MODULE_PREFIX = "nn.Module: "
"""How torch.profiler names a module's call, with ``with_modules`` or ``with_stack``."""


@dataclass(frozen=True, slots=True)
class OwnerTime:
    """GPU time that one op or module caused.

    Attributes:
        name: Op name or module path; "" = not known.
        count: Pieces of GPU work.
        total_ns: Sum of their durations.
    """

    name: str
    count: int
    total_ns: int


def by_op(timeline: Timeline, links: Links) -> list[OwnerTime]:
    """Return GPU time by the name of the op that launched it, longest first."""
    names = np.concatenate([timeline.ops["name"].astype(np.int64), [0]])[links.op]
    return _sums(links, names, timeline)


def by_module(timeline: Timeline, links: Links) -> list[OwnerTime]:
    """Return GPU time by module, longest first."""
    return _sums(links, module_of(timeline, links), timeline)


def module_of(timeline: Timeline, links: Links) -> NDArray[np.int64]:
    """Return for each piece of work the number of its module's text in ``timeline.names``; 0 = not known."""
    ops = timeline.ops
    said = np.concatenate([ops["module"].astype(np.int64), [0]])[links.op]
    is_module = (ops["kind"] == OpKind.PYTHON) & np.isin(ops["name"], _module_names(timeline))
    if not is_module.any():
        return said
    frame = innermost(ops, links.calls["thread"], links.calls["start"], is_module)
    of_call = np.where(frame >= 0, ops["name"][frame], 0).astype(np.int64)
    of_call = np.where(of_call > 0, of_call, _of_forward(ops, links, is_module))
    return np.where(said > 0, said, np.concatenate([of_call, [0]])[links.call])


def _of_forward(ops: Ops, links: Links, is_module: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each API call of the backward pass the module of the forward op with the same sequence number."""
    numbered = (ops["sequence"] >= 0) & (ops["kind"] == OpKind.OP)
    backward, forward = numbered & ops["backward"], np.flatnonzero(numbered & ~ops["backward"])
    if not len(forward) or not backward.any():
        return np.zeros(len(links.calls), np.int64)
    frame = innermost(ops, ops["thread"][forward], ops["start"][forward], is_module)
    known = forward[frame >= 0]
    names = dict(zip(ops["sequence"][known].tolist(), ops["name"][frame[frame >= 0]].tolist(), strict=True))
    around = innermost(ops, links.calls["thread"], links.calls["start"], backward)
    sequences = np.where(around >= 0, ops["sequence"][around], NO_SEQUENCE)
    return np.array([names.get(sequence, 0) for sequence in sequences.tolist()], np.int64)


def _module_names(timeline: Timeline) -> NDArray[np.int64]:
    return np.array([i for i, name in enumerate(timeline.names) if name.startswith(MODULE_PREFIX)], np.int64)


def _sums(links: Links, codes: NDArray[np.int64], timeline: Timeline) -> list[OwnerTime]:
    duration = (links.work["end"] - links.work["start"]).astype(np.int64)
    distinct, inverse = np.unique(codes, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, inverse, duration)
    count = np.bincount(inverse, minlength=len(distinct))
    rows = zip(distinct.tolist(), count.tolist(), total.tolist(), strict=True)
    found = [OwnerTime(timeline.names[code].removeprefix(MODULE_PREFIX), n, ns) for code, n, ns in rows]
    return sorted(found, key=lambda owner: -owner.total_ns)
