"""From plain rows to columns: once per batch, on the exporter's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller

import numpy as np
from numpy.typing import NDArray

from pasta_otel import semconv
from pasta_otel.clock import ClockOffset
from pasta_otel.exporters.otlp.encoder import string_column
from pasta_otel.model import OpSpan, SpanColumns, SpanSite

_trace_bytes: Callable[[int], bytes] = methodcaller("to_bytes", 16, "big")
_span_bytes: Callable[[int], bytes] = methodcaller("to_bytes", 8, "big")


def columns_from_rows(rows: Sequence[OpSpan], offset: ClockOffset) -> SpanColumns:
    """Return the columns of a batch, with times converted by one clock offset.

    Args:
        rows: At least one row.
        offset: Unix time minus CLOCK_MONOTONIC.

    Raises:
        OverflowError: An id or time does not fit its OTLP field.
    """
    trace_id, span_id, parent, start, end, thread, site, messages = zip(*rows, strict=True)
    codes, sites = _sites(site)
    error = np.fromiter((message is not None for message in messages), dtype=np.bool_, count=len(rows))
    return SpanColumns(
        trace_id=_ids(map(_trace_bytes, trace_id), 16),
        span_id=_ids(map(_span_bytes, span_id), 8),
        parent_span_id=_ids(map(_span_bytes, parent), 8),
        start_time_unix_nano=_unix(start, offset),
        end_time_unix_nano=_unix(end, offset),
        site=codes,
        sites=sites,
        attributes={semconv.THREAD_ID: np.array(thread, dtype=np.int64)},
        error=error if error.any() else None,
        status_message=string_column(messages) if error.any() else None,
    )


def valid_rows(rows: Sequence[OpSpan], offset: ClockOffset) -> list[OpSpan]:
    """Return the rows that can be encoded; asked only after a batch failed, so that one bad row costs one row."""
    return [row for row in rows if _is_valid(row, offset)]


def _is_valid(row: OpSpan, offset: ClockOffset) -> bool:
    try:
        columns_from_rows([row], offset)
        hash(row.site)
    except (OverflowError, TypeError, ValueError, AttributeError):
        return False
    return True


def _ids(parts: Iterable[bytes], width: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(-1, width)


def _unix(monotonic_ns: Sequence[int], offset: ClockOffset) -> NDArray[np.uint64]:
    return (np.array(monotonic_ns, dtype=np.int64) + offset.offset_ns).astype(np.uint64)


def _sites(site: Sequence[SpanSite]) -> tuple[NDArray[np.int32], list[SpanSite]]:
    """Return codes and distinct sites by identity: capture interns them, and hashing one costs more than a row."""
    by_id = dict(zip(map(id, site), site, strict=True))
    if not all(isinstance(value, SpanSite) for value in by_id.values()):
        msg = "a row's site is not a SpanSite"
        raise TypeError(msg)
    index = {key: code for code, key in enumerate(by_id)}
    codes = np.fromiter(map(index.__getitem__, map(id, site)), dtype=np.int32, count=len(site))
    return codes, list(by_id.values())
