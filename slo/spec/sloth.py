"""Sloth's ``prometheus/v1`` files and its custom resource ``PrometheusServiceLevel``, read as the same model.

What Sloth allows and we refuse: an objective of 100 (no budget). What Sloth ignores silently we warn of: unknown
fields. Plugin chains are programs, which we do not run; we warn of them too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from pasta_otel.slo.spec.document import Cursor
from pasta_otel.slo.spec.model import (
    Alerting,
    Annotations,
    DurationText,
    Indicator,
    Labels,
    Metadata,
    MetricSource,
    Objective,
    RatioMetric,
    Read,
    SLODocument,
    WindowSpec,
)

VERSION = "prometheus/v1"
API_VERSION = "sloth.slok.dev/v1"
DEFAULT_PERIOD = WindowSpec(DurationText(30, "d"))
SEVERITIES = ("page", "ticket")
WINDOW = re.compile(r"\{\{\s*\.window\s*\}\}")
_NAME = re.compile(r"^[A-Za-z0-9][-A-Za-z0-9_.]*[A-Za-z0-9]$")  # Sloth's own: one letter alone does not match


@dataclass(frozen=True, slots=True)
class _Spelling:
    """The file and the custom resource differ in spelling only."""

    error_query: str
    total_query: str
    ratio_query: str
    page: str
    ticket: str
    plugins: str


_FILE = _Spelling("error_query", "total_query", "error_ratio_query", "page_alert", "ticket_alert", "slo_plugins")
_RESOURCE = _Spelling("errorQuery", "totalQuery", "errorRatioQuery", "pageAlert", "ticketAlert", "sloPlugins")


def read_objects(root: Cursor) -> list[Read]:
    """Return the SLOs of a ``prometheus/v1`` file."""
    root.mapping(frozenset({"version", "service", "labels", "slos", _FILE.plugins}), unknown="warning")
    return _slos(root, _FILE)


def read_custom_resource(root: Cursor) -> list[Read]:
    """Return the SLOs of a ``PrometheusServiceLevel``; other kinds hold none."""
    kind = root.choice("kind", ("PrometheusServiceLevel", "AlertWindows"), required=True)
    spec = root.need("spec")
    if kind != "PrometheusServiceLevel" or spec is None:
        return []
    spec.mapping(frozenset({"service", "labels", "slos", _RESOURCE.plugins}), unknown="warning")
    return _slos(spec, _RESOURCE)


def _slos(here: Cursor, spelling: _Spelling) -> list[Read]:
    service = _name(here, "service")
    _warn_of_plugins(here, spelling.plugins)
    entries = here.items("slos")
    if not entries:
        here.missing("slos", "at least one is required")
    prefix = f"{here.path}." if here.path else ""
    common = _texts(here, "labels")
    return [
        Read(_slo(entry, service, common, spelling), f"{prefix}slos[{number}].name", scope=entry.path)
        for number, entry in enumerate(entries)
    ]


def _slo(entry: Cursor, service: str, common: Annotations, spelling: _Spelling) -> SLODocument:
    entry.mapping(
        frozenset({"name", "objective", "description", "labels", "sli", "alerting", "plugins"}), unknown="warning"
    )
    _warn_of_plugins(entry, "plugins")
    name = _name(entry, "name")
    merged = dict(common) | dict(_texts(entry, "labels"))
    labels: Labels = tuple((key, (value,)) for key, value in merged.items())
    metadata = Metadata(f"{service}-{name}", display_name=name, labels=labels, annotations=tuple(merged.items()))
    sli = entry.need("sli")
    return SLODocument(
        metadata,
        service=service,
        window=DEFAULT_PERIOD,
        method="Occurrences",
        objectives=(Objective(_objective(entry)),),
        indicator=Indicator(Metadata(name), ratio=_ratio(sli, spelling) if sli is not None else RatioMetric()),
        description=entry.text("description"),
        alerting=_alerting(entry, name, spelling),
    )


def _name(here: Cursor, key: str) -> str:
    name = here.text(key, required=True)
    found = here.get(key)
    if found is not None and name.strip() and not _NAME.match(name):
        found.problem(f"{name!r} is not a valid name: at least two of letters, digits, '-', '_', '.'", kind="name")
    return name


def _objective(entry: Cursor) -> Decimal:
    if not entry.has("objective"):
        entry.missing("objective")
        return Decimal(0)
    percent = entry.number("objective")
    if percent is None:
        return Decimal(0)
    if not 0 < percent < 100:
        hint = ": an objective of 100 % leaves no error budget" if percent == 100 else ""
        entry.document.report(
            f"{entry.path}.objective", f"must be above 0 and below 100, got {percent}{hint}", kind="range"
        )
        return Decimal(0)
    return percent / 100


def _ratio(sli: Cursor, spelling: _Spelling) -> RatioMetric:
    sli.mapping(frozenset({"events", "raw", "plugin"}), unknown="warning")
    present = [key for key in ("events", "raw", "plugin") if sli.has(key)]
    if len(present) != 1:
        sli.problem("exactly one of events, raw and plugin is required", kind="exclusive")
        return RatioMetric()
    here = sli.get(present[0])
    if here is None or present[0] == "plugin":
        return RatioMetric(total=MetricSource("Sloth SLI plugin", path=sli.path))
    if present[0] == "raw":
        return RatioMetric(raw=_metric(here, spelling.ratio_query), raw_type="failure")
    bad, total = _metric(here, spelling.error_query), _metric(here, spelling.total_query)
    if bad.spec["query"] and "".join(str(bad.spec["query"]).split()) == "".join(str(total.spec["query"]).split()):
        here.problem("error and total are the same query: the ratio is always 1", kind="meaningless_ratio")
    return RatioMetric(counter=True, bad=bad, total=total)


def _metric(here: Cursor, key: str) -> MetricSource:
    query = here.text(key, required=True)
    if query and not WINDOW.search(query):
        here.document.report(f"{here.path}.{key}", "does not contain {{.window}}", kind="window")
    return MetricSource("Prometheus", spec={"query": query}, path=here.path)


def _alerting(entry: Cursor, name: str, spelling: _Spelling) -> Alerting:
    here = entry.get("alerting")
    if here is None:
        return Alerting(name)
    here.mapping(frozenset({"name", "labels", "annotations", spelling.page, spelling.ticket}), unknown="warning")
    parts = {
        severity: part
        for severity, key in zip(SEVERITIES, (spelling.page, spelling.ticket), strict=True)
        if (part := here.get(key)) is not None
    }
    for part in parts.values():
        part.mapping(frozenset({"disable", "labels", "annotations"}), unknown="warning")
    disabled = frozenset(severity for severity, part in parts.items() if part.flag("disable"))
    if disabled != set(SEVERITIES) and not here.text("name").strip():
        here.missing("name", "required unless both alerts are disabled")
    return Alerting(
        name=here.text("name") or name,
        labels=_texts(here, "labels"),
        annotations=_texts(here, "annotations"),
        severity_labels=tuple((severity, _texts(part, "labels")) for severity, part in parts.items()),
        severity_annotations=tuple((severity, _texts(part, "annotations")) for severity, part in parts.items()),
        disabled=disabled,
    )


def _texts(here: Cursor, key: str) -> Annotations:
    """Return a mapping of texts; numbers and booleans are written as YAML has them."""
    found = here.get(key)
    if found is None:
        return ()
    pairs = []
    for name, value in found.mapping().items():
        if isinstance(value, (dict, list)):
            found.document.report(f"{found.path}.{name}", "expected text", kind="type")
            continue
        pairs.append((name, str(value).lower() if isinstance(value, bool) else str(value)))
    return tuple(pairs)


def _warn_of_plugins(here: Cursor, key: str) -> None:
    found = here.get(key)
    if found is not None:
        found.problem("plugin chains are programs and are not run", kind="plugins", severity="warning")
