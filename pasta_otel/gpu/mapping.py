"""Which span a piece of GPU work belongs to, by id: a thread launches inside a region, and CUPTI reports which one.

A region's external correlation id is the 64-bit span id itself, so that nothing is looked up on the request's thread.
Between the records, the correlation id joins launch call, region and device work; it is unique over all threads,
streams, contexts and devices while CUPTI is attached, and counts anew in the next attachment, so that the attachment is
part of the key. Device and context are part of every key that is not a correlation id.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pasta_otel.gpu.cupti.rows import (
    API_CALLS,
    COPY_KINDS,
    DEVICE_WORK,
    OUR_EXTERNAL_KIND,
    ROW,
    Kind,
    Rows,
    is_kind,
)

GENERATION_NS = 30_000_000_000
"""How long a region can still be joined after it began or was last seen: one to two of these."""
MAX_REGIONS = 200_000
"""Regions kept in a generation; 200,000 module calls are about 200 forward passes of a large transformer."""
END_TOLERANCE_NS = 1_000_000
"""A launch this much later than its region's end still belongs to it: two clocks and a thread switch lie between."""


class NativeRegions(Protocol):
    """The part of ``pasta_otel._native._cupti`` that keeps each thread's regions."""

    def enter(self, external_id: int, /) -> None: ...  # noqa: D102
    def leave(self, external_id: int, /) -> None: ...  # noqa: D102
    def replace(self, external_id: int, /) -> None: ...  # noqa: D102


class Region(NamedTuple):
    """A span that GPU work can belong to.

    Attributes:
        trace_id: Its trace.
        span_id: The span that GPU work becomes a child of.
        module: Qualified module path, or None for a request.
        nodes: For a CUDA graph's replay: module path by node of the graph.
    """

    trace_id: int
    span_id: int
    module: str | None = None
    nodes: Mapping[int, str] | None = None


_Fields = tuple[int, int, str | None, Mapping[int, str] | None]  # a Region, made without its class: 0.3 us less a call


class Regions:
    """The regions of this process by external id, for as long as records about them may come.

    Args:
        native: Keeps each thread's stack and hands it to CUPTI.
        now_unix_nano: Wall time, which CUPTI's clock follows on Linux.

    Attributes:
        recording: A window is about to open, is open, or not yet digested.
        forgotten: Regions that grew too old to be joined.
    """

    def __init__(self, native: NativeRegions | Any, now_unix_nano: Callable[[], int]) -> None:
        self._native, self._now = native, now_unix_nano
        self._young: dict[int, _Fields] = {}
        self._old: dict[int, _Fields] = {}
        self._requests: dict[int, _Fields] = {}  # under way: a training loop may be one span for hours
        self._ends: dict[int, int] = {}
        self._turned = now_unix_nano()
        self._lock = threading.Lock()
        self._enter, self._leave = native.enter, native.leave
        self.forgotten = 0
        self.recording = False

    def enter(self, trace_id: int, span_id: int, module: str | None = None) -> None:
        """Begin a module's region on this thread (what the module hooks' observer is told).

        Outside windows this does nothing: a module that is running when a window opens counts as its request's.
        """
        if self.recording:
            self._young[span_id] = (trace_id, span_id, module, None)
            self._enter(span_id)

    def enter_request(self, trace_id: int, span_id: int) -> None:
        """Begin a request's region on this thread, whether or not a window is open; it is known until its end."""
        self._requests[span_id] = (trace_id, span_id, None, None)
        if len(self._requests) > MAX_REGIONS:  # spans that nobody ends
            with contextlib.suppress(RuntimeError):  # another thread has just begun or ended one
                self._requests.pop(next(iter(self._requests)), None)
            self.forgotten += 1
        self._enter(span_id)

    def enter_again(self, trace_id: int, span_id: int) -> None:
        """Be inside a span on this thread for a while, which may be a request's or module's that has its region."""
        if self.recording:
            self._young.setdefault(span_id, (trace_id, span_id, None, None))
            self._enter(span_id)

    def enter_as(self, external_id: int, region: Region) -> None:
        """Begin a region under an id of its own: a graph's replay inside a span that has a region already."""
        self._young[external_id] = region
        self._native.enter(external_id)

    def take_over(self, external_id: int, region: Region) -> None:
        """Put a thread that serves many owners in turn (autograd's) under this region alone."""
        self._young[external_id] = region
        self._native.replace(external_id)

    def leave(self, span_id: int) -> None:
        """End a region on this thread; outside windows it is forgotten at once, since no record can speak of it."""
        self._leave(span_id)
        if not self.recording:
            self._young.pop(span_id, None)

    def end(self, external_id: int) -> None:
        """Note that nothing launched from now on belongs to the region, on whatever thread it is.

        Outside windows it is forgotten: a thread that still stands in it (autograd's) must not be given to it later.
        """
        request = self._requests.pop(external_id, None)
        if self.recording:
            self._ends[external_id] = self._now()
            if request is not None:
                self._young[external_id] = request
        else:
            self._young.pop(external_id, None)
            self._old.pop(external_id, None)

    def find(self, external_id: int) -> Region | None:
        """Return the region of an external id; None when it was never ours, or is too old."""
        fields = self._requests.get(external_id) or self._young.get(external_id) or self._old.get(external_id)
        return None if fields is None else Region(*fields)

    def ended_at(self, external_id: int) -> int | None:
        """Return when the region ended, unix nanoseconds, if that was noted."""
        return self._ends.get(external_id)

    def turn(self) -> None:
        """Forget what is older than a generation; called once a window."""
        now = self._now()
        if now - self._turned < GENERATION_NS and len(self._young) < MAX_REGIONS:
            return
        with self._lock:
            self._turned = now
            self.forgotten += len(self._old)
            self._old, self._young = self._young, {}
            known = self._old
            self._ends = {key: end for key, end in list(self._ends.items()) if key in known}


@dataclass(frozen=True, slots=True)
class JoinCounts:
    """How a batch of GPU work was joined.

    Attributes:
        work: GPU kernels, copies and sets.
        linked: Those with a region.
        unlinked: Those launched outside any region that CUPTI knew of.
        stale: Launched after their region had ended, or long after: not linked, never guessed.
        early: Begun before their launch call began, in CUPTI's time: a clock violation.
        worst_early_ns: The largest of these.
        incomplete: Without timestamps; in no other count.
    """

    work: int = 0
    linked: int = 0
    unlinked: int = 0
    stale: int = 0
    early: int = 0
    worst_early_ns: int = 0
    incomplete: int = 0

    def __add__(self, other: JoinCounts) -> JoinCounts:
        """Return the counts of both batches."""
        mine, theirs = ((c.work, c.linked, c.unlinked, c.stale, c.early, c.incomplete) for c in (self, other))
        work, linked, unlinked, stale, early, incomplete = (a + b for a, b in zip(mine, theirs, strict=True))
        worst = max(self.worst_early_ns, other.worst_early_ns)
        return JoinCounts(work, linked, unlinked, stale, early, worst, incomplete)


@dataclass(frozen=True, slots=True)
class Joined:
    """GPU work of one batch with its regions.

    Attributes:
        work: Rows of GPU kernels, copies and sets that have timestamps.
        region: For each row an index into ``regions``, -1 = none.
        regions: The distinct regions.
        launches: API calls in the batch that put work on the device.
        counts: How the join went.
    """

    work: Rows
    region: NDArray[np.int64]
    regions: Sequence[Region]
    launches: int
    counts: JoinCounts


@dataclass(slots=True)
class _Seen:
    """Launch calls by attachment and correlation id: region id and start, sorted by them."""

    key: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    value: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    @classmethod
    def of(cls, rows: Rows, value: str) -> _Seen:
        key = _key(rows)
        order = np.argsort(key, kind="stable")
        return cls(key[order], rows[value][order])

    def look_up(self, wanted: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        if not len(self.key):
            return np.zeros(len(wanted), np.bool_), np.zeros(len(wanted), np.uint64)
        at = np.searchsorted(self.key, wanted)
        at[at == len(self.key)] = 0
        return self.key[at] == wanted, self.value[at]


def _key(rows: Rows) -> NDArray[np.uint64]:
    """Return what joins a row to others: its attachment and, in it, its correlation id."""
    attachment: NDArray[np.uint64] = rows["attachment"].astype(np.uint64)
    return attachment << np.uint64(32) | rows["correlation"].astype(np.uint64)


class Edge(NamedTuple):
    """Until when a thread was in a region that CUPTI did not know of: entered before the window, not touched since.

    Exact, because both times are readings of the same clock by the same thread.

    Attributes:
        thread: CUPTI's thread id.
        external_id: The region; 0 = none, and CUPTI may still say one of an earlier window.
        until_ns: When the thread first entered or left a region in the window, CUPTI's clock.
    """

    thread: int
    external_id: int
    until_ns: int


class Joiner:
    """Joins batch after batch; work that completes in a later batch than its launch still finds it."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._external, self._calls = _Seen(), _Seen()

    def join(self, batches: Iterable[Rows], edges: Sequence[Edge] = ()) -> Joined:
        """Join the rows of one window.

        Args:
            batches: Its rows.
            edges: What threads were in as the window began.
        """
        rows = list(batches)
        work = _pick(rows, DEVICE_WORK)
        incomplete = (work["start"] == 0) | (work["end"] < work["start"])
        work = work[~incomplete]
        external, calls = _pick(rows, (Kind.EXTERNAL_CORRELATION,)), _pick(rows, API_CALLS)
        external = external[external["detail"] == OUR_EXTERNAL_KIND]
        key, ids, begun = _key(work), _Seen.of(external, "value"), _Seen.of(calls, "start")
        found, value = _look_up(key, ids, self._external)
        started, call_start = _look_up(key, begun, self._calls)
        if edges:
            _apply_edges(edges, calls, key, found, value)
        region, regions, stale = self._resolve(found, value, started, call_start)
        early = started & (work["start"] < call_start)
        worst = int((call_start[early] - work["start"][early]).max()) if early.any() else 0
        self._external, self._calls = ids, begun
        linked = int((region >= 0).sum())
        counts = JoinCounts(
            len(work), linked, len(work) - linked - stale, stale, int(early.sum()), worst, int(incomplete.sum())
        )
        return Joined(work, region, regions, len(calls), counts)

    def _resolve(
        self, found: NDArray[np.bool_], value: NDArray[np.uint64], started: NDArray[np.bool_], start: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], list[Region], int]:
        region = np.full(len(found), -1, np.int64)
        distinct, inverse = np.unique(value[found], return_inverse=True)
        regions: list[Region] = []
        index = np.full(len(distinct) + 1, -1, np.int64)
        limit = np.full(len(distinct) + 1, np.iinfo(np.uint64).max, np.uint64)
        for position, external_id in enumerate(distinct.tolist()):
            known = self._regions.find(external_id)
            if known is not None:
                index[position] = len(regions)
                regions.append(known)
                if (end := self._regions.ended_at(external_id)) is not None:
                    limit[position] = end + END_TOLERANCE_NS
        region[found] = index[inverse]
        late = np.zeros(len(found), np.bool_)
        late[found] = started[found] & (start[found] > limit[inverse])
        region[late] = -1
        return region, regions, int((found & (region < 0)).sum())


def _look_up(key: NDArray[np.uint64], now: _Seen, before: _Seen) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Look work up in its own batch, and in the one before where it is not there."""
    found, value = now.look_up(key)
    if not found.all():
        earlier, old = before.look_up(key)
        value = np.where(found, value, old)
        found = found | earlier
    return found, value


def _apply_edges(
    edges: Sequence[Edge],
    calls: Rows,
    key: NDArray[np.uint64],
    found: NDArray[np.bool_],
    value: NDArray[np.uint64],
) -> None:
    """Give work the region that its thread was in as the window began, in place; id 0 takes a stale one away."""
    by = _key(calls)
    order = np.argsort(by, kind="stable")
    at = np.searchsorted(by[order], key)
    rows = np.flatnonzero(at < len(order))
    chosen = order[at[rows]]
    same = by[chosen] == key[rows]
    rows, call = rows[same], calls[chosen[same]]
    for thread, external_id, until in edges:
        mine = rows[(call["thread"] == thread) & (call["start"] < until)]
        found[mine], value[mine] = external_id != 0, external_id


def _pick(batches: Sequence[Rows], kinds: tuple[int, ...]) -> Rows:
    parts = [rows[is_kind(rows, kinds)] for rows in batches]
    return np.concatenate(parts) if parts else np.empty(0, ROW)


def work_name(row_kind: int, detail: int, name: str) -> str:
    """Return what a piece of GPU work is called: the GPU kernel's name, or the copy's direction."""
    if row_kind in {Kind.MEMCPY, Kind.MEMCPY_PEER}:
        return f"Memcpy {COPY_KINDS.get(detail, 'unknown')}"
    return "Memset" if row_kind == Kind.MEMSET else name
