"""Watch SLOs: read counts, decide verdicts, ask why, let somebody act; no source or action is known by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from opentelemetry.metrics import Meter
from opentelemetry.trace import Tracer

from pasta_otel.clock import Clock, SystemClock
from pasta_otel.model import CountRequest, EventCounts, SpanRef, TimeWindow, Verdict
from pasta_otel.slo.alerts import AlertState, changes, decide
from pasta_otel.slo.budget import Measured, exhausted_in_ns, remaining
from pasta_otel.slo.evaluation import Evaluation, SLOState, Transition
from pasta_otel.slo.history import History
from pasta_otel.slo.investigate import Burning, Investigator
from pasta_otel.slo.leader import Leader
from pasta_otel.slo.maintenance import Maintenance
from pasta_otel.slo.meters import evaluated, meters_of
from pasta_otel.slo.periods import length_ns, period_at
from pasta_otel.slo.ports import Attributor, BadExamples, Responder, SLISource
from pasta_otel.slo.spec.model import SLO
from pasta_otel.slo.state import NoState, StateStore
from pasta_otel.slo.telemetry import Telemetry
from pasta_otel.slo.verdict import Memory, Outcome, advance, read_pair, silenced
from pasta_otel.slo.windows import BurnRateWindow, BurnRateWindows, never_fire

T = TypeVar("T")
NS_PER_SECOND = 1_000_000_000
DEFAULT_GRACE_NS = 30 * NS_PER_SECOND
BAD_EXAMPLES = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the controller works with; everything but the source may be left out.

    Attributes:
        source: Answers counts.
        attributor: Says why an SLO burns.
        responder: Acts, or declines to.
        examples: Names traces of bad events.
        state: Where memory lies.
        meter: Records our own metrics.
        tracer: Records changes of verdict.
        clock: Time.
        leader: Says whether this process acts, or only watches while another one does; None = it acts.
        maintenance: Planned interruptions: no budget counts their time, and nobody acts during one.
    """

    source: SLISource
    attributor: Attributor | None = None
    responder: Responder | None = None
    examples: BadExamples | None = None
    state: StateStore | None = None
    meter: Meter | None = None
    tracer: Tracer | None = None
    clock: Clock | None = None
    leader: Leader | None = None
    maintenance: tuple[Maintenance, ...] = ()


class SLOController:
    """Evaluate SLOs tick by tick.

    Args:
        slos: What to watch; names are unique.
        windows: Burn-rate windows and guards.
        parts: Source, attributor, responder and the rest.
        grace_ns: How long to wait for late spans: every window ends this long before now.

    Raises:
        InputError: The state file is damaged or newer than this program.
    """

    def __init__(
        self, slos: Sequence[SLO], windows: BurnRateWindows, parts: Parts, *, grace_ns: int = DEFAULT_GRACE_NS
    ) -> None:
        self._windows, self._parts, self._grace_ns = windows, parts, grace_ns
        watched = evaluated(slos)
        self._slos = tuple(slo for slo, _ in watched)
        self._components = {slo.name: components for slo, components in watched}
        self._meters = tuple(meters_of((components for _, components in watched), parts.maintenance))
        self._state = parts.state or NoState()
        self._clock = parts.clock or SystemClock()
        self._memories = self._recall()
        self._leads = parts.leader is None
        self._unsaved = False
        self._history = History()
        self._last: Evaluation | None = None
        self._telemetry = Telemetry(self.states, parts.meter, parts.tracer)
        self._investigator = Investigator(parts.source, parts.attributor) if parts.attributor else None
        self._logged: set[tuple[str, str]] = set()

    def states(self) -> tuple[SLOState, ...]:
        """Return the states of the last tick; safe from any thread."""
        return self._last.states if self._last is not None else ()

    @property
    def evaluation(self) -> Evaluation | None:
        """Return what the last tick said, None before the first; safe from any thread."""
        return self._last

    def history(self) -> dict[str, list[dict[str, Any]]]:
        """Return budget and burn rate over time by SLO, as far as this process has watched; safe from any thread."""
        return self._history.points()

    def tick(self, now_unix_nano: int) -> Evaluation:
        """Evaluate every SLO once, ask why where one burns, and let the responder act.

        Never raises for a source, attributor or responder that fails: that is counted, logged once, and the verdict of
        what could not be read is ``no_data``.
        """
        began = self._clock.monotonic_ns()
        self._leads = self._take_lead()
        end = now_unix_nano - self._grace_ns
        before, outcomes, states = dict(self._memories), [], []
        for slo, windows, measured in self._measured(end, now_unix_nano):
            outcome = self._outcome(slo, measured, end, now_unix_nano)
            alerts = self._alerts(slo, measured, now_unix_nano)
            known = {alert.rule.key: alert.memory for alert in alerts}
            self._memories[slo.name] = replace(outcome.memory, alerts=known)
            outcomes.append(outcome)
            state = replace(_state(slo, outcome, windows[0], measured[0]), alerts=alerts)
            states.append(replace(state, silenced=self._silence(slo, now_unix_nano)))
        self._remember(before)
        states = self._explain(states, outcomes, end, now_unix_nano)
        evaluation = Evaluation(now_unix_nano, tuple(states), _transitions(before, states, now_unix_nano))
        self._last = evaluation
        self._history.add(evaluation.states, now_unix_nano)
        self._announce(evaluation, end)
        self._announce_alerts(before, evaluation, end)
        responder = self._parts.responder
        if responder is not None and self._leads:
            self._survive("responder", lambda: bool(responder.respond(evaluation)), False)
        self._telemetry.tick_took(self._clock.monotonic_ns() - began)
        return evaluation

    def run(self, stop: threading.Event, tick_seconds: float = 1.0) -> None:
        """Tick until ``stop`` is set; ticks lie on a fixed grid of monotonic time, and one that is late is skipped."""
        step = max(1, int(tick_seconds * NS_PER_SECOND))
        due = self._clock.monotonic_ns()
        while not stop.is_set():
            self._survive("tick", lambda: self.tick(self._clock.unix_nano()), None)
            due += step
            behind = self._clock.monotonic_ns() - due
            if behind > 0:
                missed = behind // step + 1
                self._telemetry.missed(missed)
                due += missed * step
            stop.wait(max(0.0, (due - self._clock.monotonic_ns()) / NS_PER_SECOND))

    def _recall(self) -> dict[str, Memory]:
        names = {slo.name for slo in self._slos}
        return {name: memory for name, memory in self._state.load().items() if name in names}

    def _take_lead(self) -> bool:
        """Return whether we act; what the leader before us remembered is taken over with the lead."""
        leader = self._parts.leader
        if leader is None:
            return True
        leads = self._survive("leader", leader.lead, otherwise=False)
        if leads and not self._leads:
            self._memories = self._survive("state", self._recall, self._memories)
        return leads

    def _silence(self, slo: SLO, now_unix_nano: int) -> str:
        """Return why nobody may act for an SLO now: the maintenance under way."""
        for entry in self._parts.maintenance:
            if entry.concerns(slo) and entry.window.start_unix_nano <= now_unix_nano < entry.window.end_unix_nano:
                return entry.reason
        return ""

    def _measured(self, end: int, now_unix_nano: int) -> Iterator[tuple[SLO, list[TimeWindow], list[Measured]]]:
        """Ask the source once for everything, and yield every SLO with its windows and what they say."""
        windows = [self._windows_of(slo, end) for slo in self._slos]
        asked = [meter.requests(mine) for meter, mine in zip(self._meters, windows, strict=True)]
        answers = iter(self._counts([request for requests in asked for request in requests], now_unix_nano))
        for slo, meter, mine, requests in zip(self._slos, self._meters, windows, asked, strict=True):
            found = list(islice(answers, len(requests)))
            wrong = [Measured(None, "invalid", "cannot be counted")] * len(mine)
            yield slo, mine, self._survive("slo", partial(meter.measure, mine, found), wrong)

    def _windows_of(self, slo: SLO, end: int) -> list[TimeWindow]:
        """Return the period so far, then long and short for every pair, then what every alert looks back on."""
        period = period_at(slo.window, end)
        windows = [TimeWindow(period.start_unix_nano, end)]
        for row in self._windows.rows:
            windows += [TimeWindow(end - row.long_ns, end), TimeWindow(end - row.short_ns, end)]
        return windows + [TimeWindow(end - rule.lookback_ns, end) for rule in slo.alerts]

    def _counts(self, requests: list[CountRequest], now_unix_nano: int) -> list[EventCounts]:
        down = [EventCounts(0.0, 0.0, no_data="absent", detail="the source failed")] * len(requests)
        answers = self._survive("source", lambda: list(self._parts.source.counts(requests, now_unix_nano)), down)
        if len(answers) != len(requests):
            self._report("source", f"{len(answers)} answers to {len(requests)} requests")
            return down
        return answers

    def _outcome(self, slo: SLO, measured: list[Measured], end: int, now_unix_nano: int) -> Outcome:
        period_ns = length_ns(slo.window, end)
        readings = [
            read_pair(row, measured[1 + 2 * i], measured[2 + 2 * i], period_ns, self._windows)
            for i, row in enumerate(self._windows.rows)
        ]
        outcome = advance(self._memories.get(slo.name), readings, self._windows, now_unix_nano)
        dead = never_fire(self._windows, slo.objective, period_ns)  # without it, "ok" beside a spent budget is a riddle
        outcome = replace(outcome, detail="; ".join(filter(None, (outcome.detail, *dead))))
        silence = self._silence(slo, now_unix_nano)
        return silenced(outcome, self._memories.get(slo.name), silence, now_unix_nano) if silence else outcome

    def _alerts(self, slo: SLO, measured: list[Measured], now_unix_nano: int) -> tuple[AlertState, ...]:
        memory = self._memories.get(slo.name)
        known = memory.alerts if memory is not None else {}
        mine = measured[1 + 2 * len(self._windows.rows) :]
        return tuple(
            decide(rule, found, known.get(rule.key), self._windows, now_unix_nano)
            for rule, found in zip(slo.alerts, mine, strict=True)
        )

    def _remember(self, before: dict[str, Memory]) -> None:
        """Write memory before anybody acts on it: whatever is keyed by a burn's beginning happens once."""
        self._unsaved = self._unsaved or before != self._memories
        if self._unsaved and self._leads:
            self._unsaved = not self._survive("state", self._save, otherwise=False)

    def _save(self) -> bool:
        self._state.save(self._memories)
        return True

    def _explain(self, states: list[SLOState], outcomes: list[Outcome], end: int, now: int) -> list[SLOState]:
        investigator = self._investigator
        if investigator is None:
            return states
        investigator.begin_tick({state.name for state in states if state.burn_since_unix_nano is not None})
        for slo, state, outcome in zip(self._slos, states, outcomes, strict=True):
            since = state.burn_since_unix_nano
            if state.verdict == "burning" and since is not None and self._leads and not state.silenced:
                burning = Burning(slo, self._components[slo.name], self._active_row(outcome), since)
                self._survive(
                    "attributor",
                    partial(investigator.look, burning, end, now),
                    None,
                )
        return [replace(state, attribution=investigator.best(state.name)) for state in states]

    def _active_row(self, outcome: Outcome) -> BurnRateWindow:
        return next(row for row in self._windows.rows if row.key in outcome.memory.active)

    def _announce(self, evaluation: Evaluation, end: int) -> None:
        if not self._leads:
            return
        by_name = {slo.name: slo for slo in self._slos}
        states = {state.name: state for state in evaluation.states}
        for transition in evaluation.transitions:
            state = states[transition.slo]
            bad = self._bad_examples(by_name[transition.slo], state, end) if transition.after == "burning" else ()
            log.info("slo %s: %s -> %s %s", transition.slo, transition.before, transition.after, state.detail)
            self._telemetry.transition(transition, state, bad)

    def _announce_alerts(self, before: dict[str, Memory], evaluation: Evaluation, end: int) -> None:
        if not self._leads:
            return
        by_name = {slo.name: slo for slo in self._slos}
        for state in evaluation.states:
            memory = before.get(state.name)
            old = [memory.alerts.get(alert.rule.key) if memory else None for alert in state.alerts]
            for change in () if state.silenced else changes(state.name, old, state.alerts):
                bad = self._bad_examples(by_name[state.name], state, end) if change.firing else ()
                phase = "fires" if change.firing else "is resolved"
                log.info("slo %s: alert %s %s", state.name, change.state.rule.key, phase)
                self._telemetry.alert(change, evaluation.now_unix_nano, bad)

    def _bad_examples(self, slo: SLO, state: SLOState, end: int) -> Sequence[SpanRef]:
        examples = self._parts.examples
        if examples is not None:
            window = TimeWindow(end - self._windows.rows[0].long_ns, end)
            for part in self._components[slo.name]:
                nothing: Sequence[SpanRef] = ()
                found = self._survive("examples", partial(examples.bad_spans, part.sli, window, BAD_EXAMPLES), nothing)
                if found:
                    return found
        causes = state.attribution.causes if state.attribution else ()
        return [ref for cause in causes for evidence in cause.evidence for ref in evidence.links][:BAD_EXAMPLES]

    def _survive(self, part: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever a part raises, the next tick must come
            self._report(part, f"{type(error).__name__}: {error}")
            return otherwise

    def _report(self, part: str, message: str) -> None:
        """Count every error, log each message once."""
        self._telemetry.error(part)
        if (part, message) not in self._logged:
            if len(self._logged) < 1000:
                self._logged.add((part, message))
            log.warning("%s: %s", part, message)


def _state(slo: SLO, outcome: Outcome, period: TimeWindow, measured: Measured) -> SLOState:
    period_ns = length_ns(slo.window, period.end_unix_nano - 1)
    sliced = slo.method != "Occurrences"
    elapsed = Fraction(period.end_unix_nano - period.start_unix_nano, period_ns) if sliced else Fraction(1)
    left = remaining(measured, elapsed)
    burn = outcome.rates[0].long if outcome.rates else None
    return SLOState(
        name=slo.name,
        service=slo.service,
        objective=float(slo.objective),
        verdict=outcome.memory.verdict,
        since_unix_nano=outcome.memory.since_unix_nano,
        burn_rates=outcome.rates,
        budget_remaining=left,
        reason=outcome.reason,
        detail=outcome.detail,
        annotations=slo.annotations,
        burn_since_unix_nano=outcome.memory.burn_since_unix_nano,
        period=period,
        good=measured.events - measured.bad,
        total=measured.events,
        coverage=measured.coverage,
        exhausted_in_ns=exhausted_in_ns(left, burn, period_ns, _ahead(slo, period.end_unix_nano)),
        degraded=measured.degraded,
    )


def _ahead(slo: SLO, now_unix_nano: int) -> int:
    """Return how far a projection reaches: to the end of a calendar period, or the length of a rolling one."""
    period = period_at(slo.window, now_unix_nano)
    rolling = slo.window.calendar_start is None
    return period.end_unix_nano - (period.start_unix_nano if rolling else now_unix_nano)


def _transitions(before: dict[str, Memory], states: Sequence[SLOState], now: int) -> tuple[Transition, ...]:
    """Return the changes; what has never been evaluated before counts as ``no_data``."""
    verdicts: dict[str, Verdict] = {name: memory.verdict for name, memory in before.items()}
    pairs = [(state, verdicts.get(state.name, "no_data")) for state in states]
    return tuple(Transition(state.name, old, state.verdict, now) for state, old in pairs if old != state.verdict)
