"""The records that probes and agent exchange: the mirror of ``bpf/pasta.bpf.h``; a test compares the sizes."""

from __future__ import annotations

import struct
from typing import NamedTuple

LINKS = ("none", "slot", "stale", "unregistered")
SAMPLED = 0x80
HISTOGRAM = 32
HISTOGRAM_SHIFT = 5
APIS = 256
PROBES = 16
NO_SAMPLE = 0xFFFFFFFF

PROCESS = struct.Struct("<QQQII")
AGGREGATE_KEY = struct.Struct("<16s8sIHBB")
AGGREGATE = struct.Struct(f"<6QII{HISTOGRAM}I")
EVENT = struct.Struct("<QQ16s8sIIHBBIQ")
CRITICAL = struct.Struct("<QIIII")
COUNTERS = struct.Struct("<11Q")
SETTINGS = struct.Struct("<II")
LIMIT = struct.Struct("<QII")

FLAG_COUNT_UNREGISTERED = 1
EXEC, EXIT, FORK, OOM = 1, 2, 3, 4
"""Kinds of critical events."""

BOUNDS_NS = tuple(1 << (HISTOGRAM_SHIFT + place) for place in range(HISTOGRAM - 1))
"""Upper bounds of all histogram buckets but the last, nanoseconds."""


class Counters(NamedTuple):
    """One probe's account, summed over CPUs: ``seen = filtered + submitted + full + unpaired``.

    Attributes:
        seen: Events that reached the program.
        filtered: Of processes nobody watches.
        submitted: Aggregated.
        full: Lost because a map was full.
        unpaired: Returns whose entry is not known (attached in between, or aged out).
        linked: Of the submitted, those with a span.
        unlinked: Of the submitted, those whose thread had no span.
        stale: Of the submitted, those whose thread could not see its own task switches.
        unregistered: Of the submitted, those of processes without a process context.
        ring_submitted: Records that left.
        ring_full: Records lost because the ring was full.
    """

    seen: int = 0
    filtered: int = 0
    submitted: int = 0
    full: int = 0
    unpaired: int = 0
    linked: int = 0
    unlinked: int = 0
    stale: int = 0
    unregistered: int = 0
    ring_submitted: int = 0
    ring_full: int = 0

    @property
    def balanced(self) -> bool:
        """Return whether every seen event is accounted for."""
        linked = self.linked + self.unlinked + self.stale + self.unregistered
        accounted = self.filtered + self.submitted + self.full + self.unpaired
        return self.seen == accounted and self.submitted == linked


class Aggregate(NamedTuple):
    """All events of one API within one span (or, without a span, one process) in one epoch.

    Attributes:
        trace_id: 16 bytes, all zero without a span.
        span_id: 8 bytes, all zero without a span.
        tgid: Process id in the root pid namespace.
        api: Number of the API.
        epoch: The epoch it was counted in, modulo 256.
        link: One of ``LINKS``.
        sampled: The span's trace is sampled.
        events: How many.
        sum_ns: Their durations' sum.
        max_ns: The longest.
        size: Sum of their sizes, bytes.
        first_ns: Start of the first, CLOCK_MONOTONIC.
        last_ns: End of the last, CLOCK_MONOTONIC.
        tid: Thread of the first.
        histogram: Counts by ``BOUNDS_NS``.
    """

    trace_id: bytes
    span_id: bytes
    tgid: int
    api: int
    epoch: int
    link: str
    sampled: bool
    events: int
    sum_ns: int
    max_ns: int
    size: int
    first_ns: int
    last_ns: int
    tid: int
    histogram: tuple[int, ...]


class Event(NamedTuple):
    """One slow or sampled event. Times are CLOCK_MONOTONIC nanoseconds."""

    start_ns: int
    end_ns: int
    trace_id: bytes
    span_id: bytes
    tgid: int
    tid: int
    api: int
    link: str
    sampled: bool
    probe: int
    cpu: int
    size: int


class CriticalEvent(NamedTuple):
    """A process started, ended or was killed for memory."""

    time_ns: int
    kind: int
    tgid: int
    tid: int
    value: int


def decode_counters(values: list[bytes]) -> Counters:
    """Return the sum of one probe's per-CPU accounts."""
    return Counters(*(sum(column) for column in zip(*(COUNTERS.unpack(value) for value in values), strict=True)))


def decode_aggregate(key: bytes, value: bytes) -> Aggregate:
    """Return one entry of the map ``aggregates``."""
    trace_id, span_id, tgid, api, epoch, how = AGGREGATE_KEY.unpack(key)
    count, sum_ns, max_ns, size, first_ns, last_ns, tid, _, *histogram = AGGREGATE.unpack(value)
    return Aggregate(
        trace_id, span_id, tgid, api, epoch, LINKS[how & 3], bool(how & SAMPLED),
        count, sum_ns, max_ns, size, first_ns, last_ns, tid, tuple(histogram),
    )  # fmt: skip


def decode_event(record: bytes) -> Event:
    """Return one record of the ring ``events``."""
    start, end, trace_id, span_id, tgid, tid, api, how, probe, cpu, size = EVENT.unpack(record)
    link, sampled = LINKS[how & 3], bool(how & SAMPLED)
    return Event(start, end, trace_id, span_id, tgid, tid, api, link, sampled, probe, cpu, size)


def decode_critical(record: bytes) -> CriticalEvent:
    """Return one record of the ring ``critical``."""
    return CriticalEvent(*CRITICAL.unpack(record))
