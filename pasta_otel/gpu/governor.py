"""Holds the overhead budget: how long a capture window lasts, and when the next may open.

Cost is computed, not guessed: launches inside windows times the measured cost of a launch, the time that switching
took, and the CPU time of decoding and aggregating. It is booked in a ledger against what the budget has earned, so that
cost over elapsed time stays below the budget from the first window on, whatever the program does in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LAUNCH_NS = 5_000
"""Cost of a recorded launch until it is calibrated: the most that a T2 window cost on an H200 (docs/overhead.md)."""
NODE_NS = 500
"""Cost of a recorded node of a CUDA graph: 12 % of a replay of 0.75 ms with about 175 nodes (docs/overhead.md)."""
SWITCH_NS = 12_000_000
"""Cost of attaching and detaching until the first window tells: 10 ms and 2 ms on an H200 with CUDA 13.0."""
RESIDUAL_NS = 1_800
"""Cost of a launch between windows where CUPTI could not be detached: 1.8 us on an H200 (docs/overhead.md)."""
HEADROOM = 0.5
"""Share of the budget that direct cost may use: the rest is for what cannot be booked (caches, locks, threads)."""
MIN_WINDOW_NS = 20_000_000
MAX_WINDOW_NS = 1_000_000_000
MIN_PERIOD_NS = 30_000_000_000
"""Windows are rarer and longer rather than frequent and short: attaching costs the same for each."""
DOUBLE_EVERY = 1_000
"""The period doubles with every so many windows that detached: each leaves 73 KB behind inside CUPTI (13.0, on an H200:
evenly over 700 windows), which makes 73 MB for the first eight hours, and for the next seventeen, and so on."""
MAX_WAIT_NS = 60_000_000_000
"""A window opens at least once a minute while there is any budget, so that metrics do not go silent."""
BUSY_UTILIZATION = 0.8
JITTER = 0.25
"""Relative spread of the wait, so that windows do not fall into step with a periodic program."""


@dataclass(frozen=True, slots=True)
class WindowCost:
    """What a window cost, as far as it can be measured.

    Attributes:
        began_ns: When it opened, on the governor's clock.
        recorded_ns: How long it recorded.
        launches: API calls recorded that put work on the device.
        nodes: Nodes of CUDA graphs recorded.
        attached: CUPTI stays attached after the window.
        switch_ns: Time spent in opening, closing, attaching and detaching.
        cpu_ns: CPU time of decoding, joining and aggregating.
    """

    began_ns: int
    recorded_ns: int
    launches: int
    switch_ns: int
    cpu_ns: int
    nodes: int = 0
    attached: bool = False


class Calibration:
    """How much slower the program's own operations are inside a window: the check on the computed cost.

    Windows open at random times, so that operations inside and outside are a randomised comparison. Only operations of
    one name are compared with one another.
    """

    MIN_SAMPLES = 30
    MAX_OPERATIONS = 1_000

    def __init__(self) -> None:
        self._moments: dict[tuple[str, bool], tuple[int, float, float]] = {}

    def observe(self, operation: str, duration_ns: int, *, inside: bool) -> None:
        """Take one operation's duration; operations that are partly inside a window are not to be given."""
        if len(self._moments) >= self.MAX_OPERATIONS and (operation, inside) not in self._moments:
            return
        count, mean, m2 = self._moments.get((operation, inside), (0, 0.0, 0.0))
        count += 1
        delta = duration_ns - mean
        mean += delta / count
        self._moments[operation, inside] = (count, mean, m2 + delta * (duration_ns - mean))

    def slowdown(self) -> tuple[float, float] | None:
        """Return the mean relative slowdown inside windows and its standard error; None while too little is known."""
        found = []
        for operation in {name for name, _ in list(self._moments)}:
            inside, outside = (self._moments.get((operation, where), (0, 0.0, 0.0)) for where in (True, False))
            if min(inside[0], outside[0]) >= self.MIN_SAMPLES and outside[1] > 0:
                variance = inside[2] / (inside[0] - 1) / inside[0] + outside[2] / (outside[0] - 1) / outside[0]
                found.append((inside[1] / outside[1] - 1, variance / outside[1] ** 2, inside[0]))
        if not found:
            return None
        total = sum(count for *_, count in found)
        mean = sum(ratio * count for ratio, _, count in found) / total
        error = sum(variance * count**2 for _, variance, count in found) ** 0.5 / total
        return mean, error


class Governor:
    """Says when to open and for how long; books what it cost.

    Args:
        budget: Share of elapsed time that capture may cost (``PASTA_OVERHEAD_BUDGET``).
        clock_ns: A clock that does not go back; where only part of the time counts (benchmarks), that part.
        launch_ns: Measured cost of a recorded launch.
        headroom: Share of the budget that direct cost may use.
        utilization: GPU utilisation 0..1, or None when unknown.
        random_unit: Uniform in [0, 1), for the jitter.
        window_ns: A fixed window length instead of the one that fits the period.
        min_period_ns: Shortest time from one window to the next.
        switch_ns: Cost of opening and closing a window until the first one tells.
        double_every: After how many windows that detached the period doubles; 0 = never.
    """

    def __init__(  # noqa: PLR0913 - each is a part of the world or a policy of its own
        self,
        budget: float,
        clock_ns: Callable[[], int],
        *,
        launch_ns: float = LAUNCH_NS,
        headroom: float = HEADROOM,
        utilization: Callable[[], float | None] = lambda: None,
        random_unit: Callable[[], float] = random.random,
        window_ns: int | None = None,
        min_period_ns: int = MIN_PERIOD_NS,
        switch_ns: float = SWITCH_NS,
        double_every: int = DOUBLE_EVERY,
    ) -> None:
        self.budget, self.calibration = budget, Calibration()
        self._clock, self._launch_ns, self._headroom = clock_ns, launch_ns, headroom
        self._utilization, self._random = utilization, random_unit
        self._fixed, self._min_period = window_ns, min_period_ns
        self._start = self._last_end = clock_ns()
        self._spent_ns = 0.0
        self._recorded_ns = self._detachments = 0
        self._residual_rate = 0.0  # cost over time since the last window
        self._switch_ns, self._double_every = switch_ns, double_every
        self._rate = 0.25  # cost of recording over recorded time, until the first window tells
        self._jitter = self._draw()

    # -- decisions -----------------------------------------------------------------------------------------------------

    def window_ns(self) -> int:
        """Return how long the next window should record: what a period pays for, and no less than switching costs."""
        if self._fixed is not None:
            return self._fixed
        payable = max(self._share() * self._period() - self._switch_ns, self._switch_ns)
        return int(min(max(payable / max(self._rate, 1e-6), MIN_WINDOW_NS), MAX_WINDOW_NS))

    def wait_ns(self) -> int:
        """Return how long to wait until the next window may open; 0 = now."""
        share = self._share()
        if share <= 0:
            return MAX_WAIT_NS
        ahead = self._expected_cost() * self._jitter
        due = self._start + (self._spent() + ahead) / share
        latest = self._last_end + max(MAX_WAIT_NS, self._period()) if self._affordable() else due
        earliest = self._last_end + self._period() * self._jitter if self._recorded_ns else 0
        return max(0, int(max(min(due, latest), earliest) - self._clock()))

    def book(self, cost: WindowCost, *, charged: bool = True) -> float:
        """Book a window; return its weight: how many times its work counts, from the last window's end to its own.

        Args:
            cost: The window.
            charged: False for tier 3, which an SLO that burns pays for: it takes nothing from the budget of tier 2.
        """
        self._spent_ns = self._spent()
        self._residual_rate = cost.launches / max(cost.recorded_ns, 1) * RESIDUAL_NS if cost.attached else 0.0
        recording = (cost.launches + cost.nodes * NODE_NS / LAUNCH_NS) * self._launch_cost() + cost.cpu_ns
        if charged:
            self._spent_ns += recording + cost.switch_ns
        self._recorded_ns += cost.recorded_ns
        self._detachments += not cost.attached
        self._switch_ns += (cost.switch_ns - self._switch_ns) * 0.3
        self._rate += (recording / max(cost.recorded_ns, 1) - self._rate) * 0.3
        end = self._clock()
        interval = end - self._last_end
        self._last_end, self._jitter = end, self._draw()
        return interval / cost.recorded_ns if cost.recorded_ns > 0 else 0.0

    # -- what is exported ----------------------------------------------------------------------------------------------

    @property
    def cost(self) -> float:
        """Direct cost over elapsed time."""
        return self._spent() / max(self._clock() - self._start, 1)

    @property
    def duty(self) -> float:
        """Recorded time over elapsed time: the sampled share."""
        return self._recorded_ns / max(self._clock() - self._start, 1)

    # ------------------------------------------------------------------------------------------------------------------

    def _spent(self) -> float:
        """Return what is booked, and what an attached CUPTI has cost since the last window."""
        return self._spent_ns + self._residual_rate * (self._clock() - self._last_end)

    def _period(self) -> int:
        doublings = self._detachments // self._double_every if self._double_every else 0
        return self._min_period << min(doublings, 16)

    def _share(self) -> float:
        busy = self._utilization()
        return self.budget * self._headroom * (0.5 if busy is not None and busy > BUSY_UTILIZATION else 1.0)

    def _launch_cost(self) -> float:
        """Return the cost of a launch: as measured, or as calibrated where operations say that it is surely more."""
        found = self.calibration.slowdown()
        if found is None or self._rate <= 0:
            return self._launch_ns
        mean, error = found
        surely = mean - 2 * error
        return self._launch_ns * max(1.0, surely / self._rate)

    def _expected_cost(self) -> float:
        return self._switch_ns + self._rate * self.window_ns()

    def _affordable(self) -> bool:
        """Return whether one window a minute is within the budget; otherwise even that has to wait."""
        return self._expected_cost() <= self._share() * MAX_WAIT_NS

    def _draw(self) -> float:
        return 1.0 + JITTER * (2.0 * self._random() - 1.0)
