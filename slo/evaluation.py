"""What one tick of the SLO controller says: states, transitions and, through a Responder, actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pasta_otel.model import Attribution, NoDataReason, TimeWindow, Verdict
from pasta_otel.slo.alerts import AlertState

ActionOutcome = Literal["applied", "reverted", "refused", "dry_run", "failed"]


@dataclass(frozen=True, slots=True)
class BurnRate:
    """Burn rate of one window pair at one tick.

    Attributes:
        severity: ``page`` or ``ticket``.
        long_window_ns: Long window.
        short_window_ns: Short window.
        factor: Threshold that both burn rates must exceed.
        long: Burn rate over the long window; None = no data.
        short: Burn rate over the short window; None = no data.
        exceeded: Both are above the factor, with enough events behind it; None = cannot be said.
        active: The pair burns: it was exceeded and its short window has not been below for long enough since.
        events: Events in the long window.
        bad_events: Bad events in the long window.
        note: Why the pair does not fire although its burn rates are above (low traffic), or why it cannot be said.
    """

    severity: str
    long_window_ns: int
    short_window_ns: int
    factor: float
    long: float | None
    short: float | None
    exceeded: bool | None
    active: bool = False
    events: float = 0.0
    bad_events: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class SLOState:
    """One SLO at one tick.

    Attributes:
        name: ``metadata.name`` of the SLO, with the objective's name appended when it has several.
        service: The SLO's service.
        objective: Target ratio in [0, 1).
        verdict: ``ok``, ``burning`` or ``no_data``.
        reason: With ``no_data``, which kind; with ``burning``, None.
        detail: In words, for people.
        since_unix_nano: When this verdict began.
        burn_rates: Every window pair.
        budget_remaining: Share of the period's error budget left (1 = untouched, negative = overspent); None = no data.
        attribution: Set while burning, once it has been computed.
        annotations: Owner, runbook and dashboard as the SLO file gives them.
        burn_since_unix_nano: When the burn under way began; it survives ``no_data`` and a restart, so (name, this)
            names a burn: whatever must happen once a burn is keyed by it. None = no burn under way.
        period: The period over which the budget counts.
        good: Good events (or slices) in the period.
        total: Events (or slices) in the period.
        coverage: Share of the period that the source can answer for.
        exhausted_in_ns: When the budget is gone at the present burn rate, from now; None = it is not shrinking.
        degraded: A source answered with a warning (partial response).
        silenced: Why nobody may act for this SLO now (planned maintenance), or empty.
        alerts: The alerts of its AlertPolicies.
    """

    name: str
    service: str
    objective: float
    verdict: Verdict
    since_unix_nano: int
    burn_rates: tuple[BurnRate, ...] = ()
    budget_remaining: float | None = None
    reason: NoDataReason | None = None
    detail: str = ""
    attribution: Attribution | None = None
    annotations: tuple[tuple[str, str], ...] = ()
    burn_since_unix_nano: int | None = None
    period: TimeWindow | None = None
    good: float = 0.0
    total: float = 0.0
    coverage: float = 1.0
    exhausted_in_ns: int | None = None
    degraded: bool = False
    silenced: str = ""
    alerts: tuple[AlertState, ...] = ()


@dataclass(frozen=True, slots=True)
class Transition:
    """An SLO's verdict changed at this tick (``no_data`` neither starts nor ends a burn)."""

    slo: str
    before: Verdict
    after: Verdict
    time_unix_nano: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All SLOs at one tick."""

    now_unix_nano: int
    states: tuple[SLOState, ...]
    transitions: tuple[Transition, ...] = ()


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """One line of the audit: what was done, undone or refused, to what, for which SLO, and why.

    Attributes:
        time_unix_nano: When.
        action: ``breaker.open``, ``flag.set``, ``notify``, ``capture.raise``.
        target: ``order-api -> recommendations``, ``degrade.recommendations`` or a channel's name.
        slo: The SLO that caused it.
        outcome: What became of it.
        reason: Why it was done, undone or refused, in words.
        cause: ``kind target`` of the cause that it answers, or empty.
        before: State before, as text.
        after: State after, as text.
        expires_unix_nano: When it reverts by itself; 0 = it does not apply.
    """

    time_unix_nano: int
    action: str
    target: str
    slo: str
    outcome: ActionOutcome
    reason: str = ""
    cause: str = ""
    before: str = ""
    after: str = ""
    expires_unix_nano: int = 0
