"""OpenSLO's own alerts: an AlertCondition of kind ``burnrate``, evaluated beside the burn-rate windows.

``burn rate over lookbackWindow op threshold``, true for ``alertAfter``, makes the alert fire. It is shown, counted and
recorded; the SLO's verdict, and what acts on it, follow the burn-rate windows alone. Pure: memory and a measurement in,
memory and a state out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from pasta_otel.model import NoDataReason
from pasta_otel.slo.budget import Measured
from pasta_otel.slo.spec.model import AlertRule
from pasta_otel.slo.windows import BurnRateWindows

Phase = Literal["inactive", "pending", "firing"]
_OPERATORS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


@dataclass(frozen=True, slots=True)
class AlertMemory:
    """What must outlive a restart, for one alert.

    Attributes:
        phase: The last one.
        since_unix_nano: When it began; an alert fires ``alertAfter`` after its pending phase began.
    """

    phase: Phase
    since_unix_nano: int


@dataclass(frozen=True, slots=True)
class AlertState:
    """One alert of one SLO at one tick.

    Attributes:
        rule: What it watches.
        phase: ``inactive``, ``pending`` (true, but not for long enough yet) or ``firing``.
        since_unix_nano: When this phase began.
        burn: Burn rate over the lookback window; None = no data.
        reason: Why there is no data, or None: then the phase is what it was, unless ``alertWhenNoData`` is set.
        note: In words, for people.
    """

    rule: AlertRule
    phase: Phase
    since_unix_nano: int
    burn: float | None = None
    reason: NoDataReason | None = None
    note: str = ""

    @property
    def memory(self) -> AlertMemory:
        """Return what to remember."""
        return AlertMemory(self.phase, self.since_unix_nano)


def decide(
    rule: AlertRule, measured: Measured, before: AlertMemory | None, guards: BurnRateWindows, now_unix_nano: int
) -> AlertState:
    """Return an alert's state after one more tick."""
    before = before or AlertMemory("inactive", now_unix_nano)
    met, note = _met(rule, measured, guards)
    phase, since = _next(rule, met, before, now_unix_nano)
    return AlertState(rule, phase, since, measured.rate, measured.no_data, note)


def _met(rule: AlertRule, measured: Measured, guards: BurnRateWindows) -> tuple[bool | None, str]:
    """Return whether the condition holds; None = it cannot be said, and nothing changes."""
    if measured.burn is None:
        said = measured.detail or str(measured.no_data)
        return (True if rule.when_no_data else None), said
    if not _OPERATORS[rule.op](measured.burn, Fraction(rule.threshold)):
        return False, ""
    low = low_traffic(measured, guards) if rule.op in {"gt", "gte"} else ""
    return not low, low


def low_traffic(measured: Measured, guards: BurnRateWindows) -> str:
    """Return why a burn rate stands on too few events to make anybody act, or nothing."""
    if not measured.guarded:
        return ""
    events, bad = measured.events, measured.bad
    if events < guards.min_events:
        return f"low traffic: {events:g} events, at least {guards.min_events} needed"
    if bad < guards.min_bad_events:
        return f"low traffic: {bad:g} bad of {events:g} events, at least {guards.min_bad_events} bad needed"
    return ""


def _next(rule: AlertRule, met: bool | None, before: AlertMemory, now: int) -> tuple[Phase, int]:
    since = min(before.since_unix_nano, now)  # the clock may have been set back
    if met is None:
        return before.phase, since
    if not met:
        return "inactive", since if before.phase == "inactive" else now
    if before.phase == "firing":
        return "firing", since
    began = since if before.phase == "pending" else now
    return ("firing", now) if now - began >= rule.after_ns else ("pending", began)


@dataclass(frozen=True, slots=True)
class AlertChange:
    """An alert began or ceased to fire at this tick, and its policy wants that told."""

    slo: str
    state: AlertState
    firing: bool


def changes(slo: str, before: Sequence[AlertMemory | None], after: Sequence[AlertState]) -> list[AlertChange]:
    """Return the changes that policies want told by ``alertWhenBreaching``, ``Resolved`` and ``NoData``."""
    found = []
    for old, new in zip(before, after, strict=True):
        was, firing, rule = old is not None and old.phase == "firing", new.phase == "firing", new.rule
        wanted = (rule.when_no_data if new.reason else rule.when_breaching) if firing else rule.when_resolved
        if was != firing and wanted:
            found.append(AlertChange(slo, new, firing))
    return found


def condition_text(rule: AlertRule) -> str:
    """Return the condition for people: ``burn rate over 1h >= 2 for 5m``."""
    sign = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}[rule.op]
    after = f" for {rule.after}" if rule.after_ns else ""
    return f"burn rate over {rule.lookback} {sign} {plain(rule.threshold)}{after}"


def plain(number: Decimal) -> str:
    """Return a decimal without exponent or trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
