"""Planned maintenance, and one controller that acts while others watch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.model import EventCounts, SpanSLI, TimeWindow
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.leader import FileLeader
from pasta_otel.slo.maintenance import ExcludingMeter, Maintenance, read_maintenance, without
from pasta_otel.slo.spec.document import SpecError
from pasta_otel.slo.spec.model import SLO, DurationText, WindowSpec
from pasta_otel.slo.state import FileState
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.slo import EventListSource, FixedAttributor, RecordingResponder

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
DEMO = load_windows("demo")


def slo(name: str = "orders", method: str = "Occurrences") -> SLO:
    return SLO(
        name, "order-api", Decimal("0.95"), SpanSLI("order-api"), WindowSpec(DurationText(1, "h")),
        method=method,  # type: ignore[arg-type]
        slice_target=Decimal("0.9"), slice_window=DurationText(1, "m"),
    )  # fmt: skip


def events(start_s: int, end_s: int, *, good: bool) -> list[tuple[int, bool]]:
    return [(START + at * SECOND // 10, good) for at in range(start_s * 10, end_s * 10)]


OUTAGE = events(0, 600, good=True) + events(600, 900, good=False) + events(900, 1000, good=True)
PLANNED = Maintenance(
    TimeWindow(START + 595 * SECOND, START + 905 * SECOND), "database upgrade", frozenset({"order-api"})
)


def states(*, maintenance: tuple[Maintenance, ...], method: str = "Occurrences", **parts):
    controller = SLOController(
        [slo(method=method)], DEMO, Parts(EventListSource(OUTAGE), maintenance=maintenance, **parts), grace_ns=0
    )
    return [controller.tick(START + second * SECOND).states[0] for second in range(540, 1000, 5)]


def test_an_outage_in_planned_maintenance_burns_nothing_and_spends_nothing():
    without_plan, with_plan = states(maintenance=()), states(maintenance=(PLANNED,))
    assert "burning" in {state.verdict for state in without_plan}
    assert without_plan[-1].budget_remaining < 0
    assert {state.verdict for state in with_plan} <= {"ok", "no_data"}
    assert with_plan[-1].verdict == "ok"
    assert with_plan[-1].budget_remaining == 1.0
    assert {state.silenced for state in with_plan} == {"", "database upgrade"}


def test_slices_within_maintenance_do_not_count():
    last = states(maintenance=(PLANNED,), method="Timeslices")[-1]
    assert last.budget_remaining == 1.0
    assert states(maintenance=(), method="Timeslices")[-1].budget_remaining < 1.0


def test_maintenance_of_another_service_excludes_nothing():
    other = Maintenance(PLANNED.window, "x", frozenset({"payment"}))
    assert states(maintenance=(other,)) == states(maintenance=())


def test_nobody_asks_why_during_maintenance():
    asked, silent = FixedAttributor(ValueError()), FixedAttributor(ValueError())
    states(maintenance=(), attributor=asked)
    all_day = Maintenance(TimeWindow(START, START + 2000 * SECOND), "all day")
    states(maintenance=(all_day,), attributor=silent)
    assert asked.asked
    assert silent.asked == []


def test_a_burn_that_began_just_before_maintenance_makes_nobody_act_in_it():
    late = Maintenance(TimeWindow(START + 610 * SECOND, START + 905 * SECOND), "upgrade")
    seen = states(maintenance=(late,))
    assert "burning" in {state.verdict for state in seen if not state.silenced}
    during = [state for state in seen if state.silenced]
    assert {state.verdict for state in during} == {"no_data"}
    assert during[0].detail == "planned maintenance: upgrade"
    assert seen[-1].verdict == "ok"


FILE = """
kind: MaintenanceWindows
windows:
  - {start: "2026-11-29T22:00:00Z", end: "2026-11-29T23:30:00+01:00", reason: upgrade, services: [order-api], slos: [a]}
"""


def test_a_maintenance_file_is_read_with_zones(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text(FILE)
    (entry,) = read_maintenance(file)
    assert entry.window.end_unix_nano - entry.window.start_unix_nano == 1800 * SECOND
    assert entry.concerns(slo("a"))
    assert not entry.concerns(slo("b"))


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("22:00:00Z", "22:00:00", "windows[0].start"),
        ("23:30:00+01:00", "21:30:00Z", "windows[0]"),
        ("reason: upgrade", "why: upgrade", "windows[0].why"),
        ("MaintenanceWindows", "Maintenance", "kind"),
    ],
)
def test_a_wrong_maintenance_file_is_refused_at_its_field(tmp_path, old, new, field):
    file = tmp_path / "m.yaml"
    file.write_text(FILE.replace(old, new))
    with pytest.raises(SpecError) as caught:
        read_maintenance(file)
    assert field in {problem.field for problem in caught.value.problems}


SPANS = st.tuples(st.integers(0, 100), st.integers(1, 50)).map(lambda pair: TimeWindow(pair[0], pair[0] + pair[1]))


@settings(deadline=None)
@given(SPANS, st.lists(SPANS, max_size=5))
def test_what_is_left_of_a_window_is_every_instant_outside_the_holes(window, holes):
    left = {t for part in without(window, holes) for t in range(part.start_unix_nano, part.end_unix_nano)}
    out = {t for hole in holes for t in range(hole.start_unix_nano, hole.end_unix_nano)}
    assert left == set(range(window.start_unix_nano, window.end_unix_nano)) - out


def test_only_the_leader_acts_and_the_next_one_takes_its_memory_over(tmp_path):
    def controller():
        responder, leader = RecordingResponder(), FileLeader(tmp_path / "lock")
        parts = Parts(
            EventListSource(OUTAGE), responder=responder, leader=leader, state=FileState(tmp_path / "slo.json")
        )
        return SLOController([slo()], DEMO, parts, grace_ns=0), responder, leader

    (first, first_acts, first_leader), (second, second_acts, second_leader) = controller(), controller()
    for second_of_day in range(580, 640, 5):
        first.tick(START + second_of_day * SECOND)
        second.tick(START + second_of_day * SECOND)
    burn = first.states()[0].burn_since_unix_nano
    assert burn is not None
    assert first_acts.evaluations
    assert second_acts.evaluations == []
    first_leader.release()
    evaluation = second.tick(START + 645 * SECOND)
    assert second_acts.evaluations == [evaluation]
    assert evaluation.transitions == ()
    assert evaluation.states[0].burn_since_unix_nano == burn
    second_leader.release()


def test_kill_9_of_the_leader_frees_the_lead(tmp_path):
    lock = tmp_path / "lock"
    code = f"from pasta_otel.slo.leader import FileLeader; print(FileLeader({str(lock)!r}).lead(), flush=True); input()"
    holder = "import sys; l=None\n" + code.replace("print(FileLeader", "l=FileLeader").replace(
        ".lead(), flush=True)", "; print(l.lead(), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        mine = FileLeader(lock)
        assert not mine.lead()
        assert lock.read_text() == f"{other.pid}\n"
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert mine.lead()
    mine.release()


def test_a_ready_ratio_weighs_by_time_around_a_hole():
    """20 minutes at 100 % bad before the hole, 60 at 0 % after it: a quarter bad, not a half."""
    slo = SLO("x", "web", Decimal("0.9"), SpanSLI("web"), WindowSpec(DurationText(2, "h")))
    hour = 3600 * 10**9
    meter = ExcludingMeter(slo, [Maintenance(TimeWindow(20 * hour // 60, hour), "upgrade")])
    windows = [TimeWindow(0, 2 * hour)]
    assert len(meter.requests(windows)) == 2
    (measured,) = meter.measure(
        windows, [EventCounts(0.0, 1.0, ratio_only=True), EventCounts(1.0, 1.0, ratio_only=True)]
    )
    assert measured.burn == Fraction(1, 4) / Fraction(1, 10)


def test_a_time_beyond_the_calendar_is_an_error_at_its_field(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text(
        "kind: MaintenanceWindows\nwindows: [{start: '0001-01-01T00:00:00+14:00', end: '2026-01-01T00:00:00Z', reason: x}]\n"
    )
    with pytest.raises(SpecError, match="RFC 3339"):
        read_maintenance(file)
