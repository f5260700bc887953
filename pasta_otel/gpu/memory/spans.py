"""Analysed launches as spans: children of the span that launched them, by its id; the rest below one root a process."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pasta_otel import semconv
from pasta_otel.gpu.classes import KernelClasses, short_name
from pasta_otel.gpu.memory import formulas
from pasta_otel.gpu.memory.findings import find
from pasta_otel.gpu.memory.hot import hottest_tensor
from pasta_otel.gpu.memory.model import Launch
from pasta_otel.gpu.memory.report import ratios, sectors
from pasta_otel.gpu.memory.results import TOOL, ProcessResult
from pasta_otel.model import SpanColumns, SpanSite

TRACE_LIMIT = 1000
"""Spans a trace and process, as for other GPU spans (``gpu.cupti.spans``): those that touch most sectors."""
ROOT_NAME = f"analyze {TOOL}"

Value = str | int | float


@dataclass(slots=True)
class SpanCounts:
    """What became of launches: made into spans, left out beyond their trace's limit.

    Roots are spans that are no launch.
    """

    ok: int = 0
    capped: int = 0
    roots: int = 0


class _Place(NamedTuple):
    """Where a span hangs: bytes of ids; of a launch without a span, those of the process' root."""

    trace_id: bytes
    parent_id: bytes


@dataclass(slots=True)
class _Rows:
    """Spans that have the same attributes."""

    places: list[_Place] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)
    attributes: dict[str, list[Value]] = field(default_factory=lambda: defaultdict(list))


class MemorySpans:
    """Makes the columns of one process.

    Args:
        limit: Most spans a trace.
        random_bytes: Ids come from here.
    """

    def __init__(self, limit: int = TRACE_LIMIT, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._limit, self._random = limit, random_bytes
        self._class_of = KernelClasses()
        self.counts = SpanCounts()

    def columns(self, result: ProcessResult) -> Iterator[SpanColumns]:
        """Yield a process' spans in groups that share attributes: the root of those without a span first."""
        traces: dict[str, list[Launch]] = defaultdict(list)
        for launch in result.launches:
            traces[launch.caller.span.partition("-")[0]].append(launch)
        kept = {trace: self._choose(launches) for trace, launches in traces.items()}
        root = _Place(self._random(16), self._random(8))
        if "" in kept:
            yield self._root(result, root, kept[""], len(traces[""]) - len(kept[""]))
        yield from self._launches(result, [launch for launches in kept.values() for launch in launches], root)

    def _choose(self, launches: Sequence[Launch]) -> Sequence[Launch]:
        self.counts.ok += min(self._limit, len(launches))
        self.counts.capped += max(0, len(launches) - self._limit)
        if len(launches) <= self._limit:
            return launches
        return sorted(launches, key=lambda launch: -sectors(launch.accesses))[: self._limit]

    def _root(self, result: ProcessResult, place: _Place, launches: Sequence[Launch], left_out: int) -> SpanColumns:
        self.counts.roots += 1
        times = [_times(launch) for launch in launches]
        constants = ((semconv.ANALYSIS_TOOL, TOOL), (semconv.ANALYSIS_SLOWED, True))
        rows = _Rows([_Place(place.trace_id, bytes(8))], [(min(times)[0], max(end for _, end in times))], [0])
        rows.attributes[semconv.PROCESS_PID] = [result.pid]
        rows.attributes[semconv.ANALYSIS_LEFT_OUT] = [left_out]
        return _columns(rows, place.parent_id, [SpanSite(ROOT_NAME, attributes=constants)])

    def _launches(self, result: ProcessResult, launches: Sequence[Launch], root: _Place) -> Iterator[SpanColumns]:
        sites: dict[str, int] = {}
        groups: dict[tuple[str, ...], _Rows] = defaultdict(_Rows)
        for launch in launches:
            attributes = _attributes(result, launch)
            rows = groups[tuple(attributes)]
            rows.places.append(_place(launch.caller.span) or root)
            rows.times.append(_times(launch))
            rows.sites.append(sites.setdefault(launch.name, len(sites)))
            for key, value in attributes.items():
                rows.attributes[key].append(value)
        made = [self._site(name) for name in sites]
        for rows in groups.values():
            yield _columns(rows, self._random(8 * len(rows.sites)), made)

    def _site(self, name: str) -> SpanSite:
        constants = (
            (semconv.GPU_KERNEL_CLASS, self._class_of(name)),
            (semconv.GPU_KERNEL_NAME, name),
            (semconv.ANALYSIS_TOOL, TOOL),
            (semconv.ANALYSIS_SLOWED, True),
        )
        return SpanSite(short_name(name), attributes=constants)


def _place(span: str) -> _Place | None:
    trace_id, _, span_id = span.partition("-")
    return _Place(bytes.fromhex(trace_id), bytes.fromhex(span_id)) if span else None


def _times(launch: Launch) -> tuple[int, int]:
    """Return begin and end on the device; where they are unknown, the time of the launching call twice."""
    if launch.begin_unix_nano:
        return launch.begin_unix_nano, launch.end_unix_nano
    return launch.caller.time_unix_nano, launch.caller.time_unix_nano


def _attributes(result: ProcessResult, launch: Launch) -> dict[str, Value]:
    """Return what is known of one launch, by name, in an order that depends on what is known alone."""
    counted = launch.accesses
    found = ratios(counted)
    hottest = hottest_tensor(result, launch) or (None, None)
    known: dict[str, Value | None] = {
        semconv.GPU_STREAM_ID: launch.stream,
        semconv.GPU_GRID: "x".join(map(str, launch.grid)),
        semconv.GPU_BLOCK: "x".join(map(str, launch.block)),
        semconv.GPU_GRAPH_NODES: launch.nodes or None,
        semconv.ANALYSIS_TIMES: "device" if launch.begin_unix_nano else "launch",
        semconv.LINK_METHOD: "id" if launch.caller.span else None,
        semconv.MODULE_PATH: launch.caller.module or None,
        **_code(launch.caller.source),
        semconv.GPU_MEMORY_SECTORS: sectors(counted),
        semconv.GPU_COALESCING: found["coalescing_efficiency"],
        semconv.GPU_LOAD_SECTORS: formulas.sectors_per_request(counted.global_["load"]),
        semconv.GPU_STORE_SECTORS: formulas.sectors_per_request(counted.global_["store"]),
        semconv.GPU_CONFLICT_RATIO: found["bank_conflict_ratio"],
        semconv.GPU_ACTIVE_LANES: found["active_lane_ratio"],
        semconv.GPU_MEMORY_WORKING_SET: launch.working_set,
        semconv.GPU_HOT_TENSOR: hottest[0],
        semconv.GPU_HOT_TENSOR_SHARE: hottest[1],
        semconv.GPU_MEMORY_FINDINGS: ",".join(dict.fromkeys(finding.kind for finding in find(counted))) or None,
    }
    return {key: value for key, value in known.items() if value is not None}


def _code(source: str) -> dict[str, Value | None]:
    """Take ``file:line function`` apart; a file's name may have spaces and colons."""
    place, _, function = source.rpartition(" ")
    file, _, line = place.rpartition(":")
    if not file or not line.isdecimal():
        return {}
    names = (semconv.CODE_FILE_PATH, semconv.CODE_LINE_NUMBER, semconv.CODE_FUNCTION_NAME)
    return dict(zip(names, (file, int(line), function), strict=True))


def _columns(rows: _Rows, ids: bytes, sites: list[SpanSite]) -> SpanColumns:
    times = np.array(rows.times, np.uint64)
    span_id = _bytes([ids], 8).copy()
    span_id[~span_id.any(axis=1), 7] = 1  # all zero is no id
    return SpanColumns(
        trace_id=_bytes([place.trace_id for place in rows.places], 16),
        span_id=span_id,
        parent_span_id=_bytes([place.parent_id for place in rows.places], 8),
        start_time_unix_nano=times[:, 0],
        end_time_unix_nano=times[:, 1],
        site=np.array(rows.sites, np.int32),
        sites=sites,
        attributes={key: _column(values) for key, values in rows.attributes.items()},
    )


def _bytes(parts: Sequence[bytes], width: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, width)


def _column(values: list[Value]) -> Any:
    return values if isinstance(values[0], str) else np.array(values)
