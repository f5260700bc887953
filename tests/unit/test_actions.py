"""The action engine: what it does, holds, gives back and refuses, tick by tick."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from opentelemetry.metrics import NoOpMeterProvider

from pasta_otel.errors import InputError
from pasta_otel.model import Attribution, Cause, EdgeKey, Evidence, Samples, TimeWindow
from pasta_otel.slo.actions.audit import AuditLog
from pasta_otel.slo.actions.engine import ActionEngine, make_flagbook
from pasta_otel.slo.actions.health import ProbeHealth
from pasta_otel.slo.actions.journal import Journal
from pasta_otel.slo.actions.state import Checkpoint, Degradation
from pasta_otel.slo.evaluation import Evaluation, SLOState
from pasta_otel.slo.notify import Notifier
from pasta_otel.slo.policy import parse_policy

SECOND = 1_000_000_000
START = 1_800_000_000 * SECOND
FLAG, EDGE = "degrade.recommendations", "order-api -> recommendations"
METER = NoOpMeterProvider().get_meter("test")
POLICY = {
    "mode": "enforce",
    "ttl_seconds": 10,
    "cooldown_seconds": 30,
    "max_hold_seconds": 60,
    "dependencies": {
        "recommendations": {"critical": False, "flag": FLAG, "breaker": EDGE},
        "ads": {"critical": False, "flag": "degrade.ads"},
        "payment": {"critical": True, "flag": "degrade.payment"},
        "model": {},
    },
}
ACT = [("breaker.open", EDGE, "applied"), ("flag.set", FLAG, "applied")]
REVERT = [("breaker.open", EDGE, "reverted"), ("flag.set", FLAG, "reverted")]


class ManualClock:
    def __init__(self):
        self.now = START

    def unix_nano(self):
        return self.now

    def monotonic_ns(self):
        return self.now - START


class Evidenced:
    """Health as the test says."""

    verdict = None

    def healthy(self, degradation, now_unix_nano):
        assert degradation.flag == FLAG
        return self.verdict


class Inbox:
    """A channel that keeps what it was sent."""

    def __init__(self, name="inbox"):
        self.name, self.messages = name, []

    def send(self, message):
        self.messages.append(message)


class World:
    """One controller: files in a folder, a clock, a channel; ``restart`` is what ``kill -9`` and a new start leave."""

    def __init__(self, folder, **policy):
        self.folder, self.document = folder, {**POLICY, **policy}
        self.clock, self.health, self.inbox, self.engine, self.audit = ManualClock(), Evidenced(), Inbox(), None, None
        self.published = []
        self.start()

    def start(self):
        self.policy = parse_policy(self.document)
        self.audit = AuditLog(self.folder / "audit.jsonl")
        journal = Journal(self.audit, Checkpoint(self.folder / "actions.json"))
        self.notifier = Notifier([self.inbox], METER, retry_seconds=())
        self.flags = make_flagbook(self.policy, self.clock)
        self.engine = ActionEngine(
            self.policy,
            self.flags,
            journal,
            self.clock,
            notifier=self.notifier,
            meter=METER,
            health=self.health,
            on_flags=self.published.append,
        )

    def restart(self, **policy):
        self.audit.close()  # the kernel does this for a killed process
        self.document |= policy
        self.start()

    def tick(self, *states, seconds=1):
        self.clock.now += seconds * SECOND
        records = self.engine.respond(Evaluation(self.clock.now, states))
        return [(record.action, record.target, record.outcome) for record in records if record.action != "notify"]

    def notified(self, *states):
        self.clock.now += SECOND
        return [r.cause for r in self.engine.respond(Evaluation(self.clock.now, states)) if r.action == "notify"]

    @property
    def on(self):
        return self.engine.evaluate(FLAG)["value"]

    def lines(self):
        return [json.loads(line) for line in (self.folder / "audit.jsonl").read_text().splitlines()]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.audit.close()


def cause(kind="edge_latency", service="recommendations", target=EDGE, before=0.01, after=0.4):
    evidence = Evidence("spans", "edge_duration_seconds", before, after, 0.9, 50)
    return Cause(kind, service, target, 0.9, (evidence,))


def slo(verdict="burning", *causes, name="latency", burn=START):
    window = TimeWindow(START - SECOND, START)
    attribution = Attribution(causes, window, window) if causes else None
    return SLOState(
        name=name,
        service="order-api",
        objective=0.99,
        verdict=verdict,
        since_unix_nano=START,
        burn_since_unix_nano=burn if verdict != "ok" else None,
        attribution=attribution,
        annotations=(("owner", "team-orders"),),
    )


BURNING, OK, NO_DATA = slo("burning", cause()), slo("ok"), slo("no_data")


def test_a_slow_non_critical_dependency_opens_its_breaker_and_turns_its_flag_on_once(world):
    assert world.tick(BURNING) == ACT
    assert world.on is True
    assert world.tick(BURNING) == []
    entry = world.engine.evaluate(FLAG)
    assert entry["metadata"]["expires_at"] == "2027-01-15T08:00:11.000000Z"
    assert [entry["value"] for entry in world.published[-1] if entry["key"] == FLAG] == [True]


@pytest.mark.parametrize(
    "found",
    [
        cause("edge_errors"),
        cause("self_time", target="recommendations"),
        cause("error_ratio", target="recommendations"),
    ],
)
def test_errors_and_the_services_own_time_lead_to_the_same_action(world, found):
    assert world.tick(slo("burning", found)) == ACT


@pytest.mark.parametrize(
    "found",
    [
        cause("edge_latency", "payment", "order-api -> payment"),
        cause("self_time", "payment", "payment"),
        cause("edge_latency", "model", "order-api -> model"),
        cause("cpu_throttled", "recommendations", "recommendations"),
        cause("module_time", "model", "encoder.layers.3"),
        cause("edge_latency", "recommendations", "other -> recommendations"),
        cause("edge_latency", "unknown", "order-api -> unknown"),
    ],
)
def test_a_critical_or_unknown_target_is_notified_of_and_nothing_else(world, found):
    assert world.notified(slo("burning", found)) == [f"{found.kind} {found.target}"]
    assert world.tick(slo("burning", found)) == []
    assert all(entry["value"] is False for entry in world.engine.evaluate_all() if entry["key"] != "pasta.capture")


def test_without_a_cause_there_is_one_notification_and_no_action(world):
    assert world.notified(slo("burning")) == [""]
    assert world.notified(slo("burning")) == []
    assert world.tick(slo("burning")) == []


def test_one_notification_per_burn_and_per_new_cause_not_per_tick(world):
    other = cause("self_time", "model", "model")
    assert world.notified(BURNING) == ["edge_latency " + EDGE]
    assert world.notified(BURNING) == []
    assert world.notified(NO_DATA) == []
    assert world.notified(slo("burning", other)) == ["self_time model"]
    assert world.notified(BURNING) == []  # it was named already
    assert world.notified(OK) == []
    assert world.notified(slo("burning", cause(), burn=START + 9)) == ["edge_latency " + EDGE]


def test_the_flag_is_held_while_the_slo_burns_far_beyond_its_ttl(world):
    world.tick(BURNING)
    for _ in range(200):
        assert world.tick(BURNING) == []
        assert world.on is True
    assert len(world.lines()) == 3  # breaker, flag, one notification: no line per tick


def test_recovery_alone_does_not_give_it_back_evidence_does(world):
    world.tick(BURNING)
    world.health.verdict = False
    for _ in range(59):
        assert world.tick(OK) == []
    assert world.on is True
    world.health.verdict = True
    assert world.tick(OK) == REVERT
    assert world.on is False


def test_without_evidence_it_is_held_for_the_longest_hold_then_given_back(world):
    world.tick(BURNING)
    for _ in range(59):
        assert world.tick(OK) == []
    assert world.tick(OK) == REVERT
    assert world.lines()[-1]["reason"] == "no evidence for longer than max_hold_seconds"


def test_a_dependency_that_never_is_as_it_was_is_held_for_the_longest_hold_after_the_burn(world):
    world.tick(BURNING)
    world.tick(BURNING, seconds=100)
    world.health.verdict = False
    for _ in range(59):
        assert world.tick(OK) == []
    assert world.tick(OK) == REVERT
    assert world.lines()[-1]["reason"] == "the dependency is not as it was for longer than max_hold_seconds"
    for _ in range(30):
        assert world.tick(OK) == []


def test_no_data_neither_acts_nor_recovers(world):
    assert world.tick(NO_DATA) == []
    assert world.tick(slo("no_data", cause())) == []
    world.tick(BURNING)
    world.health.verdict = True
    for _ in range(50):
        assert world.tick(NO_DATA) == []
    assert world.on is True


def test_it_does_not_flap_a_new_burn_waits_for_the_cooldown(world):
    world.tick(BURNING)
    world.health.verdict = True
    assert world.tick(OK) == REVERT
    again = slo("burning", cause(), burn=START + 99)
    refused = [("breaker.open", EDGE, "refused"), ("flag.set", FLAG, "refused")]
    assert world.tick(again) == refused
    for _ in range(28):
        assert world.tick(again) == []
    assert world.tick(again) == ACT


def test_a_cause_must_stay_first_for_the_dwell(tmp_path):
    world = World(tmp_path, dwell_seconds=5)
    assert [world.tick(BURNING) for _ in range(5)] == [[]] * 5
    assert world.tick(BURNING) == ACT
    world.audit.close()


def test_a_cause_that_is_not_first_in_between_starts_its_dwell_again(tmp_path):
    world = World(tmp_path, dwell_seconds=3)
    other = slo("burning", cause("self_time", "model", "model"))
    assert [world.tick(state) for state in (BURNING, BURNING, BURNING, other, BURNING, BURNING, BURNING)] == [[]] * 7
    assert world.tick(BURNING) == ACT
    world.audit.close()


def test_no_more_degradations_than_the_blast_radius_allows(world):
    ads = cause("edge_latency", "ads", "order-api -> ads")
    world.tick(BURNING)
    assert world.tick(BURNING, slo("burning", ads, name="errors")) == [
        ("breaker.open", "order-api -> ads", "refused"),
        ("flag.set", "degrade.ads", "refused"),
    ]
    assert world.lines()[-2]["reason"] == "1 degradations hold, 1 are allowed"
    assert world.tick(BURNING, slo("burning", ads, name="errors")) == []


def test_a_wider_blast_radius_lets_both_be_degraded(tmp_path):
    world = World(tmp_path, blast_radius={"max_flags": 2, "max_share": 1.0})
    world.tick(BURNING)
    ads = slo("burning", cause("edge_latency", "ads", "order-api -> ads"), name="errors")
    assert [outcome for _, _, outcome in world.tick(BURNING, ads)] == ["applied", "applied"]
    world.audit.close()


def test_two_slos_that_burn_for_one_cause_act_once_and_both_must_recover(world):
    other = slo("burning", cause(), name="errors")
    assert world.tick(BURNING, other) == ACT
    world.health.verdict = True
    assert world.tick(OK, other) == []
    assert world.tick(OK, slo("ok", name="errors")) == REVERT


def test_a_dry_run_says_what_it_would_do_once_and_does_nothing(tmp_path):
    world = World(tmp_path, mode="dry_run")
    assert world.tick(BURNING) == [("breaker.open", EDGE, "dry_run"), ("flag.set", FLAG, "dry_run")]
    assert world.tick(BURNING) == []
    assert world.on is False
    world.audit.close()


def test_off_notifies_and_does_nothing_else(tmp_path):
    world = World(tmp_path, mode="off")
    assert world.notified(BURNING) == ["edge_latency " + EDGE]
    assert world.tick(BURNING) == []
    assert world.on is False
    world.audit.close()


def test_a_persons_pin_wins_both_ways_and_is_audited(world):
    world.engine.pin(FLAG, False, "alice", "sale today")
    assert world.tick(BURNING) == [("breaker.open", EDGE, "refused"), ("flag.set", FLAG, "refused")]
    assert world.on is False
    world.engine.unpin(FLAG, "alice")
    assert world.tick(BURNING) == ACT
    world.engine.pin(FLAG, False, "alice", "sale today")
    assert world.on is False
    assert world.engine.evaluate(FLAG)["metadata"]["pinned"] is True
    world.engine.unpin(FLAG, "alice")
    assert world.on is True
    assert [(line["outcome"], line["reason"]) for line in world.lines() if line["action"] == "flag.pin"] == [
        ("applied", "by alice: sale today"),
        ("reverted", "by alice"),
        ("applied", "by alice: sale today"),
        ("reverted", "by alice"),
    ]


def test_a_pin_of_the_policy_file_cannot_be_changed_by_a_request(tmp_path):
    world = World(tmp_path, pins={FLAG: False})
    assert world.tick(BURNING)[0][2] == "refused"
    for change in (lambda: world.engine.pin(FLAG, True, "bob", ""), lambda: world.engine.unpin(FLAG, "bob")):
        with pytest.raises(InputError, match="pinned by the policy file"):
            change()
    world.audit.close()


@pytest.mark.parametrize(("key", "value", "kind"), [("degrade.nothing", True, "not_found"), (FLAG, "on", "invalid")])
def test_a_pin_that_cannot_be_is_refused(world, key, value, kind):
    with pytest.raises(InputError) as refusal:
        world.engine.pin(key, value, "bob", "")
    assert refusal.value.kind == kind
    assert world.lines() == []


def test_the_capture_flag_is_an_object(world):
    wanted = {"tier": 3, "targets": [{"service": "model", "operation": "POST /risk"}], "until": "2027-01-15T08:05:00Z"}
    assert world.engine.evaluate("pasta.capture")["value"]["tier"] == 2
    assert world.engine.pin("pasta.capture", wanted, "alice", "look closer")["value"] == wanted


@pytest.fixture
def closer(tmp_path):
    made = World(tmp_path, capture={"tier": 3, "seconds": 30})
    yield made
    made.audit.close()


def test_a_burn_raises_capture_for_a_bounded_time_once(closer):
    model = slo("burning", cause("module_time", "model", "encoder.layers.3"))
    assert closer.tick(model) == [("capture.raise", "pasta.capture", "applied")]
    assert closer.engine.evaluate("pasta.capture")["value"] == {
        "tier": 3,
        "targets": [{"service": "model", "operation": "*"}, {"service": "order-api", "operation": "*"}],
        "until": "2027-01-15T08:00:31.000000Z",
    }
    closer.restart()
    assert closer.engine.evaluate("pasta.capture")["value"]["tier"] == 3
    for _ in range(29):
        assert closer.tick(model) == []
    assert closer.tick(model) == [("capture.raise", "pasta.capture", "reverted")]
    assert closer.tick(model) == []
    assert closer.engine.evaluate("pasta.capture")["value"]["tier"] == 2


@pytest.mark.parametrize("tier", [1, 2])
def test_a_policy_never_lowers_capture_while_an_slo_burns(tmp_path, tier):
    calm = World(tmp_path, capture={"tier": tier, "seconds": 30})
    assert calm.tick(slo("burning")) == []
    assert calm.engine.evaluate("pasta.capture")["value"]["tier"] == 2
    calm.audit.close()


def test_capture_goes_back_when_the_slo_is_well_but_not_on_no_data(closer):
    closer.tick(slo("burning"))
    assert closer.tick(NO_DATA) == []
    assert closer.tick(OK) == [("capture.raise", "pasta.capture", "reverted")]
    assert closer.engine.evaluate("pasta.capture")["value"]["tier"] == 2


def test_without_a_tier_in_the_policy_capture_stays_as_it_is(world):
    assert world.tick(slo("burning", cause("module_time", "model", "encoder.layers.3"))) == []


def test_when_the_controller_stops_ticking_the_flag_reverts_by_its_ttl(world):
    world.tick(BURNING)
    world.clock.now += 10 * SECOND
    assert world.on is False
    assert world.tick(OK) == REVERT
    assert world.lines()[-1]["reason"] == "not refreshed before its TTL"


def test_a_restart_neither_repeats_an_action_nor_forgets_one(world):
    assert world.tick(BURNING) == ACT
    world.engine.pin("degrade.ads", True, "alice", "")
    world.restart()
    assert world.on is True
    assert world.engine.evaluate("degrade.ads")["value"] is True
    assert world.tick(BURNING) == []
    assert world.notified(BURNING) == []
    world.health.verdict = True
    assert world.tick(OK) == REVERT
    world.restart()
    assert world.on is False
    assert world.tick(slo("burning", cause(), burn=START + 5))[0][2] == "refused"  # the cooldown is remembered


@pytest.mark.parametrize("damage", ["missing", "old", "garbage"])
def test_the_audit_alone_is_enough_to_remember(world, damage):
    checkpoint = world.folder / "actions.json"
    before = checkpoint.read_bytes() if checkpoint.exists() else b'{"version": 1}'
    world.tick(BURNING)
    if damage == "missing":
        checkpoint.unlink()
    else:
        checkpoint.write_bytes(before if damage == "old" else b"\x00{")
    world.restart()
    assert world.on is True
    assert world.tick(BURNING) == []
    assert world.notified(BURNING) == []


def test_a_rotated_audit_goes_on_counting_so_that_later_lines_count(world):
    world.tick(BURNING)
    (world.folder / "audit.jsonl").rename(world.folder / "audit.jsonl.1")
    checkpoint = world.folder / "actions.json"
    before = checkpoint.read_bytes()
    world.restart()
    assert world.on is True
    world.health.verdict = True
    assert world.tick(OK) == REVERT
    assert [line["seq"] for line in world.lines()] == [4, 5]
    checkpoint.write_bytes(before)  # as if killed between the audit and the checkpoint
    world.restart()
    assert world.on is False


def test_a_restart_after_the_ttl_starts_from_off_and_says_so(world):
    world.tick(BURNING)
    world.clock.now += 3600 * SECOND
    world.restart()
    assert world.on is False
    assert world.tick(BURNING) == REVERT + ACT


def test_a_policy_that_no_longer_allows_it_gives_it_back_at_once(world):
    world.tick(BURNING)
    world.restart(mode="dry_run")
    assert world.tick(BURNING)[:2] == REVERT


def test_what_cannot_be_audited_is_not_done(world, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    assert world.tick(BURNING) == [("breaker.open", EDGE, "failed"), ("flag.set", FLAG, "failed")]
    assert world.on is False


def test_notifications_not_delivered_before_a_crash_are_sent_after_it(world):
    world.tick(BURNING)  # the notifier was not started: nothing is delivered
    world.restart()
    world.notifier.start()
    world.notifier.stop()
    (message,) = world.inbox.messages
    assert message.summary == f"SLO latency of order-api burns; cause: edge_latency {EDGE}; {FLAG} is on"
    world.restart()
    world.notifier.start()
    world.notifier.stop()
    assert len(world.inbox.messages) == 1


def test_a_notification_that_cannot_be_delivered_is_on_record(world, monkeypatch):
    monkeypatch.setattr(world.inbox, "send", lambda _: (_ for _ in ()).throw(ValueError("status 404")))
    world.tick(BURNING)
    world.notifier.start()
    world.notifier.stop()
    assert (world.lines()[-1]["action"], world.lines()[-1]["outcome"]) == ("notify", "failed")
    assert world.engine.recent(1)[0]["reason"] == "status 404"
    assert "effect" not in world.engine.recent(1)[0]


KILLED = """
import sys, os, signal
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_actions import World, BURNING
world = World(Path(sys.argv[1]))
world.tick(BURNING)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_state_survives_kill_9(tmp_path):
    code = [sys.executable, "-c", KILLED, str(tmp_path), str(os.path.dirname(__file__))]  # noqa: PTH120
    assert subprocess.run(code, check=False).returncode == -signal.SIGKILL
    world = World(tmp_path)
    world.clock.now += SECOND
    assert world.on is True
    assert world.tick(BURNING) == []
    world.audit.close()


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("nth", range(1, 19))
def test_wherever_it_is_killed_each_action_is_on_record_once(world, monkeypatch, nth):
    calls = iter(range(1, 10_000))

    def mortal(function):
        def wrapper(*args, **kwargs):
            if next(calls) == nth:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    def live(*states):
        world.health.verdict = states == (OK,)
        try:
            world.tick(*states)
        except Killed:
            world.restart()
            world.tick(*states, seconds=0)

    with monkeypatch.context() as patch:
        for module, name in (
            (os, "open"),
            (os, "write"),
            (os, "fsync"),
            (os, "close"),
            (type(world.folder), "replace"),
        ):
            patch.setattr(module, name, mortal(getattr(module, name)))
        for state in (BURNING, BURNING, OK, OK):
            live(state)
    done = [(line["action"], line["outcome"]) for line in world.lines()]
    assert sorted(done) == sorted([(action, outcome) for action, _, outcome in ACT + REVERT] + [("notify", "applied")])
    world.restart()
    assert world.on is False
    assert next(calls) > nth  # the blow did fall


class Edges:
    """A store that knows one edge: how it was in the normal window, and how it is since."""

    def __init__(self, values=(), errors=0, normal=None):
        self.values, self.errors, self.windows = values, errors, []
        self.normal = normal or Samples((), 0)

    def edge_durations(self, window, *, through=None, limit=2000):
        self.windows.append(window)
        since = Samples(self.values, len(self.values), self.errors)
        return {EdgeKey("order-api", "recommendations"): self.normal if window.end_unix_nano <= START else since}


@pytest.mark.parametrize(
    ("values", "errors", "expected"),
    [
        ((10_000_000,) * 3, 0, True),
        ((10_000_000,) * 2, 0, None),
        ((), 0, None),
        ((10_000_000, 10_000_000, 400_000_000), 0, False),
        ((400_000_000,), 0, False),
        ((10_000_000,) * 5, 1, False),
    ],
)
def test_probes_say_whether_the_dependency_is_well(world, values, errors, expected):
    world.tick(BURNING)
    (entry,) = world.engine._journal.state.active.values()
    store = Edges(values, errors)
    health = ProbeHealth(store, world.policy)  # limit: sqrt(10 ms * 400 ms) = 63 ms
    assert health.healthy(entry, world.clock.now + 30 * SECOND) is expected
    settled = entry.since_unix_nano + int(0.8 * SECOND)
    since = [window.start_unix_nano for window in store.windows if window.end_unix_nano > START]
    assert (since[0], since[-1]) == (world.clock.now + 15 * SECOND, settled)


NS = 1_000_000
NORMAL_WITH_ERRORS = Samples((10 * NS,) * 300, 300, errors=3)
NORMAL_WITH_SLOW_ONES = Samples((10 * NS,) * 270 + (90 * NS,) * 30, 300)
NORMAL = Samples((10 * NS,) * 300, 300)


@pytest.mark.parametrize(
    ("normal", "values", "errors", "expected"),
    [
        (NORMAL_WITH_ERRORS, (10 * NS,) * 120, 2, True),
        (NORMAL_WITH_ERRORS, (10 * NS,) * 120, 12, False),
        (NORMAL, (10 * NS,) * 120, 6, False),
        (NORMAL_WITH_SLOW_ONES, (10 * NS,) * 108 + (90 * NS,) * 12, 0, True),
        (NORMAL_WITH_SLOW_ONES, (10 * NS,) * 60 + (90 * NS,) * 60, 0, False),
        (NORMAL_WITH_SLOW_ONES, (400 * NS,) * 3, 0, False),
        (NORMAL, (10 * NS,) * 100_000, 5000, False),
        (NORMAL_WITH_ERRORS, (10 * NS,) * 100_000, 1000, True),
    ],
)
def test_what_was_normal_before_is_well_enough(world, normal, values, errors, expected):
    world.tick(BURNING)
    (entry,) = world.engine._journal.state.active.values()
    health = ProbeHealth(Edges(values, errors, normal), world.policy)
    assert health.healthy(entry, world.clock.now + 30 * SECOND) is expected


def test_a_degradation_of_an_older_checkpoint_has_no_normal_window_and_is_judged_all_the_same(world):
    world.tick(BURNING)
    (entry,) = world.engine._journal.state.active.values()
    old = {name: value for name, value in asdict(entry).items() if not name.startswith("normal_")}
    entry = Degradation(**old)
    assert ProbeHealth(Edges((10 * NS,) * 3), world.policy).healthy(entry, world.clock.now + 30 * SECOND) is True
    assert ProbeHealth(Edges((10 * NS,) * 3, 2), world.policy).healthy(entry, world.clock.now + 30 * SECOND) is False


def test_a_limit_in_the_policy_goes_before_the_attributions(world):
    world.tick(BURNING)
    (entry,) = world.engine._journal.state.active.values()
    stricter = replace(world.policy.dependencies["recommendations"], healthy_below_seconds=0.005)
    policy = replace(world.policy, dependencies={"recommendations": stricter})
    assert ProbeHealth(Edges((10_000_000,) * 3), policy).healthy(entry, world.clock.now + 30 * SECOND) is False


def test_a_store_that_fails_is_no_evidence(world):
    world.tick(BURNING)
    (entry,) = world.engine._journal.state.active.values()
    store = Edges()
    store.edge_durations = None
    assert ProbeHealth(store, world.policy).healthy(entry, world.clock.now + 30 * SECOND) is None
    assert ProbeHealth(store, world.policy).healthy(entry, world.clock.now) is None
