"""Planned maintenance: time that no budget counts, and in which nobody acts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pasta_otel.model import CountRequest, EventCounts, TimeWindow
from pasta_otel.slo.budget import Measured, measure, total_of
from pasta_otel.slo.spec.document import Cursor, SpecError, read_documents
from pasta_otel.slo.spec.model import SLO

KIND = "MaintenanceWindows"


@dataclass(frozen=True, slots=True)
class Maintenance:
    """One planned interruption.

    Attributes:
        window: When.
        reason: Why, for people.
        services: Services that it concerns; empty = all.
        slos: SLOs that it concerns; empty = all of the services.
    """

    window: TimeWindow
    reason: str
    services: frozenset[str] = frozenset()
    slos: frozenset[str] = frozenset()

    def concerns(self, slo: SLO) -> bool:
        """Return whether it excludes time from an SLO."""
        named = not self.slos or slo.name in self.slos or slo.composite_of in self.slos
        return named and (not self.services or slo.service in self.services)


def read_maintenance(path: Path | str) -> tuple[Maintenance, ...]:
    """Return the planned interruptions of a file.

    Raises:
        SpecError: Naming file, line and field.
        InputError: The file cannot be read.
    """
    found: list[Maintenance] = []
    errors = []
    for document in read_documents(path):
        root = document.root
        root.mapping(frozenset({"kind", "windows"}))
        root.choice("kind", (KIND,), required=True)
        found += [_entry(item) for item in root.items("windows")]
        errors += [problem for problem in document.problems if problem.severity == "error"]
    if errors:
        raise SpecError(errors)
    return tuple(found)


def _entry(item: Cursor) -> Maintenance:
    item.mapping(frozenset({"start", "end", "reason", "services", "slos"}))
    window = TimeWindow(_time(item, "start"), _time(item, "end"))
    if window.end_unix_nano <= window.start_unix_nano:
        item.problem("end must be after start", kind="range")
    return Maintenance(
        window,
        reason=item.text("reason", required=True),
        services=frozenset(str(entry.value) for entry in item.items("services")),
        slos=frozenset(str(entry.value) for entry in item.items("slos")),
    )


def _time(item: Cursor, key: str) -> int:
    text = item.text(key, required=True)
    moment = _instant(text)
    if moment is None:
        if text:
            item.document.report(f"{item.path}.{key}", f"{text!r} is not RFC 3339 with a zone", kind="time")
        return 0
    elapsed = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000_000


def _instant(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def without(window: TimeWindow, excluded: Iterable[TimeWindow]) -> list[TimeWindow]:
    """Return what is left of a window, in order."""
    left = [window]
    for hole in sorted(excluded, key=lambda hole: hole.start_unix_nano):
        left = [part for piece in left for part in _cut(piece, hole)]
    return left


def _cut(piece: TimeWindow, hole: TimeWindow) -> list[TimeWindow]:
    before = TimeWindow(piece.start_unix_nano, min(piece.end_unix_nano, hole.start_unix_nano))
    after = TimeWindow(max(piece.start_unix_nano, hole.end_unix_nano), piece.end_unix_nano)
    return [part for part in (before, after) if part.start_unix_nano < part.end_unix_nano]


class ExcludingMeter:
    """``Occurrences`` without the events of planned maintenance: the parts of a window around it, summed.

    A window that lies wholly within maintenance has no traffic.
    """

    def __init__(self, slo: SLO, maintenance: Sequence[Maintenance]) -> None:
        self._slo = slo
        self._excluded = [entry.window for entry in maintenance if entry.concerns(slo)]

    def requests(self, windows: Sequence[TimeWindow]) -> list[CountRequest]:
        """Return one request for every part of every window."""
        return [CountRequest(self._slo.sli, part) for window in windows for part in without(window, self._excluded)]

    def measure(self, windows: Sequence[TimeWindow], answers: Sequence[EventCounts]) -> list[Measured]:
        """Return one result a window."""
        rest = iter(answers)
        results = []
        for window in windows:
            parts = [next(rest) for _ in without(window, self._excluded)]
            counts = parts[0] if len(parts) == 1 else total_of(self._weighed(window, parts))
            results.append(measure(counts, self._slo.objective))
        return results

    def _weighed(self, window: TimeWindow, parts: Sequence[EventCounts]) -> list[EventCounts]:
        """Return the parts of a window; ready ratios, which have no counts, weigh by the length of their part."""
        lengths = [part.end_unix_nano - part.start_unix_nano for part in without(window, self._excluded)]
        return [
            replace(part, good=part.good * length, total=part.total * length) if part.ratio_only else part
            for part, length in zip(parts, lengths, strict=True)
        ]
