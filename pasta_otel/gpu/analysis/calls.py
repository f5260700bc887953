"""Which API calls make the host wait for the device."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.timeline import Timeline
from pasta_otel.gpu.cupti.rows import Rows

SYNCHRONIZING: Final = re.compile(
    r"(?:cuda|hip)(?:(?:Device|Stream|Event|Thread)Synchronize|Memcpy(?:2D|ToSymbol|FromSymbol|WithStream)?|Free)"
    r"|cu(?:Ctx|Stream|Event)Synchronize|cuMemcpy(?:HtoD|DtoH|DtoD)|cuMemFree"
)
"""Calls that return only when device work is done: CUDA Runtime API, "API synchronization behavior" (docs.nvidia.com),
and cudaFree, which waits for the device implicitly. Suffixes (_v2, _ptsz) are cut off first."""
MEMORY: Final = re.compile(
    r"(?:cuda|hip)(?:Malloc\w*|Free\w*|Host(?:Alloc|Malloc|Free|Register|Unregister))|cuMem(?:Alloc|Free|Host|Create|Map)\w*"
)
"""Calls that take memory from the driver or give it back. A program's first call, often ``cudaFree(0)``, also creates
the context."""
FREES: Final = re.compile(r"(?:cuda|hip)Free|cuMemFree")
_SUFFIX = re.compile(r"(?:_v\d+|_ptsz|_ptds|_spt)+$")


def is_synchronizing(name: str) -> bool:
    """Return whether a call of this name makes the host wait."""
    return SYNCHRONIZING.fullmatch(_SUFFIX.sub("", name)) is not None


def takes_memory(name: str) -> bool:
    """Return whether a call of this name takes memory from the driver or gives it back."""
    return MEMORY.fullmatch(_SUFFIX.sub("", name)) is not None


def frees_memory(name: str) -> bool:
    """Return whether a call of this name gives device memory back, for which it waits for all work queued."""
    return FREES.fullmatch(_SUFFIX.sub("", name)) is not None


def synchronizing(timeline: Timeline, calls: Rows) -> NDArray[np.bool_]:
    """Return which calls make the host wait."""
    distinct, inverse = np.unique(calls["name"], return_inverse=True)
    answers = np.array([is_synchronizing(timeline.names[name]) for name in distinct.tolist()] or [False], np.bool_)
    return answers[inverse] if len(distinct) else np.empty(0, np.bool_)


def outermost(calls: Rows) -> Rows:
    """Leave out calls within others on their thread: the driver's within the runtime's are one wait, written twice."""
    order = np.lexsort((-calls["end"].astype(np.int64), calls["start"], calls["thread"]))
    kept: list[int] = []
    thread, until = -1, 0
    for row in order.tolist():
        if int(calls["thread"][row]) != thread or int(calls["end"][row]) > until:
            kept.append(row)
            thread, until = int(calls["thread"][row]), int(calls["end"][row])
    found: Rows = calls[np.sort(np.array(kept, np.int64))]
    return found
