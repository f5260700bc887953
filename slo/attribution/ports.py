"""What the attribution asks of the world; ``pasta_otel.app`` hands in what answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from pasta_otel.model import EdgeKey, HostSample, ModuleKey, OperationKey, Samples, TimeWindow

SAMPLE_LIMIT = 2000


class SpanStore(Protocol):
    """Questions about closed traces; a span belongs to the window in which it ended.

    ``through`` restricts every answer to traces in which that (service, operation) took part as a server span:
    the SLO's own requests. An operation may be ``*`` for any operation of the service.
    """

    def operation_self_times(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[OperationKey, Samples]:
        """Return the self time of server and internal (not module) spans: duration minus the union of its children."""

    def edge_gaps(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[EdgeKey, Samples]:
        """Return, per call edge, client span duration minus server span duration; the client's errors.

        A client span without a server span (dependency not instrumented, or it never answered) has its whole duration
        as the gap, with the callee named by ``peer.service``, else ``server.address``.
        """

    def edge_durations(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[EdgeKey, Samples]:
        """Return the client span durations per call edge; ``errors`` are client spans with an error status."""

    def module_self_times(
        self, window: TimeWindow, *, through: OperationKey | None = None, limit: int = SAMPLE_LIMIT
    ) -> Mapping[ModuleKey, Samples]:
        """Return the self time of torch module spans by qualified module path."""


@runtime_checkable
class RequestDirectory(Protocol):
    """What a store may also answer, so that a question about nobody can be told from one about a quiet time."""

    def known_requests(self) -> Mapping[OperationKey, TimeWindow]:
        """Return every (service, operation) with server spans, and from the first to the last of their ends."""


class HostSeries(Protocol):
    """Readings of host counters by process."""

    def host_samples(self, window: TimeWindow) -> Sequence[HostSample]:
        """Return the readings in the window, ordered by (service, pid, metric, time)."""
