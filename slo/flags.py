"""Flags inside an application: an in-process snapshot that one background thread refreshes.

Reading a flag is a dictionary look-up and a comparison of times. It never does I/O, takes no lock and never waits: a
hung controller cannot slow a request. A value holds until its TTL, then the caller's own default counts again.
"""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from opentelemetry.metrics import Meter

from pasta_otel import semconv
from pasta_otel.clock import Clock

T = TypeVar("T")
SECOND_NS = 1_000_000_000
NEVER_NS = 1 << 63
MAX_SKEW_NS = (
    3 * SECOND_NS
)  # beyond what an HTTP date's resolution explains, the controller's clock counts for its ends
_log = logging.getLogger(__name__)


class RemoteFlag(NamedTuple):
    """One flag as the controller tells it.

    Attributes:
        value: Any JSON value.
        expires_unix_nano: When it reverts by itself; 0 = it does not.
        since: Identity of the action behind it: a new one means it was set anew.
        pinned: A person set it.
    """

    value: Any
    expires_unix_nano: int = 0
    since: str = ""
    pinned: bool = False


class FlagAnswer(NamedTuple):
    """What one poll brought.

    Attributes:
        flags: All flags; None when nothing changed since ``etag``.
        etag: What to ask with next time.
        server_unix_nano: The controller's own time to the second (HTTP ``Date``); 0 = it did not say.
    """

    flags: Mapping[str, RemoteFlag] | None
    etag: str
    server_unix_nano: int = 0


class FlagTransport(Protocol):
    """Fetch all flags from a controller."""

    def fetch(self, etag: str) -> FlagAnswer:
        """Return the flags, or that nothing changed; raises OSError or ValueError when there is no answer."""

    def close(self) -> None:
        """Let go of the connection."""


class _Entry(NamedTuple):
    value: Any
    expires_monotonic_ns: int
    flag: RemoteFlag


class FlagClient:
    """The snapshot, and the daemon thread that refreshes it.

    Args:
        transport: Where flags come from.
        clock: Time; TTLs run on its monotonic reading.
        poll_seconds: Pause between two polls.
        ttl_seconds: How long the last values hold when the controller is gone.
        meter: Where polls are counted.
        on_view: Called by the poller after every poll, failed ones too, because values expire.
    """

    def __init__(  # noqa: PLR0913 - the world as keyword parameters
        self,
        transport: FlagTransport,
        clock: Clock,
        *,
        poll_seconds: float,
        ttl_seconds: float,
        meter: Meter,
        on_view: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport, self._clock, self._on_view = transport, clock, on_view
        self._poll_seconds, self._ttl_ns = poll_seconds, int(ttl_seconds * SECOND_NS)
        self._monotonic_ns = clock.monotonic_ns
        self._entries: Mapping[str, _Entry] = {}
        self._flags: Mapping[str, RemoteFlag] = {}
        self._etag = ""
        self._failing = ""
        self._thread: threading.Thread | None = None
        self._stop, self._answered = threading.Event(), threading.Event()
        spec = semconv.METRICS[semconv.FLAG_POLLS]
        self._polls = meter.create_counter(spec.name, spec.unit, spec.description)

    def get(self, name: str, default: T) -> T:
        """Return the flag's value if it is known, unexpired and of the default's type; else the default."""
        entry = self._entries.get(name)
        if entry is None or entry[1] <= self._monotonic_ns():
            return default
        value: Any = entry[0]
        if type(value) is bool:
            return value if type(default) is bool or default is None else default  # type: ignore[return-value]  # T is bool
        return copy.deepcopy(value) if _same_type(value, default) else default

    def flag(self, name: str) -> RemoteFlag | None:
        """Return the whole flag if it is known and unexpired."""
        entry = self._entries.get(name)
        return None if entry is None or entry.expires_monotonic_ns <= self._monotonic_ns() else entry.flag

    def next_expiry_ns(self) -> int:
        """Return the monotonic time at which the next value expires; far away when nothing does."""
        now_ns = self._monotonic_ns()
        return min((e.expires_monotonic_ns for e in self._entries.values() if e.expires_monotonic_ns > now_ns),
                   default=NEVER_NS)  # fmt: skip

    def poll(self) -> bool:
        """Refresh once, on the calling thread; returns whether the controller answered. Never raises."""
        try:
            answer = self._transport.fetch(self._etag)
        except Exception as error:  # noqa: BLE001 - a poller that dies would freeze every flag
            self._polls.add(1, {"result": "failed"})
            self._complain(str(error).partition("\n")[0] or type(error).__name__)
        else:
            self._polls.add(1, {"result": "ok" if answer.flags is not None else "unchanged"})
            self._complain("")
            self._take(answer)
            self._answered.set()
        try:
            self._on_view()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("flags: a breaker could not be moved")
        return not self._failing

    def wait_ready(self, seconds: float) -> bool:
        """Wait until a poll was answered; returns whether one was. Polls that fail meanwhile are tried again."""
        return self._answered.wait(seconds)

    def start(self) -> None:
        """Start the poller unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pasta-flag-poll", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the poller; the last values stay until their TTL."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=5.0)

    def restart_after_fork(self) -> None:
        """Start the child's own poller: threads do not survive a fork, and the connection is the parent's."""
        self._transport.close()
        was_running, self._thread = self._thread is not None, None
        self._stop, self._answered = threading.Event(), threading.Event()
        if was_running:
            self.start()

    def _run(self) -> None:
        stop = self._stop
        while not stop.is_set():
            self.poll()
            stop.wait(self._poll_seconds * random.uniform(0.9, 1.1))  # noqa: S311 - spreads the polls of many workers
        self._transport.close()

    def _take(self, answer: FlagAnswer) -> None:
        if answer.flags is not None:
            self._flags, self._etag = answer.flags, answer.etag
        now_ns, now_unix_nano = self._monotonic_ns(), self._clock.unix_nano()
        if answer.server_unix_nano and abs(answer.server_unix_nano - now_unix_nano) > MAX_SKEW_NS:
            now_unix_nano = answer.server_unix_nano
        held_ns = now_ns + self._ttl_ns
        self._entries = {
            name: _Entry(flag.value, min(held_ns, _deadline_ns(flag, now_ns, now_unix_nano)), flag)
            for name, flag in self._flags.items()
        }

    def _complain(self, failing: str) -> None:
        if failing != self._failing:  # once per kind of failure, not once per poll
            if failing:
                _log.warning("flags: no answer from the controller: %s; values hold until their TTL", failing)
            else:
                _log.info("flags: the controller answers again")
        self._failing = failing


def _deadline_ns(flag: RemoteFlag, now_ns: int, now_unix_nano: int) -> int:
    return now_ns + flag.expires_unix_nano - now_unix_nano if flag.expires_unix_nano else NEVER_NS


def _same_type(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, float):
        return isinstance(value, float) or type(value) is int
    return type(value) is type(default)
