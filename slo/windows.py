"""Burn-rate windows as data with their source; factors are derived, never written down.

Formula (The Site Reliability Workbook, chapter 5): factor = budget share x period / long window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from pathlib import Path

from pasta_otel.errors import InputError
from pasta_otel.slo.spec.document import Cursor, Document, SpecError, parse_documents, read_documents

DEFAULT = "google-30d"
NS_PER_SECOND = 1_000_000_000
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
LONGEST_SECONDS = 10 * 365 * 86_400
_DURATION = re.compile(r"^([1-9][0-9]*)([smhdw])$")
_SET = frozenset({"kind", "name", "source", "min_events", "min_bad_events", "hold", "windows"})
_ROW = frozenset({"severity", "long", "short", "budget_percent"})


@dataclass(frozen=True, slots=True)
class BurnRateWindow:
    """One pair of windows.

    Attributes:
        severity: ``page`` or ``ticket``.
        long_ns: Long window: how much budget has gone.
        short_ns: Short window: whether it is still going.
        budget_share: Share of the period's budget which, spent within the long window, is worth the severity.
    """

    severity: str
    long_ns: int
    short_ns: int
    budget_share: Decimal

    @property
    def key(self) -> str:
        """Return a stable name, e.g. ``page:1h/5m``."""
        return f"{self.severity}:{duration_text(self.long_ns)}/{duration_text(self.short_ns)}"

    def factor(self, period_ns: int) -> Decimal:
        """Return the burn rate above which the pair fires, for an SLO of this period."""
        return self.budget_share * period_ns / self.long_ns


@dataclass(frozen=True, slots=True)
class BurnRateWindows:
    """A set of window pairs with the guards that go with them.

    Attributes:
        name: For messages.
        source: URL of where the numbers come from.
        rows: The pairs; any one of them makes an SLO burn.
        min_events: Fewer events than this in the long window never start a burn.
        min_bad_events: Fewer bad events than this in the long window never start a burn.
        hold_ns: How long the short window must stay below before a burn ends; 0 = each pair's own short window.
    """

    name: str
    source: str
    rows: tuple[BurnRateWindow, ...]
    min_events: int = 10
    min_bad_events: int = 2
    hold_ns: int = 0

    def hold(self, row: BurnRateWindow) -> int:
        """Return how long a pair must stay below before its burn ends."""
        return self.hold_ns or row.short_ns


def load_windows(name: str = DEFAULT) -> BurnRateWindows:
    """Return a set by the name of one that ships with pasta-otel, or by path; Sloth's ``AlertWindows`` are read too.

    Raises:
        SpecError: Naming file, line and field.
        InputError: There is no such set.
    """
    shipped = files("pasta_otel.slo").joinpath("data", "windows", f"{name}.yaml")
    if "/" not in name and shipped.is_file():
        documents = parse_documents(shipped.read_text(encoding="utf-8"), f"{name}.yaml")
    elif Path(name).is_file():
        documents = read_documents(name)
    else:
        raise InputError("neither a file nor a set of windows that ships with pasta-otel", file=name)
    if len(documents) != 1:
        raise InputError("expected exactly one document", file=name)
    return _read_sloth(documents[0], name) if documents[0].root.has("apiVersion") else _read(documents[0])


def _read(document: Document) -> BurnRateWindows:
    root = document.root
    root.mapping(_SET)
    root.choice("kind", ("BurnRateWindows",), required=True)
    rows = tuple(_row(item) for item in root.items("windows"))
    if not rows:
        root.missing("windows", "at least one pair is required")
    for number, row in enumerate(rows):
        if row.key in {other.key for other in rows[:number]}:
            document.report(f"windows[{number}]", f"the pair {row.key} stands twice", kind="duplicate_name")
    windows = BurnRateWindows(
        name=root.text("name", required=True),
        source=root.text("source", required=True),
        rows=rows,
        min_events=_whole(root, "min_events", 10),
        min_bad_events=_whole(root, "min_bad_events", 2),
        hold_ns=read_ns(root, "hold") if root.has("hold") else 0,
    )
    if not document.valid:
        raise SpecError([problem for problem in document.problems if problem.severity == "error"])
    return windows


def _read_sloth(document: Document, name: str) -> BurnRateWindows:
    """Return Sloth's ``AlertWindows``; its factors follow the SLO's own period too, ``sloPeriod`` is for its reader."""
    root = document.root
    root.mapping(frozenset({"apiVersion", "kind", "spec"}))
    root.choice("apiVersion", ("sloth.slok.dev/v1",), required=True)
    root.choice("kind", ("AlertWindows",), required=True)
    spec = root.need("spec")
    rows = []
    if spec is not None:
        spec.mapping(frozenset({"sloPeriod", "page", "ticket"}))
        read_ns(spec, "sloPeriod")
        for severity in ("page", "ticket"):
            pair = spec.need(severity)
            parts = [pair.need(speed) for speed in ("quick", "slow")] if pair is not None else []
            rows += [_sloth_row(part, severity) for part in parts if part is not None]
    if not document.valid:
        raise SpecError([problem for problem in document.problems if problem.severity == "error"])
    return BurnRateWindows(Path(name).stem, name, tuple(rows))


def _sloth_row(here: Cursor, severity: str) -> BurnRateWindow:
    here.mapping(frozenset({"errorBudgetPercent", "shortWindow", "longWindow"}))
    share = (here.number("errorBudgetPercent") or Decimal(0)) / 100
    row = BurnRateWindow(severity, read_ns(here, "longWindow"), read_ns(here, "shortWindow"), share)
    if row.short_ns >= row.long_ns:
        here.problem("shortWindow must be shorter than longWindow", kind="range")
    if not 0 < share <= 1:
        here.document.report(f"{here.path}.errorBudgetPercent", "must be above 0 and at most 100", kind="range")
    return row


def _row(item: Cursor) -> BurnRateWindow:
    item.mapping(_ROW)
    row = BurnRateWindow(
        severity=item.choice("severity", ("page", "ticket"), required=True),
        long_ns=read_ns(item, "long"),
        short_ns=read_ns(item, "short"),
        budget_share=(item.number("budget_percent") or Decimal(0)) / 100,
    )
    if row.short_ns >= row.long_ns:
        item.problem("short must be shorter than long", kind="range")
    if not 0 < row.budget_share <= 1:
        item.document.report(f"{item.path}.budget_percent", "must be above 0 and at most 100", kind="range")
    return row


def _whole(here: Cursor, key: str, default: int) -> int:
    number = here.number(key)
    if number is None:
        return default
    if number != int(number) or number < 0:
        here.document.report(key, f"expected a whole number, got {number}", kind="type")
    return int(number)


def read_ns(here: Cursor, key: str) -> int:
    """Return a duration field such as ``30s`` or ``1h`` in ns; 1 ns stands in for a wrong one, which is recorded."""
    text = here.text(key, required=True)
    match = _DURATION.match(text)
    if match and int(match[1]) * _UNITS[match[2]] <= LONGEST_SECONDS:
        return int(match[1]) * _UNITS[match[2]] * NS_PER_SECOND
    if text:
        what = "is longer than ten years" if match else "is not a duration such as 30s or 1h"
        here.document.report(f"{here.path}.{key}".lstrip("."), f"{text!r} {what}")
    return 1


def duration_text(duration_ns: int) -> str:
    """Return the shortest shorthand: ``5m``, ``1h``, ``3d``; Prometheus reads it as well."""
    if duration_ns % 1_000_000:
        return f"{duration_ns / NS_PER_SECOND:g}s"
    if duration_ns % NS_PER_SECOND:
        return f"{duration_ns // 1_000_000}ms"
    seconds = duration_ns // NS_PER_SECOND
    for unit in ("d", "h", "m"):
        if seconds % _UNITS[unit] == 0:
            return f"{seconds // _UNITS[unit]}{unit}"
    return f"{seconds}s"


def never_fire(windows: BurnRateWindows, objective: Decimal, period_ns: int) -> list[str]:
    """Return a warning for every pair that an SLO cannot make fire, however much of its budget it spends."""
    budget = 1 - objective
    return [
        f"{row.key}: can never fire: needs an error ratio above {float(factor * budget):.4g}"
        f" (factor {float(factor):.4g} x budget {float(budget):.4g})"
        for row in windows.rows
        if (factor := row.factor(period_ns)) * budget >= 1
    ]


def lint(windows: BurnRateWindows, objective: Decimal, period_ns: int) -> list[str]:
    """Return warnings: pairs that can never fire, and pairs that fire while the service is inside its budget."""
    found = never_fire(windows, objective, period_ns)
    for row in windows.rows:
        factor = row.factor(period_ns)
        if factor < 1:
            found.append(
                f"{row.key}: fires at burn rate {float(factor):.4g}, although below 1 the budget lasts the period"
            )
        if row.long_ns > period_ns:
            found.append(f"{row.key}: its long window is longer than the SLO's period")
    return found
