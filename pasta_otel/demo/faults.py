"""The demo's faults, each really injected into a running process, and what pasta-otel must find and do about it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from pasta_otel.demo import processes
from pasta_otel.demo.services.shape import layer_paths
from pasta_otel.demo.throttle import Method

FaultName = Literal["slow-dependency", "failing-dependency", "cpu-throttle", "model-sync", "none"]

SLOWER_SECONDS_PER_SECOND = 0.12
SLOWER_SECONDS_MOST = 1.5
QUOTA_OF_DEMAND = 0.7  # of the CPU time that the model was measured to need: requests queue, more and more
CONTROL_TIMEOUT_SECONDS = 10.0
EDGE = "order-api -> recommendations"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a fault must lead to.

    Attributes:
        kinds: Cause kinds that are right for the first cause; empty: no cause may be named.
        target: The first cause's target; empty with no kinds.
        degrades: True: ``degrade.recommendations`` turns on and the breaker opens. False: nothing but notification.
        notifies: A notification is due.
    """

    kinds: frozenset[str]
    target: str
    degrades: bool
    notifies: bool = True


@dataclass(frozen=True, slots=True)
class Victims:
    """The running processes that faults reach.

    Attributes:
        urls: Base URL by service.
        model_pid: The process that holds the model.
        model_cores: CPU seconds a second that it used during the baseline.
        out: Folder for logs.
    """

    urls: Mapping[str, str]
    model_pid: int
    model_cores: float
    out: Path


class Fault(Protocol):
    """Something that goes wrong on demand."""

    expected: Expectation

    def inject(self, victims: Victims) -> str:
        """Begin; returns in words what was done."""

    def remove(self) -> None:
        """End; does nothing if it never began."""


class ControlFault:
    """A fault that a service does to itself when told through its control endpoint."""

    def __init__(self, expected: Expectation, service: str, path: str, bodies: tuple[Any, Any], words: str) -> None:
        self.expected = expected
        self._service, self._path, self._words = service, path, words
        self._on, self._off = bodies
        self._url: str | None = None

    def inject(self, victims: Victims) -> str:
        """Tell the service to misbehave."""
        self._url = victims.urls[self._service] + self._path
        self._put(self._on)
        return self._words

    def remove(self) -> None:
        """Tell it to behave again."""
        if self._url is not None:
            self._put(self._off)
            self._url = None

    def _put(self, body: Any) -> None:
        if self._url is not None:
            httpx.put(self._url, json=body, timeout=CONTROL_TIMEOUT_SECONDS, trust_env=False).raise_for_status()


class CpuThrottle:
    """Less CPU for the model process than its work needs."""

    expected = Expectation(frozenset({"cpu_throttled", "cpu_contention"}), "model", degrades=False)

    def __init__(self, method: Method = "auto") -> None:
        self._method = method
        self._helper: processes.Child | None = None

    def inject(self, victims: Victims) -> str:
        """Start the helper that holds the quota."""
        cores = victims.model_cores * QUOTA_OF_DEMAND
        options = ("--pid", str(victims.model_pid), "--cores", f"{cores:.6f}", "--method", self._method)
        command = processes.python("pasta_otel.demo.throttle", *options)
        self._helper = processes.start("throttle", command, victims.out / "throttle.log", {})
        ready = self._helper.wait_ready()
        return f"the model process got {ready['detail']} ({ready['method']})"

    def remove(self) -> None:
        """End the helper, which takes the quota back."""
        helper, self._helper = self._helper, None
        if helper is not None and helper.stop() != 0:
            raise processes.DemoError(f"the CPU quota was perhaps not taken back; see {helper.log}")


class NoFault:
    """Nothing happens, and nothing may be found."""

    expected = Expectation(frozenset(), "", degrades=False, notifies=False)

    def inject(self, victims: Victims) -> str:
        """Do nothing."""
        del victims
        return "nothing was done"

    def remove(self) -> None:
        """Do nothing."""


def _slow_dependency(seed: int) -> Fault:
    del seed
    slower = {"slower_seconds_per_second": SLOWER_SECONDS_PER_SECOND, "slower_seconds_most": SLOWER_SECONDS_MOST}
    return ControlFault(
        Expectation(frozenset({"edge_latency"}), EDGE, degrades=True),
        "recommendations",
        "/control/trouble",
        (slower, {}),
        f"recommendations get slower by {SLOWER_SECONDS_PER_SECOND * 1000:.0f} ms every second",
    )


def _failing_dependency(seed: int) -> Fault:
    del seed
    return ControlFault(
        Expectation(frozenset({"edge_errors"}), EDGE, degrades=True),
        "recommendations",
        "/control/trouble",
        ({"failing": True}, {}),
        "recommendations answer 503",
    )


def sync_layer(seed: int) -> str:
    """Return the layer that ``model-sync`` hits with this seed: seeds 0, 1, 2 and so on hit different layers."""
    paths = layer_paths()
    order = random.Random("model-sync").sample(paths, len(paths))  # noqa: S311 - repeatable on purpose
    return order[seed % len(order)]


def _model_sync(seed: int) -> Fault:
    layer = sync_layer(seed)
    return ControlFault(
        Expectation(frozenset({"module_time"}), layer, degrades=False),
        "model",
        "/control/inspection",
        ({"module": layer}, {"module": None}),
        f"in {layer} every activation goes to a Python float and back",
    )


_MAKERS: Mapping[FaultName, Callable[[int], Fault]] = {
    "slow-dependency": _slow_dependency,
    "failing-dependency": _failing_dependency,
    "cpu-throttle": lambda _: CpuThrottle(),
    "model-sync": _model_sync,
    "none": lambda _: NoFault(),
}
FAULTS: tuple[FaultName, ...] = tuple(_MAKERS)


def make(name: FaultName, seed: int) -> Fault:
    """Return the fault of that name."""
    return _MAKERS[name](seed)
