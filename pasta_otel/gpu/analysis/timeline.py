"""What the analysis looks at: GPU work and API calls in the live capture's rows, host regions beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.cupti.rows import API_CALLS, DEVICE_WORK, GPU_KERNELS, ROW, Kind, Rows, is_kind

OP: Final = np.dtype(
    [
        ("start", "<u8"),  # ns on the rows' clock
        ("end", "<u8"),
        ("external", "<i8"),  # the id that GPU work names it by; 0 = none
        ("sequence", "<i8"),  # autograd's number of a forward op, which its backward op has too
        ("name", "<u4"),  # Timeline.names
        ("thread", "<u4"),  # Timeline.threads
        ("module", "<u4"),  # Timeline.names: torch module path, 0 = not said
        ("stack", "<u4"),  # Timeline.names: call stack, 0 = not said
        ("dtype", "<u4"),  # Timeline.names: element types of the inputs
        ("kind", "u1"),
        ("backward", "?"),  # an op of the backward pass
        ("unfinished", "?"),  # begun, but its end is not in the trace: it has no duration
    ]
)
"""A region of host code: an op, an annotation, or a Python function."""
NO_SEQUENCE: Final = -1
NO_NUMBER: Final = 0xFFFFFFFF
"""Device or stream of a row that does not say it."""
STEP_PREFIX: Final = "ProfilerStep#"
"""How torch.profiler marks a step."""

KNOWN_CALLS: Final = {
    (False, 20): "cudaMalloc",
    (False, 22): "cudaFree",
    (False, 31): "cudaMemcpy",
    (False, 41): "cudaMemcpyAsync",
    (False, 51): "cudaMemsetAsync",
    (False, 131): "cudaStreamSynchronize",
    (False, 137): "cudaEventSynchronize",
    (False, 165): "cudaDeviceSynchronize",
    (False, 211): "cudaLaunchKernel",
    (False, 311): "cudaGraphLaunch",
    (False, 430): "cudaLaunchKernelExC",
    (True, 307): "cuLaunchKernel",
    (True, 652): "cuLaunchKernelEx",
}
"""API calls that the analysis tells apart, by (driver API?, callback id), as Kineto writes both (``cbid``)."""

Ops = NDArray[np.void]


class OpKind(IntEnum):
    """What a host region is."""

    OP = 1
    ANNOTATION = 2
    PYTHON = 3


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's trace.

    Attributes:
        rank: The rank within its job.
        rows: GPU work and API calls, ``ROW`` of ``gpu.cupti.rows``; times are ns on one clock.
        external: int64 for each row: the external id that it carries; 0 = none.
        names: Texts by number, of rows and ops.
        ops: Host regions.
        threads: What ``thread`` of an op or API call stands for: (process id, thread id), as written.
        devices: Properties by device number, as the profiler wrote them.
        complete: False when the trace was cut off.
        source: Where it comes from, for people.
    """

    rank: int
    rows: Rows
    external: NDArray[np.int64]
    names: Sequence[str]
    ops: Ops
    threads: Sequence[tuple[Any, Any]] = ()
    devices: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    complete: bool = True
    source: str = ""

    @property
    def work(self) -> Rows:
        """Return GPU kernels, copies and sets."""
        return self.rows[is_kind(self.rows, DEVICE_WORK)]

    @property
    def kernels(self) -> Rows:
        """Return GPU kernels."""
        return self.rows[is_kind(self.rows, GPU_KERNELS)]

    @property
    def calls(self) -> Rows:
        """Return runtime and driver API calls."""
        return self.rows[is_kind(self.rows, API_CALLS)]

    def device_name(self, device: int) -> str:
        """Return what people call a device."""
        return "a GPU that is not named" if device == NO_NUMBER else f"GPU {device}"

    def row_name(self, row: np.void) -> str:
        """Return the name of one row."""
        return self.names[int(row["name"])]

    def op_rows(self, kind: OpKind) -> Ops:
        """Return the host regions of one kind."""
        chosen: Ops = self.ops[self.ops["kind"] == kind]
        return chosen


def empty_ops() -> Ops:
    """Return no host regions."""
    return np.empty(0, OP)


def from_capture(  # noqa: PLR0913 - what a capture knows, and two labels
    batches: Sequence[Rows],
    names: Sequence[str],
    ops: Ops | None = None,
    *,
    call_name: Callable[[bool, int], str | None] | None = None,
    rank: int = 0,
    source: str = "live",
) -> Timeline:
    """Return the timeline of captured CUPTI rows.

    Args:
        batches: Rows as the capture hands them over.
        names: GPU kernel names by id.
        ops: Host regions on the same clock, with names in ``names``, if there are any.
        call_name: Name of an API call by (driver API?, callback id), such as ``_native._cupti.call_name`` while the
            CUPTI library is loaded; by default the calls of ``KNOWN_CALLS``.
        rank: The rank of this process.
        source: Where the rows come from.
    """
    rows = np.concatenate([*batches]) if batches else np.empty(0, ROW)
    texts = list(names)
    rows = _name_calls(rows.copy(), texts, call_name or _known_call)
    linked = rows[rows["kind"] == Kind.EXTERNAL_CORRELATION]
    timed = (rows["start"] != 0) & (rows["end"] >= rows["start"])
    kept = rows[timed & is_kind(rows, (*DEVICE_WORK, *API_CALLS, Kind.SYNCHRONIZATION))]
    return Timeline(rank, kept, _externals(kept, linked), texts, empty_ops() if ops is None else ops, source=source)


def _externals(rows: Rows, linked: Rows) -> NDArray[np.int64]:
    out = np.zeros(len(rows), np.int64)
    if len(linked):
        order = np.argsort(linked["correlation"], kind="stable")
        keys = linked["correlation"][order]
        at = np.minimum(np.searchsorted(keys, rows["correlation"]), len(keys) - 1)
        found = keys[at] == rows["correlation"]
        out[found] = linked["value"][order][at[found]].astype(np.int64)
    return out


def _known_call(driver: bool, callback: int) -> str | None:
    return KNOWN_CALLS.get((driver, callback))


def _name_calls(rows: Rows, texts: list[str], call_name: Callable[[bool, int], str | None]) -> Rows:
    """Give API calls their names; CUPTI's records carry only a callback id."""
    for kind in API_CALLS:
        of_kind = rows["kind"] == kind
        for callback in np.unique(rows["detail"][of_kind]).tolist():
            name = call_name(kind == Kind.DRIVER, callback)
            if name:
                texts.append(name)
                rows["name"][of_kind & (rows["detail"] == callback)] = len(texts) - 1
    return rows
