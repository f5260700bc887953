"""One trace file to one timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pasta_otel.errors import InputError
from pasta_otel.gpu.analysis.timeline import OP, Timeline
from pasta_otel.gpu.cupti.rows import API_CALLS, ROW, Kind, Rows, is_kind
from pasta_otel.gpu.kineto.columns import Columns
from pasta_otel.gpu.kineto.scan import EventScanner, ScanNotes
from pasta_otel.gpu.kineto.source import TraceBytes

MOST_ROWS = 20_000_000
"""Rows of 64 bytes: a file with more would not fit into 2 GB of memory."""
_LARGEST_NS = 1 << 63
_BASE = "baseTimeNanoseconds"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read.

    Attributes:
        strict: Refuse a damaged file instead of keeping what can be read.
        most_rows: Refuse a file with more events; 0 = no limit.
    """

    strict: bool = False
    most_rows: int = MOST_ROWS


DEFAULTS = ReadOptions()


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    """A trace that was read.

    Attributes:
        timeline: Its events; the rank is 0 until ``ranks`` decides it.
        header: The document's fields beside the events.
        total: All events in the file, of every phase.
        categories: Complete events by category, as written.
        unfinished: Events without an end, or with a duration that is none; only of host regions the begin is kept.
        without_time: Events that a time could not be read of; left out.
        skipped: Damaged events left out.
        partial: 1 when the last event is cut off.
        non_finite: inf and NaN read as absent.
        truncated: The file is cut off.
        remarks: Sentences for the user.
    """

    timeline: Timeline
    header: Mapping[str, Any]
    total: int
    categories: Mapping[str, int]
    unfinished: int = 0
    without_time: int = 0
    skipped: int = 0
    partial: int = 0
    non_finite: int = 0
    truncated: bool = False
    remarks: tuple[str, ...] = field(default=())


def read_trace(
    path: Path,
    options: ReadOptions = DEFAULTS,
    progress: Callable[[int], None] | None = None,
) -> KinetoTrace:
    """Read a trace.

    Args:
        path: The file: JSON, plain or compressed with gzip or zstd.
        options: How to read.
        progress: Told how many bytes of the file were read since the last call.

    Raises:
        InputError: It is not such a trace, it is damaged beyond reading, or it is too large; kinds ``trace_format``,
            ``too_large``, ``io``.
    """
    source = TraceBytes(path, progress)
    scanner = EventScanner(iter(source), str(path), strict=options.strict)
    columns = Columns(str(path), options.most_rows)
    for batch in scanner:
        columns.add(batch)
    notes = scanner.notes
    notes.truncated |= source.cut
    if options.strict and source.cut:
        raise InputError("the compressed data is cut off or damaged", file=str(path), kind="trace_format")
    if not columns.total and notes.skipped:
        raise InputError(f"none of {notes.skipped} events can be read", file=str(path), kind="trace_format")
    base = _base_ns(notes.header)
    if base is None:
        what = f"expected nanoseconds since 1970, got {str(notes.header[_BASE])[:40]!r}"
        if options.strict:
            raise InputError(what, file=str(path), field=_BASE, kind="trace_format")
        notes.remarks.append(f"{_BASE}: {what}; times are taken as they are")
    return _trace(path, columns, notes, base or 0)


def _trace(path: Path, columns: Columns, notes: ScanNotes, base: int) -> KinetoTrace:
    rows, external = _joined(columns.rows, ROW), _joined(columns.external, np.dtype(np.int64))
    ops = _joined(columns.ops, OP)
    columns.rows, columns.external, columns.ops = [], [], []
    early = 0
    kept_rows, kept_ops = _shift(rows, base), _shift(ops, base)
    if not kept_rows.all() or not kept_ops.all():
        early = int((~kept_rows).sum() + (~kept_ops).sum())
        rows, external, ops = rows[kept_rows], external[kept_rows], ops[kept_ops]
    _take_sizes(rows)
    timeline = Timeline(
        rank=0,
        rows=rows,
        external=external,
        names=columns.texts.values_list,
        ops=ops,
        threads=list(columns.threads),
        devices=_devices(notes.header),
        complete=not notes.truncated,
        source=str(path),
    )
    notes.remarks += _without_gpu_work(timeline)
    return KinetoTrace(
        timeline, notes.header, columns.total, columns.categories, columns.unfinished, columns.without_time + early,
        notes.skipped, notes.partial, notes.non_finite, notes.truncated, tuple(notes.remarks),
    )  # fmt: skip


def _without_gpu_work(timeline: Timeline) -> list[str]:
    if len(timeline.work):
        return []
    if calls := len(timeline.calls):
        why = f"no GPU work in this trace, though {calls} API calls: the profiler could not record the GPU's activity"
    else:
        why = "no GPU work in this trace"
    return [f"{why}; the host's time is reported, and there can be no findings" if len(timeline.ops) else why]


def _joined(parts: list[Any], dtype: np.dtype[Any]) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _shift(table: Any, base_ns: int) -> Any:
    """Add the file's base to all times, in place; return which rows then have a time after 1970."""
    start, end = table["start"].view(np.int64), table["end"].view(np.int64)
    start += base_ns
    end += base_ns
    return (start >= 0) & (end >= start)


def _take_sizes(rows: Rows) -> None:
    """Give copies without a size that of their API call, in place: ROCm writes it there only."""
    unknown = np.flatnonzero(is_kind(rows, (Kind.MEMCPY, Kind.MEMSET)) & (rows["value"] == 0))
    if not len(unknown):
        return
    calls = np.flatnonzero(is_kind(rows, API_CALLS) & (rows["value"] > 0))
    sizes = dict(zip(rows["correlation"][calls].tolist(), rows["value"][calls].tolist(), strict=True))
    rows["value"][unknown] = [sizes.get(key, 0) for key in rows["correlation"][unknown].tolist()]


def _base_ns(header: Mapping[str, Any]) -> int | None:
    """Return what is added to all times, 0 when the file does not say; None when it says no time."""
    base = header.get(_BASE)
    if base is None:
        return 0
    if isinstance(base, str) and base.isdecimal() and len(base) <= len(str(_LARGEST_NS)):
        base = int(base)
    if isinstance(base, float) and base.is_integer():
        base = int(base)
    return base if isinstance(base, int) and not isinstance(base, bool) and 0 <= base < _LARGEST_NS else None


def _devices(header: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    listed = header.get("deviceProperties", header.get("computeProperties", []))
    if not isinstance(listed, list):
        return {}
    return {entry["id"]: entry for entry in listed if isinstance(entry, dict) and isinstance(entry.get("id"), int)}
