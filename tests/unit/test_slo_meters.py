"""Budgets by slices and over several indicators."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.errors import InputError
from pasta_otel.model import Attribution, EventCounts, SpanSLI, TimeWindow
from pasta_otel.slo.budget import Measured, measure
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.meters import BACKFILL_SLICES, SliceMeter, add_up, evaluated, meter_of, meters_of, union_of_ratios
from pasta_otel.slo.spec.load import check
from pasta_otel.slo.spec.model import SLO, DurationText, WindowSpec
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.slo import EventListSource

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
MINUTE = 60 * 10**9
T0 = 28_000_000 * MINUTE


def part(name: str, method: str, weight: str = "1", objective: str = "0.5", composite: str = "both") -> SLO:
    return SLO(
        f"both/{name}",
        "web",
        Decimal(objective),
        SpanSLI(name),
        WindowSpec(DurationText(10, "m")),
        method=method,  # type: ignore[arg-type]
        slice_target=Decimal("0.9") if method == "Timeslices" else None,
        slice_window=DurationText(1, "m"),
        weight=Decimal(weight),
        composite_of=composite,
    )


def sliced(parts: list[SLO], counts: dict[str, list[EventCounts]]) -> Measured:
    """Return what ten minutes of given slices say."""
    meter = SliceMeter(parts)
    windows = [TimeWindow(T0, T0 + 10 * MINUTE)]
    requests = meter.requests(windows)
    answers = [counts[r.sli.service][(r.window.start_unix_nano - T0) // MINUTE] for r in requests]
    return meter.measure(windows, answers)[0]


def even(sli: float) -> list[EventCounts]:
    return [EventCounts(sli * 1000, 1000.0)] * 10


def share_good(measured: Measured, objective: str = "0.5") -> float:
    assert measured.burn is not None
    return float(1 - measured.burn * Fraction(1 - Decimal(objective)))


@pytest.mark.case("S13")
def test_composite_budgets_add_up_as_each_method_says():
    given_, expected = (json.loads((CASES / "S13" / f"{name}.json").read_text()) for name in ("composite", "expected"))
    for key, want in (("ratio_timeslices", "ratio"), ("ratio_timeslices_weighted", "ratio_weighted")):
        parts = [part(str(i), "RatioTimeslices", str(entry["weight"])) for i, entry in enumerate(given_[key])]
        counts = {str(i): even(entry["sli"]) for i, entry in enumerate(given_[key])}
        assert share_good(sliced(parts, counts)) == pytest.approx(expected[want])
    minutes = given_["timeslices_bad_minutes"]
    counts = {
        name: [EventCounts(0.0 if i + 1 in minutes[name] else 10.0, 10.0) for i in range(minutes["minutes"])]
        for name in ("a", "b")
    }
    union = sliced([part("a", "Timeslices"), part("b", "Timeslices")], counts)
    assert share_good(union) == pytest.approx(expected["timeslices"])
    burns = [(Measured(Fraction(entry["burn"])), Decimal(entry["weight"])) for entry in given_["occurrences_burn"]]
    total = add_up(burns)
    assert total.burn == expected["occurrences_burn"]


@pytest.mark.case("S13")
def test_mixed_methods_and_slices_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="budgetingMethod"):
        meter_of([part("a", "Timeslices"), part("b", "Occurrences")])
    longer = part("b", "Timeslices")
    with pytest.raises(InputError, match="one length"):
        meter_of(
            [
                part("a", "Timeslices"),
                SLO(**{f: getattr(longer, f) for f in SLO.__slots__} | {"slice_window": DurationText(5, "m")}),
            ]
        )


COMPOSITE = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: both}
spec:
  service: web
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  objectives:
    - {displayName: a, target: 0.9, compositeWeight: 1, indicator: {metadata: {name: a}, spec: {ratioMetric: {rawType: success, raw: {metricSource: {type: spans, spec: {service: a}}}}}}}
    - {displayName: b, target: 0.9, compositeWeight: 3, indicator: {metadata: {name: b}, spec: {ratioMetric: {rawType: success, raw: {metricSource: {type: spans, spec: {service: b}}}}}}}
"""


@pytest.mark.case("S13")
@pytest.mark.parametrize(
    ("old", "new", "field", "kind"),
    [
        ("compositeWeight: 3", "compositeWeight: 0", "spec.objectives[1].compositeWeight", "range"),
        ("compositeWeight: 3", "compositeWeight: -1", "spec.objectives[1].compositeWeight", "range"),
        ("  objectives:", "  indicatorRef: x\n  objectives:", "spec.objectives[0]", "exclusive"),
    ],
)
def test_a_wrong_composite_is_refused_at_its_field(tmp_path, old, new, field, kind):
    file = tmp_path / "slo.yaml"
    file.write_text(COMPOSITE.replace(old, new))
    assert (field, kind) in {(problem.field, problem.kind) for problem in check([file]).errors}


def test_a_composite_is_evaluated_under_its_own_name(tmp_path):
    file = tmp_path / "slo.yaml"
    file.write_text(COMPOSITE)
    slos = check([file]).slos
    assert [slo.name for slo in slos] == ["both/a", "both/b"]
    ((whole, parts),) = evaluated(slos)
    assert (whole.name, len(parts)) == ("both", 2)
    source = EventListSource([(T0 + i * MINUTE // 100, i % 20 != 0) for i in range(1000)])
    state = SLOController(slos, load_windows("demo"), Parts(source), grace_ns=0).tick(T0 + 10 * MINUTE).states[0]
    assert state.name == "both"
    assert state.budget_remaining == pytest.approx(1 - (0.05 / 0.1) * (1 + 3))


class ByService:
    """Service a is healthy; of b every second event is bad in the last minute."""

    def counts(self, requests, now_unix_nano):
        del now_unix_nano
        return [self._one(r.sli.service, r.window) for r in requests]

    def _one(self, service, window):
        total = (window.end_unix_nano - window.start_unix_nano) // 10**9
        late = max(0, window.end_unix_nano - max(window.start_unix_nano, T0 + 9 * MINUTE)) // 10**9
        return EventCounts(float(total - (late // 2 if service == "b" else 0)), float(total))


def test_the_part_of_a_composite_that_burns_is_the_one_explained(tmp_path):
    file = tmp_path / "slo.yaml"
    file.write_text(COMPOSITE)

    class Ask:
        asked = ()

        def attribute(self, sli, baseline, window):
            self.asked = (*self.asked, sli.service)
            return Attribution((), baseline, window)

    ask = Ask()
    controller = SLOController(check([file]).slos, load_windows("demo"), Parts(ByService(), attributor=ask), grace_ns=0)
    assert controller.tick(T0 + 10 * MINUTE).states[0].verdict == "burning"
    assert ask.asked == ("b",)


def test_two_weeks_of_minutes_at_95_percent_allow_1008_bad_ones():
    """OpenSLO's own example: 20160 slices, 16 h 48 min."""
    slo = SLO(
        "x",
        "web",
        Decimal("0.95"),
        SpanSLI("web"),
        WindowSpec(DurationText(2, "w")),
        method="Timeslices",
        slice_target=Decimal("0.9"),
        slice_window=DurationText(1, "m"),
    )
    meter, window = SliceMeter([slo]), [TimeWindow(T0, T0 + 20160 * MINUTE)]
    bad = EventCounts(0.0, 1.0)
    while requests := meter.requests(window):
        assert len(requests) <= BACKFILL_SLICES
        index = [(r.window.start_unix_nano - T0) // MINUTE for r in requests]
        (measured,) = meter.measure(window, [bad if i < 1008 else EventCounts(1.0, 1.0) for i in index])
    assert measured.coverage == 1.0
    assert measured.burn == 1
    assert measured.bad == 16 * 60 + 48


def test_idle_slices_spend_nothing_and_a_wholly_idle_window_says_nothing():
    idle = EventCounts(0.0, 0.0)
    half = sliced([part("a", "Timeslices", composite="")], {"a": [idle] * 9 + [EventCounts(0.0, 5.0)]})
    assert share_good(half) == pytest.approx(0.9)
    none = sliced([part("a", "Timeslices", composite="")], {"a": [idle] * 10})
    assert (none.burn, none.no_data) == (None, "no_traffic")


def test_a_slice_whose_source_failed_is_asked_for_again():
    meter, window = SliceMeter([part("a", "Timeslices", composite="")]), [TimeWindow(T0, T0 + 3 * MINUTE)]
    meter.requests(window)
    down = EventCounts(0.0, 0.0, no_data="stale", detail="old")
    (measured,) = meter.measure(window, [down, EventCounts(1.0, 1.0), EventCounts(1.0, 1.0)])
    assert measured.no_data == "stale"
    (again,) = meter.requests(window)
    assert again.window.start_unix_nano == T0 + 2 * MINUTE
    (measured,) = meter.measure(window, [EventCounts(1.0, 1.0)])
    assert (measured.burn, measured.coverage) == (0, 1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 5)), min_size=1, max_size=5))
def test_a_ratio_composite_is_never_worse_than_wholly_bad(weighted):
    assert 0 <= union_of_ratios(weighted) <= 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 100)), min_size=1, max_size=4))
def test_a_composite_of_equal_weights_burns_as_the_sum_of_its_parts(pairs):
    parts = [measure(EventCounts(float(min(g, t)), float(t)), Decimal("0.9")) for g, t in pairs]
    total = add_up([(item, Decimal(1)) for item in parts])
    assert total.burn == sum(item.burn or 0 for item in parts)


def slices_of(length: str, period: WindowSpec) -> SLO:
    return SLO(
        "x", "web", Decimal("0.9"), SpanSLI("web"), period,
        method="RatioTimeslices", slice_window=DurationText(int(length[:-1]), length[-1]),
    )  # fmt: skip


@pytest.mark.parametrize("length", ["5m", "10m", "1h"])
def test_slices_longer_than_a_burn_rate_window_still_give_a_verdict(length):
    """The 5 min window rarely holds a whole slice of 5 min, and never one of an hour: the last finished one stands."""
    slo = slices_of(length, WindowSpec(DurationText(7, "d")))
    hour = 60 * MINUTE
    source = EventListSource([(T0 + i * MINUTE, i < 9600) for i in range(10080)])
    for minutes, verdict in ((9500, "ok"), (10060, "burning")):
        controller = SLOController([slo], load_windows(), Parts(source), grace_ns=0)
        state = controller.tick(T0 + minutes * MINUTE + hour // 7).states[0]
        assert (state.verdict, state.detail) == (verdict, "")


def test_a_calendar_period_counts_no_slice_that_began_before_it_and_starts_untouched():
    month = WindowSpec(DurationText(1, "M"), datetime(2026, 1, 1), "UTC")  # noqa: DTZ001  # local by definition
    start = int(datetime(2026, 3, 1, tzinfo=UTC).timestamp()) * 10**9
    source = EventListSource([(start + i * MINUTE, False) for i in range(-2000, 0)])
    controller = SLOController([slices_of("1h", month)], load_windows(), Parts(source), grace_ns=0)
    assert controller.tick(start + 30 * MINUTE).states[0].budget_remaining == 1.0
    assert controller.tick(start + 90 * MINUTE).states[0].budget_remaining == 1.0


def test_many_sliced_slos_share_what_one_tick_asks_for():
    window = [TimeWindow(T0 - 20160 * MINUTE, T0)]
    for count, each in ((1, BACKFILL_SLICES), (10, BACKFILL_SLICES // 10), (1000, 60)):
        meters = meters_of([(slices_of("1m", WindowSpec(DurationText(2, "w"))),)] * count)
        assert [len(meter.requests(window)) for meter in meters] == [each] * count


@pytest.mark.parametrize(("good", "bad_slices"), [(89, 1), (90, 0), (91, 0)])
def test_a_slice_is_bad_below_its_target_and_good_exactly_at_it(good, bad_slices):
    counts = [EventCounts(float(good), 100.0)] + [EventCounts(100.0, 100.0)] * 9
    assert sliced([part("a", "Timeslices", composite="")], {"a": counts}).bad == bad_slices


def test_older_slices_without_data_are_asked_for_now_and_then_not_at_every_tick():
    meter, window = SliceMeter([part("a", "Timeslices", composite="")]), [TimeWindow(T0, T0 + 10 * MINUTE)]
    gone, fine = EventCounts(0.0, 0.0, no_data="absent"), EventCounts(1.0, 1.0)
    asked = []
    for _ in range(62):
        requests = meter.requests(window)
        asked.append(len(requests))
        meter.measure(window, [gone if r.window.end_unix_nano < T0 + 5 * MINUTE else fine for r in requests])
    assert asked == [10, *[0] * 59, 4, 0]
