"""The exact account of what came in and where it went: received - rejected = ok + dropped + pending, per sink."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pasta_otel import semconv
from pasta_otel.errors import StateError


class LedgerNames(NamedTuple):
    """The metrics under which one ledger is exported."""

    received: str
    rejected: str
    ok: str
    dropped: str
    pending: str


SPANS = LedgerNames(
    semconv.SPANS_RECEIVED, semconv.SPANS_REJECTED, semconv.SINK_OK, semconv.SINK_DROPPED, semconv.SINK_PENDING
)
POINTS = LedgerNames(
    semconv.POINTS_RECEIVED,
    semconv.POINTS_REJECTED,
    semconv.POINTS_SINK_OK,
    semconv.POINTS_SINK_DROPPED,
    semconv.POINTS_SINK_PENDING,
)


@dataclass(frozen=True, slots=True)
class SinkAccount:
    """One sink's share of the account."""

    ok: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    pending: int = 0

    @property
    def total(self) -> int:
        """Return everything this sink was ever handed."""
        return self.ok + sum(self.dropped.values()) + self.pending


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The account at one instant."""

    received: int
    rejected: Mapping[str, int]
    sinks: Mapping[str, SinkAccount]

    @property
    def accepted(self) -> int:
        """Return received minus rejected."""
        return self.received - sum(self.rejected.values())

    @property
    def balanced(self) -> bool:
        """Say whether the identity holds for every sink."""
        return all(account.total == self.accepted for account in self.sinks.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the form the report carries (design section 13)."""
        return {
            "received": self.received,
            "rejected": dict(self.rejected),
            "sinks": {
                name: {"ok": account.ok, "dropped": dict(account.dropped), "pending": account.pending}
                for name, account in self.sinks.items()
            },
        }


class _Sink:
    __slots__ = ("dropped", "ok", "pending")

    def __init__(self) -> None:
        self.ok = 0
        self.pending = 0
        self.dropped: Counter[str] = Counter()


class Ledger:
    """Count items through a process under one lock, so that every snapshot balances.

    Args:
        sinks: Names of the sinks; each is handed every accepted item.
        meter: Where the account is exported, or None.
        names: The metrics' names.
    """

    def __init__(self, sinks: Sequence[str], meter: Meter | None = None, names: LedgerNames = SPANS) -> None:
        self._lock = threading.Lock()
        self._received = 0
        self._rejected: Counter[str] = Counter()
        self._sinks = {name: _Sink() for name in sinks}
        if meter is not None:
            self._export(meter, names)

    def receive(self, received: int, rejected: Mapping[str, int] | None = None) -> None:
        """Count a batch in: what was not rejected is pending at every sink from now on."""
        rejected = rejected or {}
        accepted = received - sum(rejected.values())
        if accepted < 0 or min(rejected.values(), default=0) < 0:
            raise StateError(f"{received} items received but {dict(rejected)} rejected")
        with self._lock:
            self._received += received
            self._rejected.update(rejected)
            for sink in self._sinks.values():
                sink.pending += accepted

    def settle(self, sink: str, ok: int = 0, dropped: Mapping[str, int] | None = None) -> None:
        """Move pending items of a sink to ok or dropped.

        Raises:
            StateError: More would be settled than is pending; nothing is changed.
        """
        dropped = dropped or {}
        done = ok + sum(dropped.values())
        with self._lock:
            account = self._sinks[sink]
            if ok < 0 or min(dropped.values(), default=0) < 0 or done > account.pending:
                raise StateError(f"sink {sink} settles {done} items but {account.pending} are pending")
            account.pending -= done
            account.ok += ok
            account.dropped.update({reason: count for reason, count in dropped.items() if count})

    def snapshot(self) -> LedgerSnapshot:
        """Return the whole account at one instant."""
        with self._lock:
            return LedgerSnapshot(
                self._received,
                dict(self._rejected),
                {name: SinkAccount(sink.ok, dict(sink.dropped), sink.pending) for name, sink in self._sinks.items()},
            )

    def _export(self, meter: Meter, names: LedgerNames) -> None:
        """Export by callbacks, so that metrics and reports come from the same snapshots."""
        for name, read in zip(names[:4], (_received, _rejected, _ok, _dropped), strict=True):
            spec = semconv.METRICS[name]
            meter.create_observable_counter(name, [self._callback(read)], spec.unit, spec.description)
        spec = semconv.METRICS[names.pending]
        callback = self._callback(_pending)
        meter.create_observable_up_down_counter(names.pending, [callback], spec.unit, spec.description)

    def _callback(self, read: _Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _options: read(self.snapshot())


_Read = Callable[[LedgerSnapshot], Iterable[Observation]]


def _received(snapshot: LedgerSnapshot) -> Iterable[Observation]:
    yield Observation(snapshot.received)


def _rejected(snapshot: LedgerSnapshot) -> Iterable[Observation]:
    for reason, count in snapshot.rejected.items():
        yield Observation(count, {"reason": reason})


def _ok(snapshot: LedgerSnapshot) -> Iterable[Observation]:
    for name, sink in snapshot.sinks.items():
        yield Observation(sink.ok, {"sink": name})


def _dropped(snapshot: LedgerSnapshot) -> Iterable[Observation]:
    for name, sink in snapshot.sinks.items():
        for reason, count in sink.dropped.items():
            yield Observation(count, {"sink": name, "reason": reason})


def _pending(snapshot: LedgerSnapshot) -> Iterable[Observation]:
    for name, sink in snapshot.sinks.items():
        yield Observation(sink.pending, {"sink": name})
