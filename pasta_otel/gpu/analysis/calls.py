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
_SUFFIX = re.compile(r"(?:_v\d+|_ptsz|_ptds|_spt)+$")


def is_synchronizing(name: str) -> bool:
    """Return whether a call of this name makes the host wait."""
    return SYNCHRONIZING.fullmatch(_SUFFIX.sub("", name)) is not None


def synchronizing(timeline: Timeline, calls: Rows) -> NDArray[np.bool_]:
    """Return which calls make the host wait."""
    distinct, inverse = np.unique(calls["name"], return_inverse=True)
    answers = np.array([is_synchronizing(timeline.names[name]) for name in distinct.tolist()] or [False], np.bool_)
    return answers[inverse] if len(distinct) else np.empty(0, np.bool_)
