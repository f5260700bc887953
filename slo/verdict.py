"""From readings to a verdict: enter on long and short window, leave on the short one, and let no-data change nothing.

Pure: memory and readings in, memory and verdict out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pasta_otel.model import NoDataReason, Verdict
from pasta_otel.slo.alerts import AlertMemory, low_traffic
from pasta_otel.slo.budget import Measured
from pasta_otel.slo.evaluation import BurnRate
from pasta_otel.slo.windows import BurnRateWindow, BurnRateWindows

BELOW_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Memory:
    """What must outlive a restart, for one SLO.

    Attributes:
        verdict: The last one.
        since_unix_nano: When it began.
        burn_since_unix_nano: When the burn under way began, or None.
        active: Window pairs that burn, with the time since which their short window has been below the factor
            (``BELOW_UNKNOWN`` = it is not below).
        alerts: The alerts of its AlertPolicies, by policy and condition.
    """

    verdict: Verdict
    since_unix_nano: int
    burn_since_unix_nano: int | None = None
    active: Mapping[str, int] = field(default_factory=dict)
    alerts: Mapping[str, AlertMemory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """One window pair at one tick."""

    row: BurnRateWindow
    rate: BurnRate
    short_exceeds: bool | None
    reason: NoDataReason | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict at one tick, and what to remember."""

    memory: Memory
    rates: tuple[BurnRate, ...]
    reason: NoDataReason | None
    detail: str


def read_pair(row: BurnRateWindow, long: Measured, short: Measured, period_ns: int, guards: BurnRateWindows) -> Reading:
    """Compare one pair of windows with its factor."""
    factor = row.factor(period_ns)
    over_long, over_short = long.exceeds(factor), short.exceeds(factor)
    low = low_traffic(long, guards) if over_long else ""
    exceeded, reason = _both(False if low else over_long, long, over_short, short)
    lacking = long if long.no_data else short
    rate = BurnRate(
        severity=row.severity,
        long_window_ns=row.long_ns,
        short_window_ns=row.short_ns,
        factor=float(factor),
        long=long.rate,
        short=short.rate,
        exceeded=exceeded,
        events=long.events,
        bad_events=long.bad,
        note=low or (lacking.detail or str(lacking.no_data) if reason else ""),
    )
    return Reading(row, rate, over_short, reason)


def _both(
    over_long: bool | None, long: Measured, over_short: bool | None, short: Measured
) -> tuple[bool | None, NoDataReason | None]:
    """Return whether both are over, and if that cannot be said, why.

    An idle window leaves the other one to decide (one that is below is enough for "no"); a window whose source is down
    or lying decides nothing, and neither does its pair.
    """
    for counts in (short, long):
        if counts.no_data is not None and counts.no_data != "no_traffic":
            return None, counts.no_data
    if over_long is False or over_short is False:
        return False, None
    if over_long is None or over_short is None:
        return None, "no_traffic"
    return True, None


def advance(memory: Memory | None, readings: Sequence[Reading], guards: BurnRateWindows, now_unix_nano: int) -> Outcome:
    """Return the verdict after one more tick."""
    before = memory or Memory("no_data", now_unix_nano)
    active = {
        reading.row.key: below
        for reading in readings
        if (below := _still_active(before, reading, guards, now_unix_nano)) is not None
    }
    verdict, blocking = _verdict(active, readings)
    burn_since = (before.burn_since_unix_nano or now_unix_nano) if active else None
    changed = memory is None or verdict != before.verdict
    rates = tuple(_marked(reading, active) for reading in readings)
    return Outcome(
        Memory(verdict, now_unix_nano if changed else before.since_unix_nano, burn_since, active),
        rates,
        reason=blocking.reason if blocking else None,
        detail=_detail(blocking, rates),
    )


def silenced(outcome: Outcome, memory: Memory | None, reason: str, now_unix_nano: int) -> Outcome:
    """Return the outcome during planned maintenance: what happened just before it must not make anybody act in it."""
    if outcome.memory.verdict != "burning":
        return outcome
    since = memory.since_unix_nano if memory is not None and memory.verdict == "no_data" else now_unix_nano
    kept = replace(outcome.memory, verdict="no_data", since_unix_nano=since)
    return replace(outcome, memory=kept, reason="partial", detail=f"planned maintenance: {reason}")


def _still_active(before: Memory, reading: Reading, guards: BurnRateWindows, now: int) -> int | None:
    """Return since when an active pair has been below, or None if it is not active (any more)."""
    below_since = before.active.get(reading.row.key)
    if reading.rate.exceeded:
        return BELOW_UNKNOWN
    if below_since is None:
        return None
    if reading.short_exceeds is not False or reading.reason not in {None, "no_traffic"}:
        return BELOW_UNKNOWN
    since = now if below_since == BELOW_UNKNOWN else min(below_since, now)  # the clock may have been set back
    return None if now - since >= guards.hold(reading.row) else since


def _verdict(active: Mapping[str, int], readings: Sequence[Reading]) -> tuple[Verdict, Reading | None]:
    """Return the verdict and, for ``no_data``, the reading that stands in the way of another one."""
    burning = [reading for reading in readings if reading.row.key in active]
    if burning:
        unclear = [reading for reading in burning if reading.short_exceeds is None or reading.reason is not None]
        return ("no_data", _with_reason(unclear[0])) if len(unclear) == len(burning) else ("burning", None)
    for reading in readings:
        if reading.rate.exceeded is None:
            return "no_data", _with_reason(reading)
    return "ok", None


def _with_reason(reading: Reading) -> Reading:
    if reading.reason is not None:
        return reading
    return Reading(reading.row, reading.rate, reading.short_exceeds, "no_traffic")


def _marked(reading: Reading, active: Mapping[str, int]) -> BurnRate:
    rate = reading.rate
    return BurnRate(
        rate.severity,
        rate.long_window_ns,
        rate.short_window_ns,
        rate.factor,
        rate.long,
        rate.short,
        rate.exceeded,
        active=reading.row.key in active,
        events=rate.events,
        bad_events=rate.bad_events,
        note=rate.note,
    )


def _detail(blocking: Reading | None, rates: Sequence[BurnRate]) -> str:
    if blocking is not None:
        return f"{blocking.row.key}: {blocking.rate.note or 'no events'}"
    return "; ".join(sorted({rate.note for rate in rates if rate.note}))
