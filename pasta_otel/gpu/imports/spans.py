"""A timeline as spans: a trace a rank, host regions nested by thread and time, GPU work below the op it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pasta_otel import semconv
from pasta_otel.gpu.analysis.groups import class_codes
from pasta_otel.gpu.analysis.link import METHODS, link
from pasta_otel.gpu.analysis.nesting import parents_by_nesting
from pasta_otel.gpu.analysis.timeline import NO_NUMBER, OpKind, Ops, Timeline
from pasta_otel.gpu.classes import CLASSES, short_name
from pasta_otel.gpu.cupti.rows import GPU_KERNELS, Rows, is_kind
from pasta_otel.model import AttributeValue, SpanColumns, SpanSite, StringColumn

ROOT_NAME = "pytorch profile"
_KIND_WORDS: Final = {OpKind.OP: "op", OpKind.ANNOTATION: "annotation", OpKind.PYTHON: "python"}
ROWS_AT_ONCE: Final = 100_000
_DEVICE_BITS: Final = ROWS_AT_ONCE.bit_length()  # so many rows name at most so many devices
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def timeline_spans(timeline: Timeline, *, python: bool = False) -> Iterator[SpanColumns]:
    """Yield a timeline's spans: the root, host regions and API calls, GPU work.

    Ids are computed from the trace's content, so that importing a file twice gives the same spans. Unfinished regions
    have no end and become no span.

    Args:
        timeline: The trace.
        python: Also make spans of Python frames; there may be very many.
    """
    if not len(timeline.rows) and not len(timeline.ops):
        return
    yield from _Spans(timeline, python=python).columns()


class _Spans:
    def __init__(self, timeline: Timeline, *, python: bool) -> None:
        self._timeline, self._links = timeline, link(timeline)
        ops = timeline.ops
        kept = ~ops["unfinished"] & ((ops["kind"] != OpKind.PYTHON) | python)
        self._op_rows = np.flatnonzero(kept)
        self._trace = _trace_id(timeline)
        self._seed = np.frombuffer(self._trace[:8], "<u8")[0]
        tables = [table for table in (timeline.rows, ops[kept]) if len(table)]
        self._start = min((int(table["start"].min()) for table in tables), default=0)
        self._end = max((int(table["end"].max()) for table in tables), default=0)

    def columns(self) -> Iterator[SpanColumns]:
        yield self._root()
        number_of_op = np.zeros(len(self._timeline.ops) + 1, np.uint64)  # the last one is what row -1 finds: the root
        number_of_op[self._op_rows] = np.arange(1, len(self._op_rows) + 1, dtype=np.uint64)
        ops = self._timeline.ops[self._op_rows]
        parents = parents_by_nesting(ops) + 1  # the root, number 0, is the parent of what has none
        for part in _parts(len(ops)):
            yield self._ops(ops[part], self._numbers(ops, 1)[part], parents[part].astype(np.uint64))
        calls, work = self._links.calls, self._links.work
        first_call, first_work = len(ops) + 1, len(ops) + 1 + len(calls)
        for part in _parts(len(calls)):
            yield self._calls(
                calls[part], self._numbers(calls, first_call)[part], number_of_op[self._links.call_op[part]]
            )
        for part in _parts(len(work)):
            numbers = self._numbers(work, first_work)[part]
            yield from self._work_groups(
                work[part], self._links.method[part], numbers, number_of_op[self._links.op[part]]
            )

    def _root(self) -> SpanColumns:
        attributes = (
            (semconv.TORCH_RANK, self._timeline.rank),
            (semconv.TRACE_FILE, PurePath(self._timeline.source).name),
        )
        times = np.array([[self._start, self._end]], np.uint64)
        no_parent = np.zeros((1, 8), np.uint8)
        return SpanColumns(
            self._traces(1), self._ids(np.zeros(1, np.uint64)), no_parent, times[:, 0], times[:, 1],
            np.zeros(1, np.int32), [SpanSite(ROOT_NAME, 1, attributes)],
        )  # fmt: skip

    def _ops(self, ops: Ops, numbers: NDArray[np.uint64], parents: NDArray[np.uint64]) -> SpanColumns:
        kinds = ops["kind"].astype(np.int64)
        site, keys = _codes(ops["name"].astype(np.int64) << 8 | kinds)
        names = self._timeline.names
        sites = [
            SpanSite(names[key >> 8], 1, ((semconv.TORCH_REGION, _KIND_WORDS[OpKind(key & 0xFF)]),)) for key in keys
        ]
        attributes: dict[str, Any] = {semconv.THREAD_ID: self._threads(ops["thread"])}
        if ops["module"].any():
            attributes[semconv.MODULE_PATH] = StringColumn(
                np.where(ops["module"] > 0, ops["module"], -1).astype(np.int32), names
            )
        return self._made(ops, numbers, parents, site, sites, attributes)

    def _calls(self, calls: Rows, numbers: NDArray[np.uint64], parents: NDArray[np.uint64]) -> SpanColumns:
        site, keys = _codes(calls["name"].astype(np.int64))
        sites = [SpanSite(self._timeline.names[key], 1, ((semconv.TORCH_REGION, "api_call"),)) for key in keys]
        attributes = {
            semconv.THREAD_ID: self._threads(calls["thread"]),
            semconv.GPU_CORRELATION_ID: calls["correlation"].astype(np.int64),
        }
        return self._made(calls, numbers, parents, site, sites, attributes)

    def _work_groups(
        self, work: Rows, method: NDArray[np.int8], numbers: NDArray[np.uint64], parents: NDArray[np.uint64]
    ) -> Iterator[SpanColumns]:
        """Yield the work by what is known of it, size and stream: what is not known is absent, not 0."""
        sized = ~is_kind(work, GPU_KERNELS) & (work["value"] > 0)
        on_stream = work["stream"] != NO_NUMBER
        for mask in (sized & on_stream, ~sized & on_stream, sized & ~on_stream, ~sized & ~on_stream):
            if mask.any():
                yield self._work(work[mask], method[mask], numbers[mask], parents[mask])

    def _work(
        self, work: Rows, method: NDArray[np.int8], numbers: NDArray[np.uint64], parents: NDArray[np.uint64]
    ) -> SpanColumns:
        classes = class_codes(work, self._timeline.names)
        kernel = is_kind(work, GPU_KERNELS)
        devices, device = np.unique(work["device"], return_inverse=True)
        of_class = (work["name"].astype(np.int64) << 8 | classes) << _DEVICE_BITS
        site, keys = _codes((of_class | device.astype(np.int64)) << 1 | kernel)
        attributes: dict[str, Any] = {
            semconv.GPU_CORRELATION_ID: work["correlation"].astype(np.int64),
            semconv.LINK_METHOD: StringColumn(method.astype(np.int32), METHODS),
        }
        if work["stream"][0] != NO_NUMBER:
            attributes[semconv.GPU_STREAM_ID] = work["stream"].astype(np.int64)
        if work["value"].all() and not kernel.any():
            attributes[semconv.GPU_COPY_SIZE] = work["value"].astype(np.int64)
        sites = [self._work_site(value, devices) for value in keys]
        return self._made(work, numbers, parents, site, sites, attributes)

    def _work_site(self, key: int, devices: NDArray[np.uint32]) -> SpanSite:
        kernel, at, key = key & 1, key >> 1 & ((1 << _DEVICE_BITS) - 1), key >> _DEVICE_BITS + 1
        name, device = self._timeline.names[key >> 8], int(devices[at])
        attributes: list[tuple[str, AttributeValue]] = [(semconv.GPU_KERNEL_CLASS, CLASSES[key & 0xFF])]
        if device != NO_NUMBER:
            attributes.append((semconv.HW_ID, str(device)))
        if kernel:
            attributes.append((semconv.GPU_KERNEL_NAME, name))
        return SpanSite(short_name(name), 1, tuple(attributes))

    def _made(  # noqa: PLR0913, PLR0917 - one parameter a column
        self,
        table: Any,
        numbers: NDArray[np.uint64],
        parents: NDArray[np.uint64],
        site: NDArray[np.int32],
        sites: Sequence[SpanSite],
        attributes: dict[str, Any],
    ) -> SpanColumns:
        start, end = table["start"].astype(np.uint64), table["end"].astype(np.uint64)
        return SpanColumns(
            self._traces(len(table)), self._ids(numbers), self._ids(parents), start, end, site, sites, attributes
        )

    def _numbers(self, table: Any, first: int) -> NDArray[np.uint64]:
        return np.arange(first, first + len(table), dtype=np.uint64)

    def _threads(self, codes: NDArray[Any]) -> NDArray[np.int64]:
        ids = [_thread_id(thread) for _, thread in self._timeline.threads]
        table = np.array(ids or [0], np.int64)
        numbers: NDArray[np.int64] = table[np.minimum(codes, len(table) - 1)]
        return numbers

    def _traces(self, count: int) -> NDArray[np.uint8]:
        return np.repeat(np.frombuffer(self._trace, np.uint8)[None, :], count, axis=0)

    def _ids(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return span ids: number by number a bijection of 64 bits (splitmix64), so that none occurs twice."""
        with np.errstate(over="ignore"):
            mixed = (numbers + np.uint64(1)) * _GOLDEN + self._seed
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        mixed[mixed == 0] = 1  # all zero is no id
        ids: NDArray[np.uint8] = mixed.astype(">u8").view(np.uint8).reshape(-1, 8)
        return ids


def _parts(count: int) -> Iterator[slice]:
    """Yield slices of rows: all columns of a large trace at once would take more memory than the trace."""
    for start in range(0, count, ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, count))


def _trace_id(timeline: Timeline) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{timeline.rank} {len(timeline.rows)} {len(timeline.ops)}".encode())
    for table in (timeline.rows, timeline.ops):
        digest.update(np.ascontiguousarray(table["start"]).tobytes())
    return digest.digest()


def _codes(keys: NDArray[np.int64]) -> tuple[NDArray[np.int32], list[int]]:
    distinct, inverse = np.unique(keys, return_inverse=True)
    return inverse.astype(np.int32), distinct.tolist()


def _thread_id(thread: Any) -> int:
    try:
        number = int(thread)
    except (TypeError, ValueError):
        return -1
    return number if -(1 << 62) < number < 1 << 62 else -1
