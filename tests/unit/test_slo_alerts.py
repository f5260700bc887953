"""OpenSLO's AlertPolicies: conditions of kind burnrate, evaluated, shown, recorded and written as rules."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pasta_otel import semconv
from pasta_otel.model import EventCounts, SpanRef
from pasta_otel.slo.alerts import AlertMemory, AlertState, changes, condition_text, decide
from pasta_otel.slo.budget import Measured
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.report import evaluation_to_json
from pasta_otel.slo.spec.load import check, load
from pasta_otel.slo.spec.model import SLO, AlertRule
from pasta_otel.slo.state import FileState
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.slo import EventListSource

SECOND = 10**9
T0 = 1_700_000_000 * SECOND
MINUTE = 60 * SECOND
RULE = AlertRule("on-call", "fast", "page", "gte", Decimal(2), "10m", 10 * MINUTE, "5m", 5 * MINUTE)
DEMO = load_windows("demo")

SPEC = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: web}
spec:
  service: web
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  indicator: {metadata: {name: i}, spec: {ratioMetric: {rawType: success, raw: {metricSource: {type: spans, spec: {service: web}}}}}}
  objectives: [{target: 0.9}]
  alertPolicies:
    - {alertPolicyRef: on-call}
    - kind: AlertPolicy
      metadata: {name: slow-burn}
      spec:
        alertWhenBreaching: true
        alertWhenResolved: true
        conditions:
          - kind: AlertCondition
            metadata: {name: slow}
            spec: {severity: ticket, condition: {kind: burnrate, op: gt, threshold: 1.5, lookbackWindow: 5m, alertAfter: 0m}}
        notificationTargets: [{targetRef: mail}]
---
apiVersion: openslo/v1
kind: AlertPolicy
metadata: {name: on-call}
spec:
  alertWhenBreaching: true
  conditions: [{conditionRef: fast}]
  notificationTargets: [{targetRef: mail}, {targetRef: pager}]
---
apiVersion: openslo/v1
kind: AlertCondition
metadata: {name: fast}
spec: {severity: page, condition: {kind: burnrate, op: gte, threshold: 2, lookbackWindow: 10m, alertAfter: 5m}}
---
apiVersion: openslo/v1
kind: AlertNotificationTarget
metadata: {name: mail}
spec: {target: email}
---
apiVersion: openslo/v1
kind: AlertNotificationTarget
metadata: {name: pager}
spec: {target: pagerduty}
"""


def watched(tmp_path, text: str = SPEC) -> SLO:
    file = tmp_path / "slo.yaml"
    file.write_text(text)
    (slo,) = load([file]).slos
    return slo


def burn(rate: str, events: float = 1000.0) -> Measured:
    return Measured(Fraction(rate), events=events, bad=events / 2)


def test_references_become_rules_with_their_targets(tmp_path):
    fast, slow = watched(tmp_path).alerts
    assert (fast.key, fast.severity, fast.op, fast.threshold) == ("on-call/fast", "page", "gte", 2)
    assert (fast.lookback_ns, fast.after_ns) == (10 * MINUTE, 5 * MINUTE)
    assert fast.targets == (("mail", "email"), ("pager", "pagerduty"))
    assert condition_text(fast) == "burn rate over 10m >= 2 for 5m"
    assert (slow.after_ns, slow.when_resolved, condition_text(slow)) == (0, True, "burn rate over 5m > 1.5")


@pytest.mark.parametrize(
    ("op", "below", "at", "above"),
    [("gt", False, False, True), ("gte", False, True, True), ("lt", True, False, False), ("lte", True, True, False)],
)
def test_operators_compare_exactly(op, below, at, above):
    tenth = AlertRule("p", "c", "page", op, Decimal("0.1"), "10m", 10 * MINUTE)
    for rate, met in (("0.0999999999999999999", below), ("0.1", at), ("0.1000000000000000001", above)):
        assert (decide(tenth, burn(rate), None, DEMO, T0).phase == "firing") == met


def test_an_alert_is_pending_until_it_has_held_for_alert_after_and_begins_anew_when_it_did_not():
    state = None
    seen = []
    for minute, rate in enumerate((0, 3, 3, 3, 1, 3, 3, 3, 3, 3, 3, 0)):
        state = decide(RULE, burn(str(rate)), state.memory if state else None, DEMO, T0 + minute * MINUTE)
        seen.append(state.phase[0])
    assert "".join(seen) == "ipppipppppfi"


def test_no_data_changes_nothing_unless_the_policy_wants_to_hear_of_it():
    nothing = Measured(None, "stale", "old")
    for phase in ("inactive", "pending", "firing"):
        state = decide(RULE, nothing, AlertMemory(phase, T0), DEMO, T0 + 3600 * SECOND)
        assert (state.phase, state.since_unix_nano, state.reason, state.note) == (phase, T0, "stale", "old")
    told = AlertRule("p", "c", "page", "gt", Decimal(1), "5m", 5 * MINUTE, when_no_data=True)
    state = decide(told, nothing, None, DEMO, T0)
    assert state.phase == "firing"
    assert [change.firing for change in changes("web", [None], [state])] == [True]


def test_low_traffic_fires_no_alert_and_says_so():
    few = EventCounts(1.0, 3.0)
    state = decide(RULE, Measured(Fraction(6), events=few.total, bad=few.bad), None, DEMO, T0)
    assert (state.phase, state.note) == ("inactive", "low traffic: 3 events, at least 10 needed")


@pytest.mark.parametrize(("breaching", "resolved"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_policy_is_told_what_it_asks_for(breaching, resolved):
    rule = AlertRule("p", "c", "page", "gt", Decimal(1), "5m", 1, when_breaching=breaching, when_resolved=resolved)
    fires, ends = AlertState(rule, "firing", T0), AlertState(rule, "inactive", T0)
    assert [c.firing for c in changes("web", [None], [fires])] == [True] * breaching
    assert [c.firing for c in changes("web", [fires.memory], [ends])] == [False] * resolved
    assert changes("web", [fires.memory], [fires]) == []


class Examples:
    def bad_spans(self, sli, window, limit):
        del sli, window
        return [SpanRef("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")][:limit]


def test_the_controller_evaluates_shows_records_and_remembers_them(tmp_path):
    slo = watched(tmp_path)
    # 20 minutes healthy, 15 at a burn rate of 3, then healthy
    source = EventListSource([(T0 + i * SECOND, not (1200 <= i < 2100 and i % 10 < 3)) for i in range(5400)])
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    file = FileState(tmp_path / "slo.json")

    def controller() -> SLOController:
        parts = Parts(
            source,
            examples=Examples(),
            state=file,
            meter=MeterProvider([reader]).get_meter("t") if not spans.get_finished_spans() else None,
            tracer=tracing.get_tracer("t"),
        )
        return SLOController([slo], load_windows(), parts, grace_ns=0)

    running, seen = controller(), {}
    for minute in range(10, 60):
        if minute == 30:
            running = controller()  # a restart in the middle of it
        state = running.tick(T0 + minute * MINUTE).states[0]
        for alert in state.alerts:
            seen.setdefault((alert.rule.condition, alert.phase), minute)
    # 3 x share of the window >= 2: after 6 min 40 s of 10; > 1.5: after 2 min 30 s of 5
    assert seen["fast", "pending"] == 27
    assert seen["fast", "firing"] == 32
    assert seen["slow", "firing"] == 23
    told = [
        (span.attributes[semconv.SLO_ALERT_POLICY], span.attributes[semconv.SLO_TO], len(span.links))
        for span in spans.get_finished_spans()
        if span.name == semconv.SLO_ALERT_SPAN
    ]
    assert told == [("slow-burn", "firing", 1), ("on-call", "firing", 1), ("slow-burn", "resolved", 0)]
    assert file.load()["web"].alerts["on-call/fast"].phase == "inactive"
    document = evaluation_to_json(running.tick(T0 + 34 * MINUTE))
    (fast, slow) = document["slos"][0]["alerts"]
    assert fast["targets"] == [{"name": "mail", "target": "email"}, {"name": "pager", "target": "pagerduty"}]
    assert slow["text"] == "burn rate over 5m > 1.5"
    names = {m.name for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert semconv.SLO_ALERT_FIRING in names


def test_a_state_file_from_before_alerts_is_read(tmp_path):
    (tmp_path / "slo.json").write_text(
        '{"version": 1, "slos": {"a": {"verdict": "ok", "since_unix_nano": 1, "burn_since_unix_nano": null, "active": {}}}}'
    )
    assert FileState(tmp_path / "slo.json").load()["a"].alerts == {}


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("kind: burnrate, op: gte", "kind: latency, op: gte", "spec.condition.kind"),
        ("op: gte", "op: eq", "spec.condition.op"),
        ("threshold: 2,", "", "spec.condition.threshold"),
        ("lookbackWindow: 10m, ", "", "spec.condition.lookbackWindow"),
        ("alertAfter: 5m", "alertAfter: soon", "spec.condition.alertAfter"),
        ("severity: page, ", "", "spec.severity"),
        ("conditionRef: fast", "conditionRef: fat", "spec.conditions[0].conditionRef"),
        ("[{targetRef: mail}, {targetRef: pager}]", "[]", "spec.notificationTargets"),
        ("{alertPolicyRef: on-call}", "{alertPolicyRef: off-call}", "spec.alertPolicies[0].alertPolicyRef"),
    ],
)
def test_a_wrong_alert_is_refused_at_its_field(tmp_path, old, new, field):
    file = tmp_path / "slo.yaml"
    file.write_text(SPEC.replace(old, new))
    assert field in {problem.field for problem in check([file]).errors}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.one_of(st.none(), st.integers(0, 4))), max_size=40))
def test_an_alert_never_fires_without_having_held_for_alert_after(steps):
    state, now, held = None, T0, None
    for minutes, rate in steps:
        now += minutes * MINUTE
        measured = Measured(None, "stale") if rate is None else burn(str(rate))
        before = state.phase if state else "inactive"
        state = decide(RULE, measured, state.memory if state else None, DEMO, now)
        if rate is None:
            assert state.phase == before
            continue
        held = (held if held is not None else now) if rate >= 2 else None
        assert (state.phase == "firing") == (held is not None and now - held >= RULE.after_ns)
