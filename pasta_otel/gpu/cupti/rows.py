"""The row that the C extension writes, as numpy sees it, and CUPTI's numbers for what a row is."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # installed without a C compiler there is no extension, and imported traces are rows all the same
    from pasta_otel._native import _cupti

ROW: Final = np.dtype(
    [
        ("start", "<u8"),  # ns on CUPTI's clock; 0 = CUPTI gave none
        ("end", "<u8"),
        ("value", "<u8"),  # bytes of a copy or set; the external id; an API call's result
        ("node", "<u8"),  # graph id << 32 | node of the graph; 0 outside graphs
        ("correlation", "<u4"),
        ("name", "<u4"),  # Ring.names
        ("device", "<u4"),
        ("context", "<u4"),
        ("stream", "<u4"),
        ("graph", "<u4"),
        ("thread", "<u4"),
        ("kind", "u1"),
        ("attachment", "u1"),  # of CUPTI's to the process, modulo 256: a correlation id is unique in one, not beyond
        ("detail", "<u2"),
    ]
)
"""``pasta_row`` of ``_native/rows.h``."""

Rows = NDArray[np.void]


class Kind(IntEnum):
    """``CUpti_ActivityKind`` of the records that we decode."""

    MEMCPY = 1
    MEMSET = 2
    KERNEL = 3
    DRIVER = 4
    RUNTIME = 5
    CONCURRENT_KERNEL = 10
    OVERHEAD = 17
    MEMCPY_PEER = 22
    SYNCHRONIZATION = 38
    EXTERNAL_CORRELATION = 39
    GRAPH_TRACE = 51


GPU_KERNELS: Final = (Kind.KERNEL, Kind.CONCURRENT_KERNEL)
DEVICE_WORK: Final = (*GPU_KERNELS, Kind.MEMCPY, Kind.MEMCPY_PEER, Kind.MEMSET)
API_CALLS: Final = (Kind.RUNTIME, Kind.DRIVER)

OUR_EXTERNAL_KIND: Final = 5
"""``CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM2``; Kineto uses CUSTOM0 and CUSTOM1."""

COPY_KINDS: Final = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
"""``CUpti_ActivityMemcpyKind``."""

# Calls that put work on the device, by callback id (cupti_runtime_cbid.h, cupti_driver_cbid.h): kernel launches, graph
# launches, copies and sets. They are all that a T2 window needs to join device work to spans.
RUNTIME_LAUNCHES: Final = (211, 214, 269, 270, 311, 312, 430, 431, 505, 506)
RUNTIME_COPIES: Final = (31, 41, 44, 49, 51, 161, 225, 235)
DRIVER_LAUNCHES: Final = (307, 442, 477, 478, 514, 515, 652, 653)
RUNTIME_GRAPHS: Final = (310, 311, 312, 315, 316, 348, 349, 418, 436, 437, 443, 452, 453)
DRIVER_GRAPHS: Final = (495, 496, 513, 514, 515, 539, 540, 578, 580, 581, 643, 656, 657, 720, 721)
"""Capture, instantiation, upload and launch of CUDA graphs, as in ``_native/decode.c``: no detaching then."""
DRIVER_COPIES: Final = (216, 220, 277, 279, 281, 291, 306, 319, 421, 422, 423)


def views(blocks: list[_cupti.Block]) -> list[Rows]:
    """View each block as rows, without copying; the block goes back to the ring when its view is gone."""
    return [np.frombuffer(memoryview(block), dtype=ROW) for block in blocks]


def is_kind(rows: Rows, kinds: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return which rows are of one of these kinds."""
    kind = rows["kind"]
    mask: NDArray[np.bool_] = kind == kinds[0]
    for other in kinds[1:]:
        mask |= kind == other
    return mask
