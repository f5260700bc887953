"""Events of users' own programs as spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pasta_otel.ebpf.programs import FieldValue, UserEvent
from pasta_otel.ebpf.wall_clock import WallClock
from pasta_otel.model import LinkColumn, SpanColumns, SpanSite

PREFIX = "pasta.user."
START, END, TRACE_ID, SPAN_ID = ("start_ns", "time_ns", "ts"), ("end_ns", "time_ns", "ts"), "trace_id", "span_id"
_OWN = frozenset({*START, *END, TRACE_ID, SPAN_ID})


def user_columns(
    events: Sequence[UserEvent], clock: WallClock, now_monotonic_ns: int, new_id: Callable[[], int]
) -> Iterator[SpanColumns]:
    """Yield one batch a program and output.

    Fields named ``start_ns`` and ``end_ns``, or ``time_ns`` or ``ts``, are taken as CLOCK_MONOTONIC
    (``bpf_ktime_get_ns``); ``u8 trace_id[16]`` and ``u8 span_id[8]`` make a link. Every other field is an attribute.

    Args:
        events: Events.
        clock: Converts CLOCK_MONOTONIC.
        now_monotonic_ns: For events without a time.
        new_id: Makes span ids.
    """
    groups: dict[tuple[str, str], list[Mapping[str, FieldValue]]] = {}
    for event in events:
        groups.setdefault((event.program, event.table), []).append(event.fields)
    for (program, table), rows in groups.items():
        yield _columns(f"{program}.{table}", rows, clock, now_monotonic_ns, new_id)


def _columns(
    name: str, rows: Sequence[Mapping[str, FieldValue]], clock: WallClock, now: int, new_id: Callable[[], int]
) -> SpanColumns:
    import numpy as np  # noqa: PLC0415 - an optional extra

    count = len(rows)
    linked = _ids(rows, TRACE_ID, 16)
    own = [trace if any(trace) else (new_id() << 64 | new_id()).to_bytes(16, "big") for trace in linked]

    def matrix(ids: Sequence[bytes], width: int) -> Any:
        return np.frombuffer(b"".join(ids), np.uint8).reshape(count, width)

    def times(names: Sequence[str]) -> Any:
        found = (next((int(row[key]) for key in names if key in row), now) for row in rows)
        return clock.convert(np.fromiter(found, np.int64, count))

    starts = times(START)
    return SpanColumns(
        trace_id=matrix(own, 16),
        span_id=matrix([new_id().to_bytes(8, "big") for _ in rows], 8),
        parent_span_id=np.zeros((count, 8), np.uint8),
        start_time_unix_nano=starts,
        end_time_unix_nano=np.maximum(times(END), starts),
        site=np.zeros(count, np.int32),
        sites=[SpanSite(name)],
        attributes={PREFIX + key: _column([row[key] for row in rows]) for key in rows[0] if key not in _OWN},
        links=LinkColumn(matrix(linked, 16), matrix(_ids(rows, SPAN_ID, 8), 8)),
    )


def _ids(rows: Sequence[Mapping[str, FieldValue]], name: str, size: int) -> list[bytes]:
    return [_id(row.get(name), size) for row in rows]


def _id(value: FieldValue | None, size: int) -> bytes:
    """Return an id of so many bytes, or zeros where the field is none: a number, or text that is not hexadecimal."""
    if not isinstance(value, str) or len(value) != 2 * size:
        return bytes(size)
    try:
        found = bytes.fromhex(value)
    except ValueError:
        return bytes(size)
    return found if len(found) == size else bytes(size)


def _column(values: list[FieldValue]) -> Any:
    import numpy as np  # noqa: PLC0415 - as above

    if isinstance(values[0], str):
        return [str(value) for value in values]
    if isinstance(values[0], float):
        return np.array(values, np.float64)
    return np.array([int(value) & (1 << 64) - 1 for value in values], np.uint64).view(np.int64)
