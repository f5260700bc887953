"""The running process's CUPTI activity: windows that open and close, and never against another CUPTI client.

CUPTI that is attached costs every launch even while nothing is recorded: on an H200 (CUDA 13.0) 0.7 us once GPU kernels
were recorded and 1.8 us once API calls were, beside 5.5 us for a launch (docs/overhead.md). So a window attaches, and
detaches at its end. It does not in a process that uses CUDA graphs: a graph that CUPTI has prepared for tracing fails
once CUPTI has gone (``benchmarks.gpu.graph_detach`` shows it with CUDA 13.0). Such programs launch little.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti.rows import (
    DRIVER_COPIES,
    DRIVER_GRAPHS,
    DRIVER_LAUNCHES,
    RUNTIME_COPIES,
    RUNTIME_GRAPHS,
    RUNTIME_LAUNCHES,
    Kind,
    Rows,
    views,
)
from pasta_otel.gpu.mapping import Edge

_log = logging.getLogger(__name__)

MULTIPLE_SUBSCRIBERS = 39
"""``CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED``."""
BUFFER_BYTES = 4 << 20
"""Half of Kineto's 8 MiB: a T2 window seldom fills one, and what is never touched costs no memory."""
MAX_BUFFERS = 64

SETTLE_MS = 100
"""Longest wait at a window's end for what the GPU still runs; what is not complete by then is lost, and counted."""
DETACH_MS = 100
"""Longest wait for a CUDA call of the program to detach in; without one nothing is being slowed down either."""

_RUNTIME_WORK = tuple(dict.fromkeys((*RUNTIME_LAUNCHES, *RUNTIME_COPIES, *RUNTIME_GRAPHS)))
_DRIVER_WORK = tuple(dict.fromkeys((*DRIVER_LAUNCHES, *DRIVER_COPIES, *DRIVER_GRAPHS)))

Calls = Literal["none", "launches", "all"]


@dataclass(frozen=True, slots=True)
class WindowKinds:
    """What a window records.

    Attributes:
        kinds: Activity kinds to enable.
        calls: API calls to record: none, only those that put work on the device, or all.
        driver: Also launches that bypass the runtime API: cuBLAS and cuDNN of CUDA 13, Triton, CuPy.
    """

    kinds: tuple[Kind, ...] = (
        Kind.CONCURRENT_KERNEL,
        Kind.MEMCPY,
        Kind.MEMCPY_PEER,
        Kind.MEMSET,
        Kind.EXTERNAL_CORRELATION,
    )
    calls: Calls = "launches"
    driver: bool = True


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
    def enable_calls(self, driver: bool, callback_ids: tuple[int, ...], on: bool, /) -> None: ...  # noqa: D102
    def mute_calls(self, driver: bool, /) -> None: ...  # noqa: D102
    def window(self, open: bool, /) -> None: ...  # noqa: A002, D102
    def edges(self) -> list[tuple[int, int, int]]: ...  # noqa: D102
    def detach(self, timeout_ms: int, /) -> int: ...  # noqa: D102
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
        detach: Detach CUPTI from the process between windows.
        native: The extension, with a library loaded (``library.load``).

    Attributes:
        graphs_in_use: The process uses CUDA graphs; whoever knows it earlier than the records say it may set it.
        windows: Windows opened.
        stood_back: Times that another client kept us back or made us close.
        switch_ns: Time spent in opening, closing, attaching and detaching.
        last_switch_ns: The same for the last window.
    """

    def __init__(
        self,
        ring: _cupti.Ring | None = None,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        max_buffers: int = MAX_BUFFERS,
        detach: bool = True,
        native: Native | Any = _cupti,
    ) -> None:
        self.ring = ring or _cupti.Ring()
        self._native, self._detach = native, detach
        self._lock = threading.RLock()
        self._open: WindowKinds | None = None
        self._attached = False
        self._muted: set[Kind] = set()  # API kinds that are enabled with every call off
        self._holders: list[str] = []
        self._foreign: str | None = None
        self._tolerated: str | None = None
        self._names: list[str] = []
        self.graphs_in_use = False
        self.windows = self.stood_back = self.switch_ns = self.last_switch_ns = 0
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
            if self._open is not None:
                self._shut()
                self.stood_back += 1
            self._leave()
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
            began = time.perf_counter_ns()  # the first call of CUPTI's, even a question, attaches it to the process
            if self._holders or (found := self._somebody_else()):
                self._note(None if self._holders else found)
                return False
            self._foreign = None
            if not self._attached:
                self._native.forget_buffers()
                self._native.register()
                self._attached = True
            self._open = what
            try:
                self._native.window(True)  # first: a thread's region is known for every call that is recorded
                self._switch(what, on=True)
            except OSError:
                self._shut()
                raise
            self.windows += 1
            self.last_switch_ns = time.perf_counter_ns() - began
            self.switch_ns += self.last_switch_ns
            return True

    def close(self) -> None:
        """Stop recording, take what the GPU completes within ``SETTLE_MS``, and detach."""
        with self._lock:
            if self._open is None:
                return
            began = time.perf_counter_ns()
            self._shut()
            waited = self._settle()
            detached = self._attached and self._try_detach()
            # Waiting for the GPU and for a call to detach in costs the program nothing; a detachment does.
            spent = time.perf_counter_ns() - began - waited
            self.last_switch_ns += spent if detached or not self._detach else 0
            self.switch_ns += spent

    @property
    def is_open(self) -> bool:
        """Whether a window is open."""
        return self._open is not None

    @property
    def attached(self) -> bool:
        """Whether CUPTI is attached to the process on our behalf."""
        return self._attached

    def detach(self) -> bool:
        """Try again to detach after a window whose end found no CUDA call to do it in; True = nothing is attached."""
        with self._lock:
            if self._open is None and self._attached:
                self._try_detach()
            return not self._attached

    def flush(self, *, force: bool = False) -> None:
        """Have CUPTI hand over completed records (force: also buffers with records that are not complete)."""
        with self._lock:
            if self._attached:
                self._native.flush(1 if force else 0)

    def _note(self, found: str | None) -> None:
        self.stood_back += 1
        self._attached = False
        if found is not None and found != self._foreign:
            _log.info("GPU capture stands back: %s holds CUPTI", found)
            self._foreign = found

    def _switch(self, what: WindowKinds, *, on: bool) -> None:
        """Switch so that no work is recorded without its call, and no call without its external id."""
        ids = [kind for kind in what.kinds if kind is Kind.EXTERNAL_CORRELATION]
        work = [kind for kind in what.kinds if kind is not Kind.EXTERNAL_CORRELATION]
        if on:
            self._switch_kinds(ids, on=True)
            self._switch_calls(what, on=True)
            self._switch_kinds(work, on=True)
        else:
            self._switch_kinds(work, on=False)
            self._switch_calls(what, on=False)
            self._switch_kinds(ids, on=False)

    def _switch_kinds(self, kinds: Iterable[Kind], *, on: bool) -> None:
        for kind in kinds:
            self._native.enable(kind, on)

    def _switch_calls(self, what: WindowKinds, *, on: bool) -> None:
        apis = () if what.calls == "none" else (Kind.RUNTIME, Kind.DRIVER) if what.driver else (Kind.RUNTIME,)
        for api in apis:
            if what.calls == "all":
                self._native.enable(api, on)
                self._muted.discard(api)
                continue
            if api not in self._muted:
                self._native.mute_calls(api is Kind.DRIVER)
                self._muted.add(api)
            ids = _DRIVER_WORK if api is Kind.DRIVER else _RUNTIME_WORK
            self._native.enable_calls(api is Kind.DRIVER, ids, on)

    def _shut(self) -> None:
        what, self._open = self._open, None
        if what is not None:
            self._switch(what, on=False)
        # Not before: a region entered now would be unknown to CUPTI, and its launches would be given to the one before.
        self._native.window(False)
        if what is not None:
            self._native.flush(0)

    def _settle(self) -> int:
        began = time.perf_counter_ns()
        while self._native.counts()["buffers_out"] and time.perf_counter_ns() - began < SETTLE_MS * 1_000_000:
            time.sleep(0.002)
            self._native.flush(0)
        waited = time.perf_counter_ns() - began
        if self._native.counts()["buffers_out"]:
            self._native.flush(1)
        return waited

    def _try_detach(self) -> bool:
        if not self._detach or self._tolerated or self._graphs():
            return False
        if self._native.detach(DETACH_MS) != 0:
            return False
        self._attached = False
        self._muted.clear()
        return True

    def _graphs(self) -> bool:
        """Return whether the process uses CUDA graphs, as far as we were told or have seen."""
        if not self.graphs_in_use and self.ring.counts()["graphs"]:
            self.graphs_in_use = True
            _log.info("CUDA graphs are in use: CUPTI stays attached between windows")
        return self.graphs_in_use

    def _leave(self) -> None:
        """Detach for another client; where that cannot be done now, at least leave nothing enabled."""
        if self._attached:
            if not self._try_detach():
                for api in self._muted:
                    self._native.enable(api, False)
            self._muted.clear()
            self._attached = False

    # -- what came out -------------------------------------------------------------------------------------------------

    def drain(self) -> list[Rows]:
        """Return the rows decoded since the last call, as views; let go of them soon, their blocks are a fixed pool."""
        return views(self.ring.take())

    def edges(self) -> list[Edge]:
        """Return what threads were in as the last window began, for ``Joiner.join``."""
        return [Edge(*edge) for edge in self._native.edges()]

    def names(self) -> list[str]:
        """Return GPU kernel names by name id; the list only grows."""
        self._names += self.ring.names(len(self._names))
        return self._names

    def stats(self) -> dict[str, int]:
        """Return the counts of the extension and of this capture."""
        mine = {"windows": self.windows, "stood_back": self.stood_back, "switch_ns": self.switch_ns}
        return {**self.ring.counts(), **self._native.counts(), **mine}
