"""Resolve references between documents and turn every objective into an ``SLO``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pasta_otel.slo.periods import duration_ns
from pasta_otel.slo.spec.document import Document, Problem, Severity, child_path
from pasta_otel.slo.spec.model import (
    SLO,
    AlertCondition,
    AlertNotificationTarget,
    AlertPolicy,
    AlertRule,
    Bucket,
    DataSource,
    Indicator,
    MetricSource,
    Objective,
    PrometheusSLI,
    RatioMetric,
    SLODocument,
    SpecObject,
)

PROMETHEUS = "prometheus"


@dataclass(frozen=True, slots=True)
class Placed:
    """An object and where it was read."""

    object: SpecObject
    document: Document
    path: str = ""
    name_field: str = "metadata.name"

    def problem(self, field: str, message: str, *, kind: str, severity: Severity = "error") -> Problem:
        """Return a problem at a field of this object."""
        return self.at(".".join(part for part in (self.path, field) if part), message, kind=kind, severity=severity)

    def at(self, path: str, message: str, *, kind: str, severity: Severity = "error") -> Problem:
        """Return a problem at a path from the document's top."""
        return Problem(message, self.document.file, self.document.line(path), path, kind, severity)


class _Index:
    """Objects by kind and name."""

    def __init__(self, placed: Iterable[Placed]) -> None:
        self._objects: dict[type, dict[str, Placed]] = defaultdict(dict)
        self.problems: list[Problem] = []
        for item in placed:
            self._add(item)

    def _add(self, item: Placed) -> None:
        names = self._objects[type(item.object)]
        name = item.object.metadata.name
        if name in names:
            first = names[name]
            place = f"{first.document.file}:{first.document.line(first.path)}"
            self.problems.append(
                item.problem(item.name_field, f"{name!r} is already defined in {place}", kind="duplicate_name")
            )
            return
        names[name] = item

    def find(self, kind: type, name: str) -> Any:
        item = self._objects[kind].get(name)
        return None if item is None else item.object

    def all(self, kind: type) -> Iterator[Placed]:
        yield from self._objects[kind].values()


def resolve(placed: Iterable[Placed]) -> tuple[tuple[SLO, ...], list[Problem]]:
    """Return every objective as an SLO, and the references that lead nowhere."""
    index = _Index(placed)
    slos: list[SLO] = []
    problems = index.problems
    for item in index.all(AlertPolicy):
        problems.extend(_policy_problems(item, item.object, "spec", index))
    for item in index.all(SLODocument):
        if isinstance(item.object, SLODocument):
            problems.extend(_alerting_problems(item, item.object, index))
            slos.extend(_slos(item, item.object, index, problems))
    return tuple(slos), problems


def _slos(item: Placed, document: SLODocument, index: _Index, problems: list[Problem]) -> Iterator[SLO]:
    several = len(document.objectives) > 1
    taken: set[str] = set()
    alerts = tuple(_alert_rules(document, index))
    for number, objective in enumerate(document.objectives):
        path = child_path("spec.objectives", number)
        indicator = _indicator(item, document, objective, path, index, problems)
        label = objective.display_name or str(number)
        if label in taken:
            message = f"{label!r} is already the name of another objective"
            problems.append(item.problem(f"{path}.displayName", message, kind="duplicate_name"))
        if indicator is None or label in taken:
            continue
        taken.add(label)
        yield SLO(
            name=f"{document.metadata.name}/{label}" if several else document.metadata.name,
            service=document.service,
            objective=objective.target,
            sli=_sli(item, indicator, objective, path, index, problems),
            window=document.window,
            method=document.method,
            slice_target=objective.slice_target,
            slice_window=objective.slice_window,
            weight=objective.composite_weight,
            composite_of=document.metadata.name if document.composite else "",
            description=document.description,
            labels=document.metadata.labels,
            annotations=document.metadata.annotations,
            file=item.document.file,
            alerting=document.alerting,
            alerts=alerts,
        )


def _alert_rules(document: SLODocument, index: _Index) -> Iterator[AlertRule]:
    """Yield the conditions of an SLO's policies; references that lead nowhere are problems elsewhere."""
    seen: set[str] = set()
    for entry in document.alert_policies:
        policy = entry if isinstance(entry, AlertPolicy) else index.find(AlertPolicy, entry)
        for named in policy.conditions if policy is not None else ():
            condition = named if isinstance(named, AlertCondition) else index.find(AlertCondition, named)
            rule = _alert_rule(policy, condition, index) if condition is not None else None
            if rule is not None and rule.key not in seen:
                seen.add(rule.key)
                yield rule


def _alert_rule(policy: AlertPolicy, condition: AlertCondition, index: _Index) -> AlertRule | None:
    if condition.threshold is None or condition.lookback is None or not condition.op:
        return None
    targets = [
        entry if isinstance(entry, AlertNotificationTarget) else index.find(AlertNotificationTarget, entry)
        for entry in policy.targets
    ]
    after = condition.alert_after
    return AlertRule(
        policy.metadata.name,
        condition.metadata.name,
        condition.severity,
        condition.op,
        condition.threshold,
        lookback=condition.lookback.text,
        lookback_ns=duration_ns(condition.lookback),
        after=after.text if after is not None else "",
        after_ns=duration_ns(after) if after is not None else 0,
        when_no_data=policy.alert_when_no_data,
        when_resolved=policy.alert_when_resolved,
        when_breaching=policy.alert_when_breaching,
        targets=tuple((target.metadata.name, target.target) for target in targets if target is not None),
    )


def _indicator(  # noqa: PLR0913, PLR0917  # a resolver's inputs, in reading order
    item: Placed, document: SLODocument, objective: Objective, path: str, index: _Index, problems: list[Problem]
) -> Indicator | None:
    inline = objective.indicator or document.indicator
    if inline is not None:
        return inline
    name = objective.indicator_ref or document.indicator_ref
    found: Indicator | None = index.find(Indicator, name)
    if found is None:
        field = f"{path}.indicatorRef" if objective.indicator_ref else "spec.indicatorRef"
        problems.append(item.problem(field, f"no SLI named {name!r} in the files given", kind="reference"))
    return found


def _sli(  # noqa: PLR0913, PLR0917  # see _indicator
    item: Placed, indicator: Indicator, objective: Objective, path: str, index: _Index, problems: list[Problem]
) -> Any:
    """Return the source's own record, or None with a warning when no source of ours can answer."""
    if indicator.ratio is not None and indicator.ratio.spans is not None:
        return indicator.ratio.spans
    if indicator.ratio is not None and indicator.ratio.otlp is not None:
        return indicator.ratio.otlp
    metric = _first_metric(indicator)
    source: DataSource | None = index.find(DataSource, metric.ref) if metric.ref else None
    kind = (metric.type or (source.type if source else "")).lower()
    if kind == PROMETHEUS:
        problems.extend(_without_query(item, indicator, path))
        return _prometheus(indicator, objective, source)
    what = f"data source {metric.ref!r}" if metric.ref and not kind else f"metric source type {metric.type!r}"
    message = f"{what} cannot be evaluated: spans, otlp and Prometheus can"
    problems.append(item.at(_place(item, metric, path), message, kind="source_type", severity="warning"))
    return None


def _without_query(item: Placed, indicator: Indicator, path: str) -> Iterator[Problem]:
    ratio = indicator.ratio or RatioMetric()
    for metric in (indicator.threshold, ratio.good, ratio.bad, ratio.total, ratio.raw):
        if metric is not None and not _bucket(metric) and not _query(metric):
            message = "a Prometheus source needs a query"
            place = _place(item, metric, path)
            yield item.at(f"{place}.spec.query" if place == metric.path else place, message, kind="required")


def _place(item: Placed, metric: MetricSource, path: str) -> str:
    """Return where an inline metric stands, else the objective that refers to it."""
    inline = item.document.line(metric.path) is not None and metric.path.startswith(item.path) and metric.path
    return metric.path if inline else ".".join(part for part in (item.path, path) if part)


def _first_metric(indicator: Indicator) -> MetricSource:
    ratio = indicator.ratio or RatioMetric()
    found = indicator.threshold or ratio.raw or ratio.total
    return found or MetricSource("")


def _prometheus(indicator: Indicator, objective: Objective, source: DataSource | None) -> PrometheusSLI | None:
    connection = tuple(sorted((key, str(value)) for key, value in source.connection.items())) if source else ()
    if indicator.threshold is not None:
        return PrometheusSLI(
            threshold=_query(indicator.threshold),
            op=objective.op,
            bound=objective.value if objective.value is not None else PrometheusSLI().bound,
            connection=connection,
        )
    ratio = indicator.ratio
    if ratio is None:
        return None
    return PrometheusSLI(
        total=_query(ratio.total) or "",
        good=None if _bucket(ratio.good) else _query(ratio.good),
        bad=_query(ratio.bad),
        raw=_query(ratio.raw),
        raw_failure=ratio.raw_type == "failure",
        connection=connection,
        bucket=_bucket(ratio.good),
    )


def _bucket(metric: MetricSource | None) -> Bucket | None:
    if metric is None or "threshold" not in metric.spec:
        return None
    spec = metric.spec
    return Bucket(str(spec["histogram"]), Decimal(spec["threshold"]), str(spec.get("selector", "")))


def _query(metric: MetricSource | None) -> str | None:
    if metric is None:
        return None
    if "histogram" in metric.spec:
        return f"sum(increase({metric.spec['histogram']}_count{{{metric.spec.get('selector', '')}}}[{{{{.window}}}}]))"
    found = metric.spec.get("query", metric.spec.get("promql"))
    return str(found).strip() if found is not None else ""


def _alerting_problems(item: Placed, document: SLODocument, index: _Index) -> Iterator[Problem]:
    for number, policy in enumerate(document.alert_policies):
        path = child_path("spec.alertPolicies", number)
        if isinstance(policy, AlertPolicy):
            yield from _policy_problems(item, policy, f"{path}.spec", index)
        elif index.find(AlertPolicy, policy) is None:
            yield item.problem(
                f"{path}.alertPolicyRef", f"no AlertPolicy named {policy!r} in the files given", kind="reference"
            )


def _policy_problems(item: Placed, policy: SpecObject, path: str, index: _Index) -> Iterator[Problem]:
    if not isinstance(policy, AlertPolicy):
        return
    wanted: tuple[tuple[str, type, tuple[object, ...], str], ...] = (
        ("conditions", AlertCondition, policy.conditions, "conditionRef"),
        ("notificationTargets", AlertNotificationTarget, policy.targets, "targetRef"),
    )
    for key, kind, entries, ref in wanted:
        for number, entry in enumerate(entries):
            if isinstance(entry, str) and index.find(kind, entry) is None:
                field = f"{child_path(f'{path}.{key}', number)}.{ref}"
                yield item.problem(field, f"no {kind.__name__} named {entry!r} in the files given", kind="reference")
