"""The demo's verdict: the expected cause first, the expected action and no other."""

from __future__ import annotations

import pytest

from pasta_otel.demo import faults
from pasta_otel.demo.judge import is_answered, judge

EDGE = "order-api -> recommendations"


def cause(kind: str, target: str) -> dict:
    return {"kind": kind, "service": target, "target": target, "score": 0.9, "evidence": []}


def action(name: str, target: str, outcome: str = "applied") -> dict:
    return {"action": name, "target": target, "outcome": outcome}


DEGRADED = [action("breaker.open", EDGE), action("flag.set", "degrade.recommendations"), action("notify", "log")]
SLOW = faults.make("slow-dependency", 0).expected
THROTTLE = faults.make("cpu-throttle", 0).expected
NOTHING = faults.make("none", 0).expected


def test_the_right_cause_and_actions_pass():
    assert judge(SLOW, [cause("edge_latency", EDGE)], DEGRADED) == []
    assert is_answered(SLOW, [cause("edge_latency", EDGE)], DEGRADED)


@pytest.mark.parametrize("missing", range(3))
def test_every_expected_action_is_asked_for(missing):
    done = [entry for index, entry in enumerate(DEGRADED) if index != missing]
    assert len(judge(SLOW, [cause("edge_latency", EDGE)], done)) == 1
    assert not is_answered(SLOW, [cause("edge_latency", EDGE)], done)


@pytest.mark.parametrize(
    "causes",
    [[], [cause("edge_errors", EDGE)], [cause("edge_latency", "order-api -> model")],
     [cause("self_time", "model"), cause("edge_latency", EDGE)]],
)  # fmt: skip
def test_another_first_cause_fails(causes):
    assert len(judge(SLOW, causes, DEGRADED)) == 1


def test_degrading_when_only_notification_was_due_fails():
    problems = judge(THROTTLE, [cause("cpu_throttled", "model")], DEGRADED)
    assert len(problems) == 2
    assert all("nobody expected" in problem for problem in problems)


def test_an_action_that_was_refused_is_no_action():
    refused = [action("flag.set", "degrade.recommendations", "refused"), action("notify", "log")]
    assert judge(THROTTLE, [cause("cpu_contention", "model")], refused) == []


def test_without_a_fault_anything_done_or_named_fails():
    assert judge(NOTHING, [], []) == []
    assert len(judge(NOTHING, [cause("self_time", "model")], [])) == 1
    assert len(judge(NOTHING, [], [action("notify", "log")])) == 1


def test_other_targets_are_other_actions():
    other = [action("flag.set", "degrade.payment"), *DEGRADED]
    assert judge(SLOW, [cause("edge_latency", EDGE)], other) == [
        "flag.set degrade.payment was applied, which nobody expected"
    ]
