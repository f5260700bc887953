"""The one record that every family looks at: both windows of an SLO's own requests, compared once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pasta_otel import semconv
from pasta_otel.model import EdgeKey, Evidence, HostSample, ModuleKey, OperationKey, Samples, SpanRef, TimeWindow
from pasta_otel.slo.attribution.effect import Shift, compare
from pasta_otel.slo.attribution.ports import SpanStore
from pasta_otel.slo.attribution.thresholds import Thresholds

ANY_OPERATION = "*"
SECOND_NS = 1_000_000_000
MAX_LINKS = 3

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the store says about one window of the SLO's own requests."""

    operations: Mapping[OperationKey, Samples]
    gaps: Mapping[EdgeKey, Samples]
    edges: Mapping[EdgeKey, Samples]
    modules: Mapping[ModuleKey, Samples]

    def requests(self, own: OperationKey) -> int:
        """Return how many of the SLO's own requests the window holds.

        With ``*`` as the operation, the sum over the service's operations stands for it: what matters is the ratio
        between the two windows.
        """
        if own in self.operations:
            return self.operations[own].requests or self.operations[own].count
        return sum(
            value.requests or value.count for key, value in self.operations.items() if key.service == own.service
        )


def take_snapshot(store: SpanStore, window: TimeWindow, own: OperationKey) -> Snapshot:
    """Ask the store the four questions for one window."""
    return Snapshot(
        operations=store.operation_self_times(window, through=own),
        gaps=store.edge_gaps(window, through=own),
        edges=store.edge_durations(window, through=own),
        modules=store.module_self_times(window, through=own),
    )


@dataclass(frozen=True, slots=True)
class Record:
    """Both windows, compared key by key; keys are in sorted order, so every answer is deterministic.

    Attributes:
        own: The SLO's own service and operation.
        limits: Thresholds.
        requests_before: The SLO's own requests in the baseline.
        requests_after: The same in the burning window.
        operations: Self time per (service, operation).
        gaps: Client minus server per edge.
        edges: Client duration per edge.
        modules: Self time per torch module.
        request_rate_ratio: Requests a second in the burning window over requests a second in the baseline.
        requests_per_second: Requests a second in the burning window; 0 where its length is unknown.
        host_before: Host readings of the baseline, ordered by (service, pid, metric, time).
        host_after: Host readings of the burning window.
    """

    own: OperationKey
    limits: Thresholds
    requests_before: int
    requests_after: int
    operations: Mapping[OperationKey, Shift]
    gaps: Mapping[EdgeKey, Shift]
    edges: Mapping[EdgeKey, Shift]
    modules: Mapping[ModuleKey, Shift]
    request_rate_ratio: float = 1.0
    requests_per_second: float = 0.0
    host_before: Sequence[HostSample] = ()
    host_after: Sequence[HostSample] = ()

    @property
    def baseline_ns(self) -> float:
        """Return the time of an average baseline request: self times, gaps and module times add up to it.

        Exact for sequential calls; concurrent calls count each, so it is then an upper bound of the duration.
        """
        parts = (self.operations, self.gaps, self.modules)
        return sum(shift.before_ns for part in parts for shift in part.values())

    def services(self) -> list[str]:
        """Return every service that did work in these requests."""
        return sorted({key.service for key in self.operations} | {key.service for key in self.modules})

    def callers(self, callee: str) -> list[EdgeKey]:
        """Return the edges into a service."""
        return [edge for edge in self.edges if edge.callee == callee]


def _of_services(operations: Mapping[OperationKey, Samples]) -> Mapping[OperationKey, Samples]:
    """Return the operations without host events: those are linked to a request, not made by a service."""
    return {key: samples for key, samples in operations.items() if key.service != semconv.AGENT_SERVICE}


def make_record(  # noqa: PLR0913 - two windows and what belongs to them
    own: OperationKey,
    before: Snapshot,
    after: Snapshot,
    limits: Thresholds,
    *,
    host: tuple[Sequence[HostSample], Sequence[HostSample]] = ((), ()),
    lengths_ns: tuple[int, int] = (0, 0),
) -> Record:
    """Compare two snapshots key by key.

    Args:
        own: The SLO's own service and operation.
        before: The baseline.
        after: The burning window.
        limits: Thresholds.
        host: Host readings of both windows.
        lengths_ns: Lengths of both windows; 0 = unknown.
    """
    requests = (before.requests(own), after.requests(own))
    return Record(
        own=own,
        limits=limits,
        requests_before=requests[0],
        requests_after=requests[1],
        operations=_compare_all(_of_services(before.operations), _of_services(after.operations), requests),
        gaps=_compare_all(before.gaps, after.gaps, requests),
        edges=_compare_all(before.edges, after.edges, requests),
        modules=_compare_modules(before.modules, after.modules, requests),
        request_rate_ratio=_rate_ratio(requests, lengths_ns),
        requests_per_second=requests[1] * SECOND_NS / lengths_ns[1] if lengths_ns[1] else 0.0,
        host_before=host[0],
        host_after=host[1],
    )


def _rate_ratio(requests: tuple[int, int], lengths_ns: tuple[int, int]) -> float:
    if not requests[0] or not lengths_ns[1]:
        return 1.0
    return requests[1] * lengths_ns[0] / (requests[0] * lengths_ns[1])


def _compare_all(
    before: Mapping[Key, Samples], after: Mapping[Key, Samples], requests: tuple[int, int]
) -> dict[Key, Shift]:
    keys = sorted({*before, *after}, key=repr)
    return {key: compare(before.get(key), after.get(key), *requests) for key in keys}


def _compare_modules(
    before: Mapping[ModuleKey, Samples], after: Mapping[ModuleKey, Samples], requests: tuple[int, int]
) -> dict[ModuleKey, Shift]:
    """Scale by the traces that carry module spans: they may be a sample of all requests."""
    result: dict[ModuleKey, Shift] = {}
    for service in sorted({key.service for key in (*before, *after)}):
        old = {key: value for key, value in before.items() if key.service == service}
        new = {key: value for key, value in after.items() if key.service == service}
        result |= _compare_all(old, new, (_traces(old, requests[0]), _traces(new, requests[1])))
    return result


def _traces(modules: Mapping[ModuleKey, Samples], otherwise: int) -> int:
    return max((value.requests for value in modules.values()), default=0) or otherwise


def shift_evidence(family: str, metric: str, shift: Shift, name: str) -> Evidence:
    """Return a shift in seconds as evidence, with Cliff's delta as the effect."""
    return Evidence(
        family=family,
        metric=metric,
        before=shift.median_before_ns / SECOND_NS,
        after=shift.median_after_ns / SECOND_NS,
        effect=shift.delta,
        n=shift.after.count,
        links=links(shift),
        name=name,
    )


def links(shift: Shift) -> tuple[SpanRef, ...]:
    """Return a few spans of the burning window that show the shift."""
    return tuple(shift.after.examples[:MAX_LINKS])
