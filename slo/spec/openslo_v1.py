"""OpenSLO v1: its seven kinds, read with the rules of the standard and of its reference validator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from pasta_otel.slo.spec.document import Cursor
from pasta_otel.slo.spec.fields import (
    read_description,
    read_duration,
    read_metadata,
    read_name,
    read_target,
    read_window,
)
from pasta_otel.slo.spec.indicator import read_indicator
from pasta_otel.slo.spec.model import (
    AlertCondition,
    AlertNotificationTarget,
    AlertPolicy,
    BudgetingMethod,
    DataSource,
    DurationText,
    Indicator,
    Objective,
    Read,
    Service,
    SLODocument,
    SpecObject,
    WindowSpec,
)

T = TypeVar("T")
API_VERSION = "openslo/v1"
METHODS: tuple[BudgetingMethod, ...] = ("Occurrences", "Timeslices", "RatioTimeslices")
OPERATORS = ("lte", "gte", "lt", "gt")
_TOP = frozenset({"apiVersion", "kind", "metadata", "spec"})
_SLO = frozenset(
    {
        "description",
        "service",
        "indicator",
        "indicatorRef",
        "timeWindow",
        "budgetingMethod",
        "objectives",
        "alertPolicies",
    }
)
_OBJECTIVE = frozenset(
    {
        "displayName",
        "op",
        "value",
        "target",
        "targetPercent",
        "timeSliceTarget",
        "timeSliceWindow",
        "indicator",
        "indicatorRef",
        "compositeWeight",
    }
)
_POLICY = frozenset(
    {"description", "alertWhenNoData", "alertWhenResolved", "alertWhenBreaching", "conditions", "notificationTargets"}
)


def read_objects(root: Cursor) -> list[Read]:
    """Return the object that stands at a cursor; what is wrong is recorded in its document."""
    root.mapping(_TOP)
    kind = root.choice("kind", tuple(_READERS), required=True)
    reader = _READERS.get(kind)
    spec = root.need("spec")
    if reader is None or spec is None:
        return []
    return [Read(reader(root, spec))]


def _service(root: Cursor, spec: Cursor) -> Service:
    spec.mapping(frozenset({"description"}))
    return Service(read_metadata(root), read_description(spec))


def _data_source(root: Cursor, spec: Cursor) -> DataSource:
    spec.mapping(frozenset({"description", "type", "connectionDetails"}))
    details = spec.need("connectionDetails")
    return DataSource(
        read_metadata(root),
        type=spec.text("type", required=True),
        connection=_connection(details) if details is not None else {},
        description=read_description(spec),
    )


def _connection(details: Cursor) -> Mapping[str, Any]:
    """Return connection details; the reference SDK's examples write a list of mappings, the standard a mapping."""
    if isinstance(details.value, list):
        return {key: value for entry in details.entries() for key, value in entry.mapping().items()}
    return details.mapping()


def _indicator(root: Cursor, spec: Cursor) -> Indicator:
    return read_indicator(read_metadata(root), spec)


def _alert_condition(root: Cursor, spec: Cursor) -> AlertCondition:
    spec.mapping(frozenset({"description", "severity", "condition"}))
    condition = spec.need("condition")
    parts = condition or spec
    if condition is not None:
        condition.mapping(frozenset({"kind", "op", "threshold", "lookbackWindow", "alertAfter"}))
        condition.choice("kind", ("burnrate",), required=True)
    threshold = parts.number("threshold")
    if condition is not None and not condition.has("threshold"):
        condition.missing("threshold")
    return AlertCondition(
        read_metadata(root),
        severity=spec.text("severity", required=True),
        op=parts.choice("op", OPERATORS, required=condition is not None),
        threshold=threshold,
        lookback=read_duration(parts, "lookbackWindow", required=condition is not None),
        alert_after=_alert_after(parts),
        description=read_description(spec),
    )


def _alert_after(parts: Cursor) -> DurationText | None:
    if parts.has("alertAfter") and parts.text("alertAfter") in {"0m", "0h", "0d"}:
        return None
    return read_duration(parts, "alertAfter")


def _notification_target(root: Cursor, spec: Cursor) -> AlertNotificationTarget:
    spec.mapping(frozenset({"description", "target"}))
    return AlertNotificationTarget(read_metadata(root), spec.text("target", required=True), read_description(spec))


def _alert_policy(root: Cursor, spec: Cursor) -> AlertPolicy:
    spec.mapping(_POLICY)
    conditions, targets = spec.items("conditions"), spec.items("notificationTargets")
    if len(conditions) != 1:
        spec.document.report(f"{spec.path}.conditions", f"exactly one is required, got {len(conditions)}", kind="count")
    if not targets:
        spec.missing("notificationTargets", "at least one is required")
    return AlertPolicy(
        read_metadata(root),
        alert_when_no_data=spec.flag("alertWhenNoData") or False,
        alert_when_resolved=spec.flag("alertWhenResolved") or False,
        alert_when_breaching=spec.flag("alertWhenBreaching") or False,
        conditions=tuple(
            _inline_or_ref(item, "conditionRef", "AlertCondition", _alert_condition) for item in conditions
        ),
        targets=tuple(
            _inline_or_ref(item, "targetRef", "AlertNotificationTarget", _notification_target) for item in targets
        ),
        description=read_description(spec),
    )


def _inline_or_ref(item: Cursor, ref_key: str, kind: str, reader: Callable[[Cursor, Cursor], T]) -> T | str:
    if item.has(ref_key):
        item.mapping(frozenset({ref_key}))
        return read_name(item, ref_key, required=True)
    item.mapping(frozenset({"kind", "metadata", "spec", "apiVersion"}))
    if item.has("kind"):
        item.choice("kind", (kind,))
    else:
        item.missing("kind", f"{ref_key}, or an inline {kind} with kind, metadata and spec, is required")
    return reader(item, item.need("spec") or item)


def _slo(root: Cursor, spec: Cursor) -> SLODocument:
    spec.mapping(_SLO)
    metadata = read_metadata(root)
    method = spec.choice("budgetingMethod", METHODS, required=True)
    objectives = spec.items("objectives")
    if not objectives:
        spec.missing("objectives", "at least one is required")
    inline = spec.get("indicator")
    document = SLODocument(
        metadata,
        service=read_name(spec, "service", required=True),
        window=_only_window(spec),
        method=_method(method),
        objectives=tuple(_objective(item, method) for item in objectives),
        indicator=_inline_indicator(inline) if inline is not None else None,
        indicator_ref=read_name(spec, "indicatorRef"),
        alert_policies=tuple(
            _inline_or_ref(item, "alertPolicyRef", "AlertPolicy", _alert_policy) for item in spec.items("alertPolicies")
        ),
        description=read_description(spec),
        composite=any(item.has("indicator") or item.has("indicatorRef") for item in objectives),
    )
    _check_indicators(spec, objectives, document)
    return document


def _method(text: str) -> BudgetingMethod:
    return next((method for method in METHODS if method == text), "Occurrences")


def _only_window(spec: Cursor) -> WindowSpec:
    windows = spec.items("timeWindow")
    if len(windows) != 1:
        spec.document.report(f"{spec.path}.timeWindow", f"exactly one is required, got {len(windows)}", kind="count")
        return WindowSpec(DurationText(1, "d"))
    return read_window(windows[0])


def _inline_indicator(here: Cursor) -> Indicator:
    here.mapping(frozenset({"metadata", "spec", "kind", "apiVersion"}))
    spec = here.need("spec")
    metadata = read_metadata(here)
    return read_indicator(metadata, spec) if spec is not None else Indicator(metadata)


def _objective(here: Cursor, method: str) -> Objective:
    here.mapping(_OBJECTIVE)
    weight = here.number("compositeWeight")
    if weight is not None and weight <= 0:
        here.document.report(f"{here.path}.compositeWeight", f"must be above 0, got {weight}", kind="range")
    inline = here.get("indicator")
    return Objective(
        target=read_target(here),
        display_name=here.text("displayName"),
        op=here.choice("op", OPERATORS),
        value=here.number("value"),
        slice_target=_slice_target(here, method),
        slice_window=read_duration(here, "timeSliceWindow", required=method in {"Timeslices", "RatioTimeslices"}),
        indicator=_inline_indicator(inline) if inline is not None else None,
        indicator_ref=read_name(here, "indicatorRef"),
        composite_weight=weight if weight is not None else Decimal(1),
    )


def _slice_target(here: Cursor, method: str) -> Decimal | None:
    value = here.number("timeSliceTarget")
    if method == "Timeslices" and not here.has("timeSliceTarget"):
        here.missing("timeSliceTarget", "required for Timeslices")
    if value is not None and not 0 < value <= 1:
        here.document.report(
            f"{here.path}.timeSliceTarget", f"must be above 0 and at most 1, got {value}", kind="range"
        )
    return value


def _check_indicators(spec: Cursor, objectives: list[Cursor], document: SLODocument) -> None:
    """One indicator for all objectives, or one for each: never both, never neither."""
    shared = spec.has("indicator") or spec.has("indicatorRef")
    if spec.has("indicator") and spec.has("indicatorRef"):
        spec.problem("indicator and indicatorRef exclude each other", kind="exclusive")
    if not shared and not document.composite:
        spec.missing("indicator", "indicator or indicatorRef is required")
    for item, objective in zip(objectives, document.objectives, strict=True):
        own = item.has("indicator") or item.has("indicatorRef")
        if own and shared:
            item.problem("has its own indicator although the SLO has one for all objectives", kind="exclusive")
        if item.has("indicator") and item.has("indicatorRef"):
            item.problem("indicator and indicatorRef exclude each other", kind="exclusive")
        if document.composite and not own and not shared:
            item.missing("indicator", "every objective of a composite SLO needs one")
        _check_operator(item, objective.indicator or document.indicator)


def _check_operator(item: Cursor, indicator: Indicator | None) -> None:
    if indicator is None:
        return
    if indicator.threshold is not None:
        for key in ("op", "value"):
            if not item.has(key):
                item.missing(key, "required with thresholdMetric")
    for key in ("op", "value"):
        if indicator.ratio is not None and item.has(key):
            item.document.report(
                f"{item.path}.{key}", "has no meaning with ratioMetric and is ignored", severity="warning"
            )


_READERS: dict[str, Callable[[Cursor, Cursor], SpecObject]] = {
    "SLO": _slo,
    "SLI": _indicator,
    "Service": _service,
    "DataSource": _data_source,
    "AlertPolicy": _alert_policy,
    "AlertCondition": _alert_condition,
    "AlertNotificationTarget": _notification_target,
}
