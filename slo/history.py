"""An SLO's budget and burn rate over time: counted again from its source, or kept while a controller runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pasta_otel.model import TimeWindow
from pasta_otel.slo.budget import remaining
from pasta_otel.slo.evaluation import SLOState
from pasta_otel.slo.maintenance import Maintenance
from pasta_otel.slo.meters import meter_of
from pasta_otel.slo.periods import period_at
from pasta_otel.slo.ports import SLISource
from pasta_otel.slo.report import rfc3339
from pasta_otel.slo.spec.model import SLO

POINTS = 60


def history(
    slo: SLO,
    source: SLISource,
    now_unix_nano: int,
    points: int = POINTS,
    maintenance: Sequence[Maintenance] = (),
) -> list[dict[str, Any]]:
    """Return ``[{time, remaining, burn}]`` over the period, oldest first.

    ``remaining`` is the budget of the period that ended at that time, ``burn`` the rate of the step before it; null
    where there is no data.
    """
    period = period_at(slo.window, now_unix_nano)
    step = (now_unix_nano - period.start_unix_nano) // points
    ends = [period.start_unix_nano + step * (i + 1) for i in range(points)]
    windows = [TimeWindow(period_at(slo.window, end).start_unix_nano, end) for end in ends]
    windows += [TimeWindow(end - step, end) for end in ends]
    meter = meter_of([slo], maintenance)
    measured = meter.measure(windows, source.counts(meter.requests(windows), now_unix_nano))
    return [
        {"time": rfc3339(end), "remaining": remaining(measured[i]), "burn": measured[points + i].rate}
        for i, end in enumerate(ends)
    ]


def with_history(
    document: dict[str, Any],
    slos: Sequence[SLO],
    source: SLISource,
    now_unix_nano: int,
    maintenance: Sequence[Maintenance] = (),
) -> dict[str, Any]:
    """Return the document with a history for every SLO that counts events."""
    found = {
        slo.name: history(slo, source, now_unix_nano, maintenance=maintenance)
        for slo in slos
        if slo.method == "Occurrences" and not slo.composite_of
    }
    states = [{**state, "history": found.get(state["name"], [])} for state in document["slos"]]
    return {**document, "slos": states}


class History:
    """What a running controller has seen: a bounded number of points for every SLO, coarser the longer it has watched.

    Args:
        most: Points of one SLO; when there are more, every second one goes and the step doubles.
    """

    def __init__(self, most: int = 2 * POINTS) -> None:
        self._most = most
        self._lines: dict[str, _Line] = {}

    def add(self, states: Sequence[SLOState], now_unix_nano: int) -> None:
        """Remember one tick; SLOs that are gone are forgotten."""
        lines = dict(self._lines)
        for state in states:
            start = state.period.start_unix_nano if state.period is not None else 0
            burn = state.burn_rates[0].long if state.burn_rates else None
            line = lines.get(state.name, _Line())
            lines[state.name] = line.with_point((now_unix_nano, state.budget_remaining, burn), start, self._most)
        names = {state.name for state in states}
        self._lines = {name: line for name, line in lines.items() if name in names}

    def points(self) -> dict[str, list[dict[str, Any]]]:
        """Return ``[{time, remaining, burn}]`` by SLO, oldest first."""
        return {
            name: [{"time": rfc3339(at), "remaining": left, "burn": burn} for at, left, burn in line.points]
            for name, line in self._lines.items()
        }


@dataclass(frozen=True, slots=True)
class _Line:
    """Points at least ``step_ns`` apart; the last one is the newest, whatever its distance."""

    points: tuple[tuple[int, float | None, float | None], ...] = ()
    step_ns: int = 0

    def with_point(self, point: tuple[int, float | None, float | None], start_unix_nano: int, most: int) -> _Line:
        """Return the line with one more point, without those before the period or after a clock that was set back."""
        kept = [old for old in self.points if start_unix_nano <= old[0] < point[0]]
        if len(kept) >= 2 and kept[-1][0] - kept[-2][0] < self.step_ns:
            kept.pop()
        kept.append(point)
        if len(kept) <= most:
            return _Line(tuple(kept), self.step_ns)
        thin = kept[:-1:2]
        return _Line((*thin, point), 2 * max(self.step_ns, (kept[-1][0] - kept[0][0]) // (len(kept) - 1)))
