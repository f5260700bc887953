"""Forward what the receiver took to an upstream collector: bounded, retried, accounted to the last span."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from opentelemetry.metrics import Meter, NoOpMeter

from pasta_otel import semconv
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.errors import InputError, StateError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.refusal import advice
from pasta_otel.exporters.otlp.transport import HttpTransport, Transport
from pasta_otel.exporters.receiver.batch import PointBatch, SpanBatch

logger = logging.getLogger(__name__)

_LOSS_LOG_NS = 60_000_000_000
_ABORT_S = 5.0  # an aborted request ends at once; the thread is a daemon should it not
TRACES: Final = "traces"
METRICS: Final = "metrics"
QUEUE_FULL, SHUTDOWN, RETRY_DEADLINE, NO_DESTINATION = "queue_full", "shutdown", "retry_deadline", "no_destination"
REJECTED, REFUSED = "rejected_upstream", "refused_upstream"


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Where to, and how hard to try.

    Attributes:
        traces: Destination of spans, as ``OTEL_EXPORTER_OTLP_*`` names it; its ``timeout_s`` is that of one request.
        metrics: Destination of metric points; None forwards spans only.
        queue_bytes: Bytes that may wait; what comes beyond is dropped as ``queue_full``.
        request_bytes: Waiting batches are joined up to this size.
        retry_initial_s: First pause; doubled each time, with jitter.
        retry_max_s: Longest pause, unless upstream asks for more with Retry-After.
        retry_deadline_s: After this long a batch is dropped as ``retry_deadline`` (the Collector's default: 300 s).
    """

    traces: OtlpConfig
    metrics: OtlpConfig | None = None
    queue_bytes: int = 64 * 1024**2
    request_bytes: int = 1024**2
    retry_initial_s: float = 0.2
    retry_max_s: float = 5.0
    retry_deadline_s: float = 300.0

    def __post_init__(self) -> None:
        """Check that every bound is positive."""
        for name in ("queue_bytes", "request_bytes", "retry_initial_s", "retry_max_s", "retry_deadline_s"):
            if getattr(self, name) <= 0:
                raise InputError("must be positive", field=f"forward.{name}")


class _Item(NamedTuple):
    """One batch that waits."""

    signal: str
    body: bytes
    size: int


class _Parcel:
    """Batches of one signal as one request; settled exactly once."""

    __slots__ = ("body", "count", "settled", "signal")

    def __init__(self, signal: str, body: bytes, count: int) -> None:
        self.signal, self.body, self.count = signal, body, count
        self.settled = False


class Forwarder:
    """Send batches upstream from one thread; a ``SpanSink`` and ``PointSink`` of the receiver.

    Args:
        config: Where to, and bounds.
        ledger: Account of spans, with a sink ``upstream``.
        point_ledger: Account of metric points; None forwards spans only.
        clock: Monotonic clock.
        meter: Where retries are counted.
        transports: How to send each signal; None makes them from the configuration.
    """

    name = "upstream"

    def __init__(  # noqa: PLR0913 - the parts of the world that it uses
        self,
        config: ForwardConfig,
        ledger: Ledger,
        *,
        point_ledger: Ledger | None = None,
        clock: Clock | None = None,
        meter: Meter | None = None,
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self._config, self._clock = config, clock or SystemClock()
        self._ledgers = {TRACES: ledger, METRICS: point_ledger}
        self._transports = transports or _transports(config)
        self._wake = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._bytes = 0
        self._in_hand: _Parcel | None = None
        self._stopping = self._aborted = False
        self._complained = False
        self._lost: dict[str, int] = {}
        self._loss_logged_ns: int | None = None
        spec = semconv.METRICS[semconv.FORWARD_RETRIES]
        self._retries = (meter or NoOpMeter("")).create_counter(spec.name, spec.unit, spec.description)
        self._thread = threading.Thread(target=self._run, name="otlp-forward", daemon=True)

    def start(self) -> None:
        """Begin to send.

        Raises:
            StateError: It was started before.
        """
        if self._thread.ident is not None:
            raise StateError("the forwarder was started before")
        self._thread.start()

    def has_room(self, spans: int) -> bool:
        """Return True: a slow upstream must not push back on the application."""
        del spans
        return True

    def offer(self, batch: SpanBatch) -> bool:
        """Queue spans; what does not fit is dropped as ``queue_full``."""
        return self._offer(_Item(TRACES, batch.body, len(batch)))

    def offer_points(self, batch: PointBatch) -> bool:
        """Queue metric points; what does not fit is dropped as ``queue_full``."""
        return self._offer(_Item(METRICS, batch.body, len(batch)))

    def stop(self, deadline_s: float = 10.0) -> None:
        """Send what waits until the deadline, then drop the rest as ``shutdown``: afterwards nothing is pending."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        with self._wake:
            self._aborted = True
            left, self._queue, self._bytes = list(self._queue), deque(), 0
            in_hand = self._in_hand
            self._wake.notify_all()
        for item in left:
            self._settle(item.signal, dropped={SHUTDOWN: item.size})
        if in_hand is not None:
            self._finish(in_hand, dropped={SHUTDOWN: in_hand.count})
        for transport in self._transports.values():
            transport.abort()
        if self._thread.ident is not None:
            self._thread.join(_ABORT_S)
        for transport in self._transports.values():
            transport.close()

    def trouble(self) -> str:
        """Return what is wrong with this process now, not with upstream; empty = nothing."""
        died = self._thread.ident is not None and not self._thread.is_alive() and not self._stopping
        return "the thread that forwards has died" if died else ""

    def limits(self) -> Mapping[str, tuple[int, int]]:
        """Return what fills up: used, and most."""
        return {"queue_bytes": (self._bytes, self._config.queue_bytes)}

    def _offer(self, item: _Item) -> bool:
        if item.signal not in self._transports:
            self._settle(item.signal, dropped={NO_DESTINATION: item.size})
            return False
        with self._wake:
            reason = SHUTDOWN if self._stopping else QUEUE_FULL
            fits = not self._stopping and self._bytes + len(item.body) <= self._config.queue_bytes
            if fits:
                self._queue.append(item)
                self._bytes += len(item.body)
                self._wake.notify_all()
        if not fits:
            self._settle(item.signal, dropped={reason: item.size})
        return fits

    def _run(self) -> None:
        while (parcel := self._next()) is not None:
            try:
                self._deliver(parcel)
            except Exception:
                logger.warning("a batch could not be forwarded", exc_info=True)
                self._finish(parcel, dropped={REFUSED: parcel.count})
            with self._wake:
                self._in_hand = None

    def _next(self) -> _Parcel | None:
        """Wait for work and join waiting batches: requests concatenate, since all their fields are repeated."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._stopping)
            if self._aborted or not self._queue:
                return None
            items = [self._queue.popleft()]
            size = len(items[0].body)
            while self._queue and self._queue[0].signal == items[0].signal:
                size += len(self._queue[0].body)
                if size > self._config.request_bytes:
                    break
                items.append(self._queue.popleft())
            body = items[0].body if len(items) == 1 else b"".join(item.body for item in items)
            self._bytes -= len(body)
            self._in_hand = _Parcel(items[0].signal, body, sum(item.size for item in items))
            return self._in_hand

    def _deliver(self, parcel: _Parcel) -> None:
        give_up_ns = self._clock.monotonic_ns() + int(self._config.retry_deadline_s * 1e9)
        pause_s = self._config.retry_initial_s
        timeout_s = self._config.traces.timeout_s
        while True:
            # the transport's own clock: a deadline on CLOCK_MONOTONIC in seconds
            reply = self._transports[parcel.signal].post(parcel.body, time.monotonic() + timeout_s)
            if reply.kind == "ok":
                self._delivered(parcel, reply.rejected, reply.message)
                return
            if reply.kind == "refused":
                self._complain(
                    f"upstream refuses telemetry: {reply.reason} {reply.message}".rstrip() + advice(reply.reason)
                )
                self._finish(parcel, dropped={REFUSED: parcel.count})
                return
            self._complain(f"upstream does not take telemetry now: {reply.reason}; it is tried again")
            jittered_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - not for secrets
            wait_s = jittered_s if reply.retry_after_s is None else reply.retry_after_s
            if self._clock.monotonic_ns() + int(wait_s * 1e9) > give_up_ns:
                self._finish(parcel, dropped={RETRY_DEADLINE: parcel.count})
                return
            pause_s = min(pause_s * 2.0, self._config.retry_max_s)
            with self._wake:
                if self._wake.wait_for(lambda: self._aborted, wait_s):
                    return
            self._retries.add(1)

    def _delivered(self, parcel: _Parcel, rejected: int, message: str) -> None:
        rejected = max(0, min(rejected, parcel.count))
        if message:
            self._complain(f"upstream rejected {rejected} of {parcel.count}: {message}")
        else:
            self._complained = False
        self._finish(parcel, ok=parcel.count - rejected, dropped={REJECTED: rejected})

    def _finish(self, parcel: _Parcel, ok: int = 0, dropped: Mapping[str, int] | None = None) -> None:
        """Settle a parcel unless the stop did so before."""
        with self._wake:
            settled, parcel.settled = parcel.settled, True
        if not settled:
            self._settle(parcel.signal, ok, dropped)

    def _settle(self, signal: str, ok: int = 0, dropped: Mapping[str, int] | None = None) -> None:
        for reason, count in (dropped or {}).items():
            self._log_loss(signal, reason, count)
        ledger = self._ledgers[signal]
        if ledger is not None:
            ledger.settle(self.name, ok=ok, dropped=dropped)

    def _log_loss(self, signal: str, reason: str, count: int) -> None:
        """Say that telemetry is lost: at once, then once a minute with how much it is by now."""
        if not count or reason == NO_DESTINATION:
            return
        now = self._clock.monotonic_ns()
        with self._wake:
            self._lost[signal] = self._lost.get(signal, 0) + count
            silent = self._loss_logged_ns is not None and now - self._loss_logged_ns < _LOSS_LOG_NS
            if silent:
                return
            self._loss_logged_ns = now
        what = "spans" if signal == TRACES else "metric points"
        logger.warning("%s are lost: %d were not forwarded so far; now: %s", what, self._lost[signal], reason)

    def _complain(self, text: str) -> None:
        """Log the first of a run of troubles."""
        if not self._complained:
            logger.warning("%s", text)
        self._complained = True


def _transports(config: ForwardConfig) -> dict[str, Transport]:
    transports = {TRACES: _transport(config.traces, TRACES)}
    if config.metrics is not None:
        transports[METRICS] = _transport(config.metrics, METRICS)
    return transports


def _transport(config: OtlpConfig, signal: Literal["traces", "metrics"]) -> Transport:
    if config.protocol == "grpc":
        from pasta_otel.exporters.otlp.grpc_transport import GrpcTransport  # noqa: PLC0415 - grpcio is an extra

        return GrpcTransport(config, signal)
    return HttpTransport(config)
