"""Launch probes in windows: nothing that touches every launch stays within a budget of 1 % on launch-bound work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pasta_otel import semconv
from pasta_otel.clock import Clock
from pasta_otel.ebpf.observer import HostObserver, Timing
from pasta_otel.gpu.governor import Governor, WindowCost

LAUNCH_PROBE = 1  # its number in the counters
LAUNCH_NS = 1_500
"""Cost of a launch with entry and return probes and the link: two hits (benchmarks/results/ebpf-agent.json)."""
SWITCH_NS = 1_000_000
"""CPU time of attaching and detaching until the first window tells: 0.6 ms, and the harvests around it."""
MIN_PERIOD_NS = 2_000_000_000
"""Shortest time between windows: a program that runs for ten seconds has several. Nothing stays behind of a uprobe, so
that the period never grows, as CUPTI's does."""


class LaunchWindows:
    """Opens and closes the launch probes as the overhead governor says.

    Args:
        observer: Whose launch probes.
        budget: Share of elapsed time that they may cost.
        clock: Time.
        meter: For duty and cost.
    """

    def __init__(self, observer: HostObserver, budget: float, clock: Clock, meter: Meter) -> None:
        self._observer, self._clock = observer, clock
        self._governor = Governor(
            budget,
            clock.monotonic_ns,
            launch_ns=LAUNCH_NS,
            min_period_ns=MIN_PERIOD_NS,
            switch_ns=SWITCH_NS,
            double_every=0,
        )
        self._present_ns: int | None = None  # since when there is something to probe
        self._observe(meter, semconv.PROBE_LAUNCH_DUTY, lambda: self._governor.duty)
        self._observe(meter, semconv.PROBE_LAUNCH_COST, lambda: self._governor.cost)

    def due(self) -> bool:
        """Return whether a window may open now."""
        if not self._observer.targets:
            self._present_ns = None
            return False
        if self._present_ns is None:
            self._present_ns = self._clock.monotonic_ns()
        return self._governor.wait_ns() == 0

    def wait_s(self) -> float:
        """Return how long until a window may open, seconds."""
        return self._governor.wait_ns() / 1e9 if self._observer.targets else 1.0

    def record(self, wait: Callable[[float], object]) -> float:
        """Record launches for one window; return how many launches each recorded one stands for."""
        began, before = self._clock.monotonic_ns(), self._launches()
        switch_ns = self._switch("duration")
        opened, cpu = self._clock.monotonic_ns(), time.thread_time_ns()
        wait(self._governor.window_ns() / 1e9)
        recorded_ns, cpu_ns = self._clock.monotonic_ns() - opened, time.thread_time_ns() - cpu
        switch_ns += self._switch("off")
        launches = self._launches() - before
        weight = self._governor.book(WindowCost(began, recorded_ns, launches, switch_ns, cpu_ns))
        present_ns = self._clock.monotonic_ns() - (self._present_ns or began)
        return min(weight, present_ns / max(recorded_ns, 1))  # nothing was launched before there was a driver

    def _switch(self, timing: Timing) -> int:
        """Attach or detach; return the CPU time it took. The rest is waiting in the kernel, at nobody's cost."""
        begin = time.thread_time_ns()
        self._observer.time_launches(timing)
        return time.thread_time_ns() - begin

    def _launches(self) -> int:
        return self._observer.counters()[LAUNCH_PROBE].seen

    @staticmethod
    def _observe(meter: Meter, name: str, value: Callable[[], float]) -> None:
        spec = semconv.METRICS[name]

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value())]

        meter.create_observable_gauge(spec.name, [observe], spec.unit, spec.description)
