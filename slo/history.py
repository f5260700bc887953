"""An SLO's budget and burn rate over time, counted again from its source: for a page, not for verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pasta_otel.model import CountRequest, TimeWindow
from pasta_otel.slo.budget import measure, remaining
from pasta_otel.slo.periods import period_at
from pasta_otel.slo.ports import SLISource
from pasta_otel.slo.report import rfc3339
from pasta_otel.slo.spec.model import SLO

POINTS = 60


def history(slo: SLO, source: SLISource, now_unix_nano: int, points: int = POINTS) -> list[dict[str, Any]]:
    """Return ``[{time, remaining, burn}]`` over the period, oldest first.

    ``remaining`` is the budget of the period that ended at that time, ``burn`` the rate of the step before it; null
    where there is no data.
    """
    period = period_at(slo.window, now_unix_nano)
    step = (now_unix_nano - period.start_unix_nano) // points
    ends = [period.start_unix_nano + step * (i + 1) for i in range(points)]
    requests = [CountRequest(slo.sli, TimeWindow(period_at(slo.window, end).start_unix_nano, end)) for end in ends]
    requests += [CountRequest(slo.sli, TimeWindow(end - step, end)) for end in ends]
    answers = source.counts(requests, now_unix_nano)
    return [_point(slo, end, answers[i], answers[points + i]) for i, end in enumerate(ends)]


def _point(slo: SLO, end: int, whole: Any, part: Any) -> dict[str, Any]:
    return {
        "time": rfc3339(end),
        "remaining": remaining(measure(whole, slo.objective)),
        "burn": measure(part, slo.objective).rate,
    }


def with_history(
    document: dict[str, Any], slos: Sequence[SLO], source: SLISource, now_unix_nano: int
) -> dict[str, Any]:
    """Return the document with a history for every SLO that counts events."""
    found = {
        slo.name: history(slo, source, now_unix_nano)
        for slo in slos
        if slo.method == "Occurrences" and not slo.composite_of
    }
    states = [{**state, "history": found.get(state["name"], [])} for state in document["slos"]]
    return {**document, "slos": states}
