"""GPU work as spans: children of the request's or module's span in its own trace, as columns for the OTLP encoder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pasta_otel import semconv
from pasta_otel.gpu.classes import CLASSES, short_name
from pasta_otel.gpu.cupti.aggregate import NODE_MASK, ClassCodes, module_codes
from pasta_otel.gpu.cupti.rows import GPU_KERNELS, Rows, is_kind
from pasta_otel.gpu.mapping import Joined, Region, work_name
from pasta_otel.model import SpanColumns, SpanSite

DEFAULT_TRACE_LIMIT = 1000
"""GPU spans a trace and process; a decode step of a 12-layer model has about 200 GPU kernels."""
REMEMBERED_TRACES = 10_000


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """GPU work of one window that has a region: made into spans, beyond the trace's limit, in traces not sampled."""

    ok: int = 0
    capped: int = 0
    unsampled: int = 0


class _Part(NamedTuple):
    """Some rows of GPU work with what is known about each."""

    work: Rows
    region: NDArray[np.int64]
    classes: NDArray[np.int64]
    module: NDArray[np.int64]

    def take(self, rows: NDArray[Any]) -> _Part:
        return _Part(self.work[rows], self.region[rows], self.classes[rows], self.module[rows])


class GpuSpans:
    """Makes the columns.

    Args:
        codes: Class by name id (``KernelHistograms.codes``).
        device_id: ``hw.id`` by CUDA device.
        sampled: Whether a trace's spans are exported.
        trace_limit: Most GPU spans a trace.
        random_bytes: Span ids come from here.
    """

    def __init__(
        self,
        codes: ClassCodes,
        device_id: Callable[[int], str],
        sampled: Callable[[int], bool],
        trace_limit: int = DEFAULT_TRACE_LIMIT,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._codes, self._device_id, self._sampled = codes, device_id, sampled
        self._limit, self._random = trace_limit, random_bytes
        self._sites: dict[tuple[int, int, int, int], SpanSite] = {}
        self._made: dict[int, int] = {}

    def columns(self, joined: Joined, names: Sequence[str], offset_ns: int) -> tuple[list[SpanColumns], SpanCounts]:
        """Return a window's spans, in groups that share attributes, and what became of the window's linked work.

        Args:
            joined: The work.
            names: GPU kernel names by id.
            offset_ns: Unix time minus CUPTI's.
        """
        chosen, counts = self._choose(joined)
        if not len(chosen):
            return [], counts
        module, paths = module_codes(joined)
        part = _Part(joined.work, joined.region, self._codes.of_work(joined, names), module).take(chosen)
        kernel, graph = is_kind(part.work, GPU_KERNELS), part.work["graph"] != 0
        groups = []
        for mask, kind in ((kernel & ~graph, "kernel"), (kernel & graph, "graph"), (~kernel, "copy")):
            if mask.any():
                chosen_part = part.take(mask)
                base = self._base(chosen_part, joined.regions, names, offset_ns)
                module_of = [paths[code] or None for code in chosen_part.module.tolist()]
                groups.append(_with_attributes(base, chosen_part.work, kind, module_of))
        return groups, counts

    def _choose(self, joined: Joined) -> tuple[NDArray[np.int64], SpanCounts]:
        """Choose the rows that become spans: linked, sampled, and within the limit of their trace, earliest first."""
        traces = [region.trace_id for region in joined.regions]
        wanted = np.array([self._sampled(trace) for trace in traces] + [False], np.bool_)
        linked = int((joined.region >= 0).sum())
        rows = np.flatnonzero(wanted[joined.region])
        if not len(rows):
            return rows, SpanCounts(unsampled=linked)
        distinct = list(dict.fromkeys(traces))
        code = np.array([distinct.index(trace) for trace in traces], np.int64)[joined.region[rows]]
        rows = rows[np.lexsort((joined.work["start"][rows], code))]
        code = np.sort(code)
        first = np.searchsorted(code, np.arange(len(distinct)))
        before = np.array([self._made.get(trace, 0) for trace in distinct], np.int64)
        kept = np.arange(len(rows)) - first[code] + before[code] < self._limit
        made = np.bincount(code[kept], minlength=len(distinct))
        self._remember(distinct, made.tolist())
        return rows[kept], SpanCounts(int(kept.sum()), int((~kept).sum()), linked - len(rows))

    def _remember(self, traces: Sequence[int], made: Sequence[int]) -> None:
        for trace, count in zip(traces, made, strict=True):
            self._made[trace] = self._made.pop(trace, 0) + count
        while len(self._made) > REMEMBERED_TRACES:
            del self._made[next(iter(self._made))]

    def _base(self, part: _Part, regions: Sequence[Region], names: Sequence[str], offset_ns: int) -> SpanColumns:
        work = part.work
        site, sites = self._site_codes(part, names)
        traces = _id_bytes([item.trace_id for item in regions], 16)
        parents = _id_bytes([item.span_id for item in regions], 8)
        ids = np.frombuffer(self._random(8 * len(work)), np.uint8).reshape(-1, 8).copy()
        ids[~ids.any(axis=1), 7] = 1  # all zero is no id
        return SpanColumns(
            trace_id=traces[part.region],
            span_id=ids,
            parent_span_id=parents[part.region],
            start_time_unix_nano=(work["start"].astype(np.int64) + offset_ns).astype(np.uint64),
            end_time_unix_nano=(work["end"].astype(np.int64) + offset_ns).astype(np.uint64),
            site=site,
            sites=sites,
        )

    def _site_codes(self, part: _Part, names: Sequence[str]) -> tuple[NDArray[np.int32], list[SpanSite]]:
        work = part.work
        device, detail = work["device"].astype(np.int64), work["detail"].astype(np.int64)
        key = ((work["name"].astype(np.int64) << 8 | detail & 0xFF) << 8 | device & 0xFF) << 8 | work["kind"] & 0xFF
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        sites = [self._site(work[row], CLASSES[part.classes[row]], names) for row in first.tolist()]
        return inverse.astype(np.int32), sites

    def _site(self, row: np.void, kernel_class: str, names: Sequence[str]) -> SpanSite:
        key = (int(row["kind"]), int(row["detail"]), int(row["name"]), int(row["device"]))
        found = self._sites.get(key)
        if found is None:
            name = work_name(key[0], key[1], names[key[2]])
            attributes = [
                (semconv.GPU_KERNEL_CLASS, kernel_class),
                (semconv.HW_ID, self._device_id(key[3])),
                (semconv.LINK_METHOD, "id"),
            ]
            if key[0] in GPU_KERNELS:
                attributes.append((semconv.GPU_KERNEL_NAME, name))
            found = self._sites[key] = SpanSite(short_name(name), attributes=tuple(attributes))
        return found


def _with_attributes(base: SpanColumns, work: Rows, kind: str, modules: list[str | None]) -> SpanColumns:
    attributes: dict[str, NDArray[np.int64] | list[str | None]] = {
        semconv.GPU_STREAM_ID: work["stream"].astype(np.int64),
        semconv.GPU_CONTEXT_ID: work["context"].astype(np.int64),
        semconv.GPU_CORRELATION_ID: work["correlation"].astype(np.int64),
    }
    if kind == "copy":
        attributes[semconv.GPU_COPY_SIZE] = work["value"].astype(np.int64)
    elif kind == "graph":
        attributes[semconv.GPU_GRAPH_ID] = work["graph"].astype(np.int64)
        attributes[semconv.GPU_GRAPH_NODE_ID] = (work["node"] & NODE_MASK).astype(np.int64)
        attributes[semconv.MODULE_PATH] = modules
    return SpanColumns(
        base.trace_id,
        base.span_id,
        base.parent_span_id,
        base.start_time_unix_nano,
        base.end_time_unix_nano,
        base.site,
        base.sites,
        attributes,
    )


def _id_bytes(ids: Sequence[int], width: int) -> NDArray[np.uint8]:
    joined = b"".join(value.to_bytes(width, "big") for value in ids)
    return np.frombuffer(joined, np.uint8).reshape(-1, width)
