"""Prometheus recording and alerting rules for an SLO, under Sloth's names and labels.

Right where Sloth's are wrong: the period's ratio is bad over total of the whole period, not a mean of 5-minute ratios;
an idle window has no ratio instead of NaN; a series of errors that does not exist yet counts as 0 while the total
exists; numbers are written from decimals (0.001, not 0.0009999999999999432).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pasta_otel.errors import InputError
from pasta_otel.slo.alerts import condition_text, plain
from pasta_otel.slo.periods import duration_ns
from pasta_otel.slo.sources.promql import OPERATORS, expressions
from pasta_otel.slo.spec.model import SLO, Alerting, AlertRule, PrometheusSLI
from pasta_otel.slo.windows import NS_PER_SECOND, BurnRateWindow, BurnRateWindows, duration_text

NS_PER_DAY = 86_400 * NS_PER_SECOND
MODE, SPEC = "pasta-otel", "openslo/v1"
Rule = dict[str, Any]
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Group:
    """A rule group."""

    name: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class _Subject:
    """An SLO and what its rules share."""

    slo: SLO
    sli: PrometheusSLI
    windows: BurnRateWindows
    version: str

    @property
    def name(self) -> str:
        short = self.slo.name.removeprefix(f"{self.slo.service}-")
        return short.replace("/", "-")

    @property
    def id(self) -> str:
        return f"{self.slo.service}-{self.name}"

    @property
    def ids(self) -> dict[str, str]:
        return {"sloth_id": self.id, "sloth_service": self.slo.service, "sloth_slo": self.name}

    @property
    def selector(self) -> str:
        return "{" + ", ".join(f'{key}="{_escaped(value)}"' for key, value in self.ids.items()) + "}"

    @property
    def labels(self) -> dict[str, str]:
        own = {key: ",".join(values) for key, values in self.slo.labels}
        return {key: own[key] for key in sorted(own) if _label(key)} | self.ids

    @property
    def period_ns(self) -> int:
        return duration_ns(self.slo.window.duration)

    @property
    def budget(self) -> Decimal:
        return 1 - self.slo.objective


def _label(key: str) -> bool:
    return _LABEL.fullmatch(key) is not None and not key.startswith("__")


def _escaped(value: str) -> str:
    """Return a text for inside a PromQL string, which may stand inside a template's raw string."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").replace("`", r"\x60")


def build(slo: SLO, windows: BurnRateWindows, version: str) -> list[Group]:
    """Return the rule groups of one SLO.

    Args:
        slo: An SLO over Prometheus that counts events.
        windows: Burn-rate windows.
        version: Ours, for ``sloth_version``.

    Raises:
        InputError: The SLO cannot be expressed as rules; says why.
    """
    if not isinstance(slo.sli, PrometheusSLI):
        raise InputError("rules need a Prometheus indicator", file=slo.file, field=slo.name, kind="source_type")
    if slo.sli.bucket is not None:
        what = "a histogram's threshold needs a server that knows its buckets: write the bucket in PromQL"
        raise InputError(what, file=slo.file, field=slo.name, kind="histogram")
    if slo.method != "Occurrences" or slo.composite_of:
        what = "a composite SLO" if slo.composite_of else slo.method
        raise InputError(
            f"rules cannot express {what}: use the controller", file=slo.file, field=slo.name, kind="method"
        )
    subject = _Subject(slo, slo.sli, windows, version)
    groups = [
        Group(f"sloth-slo-sli-recordings-{subject.id}", tuple(_sli_rules(subject))),
        Group(f"sloth-slo-meta-recordings-{subject.id}", tuple(_meta_rules(subject))),
    ]
    alerts = tuple(_alerts(subject))
    return [*groups, Group(f"sloth-slo-alerts-{subject.id}", alerts)] if alerts else groups


def refuse_twins(groups: Iterable[Group]) -> None:
    """Check that no two SLOs come to one ``sloth_id``: Prometheus would load neither.

    Raises:
        InputError: Naming the group that stands twice.
    """
    seen: set[str] = set()
    for group in groups:
        if group.name in seen:
            raise InputError(f"two SLOs make the rule group {group.name}: rename one", kind="duplicate_name")
        seen.add(group.name)


def error_ratio(sli: PrometheusSLI, window_ns: int, text: str) -> str:
    """Return the share of bad events over a window: absent when idle, 0 when there are events and no error series."""
    parts = {part.part: part.text for part in expressions(sli, window_ns, text)}
    if "raw" in parts:
        ratio = f"({parts['raw']}) >= 0"  # drops NaN, which Prometheus would keep for the whole period
        return ratio if sli.raw_failure else f"1 - ({ratio})"
    total = parts["total"]
    bad = parts["bad"] if "bad" in parts else f"({total})\n  - ((\n    {parts['good']}\n  ) or ({total}) * 0)"
    return f"(\n  (\n    {bad}\n  )\n  or\n  ({total}) * 0\n)\n/\n(\n  ({total}) > 0\n)"


def _sli_rules(subject: _Subject) -> Iterator[Rule]:
    spans = {row.short_ns for row in subject.windows.rows} | {row.long_ns for row in subject.windows.rows}
    spans |= {rule.lookback_ns for rule in subject.slo.alerts}
    for window_ns in sorted(spans | {subject.period_ns}):
        text = _text(subject, window_ns)
        yield {
            "record": f"slo:sli_error:ratio_rate{text}",
            "expr": error_ratio(subject.sli, window_ns, text),
            "labels": subject.labels | {"sloth_window": text},
        }


def _text(subject: _Subject, window_ns: int) -> str:
    """Return a window as Sloth writes it: the period in days, the others shortest."""
    if window_ns == subject.period_ns and window_ns % NS_PER_DAY == 0:
        return f"{window_ns // NS_PER_DAY}d"
    return duration_text(window_ns)


def _meta_rules(subject: _Subject) -> Iterator[Rule]:
    ids, objective = subject.selector, subject.slo.objective
    shortest = _text(subject, min(row.short_ns for row in subject.windows.rows))
    period = _text(subject, subject.period_ns)
    over_budget = f"/ on(sloth_id, sloth_slo, sloth_service) group_left\nslo:error_budget:ratio{ids}"
    records: Mapping[str, str] = {
        "slo:objective:ratio": f"vector({plain(objective)})",
        "slo:error_budget:ratio": f"vector({plain(subject.budget)})",
        "slo:time_period:days": f"vector({plain(Decimal(subject.period_ns) / NS_PER_DAY)})",
        "slo:current_burn_rate:ratio": f"slo:sli_error:ratio_rate{shortest}{ids}\n{over_budget}",
        "slo:period_burn_rate:ratio": f"slo:sli_error:ratio_rate{period}{ids}\n{over_budget}",
        "slo:period_error_budget_remaining:ratio": _remaining(subject, period),
    }
    for record, expr in records.items():
        yield {"record": record, "expr": expr, "labels": subject.labels}
    info = {
        "sloth_mode": MODE,
        "sloth_objective": plain(objective * 100),
        "sloth_spec": SPEC,
        "sloth_version": subject.version,
    }
    yield {"record": "sloth_slo_info", "expr": "vector(1)", "labels": subject.labels | info}


def _remaining(subject: _Subject, period: str) -> str:
    """One minus the period's burn rate; an idle period has spent nothing."""
    left = f"1 - slo:period_burn_rate:ratio{subject.selector}"
    total = _total(subject.sli, subject.period_ns, period)
    return left if total is None else f"({left})\nor on()\n(({total}) == bool 0) == 1"


def _total(sli: PrometheusSLI, window_ns: int, text: str) -> str | None:
    return next((part.text for part in expressions(sli, window_ns, text) if part.part == "total"), None)


def _alerts(subject: _Subject) -> Iterator[Rule]:
    alerting = subject.slo.alerting or Alerting()
    for severity in ("page", "ticket"):
        rows = [row for row in subject.windows.rows if row.severity == severity]
        if rows and severity not in alerting.disabled:
            yield _burn_alert(subject, alerting, severity, rows)
    for rule in subject.slo.alerts:
        if rule.when_breaching:
            yield _policy_alert(subject, rule)
    if {"page", "ticket"} - alerting.disabled:
        yield _absent_alert(subject, alerting)


def _burn_alert(subject: _Subject, alerting: Alerting, severity: str, rows: list[BurnRateWindow]) -> Rule:
    conditions = [_condition(subject, row) for row in rows]
    labels = dict(alerting.labels) | dict(dict(alerting.severity_labels).get(severity, ()))
    own = dict(alerting.annotations) | dict(dict(alerting.severity_annotations).get(severity, ()))
    return {
        "alert": alert_name(subject.slo),
        "expr": "\nor\n".join(f"(\n{condition}\n)" for condition in conditions),
        "labels": labels | subject.ids | {"sloth_severity": severity},
        "annotations": {
            "summary": "{{$labels.sloth_service}} {{$labels.sloth_slo}} SLO error budget burn rate is over expected.",
            "title": f"({severity}) {{{{$labels.sloth_service}}}} {{{{$labels.sloth_slo}}}} SLO error budget burn rate"
            " is too fast.",
            "windows": _fired_windows(subject, rows, conditions),
        }
        | _people(subject.slo)
        | own,
    }


def _policy_alert(subject: _Subject, rule: AlertRule) -> Rule:
    """Return the alert of an AlertCondition: its burn rate over its own window, for as long as it says."""
    limit = f"({plain(rule.threshold)} * {plain(subject.budget)})"
    window = _text(subject, rule.lookback_ns)
    alert = {
        "alert": camel(f"{subject.slo.name} {rule.policy} {rule.condition}"),
        "expr": f"slo:sli_error:ratio_rate{window}{subject.selector} {OPERATORS[rule.op]} {limit}",
        "for": f"{rule.after_ns // NS_PER_SECOND}s",
        "labels": subject.ids | {"sloth_severity": rule.severity},
        "annotations": {
            "summary": f"{{{{$labels.sloth_service}}}} {{{{$labels.sloth_slo}}}}: {condition_text(rule)}",
            "title": f"({rule.severity}) {{{{$labels.sloth_service}}}} {{{{$labels.sloth_slo}}}}: {rule.policy}",
        }
        | _people(subject.slo),
    }
    return alert if rule.after_ns else {key: value for key, value in alert.items() if key != "for"}


def _condition(subject: _Subject, row: BurnRateWindow) -> str:
    limit = f"({plain(row.factor(subject.period_ns))} * {plain(subject.budget)})"
    ratio = "    max(slo:sli_error:ratio_rate{}{} > {}) without (sloth_window)"
    parts = [ratio.format(_text(subject, window), subject.selector, limit) for window in (row.short_ns, row.long_ns)]
    return "\n    and\n".join(parts)


def _fired_windows(subject: _Subject, rows: list[BurnRateWindow], conditions: list[str]) -> str:
    """Return a template that names the pairs that fired.

    In an annotation, because a label would make an alert that passes from one pair to the other a new one.
    """
    return "".join(
        f"{{{{ with query `{' '.join(condition.split())}` }}}}"
        f"{_text(subject, row.long_ns)}/{_text(subject, row.short_ns)} {{{{ end }}}}"
        for row, condition in zip(rows, conditions, strict=True)
    )


def _absent_alert(subject: _Subject, alerting: Alerting) -> Rule:
    """Silence is not health: no series for the total (or raw ratio), for as long as an outage would take to page."""
    first = subject.windows.rows[0]
    text = _text(subject, first.short_ns)
    query = _total(subject.sli, first.short_ns, text)
    if query is None:
        query = expressions(subject.sli, first.short_ns, text)[0].text
    seconds = max(60, int(first.factor(subject.period_ns) * subject.budget * first.long_ns / NS_PER_SECOND))
    seconds = min(seconds, first.long_ns // NS_PER_SECOND)  # a factor that is out of reach must not delay this
    return {
        "alert": f"{alert_name(subject.slo)}Absent",
        "expr": f"absent(\n  {query}\n)",
        "for": f"{seconds}s",
        "labels": dict(alerting.labels) | subject.ids | {"sloth_severity": "ticket"},
        "annotations": {
            "summary": "{{$labels.sloth_service}} {{$labels.sloth_slo}} SLO has no data: nothing can be said of it.",
            "title": "(ticket) {{$labels.sloth_service}} {{$labels.sloth_slo}} SLO has no data.",
        }
        | _people(subject.slo),
    }


def _people(slo: SLO) -> dict[str, str]:
    known = dict(slo.annotations)
    return {key: known[key] for key in ("owner", "runbook", "dashboard") if known.get(key)}


def alert_name(slo: SLO) -> str:
    """Return the alert's name: the author's, else the SLO's in capitals as alerts are written."""
    if slo.alerting is not None and slo.alerting.name:
        return slo.alerting.name
    return camel(slo.name) + "BurnRate"


def camel(text: str) -> str:
    """Return a text's words in capitals, as alerts are named."""
    words = "".join(character if character.isalnum() else " " for character in text).split()
    return "".join(word[:1].upper() + word[1:] for word in words)
