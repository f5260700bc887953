"""Was it the expected cause, and the expected action and no other?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pasta_otel.demo.faults import EDGE, Expectation

FLAG = ("flag.set", "degrade.recommendations")
BREAKER = ("breaker.open", "recommendations")
DONE = frozenset({"applied", "reverted"})

Json = dict[str, Any]


def is_answered(expected: Expectation, causes: Sequence[Json], actions: Sequence[Json]) -> bool:
    """Say whether the expected first cause is there, and every expected action."""
    return not judge_causes(expected, causes) and not _missing(expected, actions)


def judge(expected: Expectation, causes: Sequence[Json], actions: Sequence[Json]) -> list[str]:
    """Return what is not as expected, in words; empty = all right."""
    return [*judge_causes(expected, causes), *_missing(expected, actions), *_unexpected(expected, actions)]


def judge_causes(expected: Expectation, causes: Sequence[Json]) -> list[str]:
    """Return what is wrong with the first cause."""
    if not expected.kinds:
        return [f"a cause was named although nothing was wrong: {_words(causes[0])}"] if causes else []
    wanted = f"{' or '.join(sorted(expected.kinds))} {expected.target}"
    if not causes:
        return [f"no cause was found; expected {wanted}"]
    first = causes[0]
    right = first["kind"] in expected.kinds and first["target"] == expected.target
    return [] if right else [f"the first cause is {_words(first)}; expected {wanted}"]


def _missing(expected: Expectation, actions: Sequence[Json]) -> list[str]:
    done = {_key(action) for action in actions if action["outcome"] == "applied"}
    wanted = {FLAG, BREAKER} if expected.degrades else set()
    missing = [f"{action} {target} was not done" for action, target in sorted(wanted - done)]
    if expected.notifies and not any(action == "notify" for action, _ in done):
        missing.append("nobody was notified")
    return missing


def _unexpected(expected: Expectation, actions: Sequence[Json]) -> list[str]:
    allowed = {FLAG, BREAKER} if expected.degrades else set()
    return [
        f"{action['action']} {action['target']} was {action['outcome']}, which nobody expected"
        for action in actions
        if action["outcome"] in DONE
        and _key(action) not in allowed
        and not (action["action"] == "notify" and expected.notifies)
    ]


def _key(action: Json) -> tuple[str, str]:
    name, target = action["action"], action["target"]
    kind = name.rsplit(".", 1)[0]
    if kind == "breaker" and target in {EDGE, BREAKER[1]}:
        return BREAKER
    return (FLAG[0], target) if kind == "flag" and target == FLAG[1] else (name, target)


def _words(cause: Json) -> str:
    return f"{cause['kind']} {cause['target']}"
