"""Read an OpenSLO v1 indicator: a ratio of good, bad and total, a raw ratio, or a threshold metric."""

from __future__ import annotations

from pasta_otel.model import SpanSLI
from pasta_otel.slo.spec import otlp, spans
from pasta_otel.slo.spec.document import Cursor
from pasta_otel.slo.spec.fields import read_description, read_name
from pasta_otel.slo.spec.model import Indicator, Metadata, MetricSource, OtlpSLI, RatioMetric

RAW_TYPES = ("success", "failure")
_PARTS = ("good", "bad", "total", "raw")


def read_indicator(metadata: Metadata, spec: Cursor) -> Indicator:
    """Return the indicator whose ``spec`` stands at the cursor."""
    spec.mapping(frozenset({"description", "thresholdMetric", "ratioMetric"}))
    ratio, threshold = spec.get("ratioMetric"), spec.get("thresholdMetric")
    if (ratio is None) == (threshold is None):
        spec.problem("exactly one of thresholdMetric and ratioMetric is required", kind="exclusive")
    return Indicator(
        metadata,
        ratio=_ratio(ratio) if ratio is not None else None,
        threshold=_metric(threshold) if threshold is not None else None,
        description=read_description(spec),
    )


def _ratio(here: Cursor) -> RatioMetric:
    here.mapping(frozenset({"counter", "rawType", *_PARTS}))
    parts = {key: _metric(found) for key in _PARTS if (found := here.get(key)) is not None}
    raw_type = here.choice("rawType", RAW_TYPES)
    _check_parts(here, set(parts), has_raw_type=here.has("rawType"))
    _check_meaning(here, parts)
    return RatioMetric(
        spans=_spans(here, parts),
        otlp=_otlp(here, parts),
        counter=here.flag("counter") or False,
        good=parts.get("good"),
        bad=parts.get("bad"),
        total=parts.get("total"),
        raw=parts.get("raw"),
        raw_type=raw_type,
    )


def _check_parts(here: Cursor, parts: set[str], *, has_raw_type: bool) -> None:
    if "raw" in parts:
        if len(parts) > 1:
            here.problem(f"raw excludes {', '.join(sorted(parts - {'raw'}))}", kind="exclusive")
        if not has_raw_type:
            here.missing("rawType", "required with raw: success or failure")
        return
    if {"good", "bad"} <= parts:
        here.problem("good and bad exclude each other", kind="exclusive")
    if not parts & {"good", "bad"}:
        here.missing("good", "good or bad is required")
    if "total" not in parts:
        here.missing("total")


def _check_meaning(here: Cursor, parts: dict[str, MetricSource]) -> None:
    """A ratio of one query to itself is always 1 and says nothing."""
    total = parts.get("total")
    for key in ("good", "bad"):
        part = parts.get(key)
        if part and total and part.spec and (part.type, part.ref) == (total.type, total.ref):
            query, whole = part.spec.get("query"), total.spec.get("query")
            same = _normal(query) == _normal(whole) if isinstance(query, str) and isinstance(whole, str) else False
            if same and _normal(query) != "Any":
                here.problem(f"{key} and total are the same query: the ratio is always 1", kind="meaningless_ratio")


def _normal(query: object) -> str:
    return "".join(str(query).split())


def _metric(here: Cursor) -> MetricSource:
    here.mapping(frozenset({"metricSource"}))
    source = here.need("metricSource")
    if source is None:
        return MetricSource("")
    source.mapping(frozenset({"type", "metricSourceRef", "spec"}))
    spec = source.need("spec")
    if spec is not None and isinstance(spec.value, dict):
        _check_histogram(source, spec)
    if spec is not None and spec.value == {} and source.text("type") != spans.SOURCE_TYPE:
        spec.problem("must not be empty", kind="required")
    if not source.has("type") and not source.has("metricSourceRef"):
        source.missing("type", "type or metricSourceRef is required")
    return MetricSource(
        type=source.text("type"),
        ref=read_name(source, "metricSourceRef"),
        spec=spec.mapping() if spec is not None else {},
        path=source.path,
    )


def _check_histogram(source: Cursor, spec: Cursor) -> None:
    """Our own form of a Prometheus source: a histogram and a threshold instead of a query."""
    if source.text("type").lower() != "prometheus" or not spec.has("histogram"):
        return
    spec.mapping(frozenset({"histogram", "threshold", "selector"}))
    spec.text("histogram", required=True)
    spec.text("selector")
    threshold = spec.number("threshold")
    if threshold is not None and threshold <= 0:
        spec.document.report(f"{spec.path}.threshold", f"must be above 0, got {threshold}", kind="range")


def _spans(here: Cursor, parts: dict[str, MetricSource]) -> SpanSLI | None:
    """Return the span SLI of a ratio whose source is spans; None for another source."""
    specs = {
        key: spec for key, part in parts.items() if (spec := _own_spec(here, key, part, spans.SOURCE_TYPE)) is not None
    }
    if not specs:
        return None
    if "bad" in specs:
        here.problem("a ratio over spans takes good and total, or raw with rawType: success", kind="choice")
        return None
    if "raw" in specs:
        return spans.read_spans(specs["raw"])
    if specs.keys() != {"good", "total"}:
        here.problem("good and total must both be of type spans", kind="type")
        return None
    return spans.combine(
        specs["good"], spans.read_spans(specs["good"], inherits=True), spans.read_spans(specs["total"])
    )


def _own_spec(here: Cursor, key: str, part: MetricSource, source_type: str) -> Cursor | None:
    if part.type.lower() != source_type:
        return None
    metric = here.get(key)
    source = metric.get("metricSource") if metric is not None else None
    return source.get("spec") if source is not None else None


def _otlp(here: Cursor, parts: dict[str, MetricSource]) -> OtlpSLI | None:
    """Return the SLI of a ratio whose source is OTLP metrics; None for another source."""
    specs = {key: spec for key, part in parts.items() if (spec := _own_spec(here, key, part, otlp.SOURCE_TYPE))}
    if not specs:
        return None
    if "raw" in specs or "total" not in specs or len(specs) != 2:
        here.problem("a ratio over otlp takes total with good or bad, all of type otlp", kind="type")
        return None
    selectors = {key: otlp.read_selector(spec) for key, spec in specs.items()}
    if selectors["total"] in (selectors.get("good"), selectors.get("bad")):
        here.problem("both select the same points: the ratio is always 1", kind="meaningless_ratio")
    return OtlpSLI(selectors["total"], good=selectors.get("good"), bad=selectors.get("bad"))
