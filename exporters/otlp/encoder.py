"""Columnar OTLP encoder: N spans to one ExportTraceServiceRequest, by numpy over the whole batch.

Every span is a row of pieces (ids and times, the site's constants, one piece per varying attribute, status). A piece's
bytes are made for all rows at once, as blocks of equal width; cumulative lengths give each row's offset, and a block is
scattered by one indexed assignment of fixed-width items. Nothing runs per span in Python. Protobuf allows any field
order, so what has a fixed width comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pasta_otel.exporters.otlp import wire
from pasta_otel.model import Attributes, LinkColumn, SpanColumns, SpanSite, StringColumn

Bytes2D = NDArray[np.uint8]
Rows = NDArray[np.intp] | None
"""Row numbers, or None for all rows."""

ATTRIBUTES_FIELD = 9  # trace.proto Span.attributes
LINKS_FIELD = 13  # trace.proto Span.links
STATUS_FIELD = 15  # trace.proto Span.status
STATUS_ERROR = 2  # trace.proto Status.StatusCode
FLAGS = 0x100  # SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK set, IS_REMOTE clear: our parents live in this process

_SPAN_TAG = 0x12  # ScopeSpans.spans, length-delimited
_WITH_PARENT = np.dtype(
    [
        ("trace_tag", "V2"), ("trace_id", "V16"), ("span_tag", "V2"), ("span_id", "V8"),
        ("start_tag", "V1"), ("start", "<u8"), ("end_tag", "V1"), ("end", "<u8"),
        ("flags_tag", "V2"), ("flags", "<u4"), ("parent_tag", "V2"), ("parent_id", "V8"),
    ]
)  # fmt: skip
_CORE_TEMPLATE = np.frombuffer(
    b"\x0a\x10" + bytes(16) + b"\x12\x08" + bytes(8) + b"\x39" + bytes(8) + b"\x41" + bytes(8)
    + b"\x85\x01" + FLAGS.to_bytes(4, "little") + b"\x22\x08" + bytes(8),
    dtype=_WITH_PARENT,
)  # fmt: skip
_PARENT_WIDTH = 10


class Scope(NamedTuple):
    """Instrumentation scope: name and version."""

    name: str
    version: str = ""


class _Block(NamedTuple):
    """Items of one width for some rows."""

    rows: Rows
    items: NDArray[np.void]

    @property
    def width(self) -> int:
        return self.items.dtype.itemsize


_Column = list[_Block]


def encode_spans(columns: SpanColumns, resource: bytes | Attributes, scope: bytes | Scope) -> bytes:
    """Return an ``ExportTraceServiceRequest`` with all spans of ``columns`` under one resource and scope.

    Args:
        columns: The spans.
        resource: Resource attributes, or the bytes of an encoded ``Resource``.
        scope: Instrumentation scope, or its encoded bytes.

    Raises:
        TypeError: An attribute column is of a kind OTLP has no value for.
        ValueError: A column's length differs from the number of spans.
    """
    count = len(columns)
    pieces = list(_pieces(columns))
    body = _body_lengths(count, pieces)
    header_widths = 1 + _varint_widths(body)
    ends = np.cumsum(body + header_widths)
    spans_size = int(ends[-1]) if count else 0
    prefix = _envelope(spans_size, resource, scope)
    out = np.empty(len(prefix) + spans_size, dtype=np.uint8)
    out[: len(prefix)] = np.frombuffer(prefix, dtype=np.uint8)
    if count:
        cursor = ends - (body + header_widths) + len(prefix)
        for piece in [_headers(body, header_widths), *pieces]:
            _scatter(out, cursor, piece)
    return out.tobytes()


def slice_columns(columns: SpanColumns, start: int, stop: int) -> SpanColumns:
    """Return rows ``start`` to ``stop`` (arrays are views)."""
    part = slice(start, stop)
    return SpanColumns(
        trace_id=columns.trace_id[part],
        span_id=columns.span_id[part],
        parent_span_id=columns.parent_span_id[part],
        start_time_unix_nano=columns.start_time_unix_nano[part],
        end_time_unix_nano=columns.end_time_unix_nano[part],
        site=columns.site[part],
        sites=columns.sites,
        attributes={key: _slice_values(values, part) for key, values in columns.attributes.items()},
        error=None if columns.error is None else columns.error[part],
        status_message=None if columns.status_message is None else _slice_values(columns.status_message, part),
        links=None if columns.links is None else _slice_links(columns.links, part),
    )


def _slice_links(links: LinkColumn, part: slice) -> LinkColumn:
    return LinkColumn(links.trace_id[part], links.span_id[part], links.attributes)


def _slice_values(values: Any, part: slice) -> Any:
    if isinstance(values, StringColumn):
        return StringColumn(values.codes[part], values.values)
    return values[part]


def _envelope(spans_size: int, resource: bytes | Attributes, scope: bytes | Scope) -> bytes:
    """Return all bytes in front of the spans: request, resource, scope and the lengths around the spans."""
    resource_bytes = resource if isinstance(resource, bytes) else wire.resource(resource)
    scope_bytes = scope if isinstance(scope, bytes) else wire.scope(*scope)
    scope_field = wire.message(1, scope_bytes)
    scope_spans = wire.varint(2 << 3 | 2) + wire.varint(len(scope_field) + spans_size) + scope_field
    resource_field = wire.message(1, resource_bytes)
    size = len(resource_field) + len(scope_spans) + spans_size
    return wire.varint(1 << 3 | 2) + wire.varint(size) + resource_field + scope_spans


def _pieces(columns: SpanColumns) -> Iterator[_Column]:
    count = len(columns)
    yield _core(columns)
    yield _dictionary(columns.site, _site_entries(columns.site, columns.sites))
    for key, values in columns.attributes.items():
        _check_length(key, values, count)
        yield _attribute(key, values)
    if columns.error is not None:
        _check_length("error", columns.error, count)
        yield _status(columns.error, columns.status_message)
    if columns.links is not None:
        _check_length("links", columns.links.trace_id, count)
        yield _links(columns.links)


def _check_length(name: str, values: Any, count: int) -> None:
    length = len(values.codes if isinstance(values, StringColumn) else values)
    if length != count:
        msg = f"column {name!r} has {length} rows, the batch has {count}"
        raise ValueError(msg)


def _core(columns: SpanColumns) -> _Column:
    """Return ids, times and flags; rows without a parent leave the last field out."""
    core = np.repeat(_CORE_TEMPLATE, len(columns))
    core["trace_id"] = _items(columns.trace_id)
    core["span_id"] = _items(columns.span_id)
    core["parent_id"] = _items(columns.parent_span_id)
    core["start"] = columns.start_time_unix_nano
    core["end"] = columns.end_time_unix_nano
    has_parent = columns.parent_span_id.any(axis=1)
    if has_parent.all():
        return [_Block(None, core.view(f"V{core.dtype.itemsize}"))]
    matrix = core.view(np.uint8).reshape(len(core), -1)
    roots, children = np.flatnonzero(~has_parent), np.flatnonzero(has_parent)
    return [_Block(roots, _items(matrix[roots, :-_PARENT_WIDTH])), _Block(children, _items(matrix[children]))]


@lru_cache(maxsize=8192)
def _site_bytes(site: SpanSite) -> bytes:
    constants = b"".join(wire.attribute(ATTRIBUTES_FIELD, key, value) for key, value in site.attributes)
    return wire.text(5, site.name) + wire.integer(6, site.kind) + constants


def _site_entries(codes: NDArray[np.int32], sites: Sequence[SpanSite]) -> list[bytes]:
    used = np.bincount(codes, minlength=len(sites)) if len(codes) else np.zeros(len(sites), dtype=np.intp)
    return [_site_bytes(site) if hits else b"" for site, hits in zip(sites, used.tolist(), strict=True)]


def _attribute(key: str, values: Any) -> _Column:
    if isinstance(values, StringColumn):
        return _strings(key, values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iubf":
        if values.dtype.kind == "f":
            return _floats(key, values)
        return _bools(key, values) if values.dtype.kind == "b" else _integers(key, values)
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OU":
        msg = f"attribute {key!r}: OTLP has no value for dtype {values.dtype}"
        raise TypeError(msg)
    return _strings(key, string_column(values))


def string_column(values: Sequence[str | None]) -> StringColumn:
    """Return the dictionary encoding of a list of strings (None stays absent)."""
    index: dict[str | None, int] = {value: code for code, value in enumerate(dict.fromkeys(values))}
    if None in index:  # the last entry gets code -1
        absent = index.pop(None)
        index = {value: code - (code > absent) for value, code in index.items()}
        index[None] = -1
    codes = np.fromiter(map(index.__getitem__, values), dtype=np.int32, count=len(values))
    return StringColumn(codes, [value for value in index if value is not None])


def _strings(key: str, column: StringColumn) -> _Column:
    entries = [wire.attribute(ATTRIBUTES_FIELD, key, value) for value in column.values]
    return _dictionary(column.codes, entries)


def _bools(key: str, values: NDArray[np.bool_]) -> _Column:
    entries = [wire.attribute(ATTRIBUTES_FIELD, key, value) for value in (False, True)]
    return _dictionary(values.view(np.uint8), entries)


def _floats(key: str, values: NDArray[np.floating[Any]]) -> _Column:
    matrix = _template(wire.attribute(ATTRIBUTES_FIELD, key, 0.0), len(values))
    matrix[:, -8:] = values.astype("<f8").view(np.uint8).reshape(-1, 8)
    return [_Block(None, _items(matrix))]


def _integers(key: str, values: NDArray[np.integer[Any]]) -> _Column:
    """Return one block per varint width (one to three widths in practice)."""
    numbers = values.astype(np.int64).view(np.uint64)
    blocks = []
    for width, rows in _groups(_varint_widths(numbers)):
        sample = 1 << 7 * (width - 1)  # the smallest number that takes so many bytes
        chosen = numbers if rows is None else numbers[rows]
        matrix = _template(wire.attribute(ATTRIBUTES_FIELD, key, sample), len(chosen))
        _put_varints(matrix[:, -width:], chosen)
        blocks.append(_Block(rows, _items(matrix)))
    return blocks


def _status(error: NDArray[np.bool_], messages: StringColumn | Sequence[str | None] | None) -> _Column:
    code = wire.integer(3, STATUS_ERROR)
    entries = [b"", wire.message(STATUS_FIELD, code)]
    codes = error.astype(np.int32)
    if messages is not None:
        column = messages if isinstance(messages, StringColumn) else string_column(messages)
        entries += [wire.message(STATUS_FIELD, wire.text(2, value) + code) for value in column.values]
        codes = np.where(error & (column.codes >= 0), column.codes + 2, codes)
    return _dictionary(codes, entries)


def _links(links: LinkColumn) -> _Column:
    """Return a ``Span.Link`` for every row that has one: trace id, span id, then the constant attributes."""
    constants = b"".join(wire.attribute(4, key, value) for key, value in links.attributes)
    entry = wire.message(LINKS_FIELD, wire.message(1, bytes(16)) + wire.message(2, bytes(8)) + constants)
    rows = np.flatnonzero(links.trace_id.any(axis=1))
    matrix = _template(entry, len(rows))
    ids = len(entry) - len(constants) - 28  # two tags and lengths, 16 and 8 bytes
    matrix[:, ids + 2 : ids + 18] = links.trace_id[rows]
    matrix[:, ids + 20 : ids + 28] = links.span_id[rows]
    return [_Block(rows, _items(matrix))] if len(rows) else []


def _dictionary(codes: NDArray[Any], entries: Sequence[bytes]) -> _Column:
    """Return the rows' entries, grouped by entry width; code -1 and empty entries add nothing."""
    widths = np.array([*map(len, entries), 0], dtype=np.intp)  # the extra last one is what code -1 finds
    blocks = []
    for width, rows in _groups(widths[codes]):
        if width == 0:
            continue
        same = np.flatnonzero(widths == width)
        place = np.zeros(len(widths), dtype=np.intp)
        place[same] = np.arange(len(same))
        items = np.frombuffer(b"".join(entries[entry] for entry in same.tolist()), dtype=f"V{width}")
        blocks.append(_Block(rows, items[place[codes if rows is None else codes[rows]]]))
    return blocks


def _groups(keys: NDArray[np.intp]) -> Iterator[tuple[int, Rows]]:
    """Yield every distinct key with its rows; None when all rows share one key."""
    if not len(keys):
        return
    counts = np.bincount(keys)
    present = np.flatnonzero(counts)
    if len(present) == 1:
        yield int(present[0]), None
        return
    order = np.argsort(keys, kind="stable")
    yield from zip(present.tolist(), np.split(order, np.cumsum(counts[present])[:-1]), strict=True)


def _headers(body: NDArray[np.int64], header_widths: NDArray[np.int64]) -> _Column:
    blocks = []
    for width, rows in _groups(header_widths):
        chosen = body if rows is None else body[rows]
        matrix = np.empty((len(chosen), width), dtype=np.uint8)
        matrix[:, 0] = _SPAN_TAG
        _put_varints(matrix[:, 1:], chosen.view(np.uint64))
        blocks.append(_Block(rows, _items(matrix)))
    return blocks


_THRESHOLDS = np.array([1 << 7 * width for width in range(1, 10)], dtype=np.uint64)


def _varint_widths(values: NDArray[Any]) -> NDArray[np.int64]:
    return np.searchsorted(_THRESHOLDS, values.view(np.uint64), side="right") + 1


def _put_varints(target: Bytes2D, values: NDArray[np.uint64]) -> None:
    """Write equally wide varints, one a row."""
    last = target.shape[1] - 1
    for place in range(last + 1):
        part = (values >> np.uint64(7 * place)).astype(np.uint8) & 0x7F
        target[:, place] = part if place == last else part | 0x80


def _template(entry: bytes, count: int) -> Bytes2D:
    return np.repeat(np.frombuffer(entry, dtype=np.uint8)[None, :], count, axis=0)


def _items(matrix: Bytes2D) -> NDArray[np.void]:
    """View each row of bytes as one fixed-width item."""
    contiguous = np.ascontiguousarray(matrix)
    return contiguous.view(f"V{matrix.shape[1]}").reshape(-1)


def _body_lengths(count: int, pieces: Sequence[_Column]) -> NDArray[np.int64]:
    lengths = np.zeros(count, dtype=np.int64)
    for rows, items in (block for piece in pieces for block in piece):
        if rows is None:
            lengths += items.dtype.itemsize
        else:
            lengths[rows] += items.dtype.itemsize
    return lengths


def _scatter(out: NDArray[np.uint8], cursor: NDArray[np.int64], piece: _Column) -> None:
    """Write a piece at every row's cursor and move the cursors behind it."""
    for block in piece:
        width = block.width
        # overlapping view: item i is the bytes i..i+width, so that one indexed assignment copies whole items
        window: NDArray[np.void] = np.ndarray((len(out) - width + 1,), dtype=f"V{width}", buffer=out.data, strides=(1,))
        if block.rows is None:
            window[cursor] = block.items
            cursor += width
        else:
            window[cursor[block.rows]] = block.items
            cursor[block.rows] += width


__all__ = ["Scope", "encode_spans", "slice_columns", "string_column"]
