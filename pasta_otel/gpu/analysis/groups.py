"""GPU work by what it does: compute, communication, memory; and finer, by class of GPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.timeline import Timeline
from pasta_otel.gpu.classes import CLASSES, KernelClasses
from pasta_otel.gpu.cupti.rows import Kind, Rows

COLLECTIVE: Final = CLASSES.index("collective")
MEMCPY: Final = CLASSES.index("memcpy")
MEMSET: Final = CLASSES.index("memset")
_CLASS_OF_KIND: Final = {Kind.MEMCPY: MEMCPY, Kind.MEMCPY_PEER: MEMCPY, Kind.MEMSET: MEMSET}

Mask = NDArray[np.bool_]


def class_codes(work: Rows, names: Sequence[str], classes: KernelClasses | None = None) -> NDArray[np.int64]:
    """Return for each row of GPU work an index into ``CLASSES``."""
    answer = classes or KernelClasses()
    distinct, inverse = np.unique(work["name"], return_inverse=True)
    of_name = np.array([CLASSES.index(answer(names[name])) for name in distinct.tolist()], np.int64)
    codes: NDArray[np.int64] = of_name[inverse] if len(distinct) else np.empty(0, np.int64)
    for kind, code in _CLASS_OF_KIND.items():
        codes[work["kind"] == kind] = code
    return codes


def split(codes: NDArray[np.int64]) -> tuple[Mask, Mask, Mask]:
    """Return which rows compute, which communicate, and which move or set memory."""
    communication = codes == COLLECTIVE
    memory = (codes == MEMCPY) | (codes == MEMSET)
    return ~communication & ~memory, communication, memory


def work_codes(timeline: Timeline) -> NDArray[np.int64]:
    """Return the class codes of ``timeline.work``."""
    return class_codes(timeline.work, timeline.names)
