"""OpenSLO v1alpha: older spellings of the same model; messages use the words of the user's own file."""

from __future__ import annotations

import re
from decimal import Decimal

from pasta_otel.slo.spec.document import Cursor, Severity
from pasta_otel.slo.spec.fields import NAME, read_description, read_duration, read_start_time, read_target, read_zone
from pasta_otel.slo.spec.model import (
    BudgetingMethod,
    DurationText,
    Indicator,
    Metadata,
    MetricSource,
    Objective,
    RatioMetric,
    Read,
    Service,
    SLODocument,
    WindowSpec,
)

API_VERSION = "openslo/v1alpha"
METHODS: tuple[BudgetingMethod, ...] = ("Occurrences", "Timeslices")
OPERATORS = ("lte", "gte", "lt", "gt")
UNITS = {"Minute": "m", "Hour": "h", "Day": "d", "Week": "w", "Month": "M", "Quarter": "Q", "Year": "Y"}
_SLO = frozenset({"description", "service", "indicator", "timeWindows", "budgetingMethod", "objectives"})
_OBJECTIVE = frozenset({"displayName", "op", "value", "target", "timeSliceTarget", "timeSliceWindow", "ratioMetrics"})
_METRIC = frozenset({"source", "queryType", "query", "metadata"})
_RANGE = re.compile(r"\[[^\]]+\]")


def read_objects(root: Cursor) -> list[Read]:
    """Return the object that stands at a cursor; what is wrong is recorded in its document."""
    root.mapping(frozenset({"apiVersion", "kind", "metadata", "spec"}))
    kind = root.choice("kind", ("SLO", "Service"), required=True)
    spec = root.get("spec")
    if kind == "Service":
        return [Read(Service(_metadata(root), _service_description(spec)))]
    if kind != "SLO":
        return []
    if spec is None:
        root.missing("spec")
        return []
    return [Read(_slo(root, spec))]


def _service_description(spec: Cursor | None) -> str:
    if spec is None:
        return ""
    spec.mapping(frozenset({"description"}))
    return read_description(spec)


def _metadata(root: Cursor) -> Metadata:
    here = root.need("metadata")
    if here is None:
        return Metadata("")
    here.mapping(frozenset({"name", "displayName"}))
    name = here.text("name", required=True)
    found = here.get("name")
    if found is not None and name and not NAME.match(name):
        severity: Severity = "warning"
        found.problem(f"{name!r} would not be a valid name in OpenSLO v1", kind="name", severity=severity)
    return Metadata(name, here.text("displayName"))


def _slo(root: Cursor, spec: Cursor) -> SLODocument:
    spec.mapping(_SLO)
    method = spec.choice("budgetingMethod", METHODS, required=True)
    objectives = spec.items("objectives")
    if not objectives:
        spec.missing("objectives", "at least one is required")
    shared = spec.get("indicator")
    indicator = _threshold(shared) if shared is not None else None
    document = SLODocument(
        _metadata(root),
        service=spec.text("service", required=True),
        window=_window(spec),
        method="Timeslices" if method == "Timeslices" else "Occurrences",
        objectives=tuple(_objective(item, method, has_indicator=indicator is not None) for item in objectives),
        indicator=indicator,
        description=read_description(spec),
    )
    if method == "Occurrences":
        for item in objectives:
            _warn_of_gauges(item)
    return document


def _threshold(here: Cursor) -> Indicator | None:
    here.mapping(frozenset({"thresholdMetric", "metadata"}))
    metric = here.need("thresholdMetric")
    return None if metric is None else Indicator(Metadata(""), threshold=_metric(metric))


def _metric(here: Cursor) -> MetricSource:
    here.mapping(_METRIC)
    return MetricSource(
        type=here.text("source", required=True),
        spec={"query": here.text("query", required=True), "queryType": here.text("queryType")},
        path=here.path,
    )


def _objective(here: Cursor, method: str, *, has_indicator: bool) -> Objective:
    here.mapping(_OBJECTIVE)
    ratio = here.get("ratioMetrics")
    if (ratio is None) != has_indicator:
        here.problem("exactly one of indicator.thresholdMetric and ratioMetrics is required", kind="exclusive")
    if has_indicator:
        for key in ("op", "value"):
            if not here.has(key):
                here.missing(key, "required with thresholdMetric")
    sliced = method == "Timeslices"
    if sliced and not here.has("timeSliceTarget"):
        here.missing("timeSliceTarget", "required for Timeslices")
    slice_target = here.number("timeSliceTarget")
    if slice_target is not None and not 0 < slice_target <= 1:
        here.document.report(
            f"{here.path}.timeSliceTarget", f"must be above 0 and at most 1, got {slice_target}", kind="range"
        )
    return Objective(
        target=read_target(here),
        display_name=here.text("displayName"),
        op=here.choice("op", OPERATORS),
        value=here.number("value"),
        slice_target=slice_target,
        slice_window=_slice_window(here, required=sliced),
        indicator=_ratio(ratio) if ratio is not None else None,
        composite_weight=Decimal(1),
    )


def _slice_window(here: Cursor, *, required: bool) -> DurationText | None:
    found = here.get("timeSliceWindow")
    if found is None:
        if required:
            here.missing("timeSliceWindow", "required for Timeslices")
        return None
    if isinstance(found.value, int) and not isinstance(found.value, bool) and found.value > 0:
        return DurationText(found.value, "m")  # v1alpha allowed a bare number of minutes
    return read_duration(here, "timeSliceWindow")


def _ratio(here: Cursor) -> Indicator:
    here.mapping(frozenset({"good", "total", "incremental", "counter"}))
    good, total = here.need("good"), here.need("total")
    counter = here.flag("incremental")
    ratio = RatioMetric(
        counter=bool(counter if counter is not None else here.flag("counter")),
        good=_metric(good) if good is not None else None,
        total=_metric(total) if total is not None else None,
    )
    if ratio.good and ratio.total and "".join(_query(ratio.good).split()) == "".join(_query(ratio.total).split()):
        here.problem("good and total are the same query: the ratio is always 1", kind="meaningless_ratio")
    return Indicator(Metadata(""), ratio=ratio)


def _query(metric: MetricSource) -> str:
    return str(metric.spec.get("query", ""))


def _warn_of_gauges(item: Cursor) -> None:
    """Occurrences need events over a window; an instant gauge has none."""
    ratio = item.get("ratioMetrics")
    for key in ("good", "total"):
        metric = ratio.get(key) if ratio is not None else None
        query = metric.get("query") if metric is not None else None
        if query is not None and isinstance(query.value, str) and not _RANGE.search(query.value):
            query.problem(
                "an instant gauge without a range window: Occurrences need events over a window",
                kind="instant_gauge",
                severity="warning",
            )


def _window(spec: Cursor) -> WindowSpec:
    windows = spec.items("timeWindows")
    if len(windows) != 1:
        spec.document.report(f"{spec.path}.timeWindows", f"exactly one is required, got {len(windows)}", kind="count")
        return WindowSpec(DurationText(1, "d"))
    here = windows[0]
    here.mapping(frozenset({"unit", "count", "isRolling", "calendar"}))
    unit = here.choice("unit", tuple(UNITS), required=True)
    count = here.number("count")
    if count is None or count != int(count) or count < 1:
        here.document.report(f"{here.path}.count", "expected a whole number above 0", kind="type")
        count = Decimal(1)
    duration = DurationText(int(count), UNITS.get(unit, "d"))
    calendar = here.get("calendar")
    if calendar is None:
        if here.flag("isRolling") is False:
            here.missing("calendar", "required unless isRolling is true")
        return WindowSpec(duration)
    if here.flag("isRolling"):
        here.problem("isRolling: true and calendar exclude each other", kind="exclusive")
    calendar.mapping(frozenset({"startTime", "timeZone"}))
    return WindowSpec(duration, read_start_time(calendar), read_zone(calendar))
