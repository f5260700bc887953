"""Ask why while an SLO burns: once at its start, then at intervals until a cause is found, and keep the best answer.

An SLO that counts metrics says that its service is bad, not which requests: the spans of that service are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pasta_otel.model import Attribution, CountRequest, SpanSLI, TimeWindow
from pasta_otel.slo.budget import burn_rate
from pasta_otel.slo.onset import locate, slices
from pasta_otel.slo.ports import Attributor, SLISource
from pasta_otel.slo.spec.model import SLO
from pasta_otel.slo.windows import BurnRateWindow

MAX_PER_TICK = 4  # an incident that burns many SLOs at once must not stop the clock


class Burning(NamedTuple):
    """A burn to explain.

    Attributes:
        slo: The SLO.
        parts: Itself, or the parts of a composite one: the part that burns most is looked at.
        row: A window pair that burns.
        since_unix_nano: When the burn began.
    """

    slo: SLO
    parts: Sequence[SLO]
    row: BurnRateWindow
    since_unix_nano: int


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

    def look(self, burning: Burning, end_unix_nano: int, now_unix_nano: int) -> None:
        """Attribute a burn if it is due; an exception passes through, and the next try is due later."""
        slo, row, burn_since = burning.slo, burning.row, burning.since_unix_nano
        case = self._cases.get(slo.name)
        if case is None or case.burn_since_unix_nano != burn_since:
            case = self._cases[slo.name] = _Case(burn_since, now_unix_nano)
        found = case.best is not None and bool(case.best.causes)
        if found or now_unix_nano < case.next_unix_nano or self._asked >= MAX_PER_TICK:
            return
        self._asked += 1
        case.next_unix_nano = now_unix_nano + max(1, row.short_ns // 5)
        part = self._worst(burning.parts, TimeWindow(end_unix_nano - row.long_ns, end_unix_nano), now_unix_nano)
        sli = part.sli
        recent = slices(end_unix_nano, row.long_ns, row.short_ns)
        counts = self._source.counts([CountRequest(sli, part) for part in recent], now_unix_nano)
        burn = locate(recent, counts)
        asked = sli if isinstance(sli, SpanSLI) else SpanSLI(part.service)
        case.best = _better(case.best, self._attributor.attribute(asked, burn.baseline, burn.window))

    def _worst(self, parts: Sequence[SLO], window: TimeWindow, now_unix_nano: int) -> SLO:
        """Return the part whose weighted burn over a window is the greatest."""
        if len(parts) == 1:
            return parts[0]
        counts = self._source.counts([CountRequest(part.sli, window) for part in parts], now_unix_nano)
        burns = [
            (burn_rate(count, part.objective) or 0.0) * float(part.weight)
            for part, count in zip(parts, counts, strict=True)
        ]
        return parts[burns.index(max(burns))]


def _better(old: Attribution | None, new: Attribution) -> Attribution:
    if old is None or not old.causes:
        return new
    return new if new.causes and new.causes[0].score >= old.causes[0].score else old
