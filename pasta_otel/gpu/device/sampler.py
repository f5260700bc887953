"""Ask a source for its devices, and never wait longer than the limit: a driver call of a dying GPU may never return."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from pasta_otel.clock import Clock, SystemClock
from pasta_otel.gpu.device.model import Snapshot, SourceDownError

LIMIT_S = 3.0
REUSE_NS = 500_000_000  # one scrape asks once for each instrument; they must agree
log = logging.getLogger(__name__)


class DeviceSource(Protocol):
    """A vendor's way to tell the state of its devices.

    Both methods are called from one thread at a time, but not always the same one.
    """

    @property
    def name(self) -> str:
        """Return the source's name, as the metrics call it."""

    def read(self) -> Snapshot:
        """Return all devices now.

        Raises:
            SourceDownError: The source cannot answer; the next call tries again from the start.
        """

    def close(self) -> None:
        """Let go of the driver."""


class _Call:
    """One reading under way on its own thread; a daemon, because a hung driver call cannot be ended."""

    def __init__(self, source: DeviceSource, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self._done = threading.Event()
        self.result: Snapshot | SourceDownError | None = None
        self._thread = threading.Thread(target=self._run, name=f"pasta-device-{source.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = self._clock.monotonic_ns()
        try:
            self.result = self._source.read().lasting(self._clock.monotonic_ns() - began)
        except SourceDownError as error:
            self.result = error
        except Exception as error:  # a source's bug is a state of that source
            log.exception("reading GPUs by %s", self._source.name)
            self.result = SourceDownError("internal", f"{type(error).__name__}: {error}")
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Return whether it ended in time."""
        return self._done.wait(seconds)


class DeviceSampler:
    """The newest state of a source's devices: fresh, or none.

    At most one call is outstanding. While it hangs, every ``sample`` answers at once that the source timed out; when it
    ends at last, its late answer is thrown away and the next ``sample`` asks anew.

    Args:
        source: What to ask.
        clock: Time.
        limit_s: The longest that one ``sample`` waits, seconds.
        reuse_ns: An answer younger than this is given again instead of asking, nanoseconds.
    """

    def __init__(
        self, source: DeviceSource, *, clock: Clock | None = None, limit_s: float = LIMIT_S, reuse_ns: int = REUSE_NS
    ) -> None:
        self._source, self._clock = source, clock or SystemClock()
        self._limit_s, self._reuse_ns = limit_s, reuse_ns
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._known = Snapshot(source.name)
        self._latest: Snapshot | None = None
        self._latest_ns = 0
        self._closed = False

    def sample(self) -> Snapshot:
        """Return the devices now, or the same devices without values and why."""
        with self._lock:
            if self._latest is None or self._clock.monotonic_ns() - self._latest_ns > self._reuse_ns:
                self._latest = self._ask()
                self._latest_ns = self._clock.monotonic_ns()
            return self._latest

    def _ask(self) -> Snapshot:
        if self._closed:
            return self._known.without_values("closed")
        if self._call is not None:
            if not self._call.wait(0):
                return self._timeout()
            self._call = None  # too late to be true
        call = _Call(self._source, self._clock)
        if not call.wait(self._limit_s):
            self._call = call
            return self._timeout()
        return self._take(call.result)

    def _timeout(self) -> Snapshot:
        return self._known.without_values("timeout", f"no answer within {self._limit_s:g} s")

    def _take(self, result: Snapshot | SourceDownError | None) -> Snapshot:
        if isinstance(result, Snapshot):
            self._known = result
            return result
        reason, detail = (result.reason, result.detail) if result is not None else ("internal", "")
        return self._known.without_values(reason, detail)

    def close(self) -> None:
        """Let go of the source, unless a call still hangs in it."""
        with self._lock:
            hung = self._call is not None and not self._call.wait(0)
            if not self._closed and not hung:
                self._source.close()
            self._closed, self._latest = True, None
