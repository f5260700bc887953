"""Ask why while an SLO burns: once at its start, then at intervals until a cause is found, and keep the best answer."""

from __future__ import annotations

from dataclasses import dataclass

from pasta_otel.model import Attribution, CountRequest
from pasta_otel.slo.onset import locate, slices
from pasta_otel.slo.ports import Attributor, SLISource
from pasta_otel.slo.spec.model import SLO
from pasta_otel.slo.windows import BurnRateWindow

MAX_PER_TICK = 4  # an incident that burns many SLOs at once must not stop the clock


@dataclass(slots=True)
class _Case:
    burn_since_unix_nano: int
    next_unix_nano: int
    best: Attribution | None = None


class Investigator:
    """Attribution of the burns under way.

    Args:
        source: Counts, to find when a burn began.
        attributor: Says why.
    """

    def __init__(self, source: SLISource, attributor: Attributor) -> None:
        self._source, self._attributor = source, attributor
        self._cases: dict[str, _Case] = {}
        self._asked = 0

    def begin_tick(self, burning: set[str]) -> None:
        """Forget the burns that have ended."""
        self._asked = 0
        for name in self._cases.keys() - burning:
            del self._cases[name]

    def best(self, name: str) -> Attribution | None:
        """Return the best answer so far, None before the first."""
        case = self._cases.get(name)
        return case.best if case else None

    def look(self, slo: SLO, row: BurnRateWindow, burn_since: int, end_unix_nano: int, now_unix_nano: int) -> None:
        """Attribute a burn if it is due; an exception passes through, and the next try is due later."""
        case = self._cases.get(slo.name)
        if case is None or case.burn_since_unix_nano != burn_since:
            case = self._cases[slo.name] = _Case(burn_since, now_unix_nano)
        found = case.best is not None and bool(case.best.causes)
        if found or now_unix_nano < case.next_unix_nano or self._asked >= MAX_PER_TICK:
            return
        self._asked += 1
        case.next_unix_nano = now_unix_nano + max(1, row.short_ns // 5)
        parts = slices(end_unix_nano, row.long_ns, row.short_ns)
        counts = self._source.counts([CountRequest(slo.sli, part) for part in parts], now_unix_nano)
        burn = locate(parts, counts)
        case.best = _better(case.best, self._attributor.attribute(slo.sli, burn.baseline, burn.window))


def _better(old: Attribution | None, new: Attribution) -> Attribution:
    if old is None or not old.causes:
        return new
    return new if new.causes and new.causes[0].score >= old.causes[0].score else old
