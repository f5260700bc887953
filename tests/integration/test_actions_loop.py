"""The whole loop on simulated time: real controller, engine, flags and breaker around a dependency that goes bad and well.

Only the service and the clock are simulated: twenty orders a second, each calling recommendations through the breaker.
"""

from __future__ import annotations

import heapq
from decimal import Decimal

import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracerProvider

from pasta_otel.model import Attribution, Cause, EdgeKey, Evidence, Samples, SpanSLI, TimeWindow
from pasta_otel.slo.actions.audit import AuditLog
from pasta_otel.slo.actions.engine import ActionEngine, make_flagbook
from pasta_otel.slo.actions.health import ProbeHealth
from pasta_otel.slo.actions.journal import Journal
from pasta_otel.slo.actions.ofrep_client import parse_flags
from pasta_otel.slo.actions.state import Checkpoint
from pasta_otel.slo.breaker import BreakerState, CircuitOpenError
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.flags import FlagAnswer
from pasta_otel.slo.notify import Notifier
from pasta_otel.slo.policy import parse_policy
from pasta_otel.slo.runtime import Runtime
from pasta_otel.slo.spec.model import SLO, DurationText, WindowSpec
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.slo import EventListSource, FixedAttributor

SECOND = 1_000_000_000
START = 1_800_000_000 * SECOND
RATE, LIMIT_NS = 20, 300_000_000
FLAG, EDGE = "degrade.recommendations", "order-api -> recommendations"
WELL_NS, SLOW_NS = 10_000_000, 400_000_000
NO_NORMAL = TimeWindow(START, START + 1)
METER = NoOpMeterProvider().get_meter("test")
POLICY = {
    "mode": "enforce",
    "ttl_seconds": 5,
    "cooldown_seconds": 30,
    "max_hold_seconds": 120,
    "dependencies": {"recommendations": {"critical": False, "flag": FLAG, "breaker": EDGE}},
}


class Clock:
    def __init__(self):
        self.now = START

    def unix_nano(self):
        return self.now

    def monotonic_ns(self):
        return self.now - START


class Edges:
    """The store's answer about the one edge."""

    def __init__(self):
        self.calls = []  # (end, duration, failed)

    def edge_durations(self, window, *, through=None, limit=2000):
        inside = [c for c in self.calls if window.start_unix_nano <= c[0] < window.end_unix_nano]
        errors = sum(failed for _, _, failed in inside)
        return {EdgeKey("order-api", "recommendations"): Samples([d for _, d, _ in inside], len(inside), errors)}


class Simulation:
    def __init__(self, folder, kind, *, bad_every=0, normal=NO_NORMAL, **policy):
        self.clock, self.kind, self.edges, self.bad_every = Clock(), kind, Edges(), bad_every
        policy = parse_policy({**POLICY, **policy})
        self.audit = AuditLog(folder / "audit.jsonl")
        self.engine = ActionEngine(
            policy,
            make_flagbook(policy, self.clock),
            Journal(self.audit, Checkpoint(folder / "actions.json")),
            self.clock,
            notifier=Notifier([], METER),
            meter=METER,
            health=ProbeHealth(self.edges, policy, window_ns=20 * SECOND),
        )
        self.source, self.pending = EventListSource(), []
        evidence = Evidence("spans", "edge_duration_seconds", WELL_NS / 1e9, SLOW_NS / 1e9, 0.9, 100)
        window = TimeWindow(START, START + 1)
        cause = Cause(f"edge_{kind}", "recommendations", EDGE, 0.9, (evidence,))
        slo = SLO(
            "orders",
            "order-api",
            Decimal("0.95"),
            SpanSLI("order-api"),
            WindowSpec(DurationText(1, "h")),
            annotations=(),
        )
        parts = Parts(
            self.source,
            attributor=FixedAttributor(Attribution((cause,), normal, window)),
            responder=self.engine,
            clock=self.clock,
        )
        self.controller = SLOController([slo], load_windows("demo"), parts, grace_ns=SECOND)
        self.runtime = Runtime(
            self,
            poll_seconds=0.5,
            ttl_seconds=10,
            tracer=NoOpTracerProvider().get_tracer("t"),
            meter=METER,
            clock=self.clock,
        )
        self.breaker = self.runtime.breaker(
            "recommendations",
            {"open_seconds": 5, "half_open_max_calls": 3, "slow_call_seconds": 0.2, "open_by_rate": False},
        )

    def fetch(self, etag):
        """Be the transport: the flags as the API would serve them now."""
        return FlagAnswer(parse_flags({"flags": self.engine.evaluate_all()}), "")

    def close(self): ...

    def order(self, began, bad):
        """One order; failing recommendations fail it, slow ones slow it, refused ones do neither."""
        self.clock.now, good = began, True
        try:
            self.breaker.call(self.recommend, bad)
        except CircuitOpenError:
            pass
        except ConnectionError:
            good = False
        heapq.heappush(self.pending, (self.clock.now, good and self.clock.now - began <= LIMIT_NS))

    def recommend(self, bad):
        duration = SLOW_NS if bad and self.kind == "latency" else WELL_NS
        always = self.bad_every and len(self.edges.calls) % self.bad_every == 0
        failed = (bad and self.kind == "errors") or always
        self.clock.now += duration
        self.edges.calls.append((self.clock.now, duration, failed))
        if failed:
            raise ConnectionError

    def second(self, number, bad):
        """Twenty orders, two polls and one tick; returns (verdict, flag as the app sees it, breaker's state)."""
        base = START + number * SECOND
        for index in range(RATE):
            if index % (RATE // 2) == 0:
                self.clock.now = base + index * SECOND // RATE
                self.runtime.flags.poll()
            self.order(base + index * SECOND // RATE, bad)
        self.clock.now = base + SECOND
        while self.pending and self.pending[0][0] <= self.clock.now:
            end, good = heapq.heappop(self.pending)
            self.source.add(end, good=good)
        state = self.controller.tick(self.clock.now).states[0]
        return state.verdict, self.runtime.flags.get(FLAG, False), self.breaker.state


@pytest.mark.parametrize("kind", ["latency", "errors"])
def test_it_degrades_once_holds_while_the_fault_lasts_and_gives_back_once(tmp_path, kind):
    simulation = Simulation(tmp_path, kind)
    fault = range(30, 150)
    history = [simulation.second(number, number in fault) for number in range(220)]
    verdicts = [verdict for verdict, _, _ in history]
    flags = [flag for _, flag, _ in history]

    began = verdicts.index("burning")
    assert 30 <= began <= 40
    recovered = verdicts.index("ok", began)
    assert recovered in fault, "orders recover while the fault still runs"
    assert set(verdicts[recovered:]) == {"ok"}, "a probe now and then burns no budget worth an alert"

    on = flags.index(True)
    off = flags.index(False, on)
    assert began <= on <= began + 2
    assert 150 <= off <= 200
    assert set(flags[on:off]) == {True}
    assert set(flags[off:]) == {False}
    assert [state for _, _, state in history][off:] == [BreakerState.CLOSED] * (220 - off)

    acted = [(line["action"], line["outcome"]) for line in simulation.engine.recent(100)]
    assert acted == [
        ("breaker.open", "applied"),
        ("flag.set", "applied"),
        ("breaker.open", "reverted"),
        ("flag.set", "reverted"),
    ]
    probes = [end for end, _, _ in simulation.edges.calls if on + 2 <= (end - START) // SECOND < 150]
    assert 0 < len(probes) <= 3 * (150 - on) / 5 + 3, "no more than three calls every five seconds reach the dependency"
    simulation.audit.close()


def test_a_dependency_that_always_failed_now_and_then_is_given_back_when_it_does_so_again(tmp_path):
    normal = TimeWindow(START, START + 25 * SECOND)
    simulation = Simulation(tmp_path, "latency", bad_every=100, normal=normal, max_hold_seconds=600)
    history = [simulation.second(number, number in range(30, 60)) for number in range(140)]
    flags = [flag for _, flag, _ in history]
    on = flags.index(True)
    off = flags.index(False, on)
    assert 60 <= off <= 90
    assert set(flags[off:]) == {False}, "it does not flap"
    assert history[-1][0] == "ok"
    assert history[-1][2] is BreakerState.CLOSED
    simulation.audit.close()


def test_a_dependency_that_stays_bad_is_held_for_the_longest_hold_and_its_breaker_goes_on_guarding(tmp_path):
    simulation = Simulation(tmp_path, "errors", max_hold_seconds=40, cooldown_seconds=30)
    history = [simulation.second(number, number >= 30) for number in range(240)]
    verdicts, flags = [verdict for verdict, _, _ in history], [flag for _, flag, _ in history]
    on = flags.index(True)
    ended = len(verdicts) - verdicts[::-1].index("burning") if "burning" in verdicts else 0
    off = flags.index(False, on)
    assert off <= verdicts.index("ok", on) + 42
    assert ended <= off, "no burn after it was given back"
    assert set(flags[off:]) == {False}, "it does not flap"
    assert all(state is not BreakerState.CLOSED for _, _, state in history[on + 1 :])
    simulation.audit.close()
