"""Send encoded requests with retry under one deadline, and say exactly what became of every item.

Runs on a worker's thread only; the application's threads never come here.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from pasta_otel.exporters.otlp.config import OtlpConfig, Signal
from pasta_otel.exporters.otlp.fork import renew_in_children
from pasta_otel.exporters.otlp.refusal import advice
from pasta_otel.exporters.otlp.transport import Reply, Transport, make_transport

_logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 1.0
BACKOFF_CAP_S = 30.0
CLOSE_WAIT_S = 0.5
JITTER = 0.2  # OTLP specification: exponential back-off with jitter
SAME_WARNING_EVERY_S = 20.0
_senders: weakref.WeakSet[Sender] = weakref.WeakSet()
_said: set[str] = set()  # destinations whose losses at the end of the program were told


class Outcome(NamedTuple):
    """What became of one request's items: ``ok + dropped`` is their number."""

    ok: int
    dropped: int = 0
    reason: str = ""


def limit_unheard(timeout_s: float) -> None:
    """At the end of the program, give destinations that never took anything so much time, all together.

    What they lose is told once per destination, whatever the number of senders. Each later call leaves a limit that is
    nearer as it is.
    """
    for sender in list(_senders):
        sender.limit_unheard(timeout_s)


class Sender:
    """Deliver raw OTLP request bytes to one destination.

    Args:
        config: The destination.
        signal: ``traces`` or ``metrics``; chooses the gRPC method.
        transport: How to send; made from ``config`` if not given.
        monotonic: Clock for deadlines, seconds.
        rand: Uniform random number in [0, 1) for the jitter.
    """

    def __init__(
        self,
        config: OtlpConfig,
        *,
        signal: Signal = "traces",
        transport: Transport | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self.config = config
        self._transport = transport or make_transport(config, signal)
        self._monotonic, self._rand = monotonic, rand
        self._turn = threading.Lock()  # one connection, one request at a time
        self._changed = threading.Condition()
        self._limit_s = math.inf
        self._aborted = self._heard = self._ending = False
        self._warned: dict[str, float] = {}
        renew_in_children(self)
        _senders.add(self)

    def send(self, body: bytes, items: int) -> Outcome:
        """Send one request; retry transient failures until its deadline.

        Args:
            body: The encoded request.
            items: How many spans or points are in it.

        Returns:
            How many the receiver took, how many are lost and why. Never raises for network trouble.
        """
        with self._turn:
            return self._send(body, items)

    def _send(self, body: bytes, items: int) -> Outcome:
        deadline = self._monotonic() + self.config.timeout_s
        reason = "shutdown"
        attempt = 0
        while (remaining := min(deadline, self._limit_s) - self._monotonic()) > 0:
            reply = self._transport.post(body, time.monotonic() + remaining)
            if reply.kind == "ok":
                self._heard = True
                return self._accepted(reply, items)
            reason = reply.reason
            if reply.kind == "refused":
                break
            if not self._pause(self._backoff(attempt, reply), deadline):
                break
            attempt += 1
        if self._aborted:
            reason = "shutdown"
        detail = f": {reply.message}" if reason != "shutdown" and reply.message else ""
        self._warn(reason, f"{items} items for {self.config.target} dropped, {reason}{detail}{advice(reason)}")
        return Outcome(0, items, reason)

    def limit(self, timeout_s: float) -> None:
        """Let nothing take longer than ``timeout_s`` from now, whatever waits or comes; for an orderly shutdown."""
        with self._changed:
            self._limit_s = min(self._limit_s, self._monotonic() + timeout_s)
            self._changed.notify_all()

    def limit_unheard(self, timeout_s: float) -> None:
        """Limit a destination that never took anything; see the function of that name."""
        if not self._heard:
            self._ending = True
            self.limit(timeout_s)

    def abort(self) -> None:
        """End everything now, a request in flight included."""
        self._aborted = True
        self.limit(0.0)
        self._transport.abort()

    def close(self) -> None:
        """Release the connection, unless a request that cannot be aborted still uses it."""
        if self._turn.acquire(timeout=CLOSE_WAIT_S):
            try:
                self._transport.close()
            finally:
                self._turn.release()

    def after_fork(self) -> None:
        """Make the child's copy usable: no connection, no lock of the parent's threads."""
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._transport.after_fork()

    def _accepted(self, reply: Reply, items: int) -> Outcome:
        rejected = min(reply.rejected, items)
        if rejected:
            self._warn_now(f"{self.config.target} rejected {rejected} of {items} items: {reply.message}")
        elif reply.message:
            self._warn_now(f"{self.config.target} accepted {items} items and says: {reply.message}")
        return Outcome(items - rejected, rejected, "rejected" if rejected else "")

    def _backoff(self, attempt: int, reply: Reply) -> float:
        if reply.retry_after_s is not None:
            return reply.retry_after_s
        pause = min(BACKOFF_FIRST_S * 2.0**attempt, BACKOFF_CAP_S)
        return pause * (1 - JITTER + 2 * JITTER * self._rand())

    def _pause(self, seconds: float, deadline: float) -> bool:
        """Wait; False when the pause would end after the deadline (which ``limit`` may bring nearer meanwhile)."""
        until = self._monotonic() + seconds
        with self._changed:
            while until < min(deadline, self._limit_s):
                now = self._monotonic()
                if now >= until:
                    return True
                self._changed.wait(until - now)
        return False

    def _warn(self, key: str, text: str) -> None:
        """Warn once per reason and 20 s: a dead collector must not fill the log."""
        if self._ending:
            if self.config.target in _said:
                return
            _said.add(self.config.target)
        now = self._monotonic()
        if now - self._warned.get(key, -math.inf) >= SAME_WARNING_EVERY_S:
            self._warned[key] = now
            self._warn_now(text)

    def _warn_now(self, text: str) -> None:
        _logger.warning("%s", text)
