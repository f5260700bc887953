"""The vocabulary: frozen records that every part shares, and nothing that does work.

Times are integer nanoseconds with unit and clock in the name. Ids are the OpenTelemetry wire form: lower-case hex in
records that people see, integers or raw bytes in columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # numpy is an optional extra; this module must import without it
    import numpy as np
    from numpy.typing import NDArray

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]

LinkMethod = Literal["id", "slot", "time"]
CauseKind = str
"""One of ``CAUSE_KINDS``, or ``gpu_<what>``."""

CAUSE_KINDS = (
    "self_time",
    "edge_latency",
    "edge_errors",
    "error_ratio",
    "call_structure",
    "cpu_throttled",
    "cpu_contention",
    "module_time",
)

NoDataReason = Literal["no_traffic", "nan", "invalid", "absent", "partial", "stale", "future", "sampled"]
Verdict = Literal["ok", "burning", "no_data"]


# ---- spans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpanSite:
    """What every span of one code place shares: name, kind and constant attributes (interned, never per event)."""

    name: str
    kind: int = 1  # opentelemetry.proto SpanKind: 1 internal, 2 server, 3 client
    attributes: tuple[tuple[str, AttributeValue], ...] = ()


class OpSpan(NamedTuple):
    """One torch module call, op or annotated region inside a request's trace, as a plain row.

    A NamedTuple because it is made on the request's own thread: 0.3 us beside 22 us for an SDK span object.
    """

    trace_id: int
    span_id: int
    parent_span_id: int
    start_monotonic_ns: int
    end_monotonic_ns: int
    thread_id: int
    site: SpanSite
    status_message: str | None = None  # set when the region raised: the exception's type name


class StringColumn(NamedTuple):
    """A column of strings by dictionary code, for values that repeat (what capture interns anyway).

    Attributes:
        codes: int32 array of shape (N,): index into ``values``; -1 = absent for that row.
        values: The distinct strings.
    """

    codes: NDArray[np.int32]
    values: Sequence[str]


class LinkColumn(NamedTuple):
    """One span link a row.

    Attributes:
        trace_id: uint8 array of shape (N, 16); all zero means that the row has no link.
        span_id: uint8 array of shape (N, 8).
        attributes: The same for every link, ``pasta.link.method`` among them.
    """

    trace_id: NDArray[np.uint8]
    span_id: NDArray[np.uint8]
    attributes: tuple[tuple[str, AttributeValue], ...] = ()


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """N spans by column: what the columnar OTLP encoder takes (OpSpan and GpuSpan batches).

    Attributes:
        trace_id: uint8 array of shape (N, 16).
        span_id: uint8 array of shape (N, 8).
        parent_span_id: uint8 array of shape (N, 8); all zero means no parent.
        start_time_unix_nano: uint64 array of shape (N,).
        end_time_unix_nano: uint64 array of shape (N,).
        site: int32 array of shape (N,): index into ``sites``.
        sites: Names and constant attributes.
        attributes: Attributes that differ by row: int64, float64 or bool arrays of shape (N,), a StringColumn, or a
            list of N strings (None = absent for that row).
        error: bool array of shape (N,) or None: span status ERROR.
        status_message: What rows with an error say: a StringColumn, a list of N strings (None = nothing), or None.
        links: One link a row, or None.
    """

    trace_id: NDArray[np.uint8]
    span_id: NDArray[np.uint8]
    parent_span_id: NDArray[np.uint8]
    start_time_unix_nano: NDArray[np.uint64]
    end_time_unix_nano: NDArray[np.uint64]
    site: NDArray[np.int32]
    sites: Sequence[SpanSite]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: NDArray[np.bool_] | None = None
    status_message: StringColumn | Sequence[str | None] | None = None
    links: LinkColumn | None = None

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self.site)


class HostSpan(NamedTuple):
    """What the host did to one span: one slow event, or all events of one kind within the span.

    Attributes:
        trace_id: 16 bytes: the trace it happened in.
        linked_span_id: 8 bytes: the span that the thread was in.
        link_method: How that is known.
        start_monotonic_ns: Start of the (first) event.
        end_monotonic_ns: End of the (last) event.
        name: What happened: a driver function, or ``off_cpu.sleeping``.
        service: Service name of the process, or empty.
        pid: Process id.
        thread_id: Thread of the (first) event.
        events: How many events.
        total_ns: Their durations' sum.
        max_ns: The longest.
        size: Bytes moved or allocated.
    """

    trace_id: bytes
    linked_span_id: bytes
    link_method: LinkMethod
    start_monotonic_ns: int
    end_monotonic_ns: int
    name: str
    service: str
    pid: int
    thread_id: int
    events: int
    total_ns: int
    max_ns: int
    size: int


class SpanRef(NamedTuple):
    """A span that a person can open: hex ids as every trace viewer takes them."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class HostSample:
    """One reading of a host counter or gauge that belongs to a process.

    Attributes:
        service: ``service.name`` of the process, as its spans say it.
        pid: Process id in our own pid namespace.
        metric: One of ``semconv.HOST_METRICS``.
        time_unix_nano: When it was read.
        value: Cumulative counters as read, in the metric's unit (seconds for times).
    """

    service: str
    pid: int
    metric: str
    time_unix_nano: int
    value: float


# ---- metrics ---------------------------------------------------------------------------------------------------------


class Exemplar(NamedTuple):
    """One measurement behind a point, with the span it was made in."""

    value: float
    time_unix_nano: int
    trace_id: int
    span_id: int


@dataclass(frozen=True, slots=True)
class HistogramPoint:
    """A cumulative histogram that was counted outside the SDK, because every single measurement would cost too much.

    Attributes:
        attributes: Labels.
        bounds: Upper bounds of all buckets but the last, in the metric's unit.
        counts: One count for each bucket, one more than bounds.
        total: Sum of the measurements.
        minimum: Smallest measurement.
        maximum: Largest measurement.
        start_time_unix_nano: Since when it counts.
        time_unix_nano: Until when.
        exemplars: A few measurements with their spans.
    """

    attributes: Mapping[str, AttributeValue]
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    minimum: float
    maximum: float
    start_time_unix_nano: int
    time_unix_nano: int
    exemplars: tuple[Exemplar, ...] = ()


# ---- SLO -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventCounts:
    """Good and total events of one window, both taken at the same evaluation.

    Attributes:
        good: Events that met the objective (>= 0; float because sampled spans count 1/probability).
        total: All valid events.
        no_data: Why these counts say nothing, or None. With a reason, ``good`` and ``total`` are not to be used.
        detail: The reason in words, for people.
        degraded: True when the source answered with a warning (partial response); the counts are used and flagged.
        coverage: Share of the window that the source can answer for, 0..1.
        ratio_only: The source gave a ratio without counts: ``total`` is 1 and guards on numbers of events do not apply.
    """

    good: float
    total: float
    no_data: NoDataReason | None = None
    detail: str = ""
    degraded: bool = False
    coverage: float = 1.0
    ratio_only: bool = False

    @property
    def bad(self) -> float:
        """Return total minus good."""
        return self.total - self.good


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A half-open interval of wall time: start <= t < end."""

    start_unix_nano: int
    end_unix_nano: int


@dataclass(frozen=True, slots=True)
class SpanSLI:
    """Which spans are an SLO's events, and which of them are good (``metricSource.type: spans``).

    Attributes:
        service: ``service.name``.
        operation: Span name, or None for any.
        kind: ``server`` (default), ``client``, ``internal``, ``producer`` or ``consumer``.
        where: Span attributes that must equal these values.
        good_status: True when a span with status ERROR is bad (``good: status != error``).
        threshold_ns: A span that lasts longer than this is bad; None = no latency condition.
    """

    service: str
    operation: str | None = None
    kind: str = "server"
    where: tuple[tuple[str, str | int | float | bool], ...] = ()
    good_status: bool = True
    threshold_ns: int | None = None


@dataclass(frozen=True, slots=True)
class CountRequest:
    """One window of one SLI; ``sli`` is a SpanSLI or another source's own frozen record."""

    sli: Any
    window: TimeWindow


# ---- questions the attribution asks the span store -------------------------------------------------------------------


class OperationKey(NamedTuple):
    """A span name within a service (kind kept apart: a server and a client span of one name differ)."""

    service: str
    operation: str


class EdgeKey(NamedTuple):
    """A call from one service to another, seen from the caller's client span."""

    caller: str
    callee: str


class ModuleKey(NamedTuple):
    """A torch module by qualified path within a service."""

    service: str
    module: str


@dataclass(frozen=True, slots=True)
class Samples:
    """Observations of one key in one window.

    Attributes:
        values_ns: At most ``limit`` observations, uniformly sampled if there were more; nanoseconds.
        count: How many there were before sampling.
        errors: How many of them had an error status.
        requests: How many distinct traces they came from.
        examples: A few spans of the slowest or failed observations, for links.
    """

    values_ns: Sequence[int]
    count: int
    errors: int = 0
    requests: int = 0
    examples: tuple[SpanRef, ...] = ()


# ---- attribution -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation that speaks for a cause.

    Attributes:
        family: Where it comes from: ``spans``, ``modules``, ``host``, ``gpu``.
        metric: What was compared, with its unit in the name, e.g. ``edge_gap_seconds``.
        before: Value in the baseline window (median, ratio or rate).
        after: Value in the burning window.
        effect: Effect size; which one is said by the metric's documentation (Cliff's delta in -1..1, or a ratio shift).
        n: Observations in the burning window.
        links: Spans that show it.
        name: Whose value it is: a span's name, ``caller -> callee`` or a module's path; empty for a whole service.
    """

    family: str
    metric: str
    before: float
    after: float
    effect: float
    n: int
    links: tuple[SpanRef, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """A ranked suspect: kind, the service it sits in, its target and why."""

    kind: CauseKind
    service: str
    target: str
    score: float
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Attribution:
    """The answer to "why does this SLO burn": causes best first; empty means no cause passed the thresholds.

    Attributes:
        causes: Ranked causes.
        baseline: The window taken as normal.
        window: The window that burned.
        took_ns: How long the analysis took.
        incomplete: Why the answer may be incomplete, or empty.
    """

    causes: tuple[Cause, ...]
    baseline: TimeWindow
    window: TimeWindow
    took_ns: int = 0
    incomplete: str = ""
