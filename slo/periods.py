"""The period over which an SLO's error budget counts: rolling, or calendar-aligned in a named zone."""

from __future__ import annotations

import calendar
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from pasta_otel.model import TimeWindow
from pasta_otel.slo.spec.model import DurationText, WindowSpec

NS_PER_SECOND = 1_000_000_000
_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800, "M": 30 * 86_400, "Q": 90 * 86_400, "Y": 365 * 86_400}
_MONTHS = {"M": 1, "Q": 3, "Y": 12}


def duration_ns(duration: DurationText) -> int:
    """Return a duration's length in ns; a rolling month, quarter and year are 30, 90 and 365 days.

    Source of the fixed lengths: OpenSLO's reference validator (go-sdk, ``DurationShorthand.Duration``).
    """
    return duration.count * _SECONDS[duration.unit] * NS_PER_SECOND


def period_at(window: WindowSpec, now_unix_nano: int) -> TimeWindow:
    """Return the period that holds an instant: a rolling one ends there, a calendar one may end later."""
    if window.calendar_start is None:
        return TimeWindow(now_unix_nano - duration_ns(window.duration), now_unix_nano)
    return _calendar_period(window, window.calendar_start, now_unix_nano)


def length_ns(window: WindowSpec, now_unix_nano: int) -> int:
    """Return the length of the period that holds an instant: months differ, days have 23, 24 or 25 hours."""
    period = period_at(window, now_unix_nano)
    return period.end_unix_nano - period.start_unix_nano


def _calendar_period(window: WindowSpec, start: datetime, now_unix_nano: int) -> TimeWindow:
    zone = ZoneInfo(window.time_zone)
    number = _estimate(window.duration, start, datetime.fromtimestamp(now_unix_nano // NS_PER_SECOND, zone))
    while _boundary(window.duration, start, zone, number) > now_unix_nano:
        number -= 1
    while _boundary(window.duration, start, zone, number + 1) <= now_unix_nano:
        number += 1
    return TimeWindow(
        _boundary(window.duration, start, zone, number), _boundary(window.duration, start, zone, number + 1)
    )


def _estimate(duration: DurationText, start: datetime, now: datetime) -> int:
    """Return about how many periods lie between start and now, by local time; the caller corrects by one or two."""
    if duration.unit in _MONTHS:
        months = (now.year - start.year) * 12 + now.month - start.month
        return months // (duration.count * _MONTHS[duration.unit])
    elapsed = (now.replace(tzinfo=None) - start).total_seconds()
    return int(elapsed // (duration.count * _SECONDS[duration.unit]))


def _boundary(duration: DurationText, start: datetime, zone: ZoneInfo, number: int) -> int:
    """Return the start of period ``number``; days and longer keep the local time of day, minutes and hours elapse."""
    steps = duration.count * number
    if duration.unit in _MONTHS:
        return _unix_nano(_add_months(start, steps * _MONTHS[duration.unit]).replace(tzinfo=zone))
    if duration.unit in {"d", "w"}:
        days = steps * (7 if duration.unit == "w" else 1)
        return _unix_nano((start + timedelta(days=days)).replace(tzinfo=zone))
    return _unix_nano(start.replace(tzinfo=zone)) + steps * _SECONDS[duration.unit] * NS_PER_SECOND


def _add_months(start: datetime, months: int) -> datetime:
    """Return the same day of another month, or that month's last day when it is shorter."""
    index = start.year * 12 + start.month - 1 + months
    year, month = divmod(index, 12)
    last = calendar.monthrange(year, month + 1)[1]
    return start.replace(year=year, month=month + 1, day=min(start.day, last))


def _unix_nano(moment: datetime) -> int:
    elapsed = moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (elapsed.days * 86_400 + elapsed.seconds) * NS_PER_SECOND
