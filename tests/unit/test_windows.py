"""Burn-rate windows and periods."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.errors import InputError
from pasta_otel.slo.periods import NS_PER_SECOND, duration_ns, length_ns, period_at
from pasta_otel.slo.spec.document import SpecError, parse_documents
from pasta_otel.slo.spec.fields import read_window
from pasta_otel.slo.spec.model import DurationText, WindowSpec
from pasta_otel.slo.windows import duration_text, lint, load_windows

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
DAY = 86_400 * NS_PER_SECOND


def factors(days: int) -> list[Decimal]:
    return [row.factor(days * DAY) for row in load_windows().rows]


def test_factors_follow_the_period_as_the_workbook_derives_them():
    assert factors(30) == [Decimal("14.4"), Decimal(6), Decimal(3), Decimal(1)]
    assert factors(28)[:2] == [Decimal("13.44"), Decimal("5.6")]
    assert [round(factor, 3) for factor in factors(7)] == [Decimal(text) for text in ("3.36", "1.4", "0.7", "0.233")]
    assert factors(90) == [Decimal("43.2"), Decimal(18), Decimal(9), Decimal(3)]


def test_the_short_window_is_a_twelfth_of_the_long_one():
    assert all(row.long_ns == 12 * row.short_ns for row in load_windows().rows)


@pytest.mark.case("S03")
def test_pairs_that_can_never_fire_are_warned_of():
    expected = json.loads((CASES / "S03" / "expected.json").read_text())
    windows, objective = load_windows(), Decimal("0.1")
    assert float(1 / (1 - objective)) == pytest.approx(expected["max_burn"])
    found = lint(windows, objective, 30 * DAY)
    assert [float(row.factor(30 * DAY)) for row in windows.rows if any(row.key in text for text in found)] == expected[
        "unreachable"
    ]
    for row in windows.rows:
        factor = row.factor(30 * DAY)
        assert float(factor * (1 - objective)) == pytest.approx(expected["thresholds"][f"{float(factor):g}"])


def test_a_factor_below_one_is_warned_of_because_it_fires_inside_the_budget():
    found = lint(load_windows(), Decimal("0.999"), 7 * DAY)
    assert [text.split(":")[2].split()[0] for text in found] == ["fires", "fires"]


def test_the_demo_windows_are_small_and_reachable():
    windows = load_windows("demo")
    assert [row.key for row in windows.rows] == ["page:30s/5s"]
    assert not lint(windows, Decimal("0.9"), 3600 * NS_PER_SECOND)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("windows: []", "windows"),
        ("windows: [{severity: page, long: 5m, short: 1h, budget_percent: 2}]", "windows[0]"),
        ("windows: [{severity: mail, long: 1h, short: 5m, budget_percent: 2}]", "windows[0].severity"),
        ("windows: [{severity: page, long: 1h, short: 5m, budget_percent: 0}]", "windows[0].budget_percent"),
        ("windows: [{severity: page, long: 1 h, short: 5m, budget_percent: 2}]", "windows[0].long"),
    ],
)
def test_a_windows_file_of_ones_own_is_validated(tmp_path, line, field):
    file = tmp_path / "mine.yaml"
    file.write_text(f"kind: BurnRateWindows\nname: mine\nsource: https://example.com\n{line}\n")
    with pytest.raises(SpecError) as caught:
        load_windows(str(file))
    assert field in {problem.field for problem in caught.value.problems}


def test_an_unknown_set_of_windows_is_refused_by_name():
    with pytest.raises(InputError, match="google-7w"):
        load_windows("google-7w")


@pytest.mark.parametrize(
    ("duration", "text"), [(5, "5s"), (60, "1m"), (90, "90s"), (3600, "1h"), (5400, "90m"), (259_200, "3d")]
)
def test_durations_are_written_as_prometheus_writes_them(duration, text):
    assert duration_text(duration * NS_PER_SECOND) == text


def unix_nano(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * NS_PER_SECOND


@pytest.mark.case("S11")
@pytest.mark.parametrize("quote", ["", '"'])
def test_a_calendar_month_across_a_clock_change_has_743_hours(quote):
    expected = json.loads((CASES / "S11" / "expected.json").read_text())
    now = unix_nano(json.loads((CASES / "S11" / "now.json").read_text())["now"])
    text = (
        (CASES / "S11" / "spec.yaml").read_text().replace("2022-01-01 12:00:00", f"{quote}2022-01-01 12:00:00{quote}")
    )
    (document,) = parse_documents(text, "spec.yaml")
    spec = document.root.get("spec")
    assert spec is not None
    window = read_window(spec.items("timeWindow")[0])
    assert document.valid
    period = period_at(window, now)
    assert period.start_unix_nano == unix_nano(expected["start"])
    assert period.end_unix_nano == unix_nano(expected["end"])
    assert length_ns(window, now) == expected["seconds"] * NS_PER_SECOND
    assert (now - period.start_unix_nano) / length_ns(window, now) == pytest.approx(439 / 743)


@pytest.mark.case("S11")
@pytest.mark.parametrize(
    ("old", "new", "field", "kind"),
    [
        ("isRolling: false", "isRolling: true", "spec.timeWindow[0]", "exclusive"),
        ("America/New_York", "America/Atlantis", "spec.timeWindow[0].calendar.timeZone", "time_zone"),
        ("America/New_York", "../etc/passwd", "spec.timeWindow[0].calendar.timeZone", "time_zone"),
        ("2022-01-01 12:00:00", "January", "spec.timeWindow[0].calendar.startTime", "time"),
    ],
)
def test_a_wrong_calendar_is_refused_at_its_field(old, new, field, kind):
    (document,) = parse_documents((CASES / "S11" / "spec.yaml").read_text().replace(old, new), "spec.yaml")
    spec = document.root.get("spec")
    assert spec is not None
    read_window(spec.items("timeWindow")[0])
    assert (field, kind) in {(problem.field, problem.kind) for problem in document.problems}


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from("mhdwMQY"),
    st.datetimes(datetime(1990, 1, 1), datetime(2040, 1, 1)),  # noqa: DTZ001  # local by definition
    st.sampled_from(["UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Apia"]),
    st.integers(0, 2_500_000_000),
)
def test_calendar_periods_hold_the_instant_and_follow_one_another_without_gap(count, unit, start, zone, seconds):
    window = WindowSpec(DurationText(count, unit), start.replace(microsecond=0), zone)
    now = seconds * NS_PER_SECOND
    period = period_at(window, now)
    assert period.start_unix_nano <= now < period.end_unix_nano
    after = period_at(window, period.end_unix_nano)
    assert after.start_unix_nano == period.end_unix_nano


def test_a_rolling_month_has_thirty_days_as_the_reference_validator_says():
    now = datetime(2026, 3, 1, tzinfo=UTC)
    period = period_at(WindowSpec(DurationText(1, "M")), int(now.timestamp()) * NS_PER_SECOND)
    assert period.end_unix_nano - period.start_unix_nano == 30 * DAY == duration_ns(DurationText(1, "M"))


SLOTH = Path(__file__).parents[1] / "fixtures" / "samples" / "slok+sloth" / "examples" / "windows"


def test_sloths_own_windows_are_read():
    rows = load_windows(str(SLOTH / "7d.yaml")).rows
    assert [row.key for row in rows] == ["page:1h/5m", "page:6h/30m", "ticket:1d/2h", "ticket:3d/6h"]
    assert [row.factor(7 * DAY) for row in rows] == [Decimal(text) for text in ("13.44", "3.5", "1.4", "0.98")]
    assert [row.key for row in load_windows(str(SLOTH / "custom-30d.yaml")).rows][3] == "ticket:36h/3h"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("shortWindow: 5m", "shortWindow: 2h", "spec.page.quick"),
        ("errorBudgetPercent: 8", "errorBudgetPercent: 800", "spec.page.quick.errorBudgetPercent"),
        ("sloPeriod: 7d", "sloPeriod: soon", "spec.sloPeriod"),
        ("ticket:", "tickets:", "spec.ticket"),
    ],
)
def test_sloths_windows_are_validated(tmp_path, old, new, field):
    (tmp_path / "w.yaml").write_text((SLOTH / "7d.yaml").read_text().replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        load_windows(str(tmp_path / "w.yaml"))
    assert field in {problem.field for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("long: 99999999999d, short: 5m", "longer than ten years"),
        ("long: 1h, short: 5x", "not a duration"),
        ("long: 5m, short: 1h", "short must be shorter than long"),
        ("long: 2h, short: 10m", "stands twice"),
    ],
)
def test_odd_windows_are_refused(tmp_path, row, words):
    file = tmp_path / "w.yaml"
    file.write_text(
        "kind: BurnRateWindows\nname: odd\nsource: https://example.com\nwindows:\n"
        f"  - {{severity: page, long: 2h, short: 10m, budget_percent: 2}}\n  - {{severity: page, {row}, budget_percent: 3}}\n"
    )
    with pytest.raises(SpecError, match=words):
        load_windows(str(file))
