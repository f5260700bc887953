"""Scenario files: series in, verdicts out, checked by promtool on the rules that the SLOs make.

promtool compares exactly, so every expectation is an expression with its tolerance inside, which must be 1.
Schema: docs/reference/slo-scenario.schema.json.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from pasta_otel.errors import InputError
from pasta_otel.slo.alerts import plain
from pasta_otel.slo.rules.build import alert_name
from pasta_otel.slo.spec.document import Cursor, Document, SpecError, read_documents
from pasta_otel.slo.spec.model import SLO
from pasta_otel.slo.windows import DEFAULT

KIND = "SLOScenario"
DEFAULT_TOLERANCE = Decimal("0.000001")
_DURATION = re.compile(r"^([0-9]+(ms|[smhdwy]))+$")
_MEASURES = ("error_ratio", "burn_rate", "budget_remaining")
_TOP = frozenset({"kind", "name", "slo", "windows", "interval", "series", "expect"})
_EXPECT = frozenset({"at", "slo", "window", "tolerance", "absent", "alerts", *_MEASURES})


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must hold at one time.

    Attributes:
        at: Time from the start, as Prometheus writes durations.
        slo: Name of the SLO.
        measure: ``error_ratio``, ``burn_rate``, ``budget_remaining``, or empty for alerts.
        window: Window of ``error_ratio``.
        value: Expected value; None = the measure must be absent.
        tolerance: Relative tolerance.
        alerts: Severities that must fire, and no others; None = not checked.
    """

    at: str
    slo: str
    measure: str = ""
    window: str = ""
    value: Decimal | None = None
    tolerance: Decimal = DEFAULT_TOLERANCE
    alerts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario file.

    Attributes:
        name: For messages.
        slo_files: SLO files, relative to the scenario's own folder.
        windows: Burn-rate windows.
        interval: Time between samples and between evaluations.
        series: (series, values in promtool's notation).
        expectations: What must hold.
    """

    name: str
    slo_files: tuple[Path, ...]
    windows: str
    interval: str
    series: tuple[tuple[str, str], ...]
    expectations: tuple[Expectation, ...]


def read_scenario(path: Path) -> Scenario:
    """Return a scenario.

    Raises:
        SpecError: Naming file, line and field.
        InputError: The file cannot be read or does not hold exactly one document.
    """
    documents = read_documents(path)
    if len(documents) != 1:
        raise InputError("expected exactly one document", file=str(path))
    scenario = _read(documents[0], path)
    errors = [problem for problem in documents[0].problems if problem.severity == "error"]
    if errors:
        raise SpecError(errors)
    return scenario


def _read(document: Document, path: Path) -> Scenario:
    root = document.root
    root.mapping(_TOP)
    root.choice("kind", (KIND,), required=True)
    for key in ("slo", "series", "expect"):
        if not root.items(key):
            root.missing(key, "at least one is required")
    series = root.items("series")
    for item in series:
        item.mapping(frozenset({"series", "values"}))
    return Scenario(
        name=root.text("name", required=True),
        slo_files=tuple(path.parent / str(item.value) for item in root.items("slo")),
        windows=root.text("windows", default=DEFAULT),
        interval=_duration(root, "interval", default="1m"),
        series=tuple((item.text("series", required=True), item.text("values", required=True)) for item in series),
        expectations=tuple(_expectation(item) for item in root.items("expect")),
    )


def _duration(here: Cursor, key: str, default: str = "") -> str:
    text = here.text(key, required=not default, default=default)
    if text and not _DURATION.match(text):
        here.document.report(
            f"{here.path}.{key}".lstrip("."), f"{text!r} is not a duration such as 65m", kind="duration"
        )
    return text


def _expectation(item: Cursor) -> Expectation:
    item.mapping(_EXPECT)
    given = [measure for measure in _MEASURES if item.has(measure)]
    absent = item.choice("absent", _MEASURES)
    alerts = tuple(str(entry.value) for entry in item.items("alerts")) if item.has("alerts") else None
    if len(given) + bool(absent) + (alerts is not None) != 1:
        item.problem(f"exactly one of {', '.join(_MEASURES)}, absent and alerts is required", kind="exclusive")
    measure = given[0] if given else absent
    if measure == "error_ratio" and not item.has("window"):
        item.missing("window", "required with error_ratio")
    tolerance = item.number("tolerance")
    return Expectation(
        at=_duration(item, "at"),
        slo=item.text("slo", required=True),
        measure=measure,
        window=item.text("window"),
        value=item.number(given[0]) if given else None,
        tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance,
        alerts=alerts,
    )


def promtool_document(scenario: Scenario, rules_file: str, slos: Sequence[SLO]) -> dict[str, Any]:
    """Return promtool's test file.

    Raises:
        InputError: An expectation names an SLO that the files do not hold.
    """
    by_name = {slo.name: slo for slo in slos}
    for expectation in scenario.expectations:
        if expectation.slo not in by_name:
            raise InputError(f"no SLO named {expectation.slo!r}; there are {', '.join(by_name)}", field="expect.slo")
    queries = [_query(item, by_name[item.slo]) for item in scenario.expectations]
    return {
        "rule_files": [rules_file],
        "evaluation_interval": scenario.interval,
        "tests": [
            {
                "name": scenario.name,
                "interval": scenario.interval,
                "input_series": [{"series": name, "values": values} for name, values in scenario.series],
                "promql_expr_test": [query for query in queries if query],
            }
        ],
    }


def _query(item: Expectation, slo: SLO) -> dict[str, Any]:
    expression = _alerts(item, slo) if item.alerts is not None else _measure(item, slo)
    return {"expr": expression, "eval_time": item.at, "exp_samples": [{"labels": "{}", "value": 1}]}


def _measure(item: Expectation, slo: SLO) -> str:
    name = {
        "error_ratio": f"slo:sli_error:ratio_rate{item.window}",
        "burn_rate": "slo:current_burn_rate:ratio",
        "budget_remaining": "slo:period_error_budget_remaining:ratio",
    }[item.measure]
    series = f'{name}{{sloth_slo="{_slo_label(slo)}", sloth_service="{slo.service}"}}'
    if item.value is None:
        return f"absent(sum({series}))"
    allowed = max(abs(item.value) * item.tolerance, Decimal("1e-12"))
    return f"abs(sum({series}) - ({plain(item.value)})) <= bool {plain(allowed)}"


def _alerts(item: Expectation, slo: SLO) -> str:
    """Count the severities that fire: exactly the wanted ones."""
    firing = f'ALERTS{{alertname="{alert_name(slo)}", alertstate="firing", sloth_slo="{_slo_label(slo)}"'
    wanted = "|".join(item.alerts or ("none",))
    right = f'(count(count by (sloth_severity) ({firing}, sloth_severity=~"{wanted}"}})) or vector(0))'
    wrong = f'(count({firing}, sloth_severity!~"{wanted}"}}) or vector(0))'
    return f"({right} == bool {len(set(item.alerts or ()))}) * ({wrong} == bool 0)"


def _slo_label(slo: SLO) -> str:
    return slo.name.removeprefix(f"{slo.service}-").replace("/", "-")
