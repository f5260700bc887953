"""The SLO controller over exact event lists: when a burn begins, when it ends, and what changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pasta_otel import semconv
from pasta_otel.errors import InputError
from pasta_otel.model import Attribution, Cause, EventCounts, Evidence, SpanRef, SpanSLI, TimeWindow
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.report import evaluation_to_json
from pasta_otel.slo.spec.model import SLO, DurationText, PrometheusSLI, WindowSpec
from pasta_otel.slo.state import FileState
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.slo import EventListSource, FixedAttributor, RecordingResponder

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
GRACE = 2 * SECOND
DEMO = load_windows("demo")
RATE = 20  # events a second

REF = SpanRef("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
EVIDENCE = Evidence("spans", "edge_gap_seconds", 0.01, 0.5, 0.9, 40, (REF,))
CAUSE = Cause("edge_latency", "order-api", "order-api -> recommendations", 0.9, (EVIDENCE,))


def slo(name: str = "orders", objective: str = "0.95") -> SLO:
    return SLO(
        name,
        "order-api",
        Decimal(objective),
        SpanSLI("order-api"),
        WindowSpec(DurationText(1, "h")),
        annotations=(("owner", "team-orders"),),
    )


def events(*phases: tuple[float, float]) -> list[tuple[int, bool]]:
    """Return events of phases of (seconds, share of bad ones), evenly mixed, from START on."""
    result, at = [], 0
    for seconds, bad in phases:
        owed = 0.0
        for _ in range(int(seconds * RATE)):
            owed += bad
            result.append((START + at * SECOND // RATE, owed < 1))
            owed -= owed >= 1
            at += 1
    return result


def run(controller: SLOController, first: int, last: int) -> list:
    return [controller.tick(START + second * SECOND) for second in range(first, last)]


def transitions(evaluations) -> list[tuple[int, str, str]]:
    return [((t.time_unix_nano - START) // SECOND, t.before, t.after) for e in evaluations for t in e.transitions]


def exact_crossing(listed, factor: Decimal, objective: Decimal) -> int:
    """Return the first whole second at which both windows are above the factor, by brute force."""
    for second in range(1, 1000):
        now = START + second * SECOND
        inside = [[good for at, good in listed if now - width * SECOND <= at < now] for width in (30, 5)]
        limit = float(factor * (1 - objective))
        if all(window and sum(not good for good in window) / len(window) > limit for window in inside):
            return second
    raise AssertionError


def test_a_burn_is_found_at_the_tick_after_the_exact_crossing_and_ends_on_the_short_window():
    listed = events((60, 0.0), (60, 0.5), (60, 0.0))
    controller = SLOController([slo()], DEMO, Parts(EventListSource(listed)), grace_ns=GRACE)
    found = transitions(run(controller, 3, 180))
    crossing = exact_crossing(listed, DEMO.rows[0].factor(3600 * SECOND), Decimal("0.95"))
    assert found[0] == (3, "no_data", "ok")
    assert found[1] == (crossing + GRACE // SECOND, "ok", "burning")
    # the last bad event ends near 120 s; it has left enough of the 5 s window within 5 s, then the hold of 2 s
    assert found[2][1:] == ("burning", "ok")
    assert 120 + 2 <= found[2][0] <= 120 + 5 + 2 + 2
    assert len(found) == 3


def test_an_error_ratio_that_oscillates_around_the_factor_does_not_flap():
    phases = [(1, 0.0), (1, 0.6)] * 150
    controller = SLOController([slo()], DEMO, Parts(EventListSource(events((40, 0.0), *phases))), grace_ns=GRACE)
    found = transitions(run(controller, 3, 342))
    assert [after for _, _, after in found] == ["ok", "burning"]


def test_an_objective_that_the_windows_cannot_watch_is_said_beside_its_verdict():
    listed = events((60, 1.0))
    lax = SLOController([slo(objective="0.5")], DEMO, Parts(EventListSource(listed)), grace_ns=GRACE)
    (state,) = run(lax, 3, 60)[-1].states
    assert state.verdict == "ok"
    assert "page:30s/5s: can never fire: needs an error ratio above 1.2" in state.detail
    strict = SLOController([slo()], DEMO, Parts(EventListSource(listed)), grace_ns=GRACE)
    assert "never fire" not in run(strict, 3, 60)[-1].states[0].detail


def test_low_traffic_never_starts_a_burn_and_the_detail_says_so():
    source = EventListSource([(START + i * 4 * SECOND, i != 14) for i in range(16)])
    state = SLOController([slo()], DEMO, Parts(source), grace_ns=0).tick(START + 60 * SECOND).states[0]
    assert state.verdict == "ok"
    assert "low traffic" in state.detail
    assert state.burn_rates[0].bad_events == 1


def test_an_idle_service_is_no_data_and_its_budget_is_untouched():
    state = SLOController([slo()], DEMO, Parts(EventListSource()), grace_ns=0).tick(START).states[0]
    assert (state.verdict, state.reason, state.budget_remaining) == ("no_data", "no_traffic", 1.0)


WRONG_ANSWERS = [
    EventCounts(float("nan"), float("nan")),
    EventCounts(1.0, float("inf")),
    EventCounts(-5.0, 10.0),
    EventCounts(11.0, 10.0),
    EventCounts(0.0, 0.0, no_data="stale"),
    EventCounts(0.0, 0.0, no_data="future"),
    EventCounts(0.0, 0.0, no_data="sampled"),
    EventCounts(0.0, 0.0, no_data="partial"),
    EventCounts(0.0, 0.0),
    OSError("connection refused"),
]


@pytest.mark.parametrize("wrong", WRONG_ANSWERS)
@pytest.mark.parametrize("burning", [True, False])
def test_a_source_that_is_down_or_lies_changes_no_verdict_to_ok_or_burning(wrong, burning):
    source = EventListSource(events((60, 0.0), (60, 0.5 if burning else 0.0)))
    controller = SLOController([slo()], DEMO, Parts(source), grace_ns=GRACE)
    before = run(controller, 3, 120)[-1].states[0]
    assert before.verdict == ("burning" if burning else "ok")
    source.answer = wrong if isinstance(wrong, EventCounts) else None
    source.error = wrong if isinstance(wrong, Exception) else None
    during = run(controller, 120, 170)
    assert {e.states[0].verdict for e in during} == {"no_data"}
    assert all(e.states[0].reason and e.states[0].detail for e in during)
    assert during[-1].states[0].burn_since_unix_nano == before.burn_since_unix_nano
    source.answer = source.error = None
    back = controller.tick(START + 120 * SECOND).states[0]
    assert (back.verdict, back.burn_since_unix_nano) == (before.verdict, before.burn_since_unix_nano)


def test_a_source_that_answers_too_little_is_no_data():
    source = SimpleNamespace(counts=lambda requests, now: [EventCounts(1.0, 1.0)])
    state = SLOController([slo()], DEMO, Parts(source)).tick(START).states[0]
    assert (state.verdict, state.reason) == ("no_data", "absent")


def test_all_requests_of_a_tick_go_to_the_source_in_one_call():
    source = EventListSource(events((60, 0.0)))
    SLOController([slo(f"slo-{i}") for i in range(20)], DEMO, Parts(source)).tick(START + 40 * SECOND)
    assert source.calls == 1


def test_a_restart_neither_fires_twice_nor_forgets(tmp_path):
    source = EventListSource(events((60, 0.0), (120, 0.5)))
    parts = Parts(source, state=FileState(tmp_path / "state" / "slo.json"))
    first = SLOController([slo()], DEMO, parts, grace_ns=GRACE)
    burn = run(first, 3, 100)[-1].states[0].burn_since_unix_nano
    second = SLOController([slo()], DEMO, parts, grace_ns=GRACE)
    evaluation = second.tick(START + 101 * SECOND)
    assert evaluation.transitions == ()
    assert evaluation.states[0].verdict == "burning"
    assert evaluation.states[0].burn_since_unix_nano == burn
    assert evaluation.states[0].since_unix_nano == burn


KILLED = """
    import sys
    from decimal import Decimal
    from pasta_otel.model import SpanSLI
    from pasta_otel.slo.controller import Parts, SLOController
    from pasta_otel.slo.spec.model import SLO, DurationText, WindowSpec
    from pasta_otel.slo.state import FileState
    from pasta_otel.slo.windows import load_windows
    from pasta_otel.testing.slo import EventListSource
    S, START = 10**9, 1_700_000_000 * 10**9
    source = EventListSource([(START + i * S // 20, i < 1200 or i % 2 == 0) for i in range(3600)])
    slo = SLO("orders", "order-api", Decimal("0.95"), SpanSLI("order-api"), WindowSpec(DurationText(1, "h")))
    controller = SLOController([slo], load_windows("demo"), Parts(source, state=FileState(sys.argv[1])), grace_ns=0)
    for second in range(int(sys.argv[2]), 180):
        evaluation = controller.tick(START + second * S)
        for t in evaluation.transitions:
            print("transition", t.after, flush=True)
        print("burn", evaluation.states[0].burn_since_unix_nano, flush=True)
        if sys.argv[3] == "wait" and evaluation.states[0].verdict == "burning":
            sys.stdin.read()
"""


def test_kill_9_in_the_middle_of_a_burn_neither_fires_twice_nor_forgets(tmp_path):
    state = tmp_path / "slo.json"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(state)]
    with subprocess.Popen([*command, "30", "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        lines = []
        assert first.stdout is not None
        for line in first.stdout:
            lines.append(line.strip())
            if lines[-1].startswith("burn ") and lines[-1] != "burn None":
                break
        os.kill(first.pid, signal.SIGKILL)
    assert lines.count("transition burning") == 1
    again = subprocess.run([*command, "100", "go"], capture_output=True, text=True, check=True).stdout.split("\n")
    assert "transition burning" not in again
    assert again[0] == lines[-1]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2, "slos": {}}', '{"version": 1, "slos": {"a": {"verdict": "fine"}}}', "\x00"]
)
def test_a_damaged_or_newer_state_file_is_refused_by_name(tmp_path, text):
    file = tmp_path / "slo.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"slo\.json"):
        SLOController([slo()], DEMO, Parts(EventListSource(), state=FileState(file)))


def test_a_state_that_cannot_be_written_does_not_stop_the_controller(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    state = FileState(blocked / "slo.json")
    state.load = dict  # type: ignore[method-assign]
    controller = SLOController([slo()], DEMO, Parts(EventListSource(events((60, 0.0))), state=state))
    assert controller.tick(START + 60 * SECOND).states[0].verdict == "ok"


def attribution(*causes: Cause) -> Attribution:
    return Attribution(causes, TimeWindow(0, 1), TimeWindow(1, 2))


def test_a_burn_is_attributed_from_its_onset_against_a_baseline_that_excludes_it():
    attributor = FixedAttributor(attribution(CAUSE))
    listed = events((60, 0.01), (60, 0.5))
    controller = SLOController([slo()], DEMO, Parts(EventListSource(listed), attributor=attributor), grace_ns=GRACE)
    states = [evaluation.states[0] for evaluation in run(controller, 3, 100)]
    ((baseline, window),) = attributor.asked
    onset = START + 60 * SECOND
    assert baseline.end_unix_nano <= onset
    assert baseline.end_unix_nano - baseline.start_unix_nano >= 40 * SECOND
    assert abs(window.start_unix_nano - onset) <= 5 * SECOND
    assert states[-1].attribution is not None
    assert states[-1].attribution.causes == (CAUSE,)
    assert all(state.attribution is None for state in states if state.verdict == "ok")


def test_attribution_is_tried_again_until_a_cause_is_found_and_the_attribution_ends_with_the_burn():
    attributor = FixedAttributor(attribution(), ValueError("no spans yet"), attribution(CAUSE), attribution())
    listed = events((60, 0.0), (40, 0.5), (30, 0.0))
    controller = SLOController([slo()], DEMO, Parts(EventListSource(listed), attributor=attributor), grace_ns=GRACE)
    evaluations = run(controller, 3, 128)
    assert len(attributor.asked) == 3
    burning = [e.states[0] for e in evaluations if e.states[0].verdict == "burning"]
    assert burning[-1].attribution == attribution(CAUSE)
    assert evaluations[-1].states[0].attribution is None


def test_the_responder_sees_every_tick_and_may_fail():
    responder = RecordingResponder()
    controller = SLOController([slo()], DEMO, Parts(EventListSource(events((60, 0.0))), responder=responder))
    run(controller, 10, 20)
    assert len(responder.evaluations) == 10

    def broken(evaluation):
        raise RuntimeError(evaluation.now_unix_nano)

    failing = SimpleNamespace(respond=broken)
    survivor = SLOController([slo()], DEMO, Parts(EventListSource(events((60, 0.0))), responder=failing), grace_ns=0)
    assert survivor.tick(START + 60 * SECOND).states[0].verdict == "ok"


def observed(reader: InMemoryMetricReader) -> dict[str, list]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_metrics_and_transition_spans_say_what_the_verdict_says():
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    parts = Parts(
        EventListSource(events((60, 0.0), (40, 0.5))),
        attributor=FixedAttributor(attribution(CAUSE)),
        meter=meters.get_meter("test"),
        tracer=tracers.get_tracer("test"),
    )
    controller = SLOController([slo()], DEMO, parts, grace_ns=GRACE)
    run(controller, 3, 100)
    points = observed(reader)
    assert points.keys() <= semconv.METRICS.keys()
    (burning,) = points[semconv.SLO_BURNING]
    assert burning.value == 1
    assert dict(burning.attributes) == {"slo": "orders", "service": "order-api"}
    assert {dict(point.attributes)["window"] for point in points[semconv.SLO_BURN_RATE]} == {"30s", "5s"}
    spans = exporter.get_finished_spans()
    assert [(span.attributes[semconv.SLO_FROM], span.attributes[semconv.SLO_TO]) for span in spans] == [
        ("no_data", "ok"),
        ("ok", "burning"),
    ]
    (link,) = spans[1].links
    assert f"{link.context.trace_id:032x}" == REF.trace_id
    assert spans[1].attributes[semconv.SLO_CAUSE] == "edge_latency order-api -> recommendations"
    parts.source.answer = EventCounts(0.0, 0.0, no_data="stale")  # type: ignore[attr-defined]
    controller.tick(START + 101 * SECOND)
    points = observed(reader)
    assert semconv.SLO_BURNING not in points
    assert dict(points[semconv.SLO_NO_DATA][0].attributes)["reason"] == "stale"


def test_states_are_strict_json_with_rfc_3339_times():
    controller = SLOController(
        [slo()], DEMO, Parts(EventListSource(events((60, 0.5))), attributor=FixedAttributor(attribution(CAUSE)))
    )
    document = json.loads(json.dumps(evaluation_to_json(controller.tick(START + 90 * SECOND)), allow_nan=False))
    (state,) = document["slos"]
    assert document["time"] == "2023-11-14T22:14:50.000000Z"
    assert state["annotations"] == {"owner": "team-orders"}
    assert state["budget"]["total"] == 60 * RATE
    assert state["attribution"]["causes"][0]["evidence"][0]["links"] == [REF._asdict()]


class GridClock:
    """A clock that a waiting event moves, with one slow tick in it."""

    def __init__(self) -> None:
        self.now = 0

    def unix_nano(self) -> int:
        return START + self.now

    def monotonic_ns(self) -> int:
        return self.now


def test_the_loop_keeps_to_its_grid_and_skips_what_it_missed():
    clock, ticks = GridClock(), []

    class Source(EventListSource):
        def counts(self, requests, now_unix_nano):
            ticks.append(clock.now / SECOND)
            clock.now += SECOND // 10 if len(ticks) != 3 else 3 * SECOND
            return super().counts(requests, now_unix_nano)

    class Stop(threading.Event):
        def wait(self, timeout=None):
            clock.now += round((timeout or 0) * SECOND)
            return clock.now >= 9 * SECOND and not self.set()  # type: ignore[func-returns-value]

    controller = SLOController([slo()], DEMO, Parts(Source(events((20, 0.0))), clock=clock))
    controller.run(Stop(), tick_seconds=1.0)
    assert ticks == [0, 1, 2, 6, 7, 8]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0])), min_size=1, max_size=8))
def test_verdicts_over_random_streams_keep_their_promises(phases):
    """A burn begins only when both windows are above, ends only after the short one is below, and never in between."""
    controller = SLOController([slo()], DEMO, Parts(EventListSource(events(*phases))), grace_ns=0)
    previous = None
    for second in range(1, sum(seconds for seconds, _ in phases)):
        state = controller.tick(START + second * SECOND).states[0]
        rate = state.burn_rates[0]
        if state.verdict == "burning" and (previous is None or previous.verdict != "burning"):
            assert rate.exceeded
        if previous is not None and previous.verdict == "burning" and state.verdict == "ok":
            assert rate.short is not None
            assert rate.short <= rate.factor
        assert (state.burn_since_unix_nano is not None) == (state.verdict == "burning")
        previous = state


class FailingState(FileState):
    """A disk that is full for a while."""

    full = True

    def save(self, memories):
        if self.full:
            raise OSError(28, "No space left on device")
        super().save(memories)


def test_a_burn_that_could_not_be_written_is_written_as_soon_as_it_can(tmp_path):
    state = FailingState(tmp_path / "slo.json")
    listed = EventListSource(events((60, 0.0), (60, 0.5)))
    controller = SLOController([slo()], DEMO, Parts(listed, state=state), grace_ns=GRACE)
    run(controller, 50, 100)
    assert controller.states()[0].verdict == "burning"
    state.full = False
    run(controller, 100, 101)  # nothing changes at this tick
    assert state.load()["orders"].verdict == "burning"


def test_a_clock_that_is_set_back_does_not_prolong_a_burn():
    ahead = [(START + 10_000 * SECOND - i * SECOND // RATE, True) for i in range(1, 5 * RATE)]
    listed = EventListSource(events((60, 0.0), (60, 0.5), (120, 0.0)) + ahead)
    controller = SLOController([slo()], DEMO, Parts(listed), grace_ns=0)
    run(controller, 60, 122)
    assert controller.states()[0].verdict == "burning"
    controller.tick(START + 10_000 * SECOND)  # a step ahead, where the short window is below, and back again
    after = run(controller, 124, 135)
    assert after[-1].states[0].verdict == "ok"


class Nonsense(EventListSource):
    """Answers the first SLO's requests with no numbers at all."""

    def counts(self, requests, now_unix_nano):
        answers = list(super().counts(requests, now_unix_nano))
        return [EventCounts("many", None), *answers[1:]]  # type: ignore[arg-type]  # what a source must not do


def test_one_slo_that_cannot_be_counted_leaves_the_others_theirs():
    good, wrong = slo("good"), slo("wrong")
    controller = SLOController([wrong, good], DEMO, Parts(Nonsense(events((60, 0.0)))), grace_ns=0)
    states = {state.name: state for state in controller.tick(START + 60 * SECOND).states}
    assert (states["wrong"].verdict, states["wrong"].reason) == ("no_data", "invalid")
    assert states["good"].verdict == "ok"


def test_a_calendar_budget_is_not_projected_beyond_its_own_end():
    hour = WindowSpec(DurationText(1, "h"), datetime(2023, 11, 14), "UTC")  # noqa: DTZ001  # local by definition
    listed = EventListSource(events((3600, 0.04)))
    watched = SLO("x", "order-api", Decimal("0.95"), SpanSLI("order-api"), hour)
    controller = SLOController([watched], DEMO, Parts(listed), grace_ns=0)
    state = controller.tick(START + 300 * SECOND).states[0]  # 22:18:20: the period ends in 41 min
    assert state.period is not None
    assert state.budget_remaining == pytest.approx(0.2, abs=0.05)
    assert state.exhausted_in_ns == pytest.approx(0.2 * 3600e9 / 0.8, rel=0.1)
    rolled = controller.tick(START + 2400 * SECOND).states[0]  # 22:53:20
    assert rolled.exhausted_in_ns is None


@pytest.mark.parametrize("text", ['{"version": 1, "slos": {"a": {"verdict": "ok", "since_unix_nano": Infinity, "burn_since_unix_nano": null, "active": {}}}}', "[" * 100_000])  # fmt: skip
def test_a_state_file_of_nonsense_is_refused_by_name_not_by_a_crash(tmp_path, text):
    (tmp_path / "slo.json").write_text(text)
    with pytest.raises(InputError, match=r"slo\.json"):
        FileState(tmp_path / "slo.json").load()


def test_the_state_file_is_replaced_never_written_in_place(tmp_path):
    """Whoever reads it, or is killed while it is written, has the whole old one or the whole new one."""
    state = FileState(tmp_path / "slo.json")
    state.save({})
    before = (tmp_path / "slo.json").read_text()
    (tmp_path / "held").hardlink_to(tmp_path / "slo.json")
    controller = SLOController([slo()], DEMO, Parts(EventListSource(events((60, 0.0))), state=state), grace_ns=0)
    run(controller, 59, 60)
    assert (tmp_path / "held").read_text() == before
    assert (tmp_path / "slo.json").read_text() != before


def test_a_burn_of_metrics_is_explained_by_the_spans_of_its_service():
    watched = SLO(
        "x", "order-api", Decimal("0.95"), PrometheusSLI(total="t", bad="b"), WindowSpec(DurationText(1, "h"))
    )
    asked = []

    class Ask:
        def attribute(self, sli, baseline, window):
            asked.append(sli)
            return Attribution((), baseline, window)

    source = EventListSource(events((60, 0.0), (60, 0.5)))
    run(SLOController([watched], DEMO, Parts(source, attributor=Ask()), grace_ns=0), 60, 100)
    assert asked[0] == SpanSLI("order-api")
