"""Joins what records with what exports: rows to a sink, the capture tier to what reads it, and their counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation

from pasta_otel import semconv
from pasta_otel.context import selected
from pasta_otel.errors import InputError
from pasta_otel.model import OpSpan

DEFAULT_TIER = semconv.CAPTURE_DEFAULT_TIER
MODULE_TIER = 2
FULL_TIER = 3
MAX_TIER = 4
NEVER_UNIX_NANO = 1 << 63


class RowSink(Protocol):
    """Takes finished rows; must not block and must not raise. Exporters implement it."""

    def offer(self, row: OpSpan, /) -> object:
        """Take one row."""


@dataclass(frozen=True, slots=True)
class CaptureTarget:
    """A service and operation to look at more closely; None stands for any."""

    service: str | None = None
    operation: str | None = None


class CaptureState:
    """The capture tier: its default, or what the flag ``pasta.capture`` raised it to until a deadline.

    Args:
        service: This process' ``service.name``, to tell which targets are meant.
        default_tier: Tier while no flag says otherwise.
        unix_nano: Wall clock in nanoseconds.
    """

    def __init__(
        self, service: str = "", default_tier: int = DEFAULT_TIER, unix_nano: Callable[[], int] = time.time_ns
    ) -> None:
        self.service, self.default_tier, self._unix_nano = service, default_tier, unix_nano
        self._raised: tuple[int, frozenset[str | None], int] | None = None

    def raise_to(self, tier: int, until_unix_nano: int, targets: Iterable[CaptureTarget] = ()) -> None:
        """Set a tier for some operations until a deadline; no targets means all operations.

        Raises:
            ValueError: The tier is not 0 to 4.
        """
        if not 0 <= tier <= MAX_TIER:
            msg = f"capture tier must be 0 to {MAX_TIER}, got {tier}"
            raise ValueError(msg)
        named = list(targets)
        ours = frozenset(target.operation for target in named if target.service in (None, self.service))
        if named and not ours:
            return
        self._raised = (tier, ours, until_unix_nano)

    def apply(self, flag: Mapping[str, Any] | None) -> None:
        """Take over the flag ``pasta.capture``: ``{"tier", "targets": [{"service", "operation"}], "until"}``.

        Without a flag, and at the default tier that the controller serves while nothing burns, the app's own default
        holds; below it no module spans are made.
        ``until`` is RFC 3339; without it the tier holds until the flag changes.

        Raises:
            InputError: The flag cannot be read; names the field. The tier stays as it was.
        """
        if not flag or flag.get("tier") is None:
            self.lower()
            return
        tier = flag["tier"]
        if not isinstance(tier, int) or isinstance(tier, bool) or not 0 <= tier <= MAX_TIER:
            raise InputError(f"expected 0 to {MAX_TIER}, got {tier!r}", field="pasta.capture.tier")
        if tier == DEFAULT_TIER:
            self.lower()
            return
        until, targets = _deadline(flag.get("until")), _targets(flag.get("targets") or ())
        self.lower()
        self.raise_to(tier, until, targets)

    def lower(self) -> None:
        """Return to the default tier."""
        self._raised = None

    def tier(self, operation: str | None = None) -> int:
        """Return the tier for an operation now; without one, the highest that applies to anything."""
        raised = self._raised
        if raised is None:
            return self.default_tier
        tier, operations, until = raised
        if self._unix_nano() >= until:
            self._raised = None
            return self.default_tier
        if not operations or None in operations or operation is None or operation in operations:
            return tier
        return self.default_tier


class CaptureSelection:
    """Decide by tier and sampling rate whether a sampled trace carries module spans.

    Args:
        capture: The tier.
        rate: Share of traces, ``PASTA_SAMPLING_RATE``; a raised tier takes every trace of its operations.
    """

    def __init__(self, capture: CaptureState, rate: float) -> None:
        self._capture, self._rate = capture, rate

    def __call__(self, trace_id: int, operation: str) -> bool:
        """Return whether the trace is recorded."""
        tier = self._capture.tier(operation)
        if tier >= FULL_TIER:
            return True
        return tier >= MODULE_TIER and selected(trace_id, self._rate)


class Pipeline:
    """Where rows go, and how many.

    ``offer`` is the sink's own method once there is a sink, so that nothing is added to a row's cost.

    Args:
        meter: Counts what was recorded and dropped.
        capture: The tier, exported as a gauge.
    """

    def __init__(self, meter: Meter | None = None, capture: CaptureState | None = None) -> None:
        self.capture = capture or CaptureState()
        self._lock = threading.Lock()
        self._without_sink = 0
        self.sink: RowSink | None = None
        self.offer: Callable[[OpSpan], object] = self._drop
        meter = meter or NoOpMeter(semconv.SCOPE)
        self._recorded = _counter(meter, semconv.MODULE_SPANS)
        self._dropped = _counter(meter, semconv.MODULE_SPANS_DROPPED)
        self._traces = _counter(meter, semconv.TRACES_RECORDED)
        spec = semconv.METRICS[semconv.CAPTURE_TIER]
        meter.create_observable_gauge(
            spec.name, callbacks=[self._observe_tier], unit=spec.unit, description=spec.description
        )

    def connect(self, sink: RowSink) -> None:
        """Send rows to a sink from now on."""
        self.sink = sink
        self.offer = sink.offer

    def disconnect(self) -> RowSink | None:
        """Drop and count rows from now on; returns the sink that was connected."""
        sink, self.sink = self.sink, None
        self.offer = self._drop
        return sink

    def trace_ended(self, calls: int, limit: int, lost: int = 0) -> None:
        """Count an ended trace: module calls seen, of which ``limit`` less ``lost`` at most became rows."""
        self._traces.add(1)
        recorded = max(min(calls, limit) - lost, 0)
        with self._lock:
            unsunk, self._without_sink = min(self._without_sink, recorded), 0
        self._recorded.add(recorded - unsunk)
        if calls > limit:
            self._dropped.add(calls - limit, {"reason": "trace_limit"})
        if lost:
            self._dropped.add(lost, {"reason": "end_unseen"})
        if unsunk:
            self._dropped.add(unsunk, {"reason": "no_sink"})

    def _drop(self, row: OpSpan) -> None:
        del row
        with self._lock:
            self._without_sink += 1

    def _observe_tier(self, options: CallbackOptions) -> Iterable[Observation]:
        del options
        return [Observation(self.capture.tier())]


def _counter(meter: Meter, name: str) -> Any:
    spec = semconv.METRICS[name]
    return meter.create_counter(spec.name, unit=spec.unit, description=spec.description)


def _targets(targets: Iterable[Any]) -> list[CaptureTarget]:
    return [
        CaptureTarget(service=target.get("service"), operation=target.get("operation"))
        for target in targets
        if isinstance(target, Mapping)
    ]


def _deadline(until: Any) -> int:
    if until is None or until == "":
        return NEVER_UNIX_NANO
    try:
        end = datetime.fromisoformat(str(until))
    except ValueError as error:
        raise InputError(f"expected an RFC 3339 time, got {until!r}", field="pasta.capture.until") from error
    if end.tzinfo is None:
        raise InputError(f"the time {until!r} has no zone", field="pasta.capture.until")
    return int(end.timestamp()) * 1_000_000_000 + end.microsecond * 1000
