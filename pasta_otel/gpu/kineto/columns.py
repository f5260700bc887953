"""Events to columns: GPU work and API calls in the live capture's rows, host regions in a table of their own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pasta_otel.errors import InputError
from pasta_otel.gpu.analysis.timeline import NO_NUMBER, NO_SEQUENCE, OP, OpKind
from pasta_otel.gpu.cupti.rows import COPY_KINDS, ROW, Kind
from pasta_otel.gpu.kineto.events import EXACT_TIMES, Args, Event
from pasta_otel.gpu.kineto.repair import MALFORMED
from pasta_otel.gpu.kineto.scan import Batch

EXACT_BELOW_US = 2.0**42
"""Below this many microseconds a float64 holds the nanosecond: its spacing is 2**-11 us or less."""
LARGEST_US = 9.2e15
"""What an int64 of nanoseconds holds."""
MOST_TEXT_BYTES = 256 << 20
"""Distinct names of a trace; ten million kernels share a few thousand."""

_ROW_KINDS: Final = {
    "kernel": Kind.CONCURRENT_KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "memset": Kind.MEMSET,
    "cuda_runtime": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "cuda_driver": Kind.DRIVER,
    "hip_driver": Kind.DRIVER,
    "driver": Kind.DRIVER,
    "cuda_sync": Kind.SYNCHRONIZATION,
}
"""By category in lower case: Kineto's ActivityType names since 2022, and those of 2021 (``Kernel``, ``Runtime``)."""
_OP_KINDS: Final = {
    "cpu_op": OpKind.OP,
    "operator": OpKind.OP,
    "user_annotation": OpKind.ANNOTATION,
    "python_function": OpKind.PYTHON,
}
_OP_CODE = 1000  # codes of both tables in one column: op kinds lie above
_COPY_CODES: Final = {name: code for code, name in COPY_KINDS.items()}
_FRACTIONS = re.compile(rb'"ts"\s*:\s*\d{13,}\.\d*[1-9]')
_COPY_NAME = re.compile(r"([HDAP])to([HDAP])")
_NO_ARGS: Final = Args()
_ABSENT: Final = -1
_NO_TIME: Final = -(1 << 63)
_NO_END: Final = -1
"""The duration of an event without an end, as Kineto writes it; so read is one that is absent, or no number of ours."""
_BIG: Final = 1 << 62


class Texts(dict[Any, int]):
    """Distinct texts by number; 0 is the empty one."""

    def __init__(self, file: str) -> None:
        super().__init__({"": 0, None: 0})
        self.values_list: list[str] = [""]
        self._bytes, self._file = 0, file

    def __missing__(self, text: Any) -> int:
        """Give a new text the next number."""
        number = self[text] = len(self.values_list)
        self.values_list.append(str(text))
        self._bytes += len(self.values_list[-1])
        if self._bytes > MOST_TEXT_BYTES:
            raise InputError(
                f"more than {MOST_TEXT_BYTES >> 20} MiB of distinct names", file=self._file, kind="too_large"
            )
        return number


class Numbers(dict[Any, int]):
    """Distinct keys by number, from 0."""

    def __missing__(self, key: Any) -> int:
        """Give a new key the next number."""
        number = self[key] = len(self)
        return number


class Columns:
    """Collects batches.

    Args:
        file: The trace's name, for errors.
        most_rows: Refuse a file with more; 0 = no limit.
    """

    def __init__(self, file: str, most_rows: int) -> None:
        self.texts, self.threads = Texts(file), Numbers()
        self.rows: list[NDArray[np.void]] = []
        self.external: list[NDArray[np.int64]] = []
        self.ops: list[NDArray[np.void]] = []
        self.categories: dict[str, int] = {}
        self.unfinished, self.without_time, self.total = 0, 0, 0
        self._file, self._most_rows, self._kept = file, most_rows, 0
        self._codes: dict[Any, int] = {}

    def add(self, batch: Batch) -> None:
        """Add a batch of events.

        Raises:
            InputError: The file has more events, or more distinct text, than is allowed; kind ``too_large``.
        """
        self.total += len(batch.events)
        chosen = [event for event in batch.events if event.ph == "X"]
        categories = [event.cat for event in chosen]
        self._note(Counter(categories))
        code = np.array([*map(self._codes.__getitem__, categories)], np.int32)
        start, duration = self._times(batch, chosen)
        usable = (start != _NO_TIME) & (code != 0)
        self.without_time += int(((start == _NO_TIME) & (code != 0)).sum())
        open_ = usable & (duration < 0)
        self.unfinished += int(open_.sum())
        for is_op in (False, True):  # GPU work and API calls are their durations: without one they are left out
            at = np.flatnonzero(usable & ((code >= _OP_CODE) == is_op) & (is_op | ~open_))
            self._count(len(at))
            if len(at):
                events = [chosen[i] for i in at.tolist()]
                make = self._op_rows if is_op else self._gpu_rows
                (self.ops if is_op else self.rows).append(make(events, code[at], start[at], duration[at]))

    def _note(self, counts: Mapping[Any, int]) -> None:
        for category, count in counts.items():
            self._codes[category] = _category_code(category)
            self.categories[str(category)] = self.categories.get(str(category), 0) + count

    def _count(self, more: int) -> None:
        self._kept += more
        if self._most_rows and self._kept > self._most_rows:
            raise InputError(f"more than {self._most_rows:,} events (--max-events)", file=self._file, kind="too_large")

    def _times(self, batch: Batch, chosen: Sequence[Event]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start_us, duration_us = _floats(event.ts for event in chosen), _floats(event.dur for event in chosen)
        with np.errstate(invalid="ignore"):
            large = np.abs(start_us) >= EXACT_BELOW_US
        if large.any() and _FRACTIONS.search(batch.text):
            exact = _exact_times(batch, chosen)
            if exact is not None:
                return exact
        return _nanoseconds(start_us, _NO_TIME), _nanoseconds(duration_us, _NO_END)

    def _gpu_rows(
        self, events: list[Event], code: NDArray[np.int32], start: NDArray[np.int64], duration: NDArray[np.int64]
    ) -> NDArray[np.void]:
        args = [event.args or _NO_ARGS for event in events]
        rows = np.zeros(len(events), ROW)
        rows["start"], rows["end"] = start, start + duration
        rows["kind"] = code
        rows["name"] = [self.texts[event.name] for event in events]
        rows["correlation"] = _unsigned32([a.correlation for a in args], 0)
        self.external.append(_external(args))
        rows["thread"] = [self.threads[event.pid, event.tid] for event in events]
        on_device = (code != Kind.RUNTIME) & (code != Kind.DRIVER)
        for name, values in (("device", [a.device for a in args]), ("stream", [a.stream for a in args])):
            rows[name] = np.where(on_device, _unsigned32(values, _ABSENT), 0)
        missing = on_device & (rows["device"] == NO_NUMBER)
        if missing.any():  # without args.device the event's process is its device, as Kineto writes it
            rows["device"][missing] = _unsigned32([events[i].pid for i in np.flatnonzero(missing)], _ABSENT)
        rows["context"] = _unsigned32([a.context for a in args], 0)
        rows["graph"] = _unsigned32([a.graph for a in args], 0)
        rows["node"] = _integers([a.node for a in args], 0)
        rows["value"] = np.maximum(_integers([a.size if a.bytes is None else a.bytes for a in args], 0), 0)
        for at in np.flatnonzero(code == Kind.MEMCPY).tolist():
            rows["detail"][at] = copy_code(str(events[at].name))
        return rows

    def _op_rows(
        self, events: list[Event], code: NDArray[np.int32], start: NDArray[np.int64], duration: NDArray[np.int64]
    ) -> NDArray[np.void]:
        args = [event.args or _NO_ARGS for event in events]
        ops = np.zeros(len(events), OP)
        ops["start"], ops["end"] = start, np.where(duration < 0, start, start + duration)
        ops["unfinished"] = duration < 0
        ops["kind"] = code - _OP_CODE
        ops["name"] = [self.texts[event.name] for event in events]
        ops["external"] = _external(args)
        ops["thread"] = [self.threads[event.pid, event.tid] for event in events]
        ops["sequence"] = _integers([a.sequence for a in args], NO_SEQUENCE)
        ops["backward"] = _integers([a.forward_thread for a in args], 0) > 0
        ops["module"] = [self.texts[a.module] for a in args]
        ops["stack"] = [self.texts[a.call_stack] for a in args]
        ops["dtype"] = [0 if a.input_type is None else self.texts[_types(a.input_type)] for a in args]
        return ops


def copy_code(name: str) -> int:
    """Return ``CUpti_ActivityMemcpyKind`` by a copy's name (``Memcpy HtoD (Pageable -> Device)``); 0 = unknown."""
    found = _COPY_NAME.search(name)
    return _COPY_CODES.get(found[0], 0) if found else 0


def _category_code(category: Any) -> int:
    key = category.lower().replace(" ", "_") if isinstance(category, str) else ""
    return _ROW_KINDS.get(key) or (_OP_KINDS[key] + _OP_CODE if key in _OP_KINDS else 0)


def _floats(values: Iterable[Any]) -> NDArray[np.float64]:
    """Return numbers, NaN where there is none."""
    return np.array([_float(value) if type(value) is not float else value for value in values], np.float64)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _nanoseconds(microseconds: NDArray[np.float64], otherwise: int) -> NDArray[np.int64]:
    out = np.full(len(microseconds), otherwise, np.int64)
    with np.errstate(invalid="ignore"):
        usable = np.abs(microseconds) < LARGEST_US
    whole = np.trunc(microseconds[usable])  # apart, so that microseconds since 1970 keep every digit
    out[usable] = whole.astype(np.int64) * 1000 + np.rint((microseconds[usable] - whole) * 1000).astype(np.int64)
    return out


def _exact_times(batch: Batch, chosen: Sequence[Event]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    try:
        exact = EXACT_TIMES.decode(b"[" + batch.text + b"]")
    except MALFORMED:
        return None
    wanted = [times for times, event in zip(exact, batch.events, strict=True) if event.ph == "X"]
    start = np.array([_exact_nanoseconds(times.ts, _NO_TIME) for times in wanted], np.int64)
    duration = np.array([_exact_nanoseconds(times.dur, _NO_END) for times in wanted], np.int64)
    return (start, duration) if len(wanted) == len(chosen) else None


def _exact_nanoseconds(raw: msgspec.Raw, otherwise: int) -> int:
    try:
        value = Decimal(bytes(raw).strip(b'"').decode()) * 1000
    except (InvalidOperation, UnicodeDecodeError):
        return otherwise
    within = value.is_finite() and abs(value) < LARGEST_US * 1000
    return int(value.to_integral_value()) if within else otherwise


def _integers(values: Sequence[Any], otherwise: int) -> NDArray[np.int64]:
    """Return whole numbers; what is none (absent, text that is no number, too large) becomes ``otherwise``."""
    return np.array(
        [value if type(value) is int and -_BIG < value < _BIG else _integer(value, otherwise) for value in values],
        np.int64,
    )


def _integer(value: Any, otherwise: int) -> int:
    if value is None:
        return otherwise
    try:
        number = int(value, 0) if isinstance(value, str) else int(value)
    except (ValueError, OverflowError):
        return otherwise
    return number if -_BIG < number < _BIG else otherwise


def _unsigned32(values: Sequence[Any], otherwise: int) -> NDArray[np.uint32]:
    numbers = _integers(values, otherwise)
    return np.where((numbers >= 0) & (numbers < NO_NUMBER), numbers, otherwise & NO_NUMBER).astype(np.uint32)


def _external(args: Sequence[Args]) -> NDArray[np.int64]:
    return _integers([a.external_id if a.external_id is not None else a.external_id_2021 for a in args], 0)


def _types(value: Any) -> str:
    """Return the distinct element types of an op's inputs, e.g. ``c10::Half``."""
    if not isinstance(value, list):
        return ""
    return ",".join(
        sorted({item for item in value if isinstance(item, str) and item not in {"", "Scalar", "ScalarList"}})
    )
