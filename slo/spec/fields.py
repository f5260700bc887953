"""Readers of the small values that OpenSLO files share: names, labels, durations, zones, targets."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pasta_otel.slo.spec.document import Cursor
from pasta_otel.slo.spec.model import Annotations, DurationText, Labels, Metadata, WindowSpec

NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")  # RFC 1123 label, as OpenSLO v1 requires
NAME_LIMIT = 63
DESCRIPTION_LIMIT = 1050
_DURATION = re.compile(r"^([1-9][0-9]*)([mhdwMQY])$", re.ASCII)
LONGEST_MINUTES = 10 * 365 * 1440  # beyond ten years the calendar itself ends somewhere
_MINUTES = {"m": 1, "h": 60, "d": 1440, "w": 10_080, "M": 43_200, "Q": 129_600, "Y": 525_600}
_METADATA_FIELDS = frozenset({"name", "displayName", "labels", "annotations"})
_CALENDAR_FIELDS = frozenset({"startTime", "timeZone"})
_LABEL_KEY = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$")


def read_metadata(parent: Cursor, *, key: str = "metadata") -> Metadata:
    """Return the metadata below a cursor."""
    here = parent.need(key)
    if here is None or not here.mapping(_METADATA_FIELDS):
        return Metadata("")
    return Metadata(
        name=read_name(here, "name", required=True),
        display_name=here.text("displayName"),
        labels=_read_labels(here),
        annotations=_read_annotations(here),
    )


def read_name(here: Cursor, key: str, *, required: bool = False) -> str:
    """Return a name or a reference: an RFC 1123 label."""
    name = here.text(key, required=required)
    found = here.get(key)
    if found is not None and name and (len(name) > NAME_LIMIT or not NAME.match(name)):
        found.problem(
            f"{name!r} is not a valid name: lower-case letters, digits and '-', at most {NAME_LIMIT}", kind="name"
        )
    return name


def _read_labels(here: Cursor) -> Labels:
    labels = here.get("labels")
    if labels is None:
        return ()
    result: list[tuple[str, tuple[str, ...]]] = []
    for key in labels.mapping():
        _check_label_key(labels, key)
        value = labels.get(key)
        texts = value.value if value and isinstance(value.value, list) else [value.value] if value else []
        if not all(isinstance(text, str) for text in texts):
            (value or labels).problem("expected text or a list of texts", kind="type")
            continue
        result.append((key, tuple(texts)))
    return tuple(result)


def _read_annotations(here: Cursor) -> Annotations:
    annotations = here.get("annotations")
    if annotations is None:
        return ()
    for key in annotations.mapping():
        _check_label_key(annotations, key)
    return tuple((key, annotations.text(key)) for key in annotations.mapping())


def _check_label_key(here: Cursor, key: str) -> None:
    if not _LABEL_KEY.match(key):
        here.problem(f"{key!r} is not a valid key", kind="name")


def read_description(here: Cursor) -> str:
    """Return the description, which OpenSLO limits to 1050 characters."""
    text = here.text("description")
    found = here.get("description")
    if found is not None and len(text) > DESCRIPTION_LIMIT:
        found.problem(f"{len(text)} characters, at most {DESCRIPTION_LIMIT}", kind="length")
    return text


def read_duration(here: Cursor, key: str, *, required: bool = False) -> DurationText | None:
    """Return a duration shorthand: a whole number and one of m h d w M Q Y."""
    text = here.text(key, required=required)
    match = _DURATION.match(text)
    found = here.get(key)
    if match and found is not None and (len(match[1]) > 9 or int(match[1]) * _MINUTES[match[2]] > LONGEST_MINUTES):
        found.problem("longer than ten years", kind="duration")
        return None
    if match:
        return DurationText(int(match[1]), match[2])
    if found is not None and isinstance(found.value, str) and text:
        found.problem(f"{text!r} is not a duration: a whole number and one of m h d w M Q Y", kind="duration")
    return None


def read_window(here: Cursor) -> WindowSpec:
    """Return a v1 time window: rolling, or calendar-aligned."""
    here.mapping(frozenset({"duration", "isRolling", "calendar"}))
    duration = read_duration(here, "duration", required=True) or DurationText(1, "d")
    rolling, calendar = here.flag("isRolling"), here.get("calendar")
    if calendar is not None and rolling:
        here.problem("isRolling: true and calendar exclude each other", kind="exclusive")
    if calendar is None:
        if not rolling:
            here.missing("calendar", "required unless isRolling is true")
        return WindowSpec(duration)
    calendar.mapping(_CALENDAR_FIELDS)
    return WindowSpec(duration, read_start_time(calendar), read_zone(calendar))


def read_start_time(here: Cursor, key: str = "startTime") -> datetime | None:
    """Return a local time written ``YYYY-MM-DD hh:mm:ss``, without zone."""
    text = here.text(key, required=True)
    found = here.get(key)
    for form in ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S"):
        try:
            return datetime.strptime(text, form)  # noqa: DTZ007  # local by definition; the zone stands in timeZone
        except ValueError:
            continue
    if found is not None and text:
        found.problem(f"{text!r} is not a time: YYYY-MM-DD hh:mm:ss", kind="time")
    return None


def read_zone(here: Cursor, key: str = "timeZone") -> str:
    """Return an IANA zone name that this machine, or the tzdata package, knows."""
    name = here.text(key, required=True)
    found = here.get(key)
    if found is not None and name:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            found.problem(f"unknown time zone {name!r}", kind="time_zone")
    return name


def read_target(here: Cursor) -> Decimal:
    """Return the objective's target as a ratio in [0, 1): ``target`` or ``targetPercent``, never both."""
    ratio, percent = here.get("target"), here.get("targetPercent")
    if ratio is not None and percent is not None:
        here.problem("target and targetPercent exclude each other", kind="exclusive")
        return Decimal(0)
    if ratio is None and percent is None:
        here.missing("target", "target or targetPercent is required")
        return Decimal(0)
    found, limit = (ratio, 1) if ratio is not None else (percent, 100)
    number = found.as_number() if found is not None else None
    if found is None or number is None:
        return Decimal(0)
    if not 0 <= number < limit:
        hint = ": an objective of 100 % leaves no error budget" if number == limit else ""
        found.problem(f"must be at least 0 and below {limit}, got {number}{hint}", kind="range")
        return Decimal(0)
    return number / limit
