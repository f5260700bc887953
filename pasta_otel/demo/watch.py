"""What the demo sees while it runs: SLO states and burn rates over time, from the sidecar's API."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pasta_otel.demo.sidecar import Sidecar

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BurnPoint:
    """One SLO's burn rate at one reading; None where there is no data.

    Attributes:
        monotonic_ns: When it was read.
        slo: The SLO.
        verdict: ``ok``, ``burning`` or ``no_data``.
        factor: What both must exceed.
        long: Over the long window.
        short: Over the short window.
    """

    monotonic_ns: int
    slo: str
    verdict: str
    factor: float
    long: float | None
    short: float | None


@dataclass(slots=True)
class Watch:
    """Readings so far.

    Attributes:
        sidecar: Who is asked.
        points: Burn rates, oldest first.
        states: The last reading, by SLO.
        attributions: The last answer with a cause, or else the last answer, by SLO.
        burned: When each SLO first burned by the controller's own word, monotonic nanoseconds.
        unix_minus_monotonic_ns: To put the controller's wall times on the monotonic clock.
    """

    sidecar: Sidecar
    points: list[BurnPoint] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    attributions: dict[str, dict[str, Any]] = field(default_factory=dict)
    burned: dict[str, int] = field(default_factory=dict)
    unix_minus_monotonic_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    def read(self) -> None:
        """Read once."""
        states = self.sidecar.slos()
        now_ns = time.monotonic_ns()
        for state in states:
            self._take(state, now_ns)

    @property
    def first_burned(self) -> str | None:
        """Return the SLO that burned first, or None."""
        return min(self.burned, key=lambda name: self.burned[name]) if self.burned else None

    @property
    def settled_since(self) -> int:
        """Return since when every SLO has been fine, monotonic nanoseconds; only while ``settled``."""
        return max(self._monotonic_ns(state["since"]) for state in self.states.values())

    @property
    def settled(self) -> bool:
        """Say whether every SLO is known to be fine now."""
        return bool(self.states) and all(state["verdict"] == "ok" for state in self.states.values())

    def causes(self) -> list[dict[str, Any]]:
        """Return the causes of the SLO that burned first, best first."""
        name = self.first_burned
        return list(self.attributions.get(name, {}).get("causes", [])) if name else []

    def snapshot(self) -> list[State]:
        """Return the last states, for the report."""
        return [self.states[name] for name in sorted(self.states)]

    def _take(self, state: State, now_ns: int) -> None:
        name = state["name"]
        self.states[name] = state
        if state["verdict"] == "burning":
            self.burned.setdefault(name, self._monotonic_ns(state["burn_since"] or state["since"]))
        answer = state.get("attribution")
        if answer and (answer["causes"] or name not in self.attributions):
            self.attributions[name] = answer
        for rate in state["burn_rates"]:
            point = BurnPoint(now_ns, name, state["verdict"], rate["factor"], rate["long"], rate["short"])
            self.points.append(point)

    def _monotonic_ns(self, rfc3339: str) -> int:
        return round(datetime.fromisoformat(rfc3339).timestamp() * 1e9) - self.unix_minus_monotonic_ns
