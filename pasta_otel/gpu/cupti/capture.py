"""The running process's CUPTI activity: windows that open and close, and never against another CUPTI client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti.rows import DRIVER_LAUNCHES, RUNTIME_COPIES, RUNTIME_LAUNCHES, Kind, Rows, views

_log = logging.getLogger(__name__)

MULTIPLE_SUBSCRIBERS = 39
"""``CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED``."""
BUFFER_BYTES = 4 << 20
"""Half of Kineto's 8 MiB: a T2 window seldom fills one, and what is never touched costs no memory."""
MAX_BUFFERS = 64

Calls = Literal["none", "launches", "all"]


@dataclass(frozen=True, slots=True)
class WindowKinds:
    """What a window records.

    Attributes:
        kinds: Activity kinds to enable.
        calls: API calls to record: none, only those that put work on the device, or all.
        driver: Also launches that bypass the runtime API (Triton, CuPy).
    """

    kinds: tuple[Kind, ...] = (Kind.CONCURRENT_KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.EXTERNAL_CORRELATION)
    calls: Calls = "launches"
    driver: bool = False


T2_WINDOW = WindowKinds()
T3_WINDOW = WindowKinds(
    kinds=(
        Kind.CONCURRENT_KERNEL,
        Kind.MEMCPY,
        Kind.MEMCPY_PEER,
        Kind.MEMSET,
        Kind.EXTERNAL_CORRELATION,
        Kind.SYNCHRONIZATION,
        Kind.OVERHEAD,
    ),
    calls="all",
)


class Native(Protocol):
    """The part of ``pasta_otel._native._cupti`` that a capture calls."""

    def attach(self, ring: _cupti.Ring, buffer_bytes: int, max_buffers: int, /) -> None: ...  # noqa: D102
    def register(self) -> None: ...  # noqa: D102
    def enable(self, kind: int, on: bool, /) -> None: ...  # noqa: D102
    def enable_call(self, driver: bool, callback_id: int, on: bool, /) -> None: ...  # noqa: D102
    def flush(self, flag: int, /) -> None: ...  # noqa: D102
    def probe(self) -> tuple[int, str, str]: ...  # noqa: D102
    def forget_buffers(self) -> None: ...  # noqa: D102
    def counts(self) -> dict[str, int]: ...  # noqa: D102


class Capture:
    """Open and close windows of CUPTI activity in this process.

    Args:
        ring: Where rows go; kept for the life of the process, because CUPTI's threads write to it.
        buffer_bytes: Size of an activity buffer.
        max_buffers: Most buffers that CUPTI may hold; beyond it drops, which is counted.
        native: The extension, with a library loaded (``library.load``).
    """

    def __init__(
        self,
        ring: _cupti.Ring | None = None,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        max_buffers: int = MAX_BUFFERS,
        native: Native | Any = _cupti,
    ) -> None:
        self.ring = ring or _cupti.Ring()
        self._native = native
        self._lock = threading.RLock()
        self._open: WindowKinds | None = None
        self._holders: list[str] = []
        self._foreign: str | None = None
        self._displaced = True  # our callbacks are not registered, or another client has had its own since
        self._tolerated: str | None = None
        self._names: list[str] = []
        self.windows = self.stood_back = self.switch_ns = 0
        native.attach(self.ring, buffer_bytes, max_buffers)

    # -- other clients -------------------------------------------------------------------------------------------------

    @property
    def holder(self) -> str | None:
        """Who holds CUPTI instead of us: a client that said so, or the subscriber found at the last try."""
        with self._lock:
            return self._holders[-1] if self._holders else self._foreign

    def hold(self, who: str) -> None:
        """Stand back for a client that is about to use CUPTI: the open window is closed before this returns."""
        with self._lock:
            self._holders.append(who)
            self._displaced = True
            if self._open is not None:
                self._shut()
                self.stood_back += 1
            _log.info("GPU capture stands back: %s uses CUPTI", who)

    def release(self, who: str, *, idle_subscriber: bool = False) -> None:
        """Take note that a client has gone; the next window tries again.

        Args:
            who: As given to ``hold``.
            idle_subscriber: The client is known to keep its subscription without using it (Kineto before its teardown
                became the default): the subscription alone no longer counts as somebody else.
        """
        with self._lock:
            if who in self._holders:
                self._holders.remove(who)
            self._tolerated = who if idle_subscriber else None

    def _somebody_else(self) -> str | None:
        """Try to subscribe, and leave at once: a subscription of ours would lock torch.profiler out for good."""
        code, name, text = self._native.probe()
        if code == 0:
            return None
        if code == MULTIPLE_SUBSCRIBERS:
            return None if self._tolerated else (name or "another CUPTI client in this process")
        return f"CUPTI refuses: {text}"

    # -- windows -------------------------------------------------------------------------------------------------------

    def open(self, what: WindowKinds = T2_WINDOW) -> bool:
        """Begin to record; False = another client has CUPTI (``holder`` says who) and nothing was touched."""
        with self._lock:
            if self._open is not None:
                return True
            if self._holders or (found := self._somebody_else()):
                self._note(None if self._holders else found)
                return False
            self._foreign = None
            began = time.perf_counter_ns()
            if self._displaced:
                self._native.forget_buffers()
                self._native.register()
                self._displaced = False
            self._open = what
            try:
                self._switch(what, on=True)
            except OSError:
                self._shut()
                raise
            self.windows += 1
            self.switch_ns += time.perf_counter_ns() - began
            return True

    def close(self) -> None:
        """Stop recording and have CUPTI hand over what is complete; what still runs on the GPU comes with a later flush."""
        with self._lock:
            if self._open is not None:
                began = time.perf_counter_ns()
                self._shut()
                self.switch_ns += time.perf_counter_ns() - began

    @property
    def is_open(self) -> bool:
        """Whether a window is open."""
        return self._open is not None

    def flush(self, *, force: bool = False) -> None:
        """Have CUPTI hand over completed records (force: also buffers with records that are not complete)."""
        with self._lock:
            if not self._displaced:
                self._native.flush(1 if force else 0)

    def _note(self, found: str | None) -> None:
        self.stood_back += 1
        self._displaced = True
        if found is not None and found != self._foreign:
            _log.info("GPU capture stands back: %s holds CUPTI", found)
            self._foreign = found

    def _switch(self, what: WindowKinds, *, on: bool) -> None:
        native = self._native
        for kind in what.kinds:
            native.enable(kind, on)
        if what.calls == "all":
            native.enable(Kind.RUNTIME, on)
            if what.driver:
                native.enable(Kind.DRIVER, on)
        elif what.calls == "launches":
            _each_call(native, driver=False, ids=(*RUNTIME_LAUNCHES, *RUNTIME_COPIES), on=on)
            if what.driver:
                _each_call(native, driver=True, ids=DRIVER_LAUNCHES, on=on)

    def _shut(self) -> None:
        what, self._open = self._open, None
        if what is not None:
            self._switch(what, on=False)
            self._native.flush(0)

    # -- what came out -------------------------------------------------------------------------------------------------

    def drain(self) -> list[Rows]:
        """Return the rows decoded since the last call, as views; let go of them soon, their blocks are a fixed pool."""
        return views(self.ring.take())

    def names(self) -> list[str]:
        """Return GPU kernel names by name id; the list only grows."""
        self._names += self.ring.names(len(self._names))
        return self._names

    def stats(self) -> dict[str, int]:
        """Return the counts of the extension and of this capture."""
        mine = {"windows": self.windows, "stood_back": self.stood_back, "switch_ns": self.switch_ns}
        return {**self.ring.counts(), **self._native.counts(), **mine}


def _each_call(native: Native, *, driver: bool, ids: Iterable[int], on: bool) -> None:
    for callback_id in ids:
        native.enable_call(driver, callback_id, on)
