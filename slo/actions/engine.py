"""Decide what an evaluation warrants, within the policy: degrade, hold, give back, notify, or refuse and say why.

Every rule is in design section 9: never a critical dependency, dwell, cooldown, TTL, blast radius, dry run, a person's
pin wins, ``no_data`` neither acts nor recovers, and one audit record each.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from opentelemetry.metrics import Meter

from pasta_otel import semconv
from pasta_otel.clock import Clock
from pasta_otel.model import Cause
from pasta_otel.slo.actions.capture import capture_record, capture_value
from pasta_otel.slo.actions.flagbook import CAPTURE_DEFAULT, FlagBook
from pasta_otel.slo.actions.health import DependencyHealth, NoEvidence
from pasta_otel.slo.actions.journal import Effect, Journal
from pasta_otel.slo.actions.records import public
from pasta_otel.slo.actions.state import Degradation
from pasta_otel.slo.actions.times import to_rfc3339
from pasta_otel.slo.evaluation import ActionOutcome, ActionRecord, Evaluation, SLOState
from pasta_otel.slo.notify import Notification, Notifier
from pasta_otel.slo.policy import ARROW, Dependency, Policy

_log = logging.getLogger(__name__)
Commit = Sequence[tuple[ActionRecord, Effect | None]]
FlagsListener = Callable[[Sequence[Mapping[str, Any]]], object]


def make_flagbook(policy: Policy, clock: Clock) -> FlagBook:
    """Return the flags that a policy declares, all off, and the capture flag."""
    flags = {dependency.flag: False for dependency in policy.dependencies.values() if dependency.flag}
    return FlagBook({**flags, semconv.FLAG_CAPTURE: CAPTURE_DEFAULT}, clock, policy.pins)


class ActionEngine:
    """Implement ``slo.ports.Responder``, and serve flags and pins to the HTTP API.

    Args:
        policy: What may be done.
        flags: The flags served; made by ``make_flagbook``.
        journal: Audit and checkpoint; what it remembers is taken up again.
        clock: Time.
        notifier: Where people are told; started and stopped by its owner.
        meter: Where actions are counted.
        health: Evidence that a degraded dependency is well again.
        on_flags: Told of all flags after every change, e.g. to write flagd's file.
    """

    def __init__(  # noqa: PLR0913 - the world as parameters
        self,
        policy: Policy,
        flags: FlagBook,
        journal: Journal,
        clock: Clock,
        *,
        notifier: Notifier,
        meter: Meter,
        health: DependencyHealth | None = None,
        on_flags: FlagsListener = lambda _: None,
    ) -> None:
        self._policy, self._flags, self._journal, self._clock = policy, flags, journal, clock
        self._notifier, self._health, self._on_flags = notifier, health or NoEvidence(), on_flags
        self._lock = threading.RLock()
        self._first: dict[str, tuple[int, str, int]] = {}  # SLO -> (burn, cause, since when that cause is first)
        spec = semconv.METRICS[semconv.ACTIONS]
        self._count = meter.create_counter(spec.name, spec.unit, spec.description)
        self._restore()

    # the controller's side

    def respond(self, evaluation: Evaluation) -> Sequence[ActionRecord]:
        """Return one record for everything done, undone or refused at this tick."""
        now = evaluation.now_unix_nano
        with self._lock:
            records = [*self._expire(now), *self._review(evaluation), *self._review_capture(evaluation)]
            for state in evaluation.states:
                if state.verdict == "burning":
                    records += self._answer(state, now)
            ended = {state.name for state in evaluation.states if state.verdict == "ok"}
            self._first = {slo: first for slo, first in self._first.items() if slo not in ended}
        return tuple(records)

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """Return the last records as the API shows them, newest last."""
        with self._lock:
            return [public(line) for line in self._journal.recent(limit)]

    # the API's side (exporters.api.FlagProvider)

    def evaluate(self, key: str) -> dict[str, Any] | None:
        """Return one flag as an OFREP entry, or None."""
        return self._flags.evaluate(key)

    def evaluate_all(self) -> list[dict[str, Any]]:
        """Return every flag as OFREP entries."""
        return self._flags.evaluate_all()

    def pin(self, key: str, value: Any, by: str, reason: str) -> dict[str, Any]:
        """Fix a flag by a person's hand; it wins over the controller until it is unpinned.

        Raises:
            InputError: Unknown flag, wrong type, or fixed by the policy file.
            OSError: The audit could not be written: the pin is not set.
        """
        with self._lock:
            self._flags.check_pin(key, value)
            before = self._flags.value(key)
            record = self._person("flag.pin", key, "applied", f"by {by or 'a person'}: {reason}", (before, value))
            self._commit([(record, {"op": "pin", "flag": key, "value": value, "by": by, "reason": reason})])
            self._flags.pin(key, value, by, reason)
            self._publish()
        return self._flags.evaluate(key) or {}

    def unpin(self, key: str, by: str) -> dict[str, Any]:
        """Give a flag back to the controller; raises as ``pin`` does. Unpinning what is not pinned does nothing."""
        with self._lock:
            self._flags.check_unpin(key)
            if self._flags.pinned_by(key):
                record = self._person("flag.pin", key, "reverted", f"by {by or 'a person'}", (None, None))
                self._commit([(record, {"op": "unpin", "flag": key})])
                self._flags.unpin(key)
                self._publish()
        return self._flags.evaluate(key) or {}

    def _person(
        self, action: str, key: str, outcome: ActionOutcome, reason: str, change: tuple[Any, Any]
    ) -> ActionRecord:
        before, after = (_text(value) for value in change)
        return ActionRecord(self._clock.unix_nano(), action, key, "", outcome, reason, before=before, after=after)

    # giving back

    def _expire(self, now: int) -> list[ActionRecord]:
        """Note what reverted by itself because nobody refreshed it; no cooldown, for nothing was decided."""
        late = [entry for entry in self._journal.state.active.values() if entry.expires_unix_nano <= now]
        return [record for entry in late for record in self._revert(entry, "not refreshed before its TTL", now, 0)]

    def _review(self, evaluation: Evaluation) -> list[ActionRecord]:
        states = {state.name: state for state in evaluation.states}
        now, records = evaluation.now_unix_nano, []
        for entry in list(self._journal.state.active.values()):
            reason = self._why_end(entry, [states[slo].verdict for slo in entry.slos if slo in states], now)
            if reason:
                records += self._revert(entry, reason, now, self._policy.cooldown_ns)
            else:
                self._refresh(entry, now)
        return records

    def _why_end(self, entry: Degradation, verdicts: Sequence[str], now: int) -> str:
        """Return why a degradation ends, or an empty text while it is warranted."""
        dependency = self._policy.dependencies.get(entry.dependency)
        if self._policy.mode != "enforce" or dependency is None or not dependency.degradable:
            return "the policy no longer allows it"
        if "burning" in verdicts:
            entry.warranted_unix_nano = now
            return ""
        healthy = None if "no_data" in verdicts else self._health.healthy(entry, now)
        if healthy is True:
            return "the dependency answers well again"
        if now - entry.warranted_unix_nano < self._policy.max_hold_ns:
            return ""
        # the app's breaker stays as its own probes leave it, so that giving the flag back lets no bad calls through
        found = "no evidence" if healthy is None else "the dependency is not as it was"
        return f"{found} for longer than max_hold_seconds"

    def _refresh(self, entry: Degradation, now: int) -> None:
        """Prolong the TTL once half of it is gone: the flag's ETag then changes seldom."""
        if entry.expires_unix_nano - now <= self._policy.ttl_ns // 2:
            entry.expires_unix_nano = now + self._policy.ttl_ns
            self._flags.refresh(entry.flag, entry.expires_unix_nano)
            self._journal.save()
            self._publish()

    def _revert(self, entry: Degradation, reason: str, now: int, cooldown_ns: int) -> list[ActionRecord]:
        until = now + cooldown_ns if cooldown_ns else 0
        effect = {"op": "deactivate", "flag": entry.flag, "cooldown_until_unix_nano": until}
        pair = _pair(entry, now, "reverted", reason)
        records = self._try_commit([(pair[0], effect), (pair[1], None)])
        if records[0].outcome == "reverted":
            self._flags.clear(entry.flag)
            self._publish()
        return records

    # acting

    def _answer(self, state: SLOState, now: int) -> list[ActionRecord]:
        burn = state.since_unix_nano if state.burn_since_unix_nano is None else state.burn_since_unix_nano
        causes = state.attribution.causes if state.attribution else ()
        cause = causes[0] if causes else None
        first = (burn, _cause_text(cause) if cause else "")
        if self._first.get(state.name, ())[:2] != first:
            self._first[state.name] = (*first, now)
        done = self._degrade(state, burn, cause, now) if cause else []
        return [*done, *self._raise_capture(state, burn, cause, now), *self._notify(state, burn, cause, now)]

    def _degrade(self, state: SLOState, burn: int, cause: Cause, now: int) -> list[ActionRecord]:
        dependency = self._policy.find(cause.kind, cause.service, cause.target)
        if dependency is None or not dependency.degradable or self._policy.mode == "off":
            return []
        active = self._journal.state.active.get(dependency.flag)
        if active is not None:
            if state.name not in active.slos:
                active.slos.append(state.name)
                self._journal.save()
            return []
        if now - self._first[state.name][2] < self._policy.dwell_ns:
            return []
        entry = self._plan(dependency, state, cause, now)
        kind, obstacle = self._obstacle(dependency, now)
        if obstacle:
            return self._once(state, burn, f"{kind}:{dependency.name}", _pair(entry, now, "refused", obstacle))
        if self._policy.mode == "dry_run":
            return self._once(
                state, burn, f"dry_run:{dependency.name}", _pair(entry, now, "dry_run", "mode is dry_run")
            )
        return self._activate(entry, now)

    def _plan(self, dependency: Dependency, state: SLOState, cause: Cause, now: int) -> Degradation:
        edge = dependency.breaker or (
            cause.target if ARROW in cause.target else f"{state.service}{ARROW}{dependency.service}"
        )
        duration = next((e for e in cause.evidence if e.metric == "edge_duration_seconds"), None)
        normal = state.attribution.baseline if state.attribution else None
        return Degradation(
            dependency=dependency.name,
            flag=dependency.flag,
            edge=edge,
            cause=_cause_text(cause),
            slos=[state.name],
            since_unix_nano=now,
            expires_unix_nano=now + self._policy.ttl_ns,
            warranted_unix_nano=now,
            normal_seconds=duration.before if duration else None,
            slow_seconds=duration.after if duration else None,
            normal_start_unix_nano=normal.start_unix_nano if normal else 0,
            normal_end_unix_nano=normal.end_unix_nano if normal else 0,
        )

    def _obstacle(self, dependency: Dependency, now: int) -> tuple[str, str]:
        who = self._flags.pinned_by(dependency.flag)
        if who:
            return "pinned", f"pinned by {who}"
        until = self._journal.state.cooldowns.get(dependency.flag, 0)
        if now < until:
            return "cooldown", f"in cooldown until {to_rfc3339(until)}"
        held = len(self._journal.state.active)
        if held >= self._policy.allowed_flags:
            return "blast_radius", f"{held} degradations hold, {self._policy.allowed_flags} are allowed"
        return "", ""

    def _activate(self, entry: Degradation, now: int) -> list[ActionRecord]:
        pair = _pair(entry, now, "applied", f"SLO {entry.slos[0]} burns")
        records = self._try_commit([(pair[0], {"op": "activate", "entry": asdict(entry)}), (pair[1], None)])
        if records[0].outcome == "applied":
            self._flags.set(entry.flag, True, entry.since_unix_nano, entry.expires_unix_nano)
            self._publish()
        return records

    def _once(self, state: SLOState, burn: int, key: str, records: Sequence[ActionRecord]) -> list[ActionRecord]:
        """Say something once in a burn."""
        if self._journal.state.has_seen(state.name, burn, key):
            return []
        seen = {"seen": {"slo": state.name, "burn_unix_nano": burn, "key": key}}
        return self._try_commit([(record, seen if index == 0 else None) for index, record in enumerate(records)])

    # looking closer

    def _raise_capture(self, state: SLOState, burn: int, cause: Cause | None, now: int) -> list[ActionRecord]:
        """Raise the tier once per burn and per new cause, one raise at a time."""
        tier, key = self._policy.capture_tier, f"capture:{_cause_text(cause) if cause else ''}"
        if tier is None or tier <= semconv.CAPTURE_DEFAULT_TIER:  # nothing to raise
            return []
        if self._policy.mode == "off" or self._journal.state.capture:
            return []
        if self._journal.state.has_seen(state.name, burn, key) or self._flags.pinned_by(semconv.FLAG_CAPTURE):
            return []
        expires = now + self._policy.capture_ns
        held = {
            "slo": state.name,
            "cause": _cause_text(cause) if cause else "",
            "value": capture_value(state, cause, tier, expires),
            "since_unix_nano": now,
            "expires_unix_nano": expires,
        }
        enforce = self._policy.mode == "enforce"
        record = capture_record(held, now, "applied" if enforce else "dry_run", "an SLO burns", CAPTURE_DEFAULT["tier"])
        effect: dict[str, Any] = {"seen": {"slo": state.name, "burn_unix_nano": burn, "key": key}}
        effect |= {"op": "capture", "held": held} if enforce else {}
        records = self._try_commit([(record, effect)])
        if records[0].outcome == "applied":
            self._flags.set(semconv.FLAG_CAPTURE, held["value"], now, expires)
            self._publish()
        return records

    def _review_capture(self, evaluation: Evaluation) -> list[ActionRecord]:
        """Lower the tier when its time is over or its SLO is well again; ``no_data`` changes nothing."""
        held, now = self._journal.state.capture, evaluation.now_unix_nano
        if not held:
            return []
        well = all(state.verdict == "ok" for state in evaluation.states if state.name == held["slo"])
        over = held["expires_unix_nano"] <= now
        if not (well or over or self._policy.mode != "enforce"):
            return []
        reason = "its time is over" if over else "the SLO is well again"
        record = capture_record(held, now, "reverted", reason, CAPTURE_DEFAULT["tier"])
        records = self._try_commit([(record, {"op": "capture", "held": {}})])
        if records[0].outcome == "reverted":
            self._flags.clear(semconv.FLAG_CAPTURE)
            self._publish()
        return records

    # telling people

    def _notify(self, state: SLOState, burn: int, cause: Cause | None, now: int) -> list[ActionRecord]:
        text = _cause_text(cause) if cause else ""
        records: list[ActionRecord] = []
        for channel in self._notifier.channels:
            key = f"notify:{channel}:{text}"
            if self._journal.state.has_seen(state.name, burn, key):
                continue
            message = self._message(state, burn, text)
            record = ActionRecord(now, "notify", channel, state.name, "applied", message.summary, text)
            effect = {
                "op": "notify",
                "id": f"{message.id}:{channel}",
                "message": {"channel": channel, **asdict(message)},
                "seen": {"slo": state.name, "burn_unix_nano": burn, "key": key},
            }
            records += (committed := self._try_commit([(record, effect)]))
            if committed[0].outcome == "applied":
                self._send(f"{message.id}:{channel}", channel, message)
        return records

    def _message(self, state: SLOState, burn: int, cause: str) -> Notification:
        held = [entry.flag for entry in self._journal.state.active.values() if state.name in entry.slos]
        parts = [
            f"SLO {state.name} of {state.service} burns",
            f"cause: {cause}" if cause else "cause not known yet",
            *(f"{flag} is on" for flag in held),
            *(["dry run: nothing is changed"] if self._policy.mode == "dry_run" else []),
        ]
        return Notification(
            state.name,
            state.service,
            "; ".join(parts),
            cause,
            to_rfc3339(burn),
            self._policy.mode,
            dict(state.annotations),
        )

    def _send(self, identity: str, channel: str, message: Notification) -> None:
        self._notifier.submit(channel, message, functools.partial(self._delivered, identity, channel, message))

    def _delivered(self, identity: str, channel: str, message: Notification, problem: str) -> None:
        """Note how a delivery ended; until then it is pending and survives a crash."""
        with self._lock:
            if identity not in self._journal.state.pending:
                return
            effect = {"op": "delivered", "id": identity}
            if problem:
                now = self._clock.unix_nano()
                record = ActionRecord(now, "notify", channel, message.slo, "failed", problem, message.cause)
                self._try_commit([(record, effect)])
            else:
                self._journal.state.apply(effect)
                self._journal.save()

    # plumbing

    def _restore(self) -> None:
        """Take up what was under way when the last process ended, however it ended."""
        state, now = self._journal.state, self._clock.unix_nano()
        for flag, pin in state.pins.items():
            if self._flags.evaluate(flag) is not None and not self._flags.pinned_by(flag):
                self._flags.pin(flag, pin["value"], pin["by"], pin["reason"])
        for entry in state.active.values():
            if entry.expires_unix_nano > now:
                self._flags.set(entry.flag, True, entry.since_unix_nano, entry.expires_unix_nano)
        held = state.capture
        if held:  # an expired value is not served, and the first tick notes its end
            self._flags.set(semconv.FLAG_CAPTURE, held["value"], held["since_unix_nano"], held["expires_unix_nano"])
        for identity, fields in list(state.pending.items()):
            message = {name: value for name, value in fields.items() if name != "channel"}
            self._send(identity, fields["channel"], Notification(**message))
        self._publish()

    def _publish(self) -> None:
        try:
            self._on_flags(self._flags.evaluate_all())
        except Exception:  # noqa: BLE001 - a flag file that cannot be written must not stop the controller
            _log.exception("flags could not be published")

    def _commit(self, entries: Commit) -> None:
        self._journal.commit(entries)
        for record, _ in entries:
            self._count.add(1, {"action": record.action, "outcome": record.outcome})

    def _try_commit(self, entries: Commit) -> list[ActionRecord]:
        """Commit, or return the records as failed: without an audit line nothing is done."""
        try:
            self._commit(entries)
        except OSError as error:
            _log.error("audit: %s; nothing is done without it", error)
            failed = [replace(record, outcome="failed", reason=f"audit: {error}") for record, _ in entries]
            for record in failed:
                self._count.add(1, {"action": record.action, "outcome": "failed"})
            return failed
        return [record for record, _ in entries]


def _pair(entry: Degradation, now: int, outcome: ActionOutcome, reason: str) -> tuple[ActionRecord, ActionRecord]:
    """Return the two records of one degradation: the breaker that it opens, and the flag."""
    expires = entry.expires_unix_nano if outcome in {"applied", "dry_run"} else 0
    ends = {"applied": ("closed", "open"), "reverted": ("open", "half_open")}.get(outcome, ("closed", "closed"))
    values = {"applied": ("false", "true"), "reverted": ("true", "false")}.get(outcome, ("false", "false"))
    slo = ", ".join(entry.slos)
    return (
        ActionRecord(now, "breaker.open", entry.edge, slo, outcome, reason, entry.cause, *ends, expires),
        ActionRecord(now, "flag.set", entry.flag, slo, outcome, reason, entry.cause, *values, expires),
    )


def _cause_text(cause: Cause) -> str:
    return f"{cause.kind} {cause.target}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
