"""OpenSLO v1 files: what is accepted, and the exact place and words of what is not."""

from __future__ import annotations

import json
import textwrap
from decimal import Decimal
from pathlib import Path

import pytest

from pasta_otel.errors import InputError
from pasta_otel.model import SpanSLI
from pasta_otel.slo.spec.document import SpecError
from pasta_otel.slo.spec.load import check, load
from pasta_otel.slo.spec.model import Indicator, RatioMetric

CASES = Path(__file__).parents[1] / "fixtures" / "cases"

GOOD = """
apiVersion: openslo/v1
kind: SLO
metadata:
  name: orders
  annotations: {owner: team-orders, runbook: https://example.com/r, dashboard: https://example.com/d}
spec:
  service: order-api
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  indicator:
    metadata: {name: fast-and-right}
    spec:
      ratioMetric:
        counter: true
        good: {metricSource: {type: spans, spec: {good: "status != error", threshold_ms: 300.5}}}
        total: {metricSource: {type: spans, spec: {service: order-api, operation: POST /orders, where: {http.route: /orders}}}}
  objectives:
    - target: 0.95
"""


def write(tmp_path, text: str, name: str = "slo.yaml") -> Path:
    file = tmp_path / name
    file.write_text(textwrap.dedent(text))
    return file


def places(found) -> list[tuple[int | None, str, str]]:
    return [(problem.line, problem.field, problem.kind) for problem in found.problems]


def test_a_ratio_over_spans_becomes_one_span_indicator(tmp_path):
    (slo,) = load([write(tmp_path, GOOD)]).slos
    assert slo.sli == SpanSLI(
        "order-api", "POST /orders", "server", (("http.route", "/orders"),), good_status=True, threshold_ns=300_500_000
    )
    assert slo.objective == Decimal("0.95")
    assert dict(slo.annotations)["owner"] == "team-orders"


def test_a_raw_indicator_over_spans_needs_one_source_only(tmp_path):
    text = GOOD.replace("counter: true", "rawType: success").replace("good: {metricSource", "raw: {metricSource")
    text = text.replace('{good: "status != error"', "{service: order-api, good: any")
    text = "\n".join(line for line in text.splitlines() if "total:" not in line)
    (slo,) = load([write(tmp_path, text)]).slos
    assert slo.sli == SpanSLI("order-api", good_status=False, threshold_ns=300_500_000)


@pytest.mark.case("S07")
def test_good_bad_total_and_raw_exclude_one_another_as_the_standard_says():
    expected = json.loads((CASES / "S07" / "expected.json").read_text())
    files = sorted((CASES / "S07").glob("*.yaml"))
    assert len(files) == 10
    assert [file.name for file in files if not check([file]).errors] == expected["valid"]
    kinds = {file.name[:2]: [(p.field, p.kind) for p in check([file]).errors] for file in files}
    assert kinds["01"] == [("spec.ratioMetric", "meaningless_ratio")]
    assert kinds["02"] == [("spec.ratioMetric", "exclusive")]
    assert kinds["03"] == [("spec.ratioMetric.rawType", "required")]
    assert kinds["04"] == [("spec.ratioMetric", "exclusive")]
    assert kinds["05"] == [("spec.ratioMetric.good", "required")]
    assert kinds["06"] == [("spec", "exclusive")]
    assert kinds["07"] == [("spec.ratioMetric.rawType", "choice")]


@pytest.mark.case("S07")
def test_a_raw_failure_ratio_is_turned_into_a_share_of_good_events():
    (read,) = check([CASES / "S07" / "10_ok_raw_failure.yaml"]).objects
    assert isinstance(read, Indicator)
    assert read.ratio is not None
    assert read.ratio.sli_of_raw(0.02) == pytest.approx(0.98)
    assert RatioMetric(raw_type="success").sli_of_raw(0.02) == 0.02


@pytest.mark.parametrize("number", ["1", "1.0", "1.5", "-0.1", "100"])
def test_a_target_outside_zero_to_below_one_is_refused_at_its_line(tmp_path, number):
    found = check([write(tmp_path, GOOD.replace("target: 0.95", f"target: {number}"))])
    assert places(found) == [(19, "spec.objectives[0].target", "range")]


def test_target_percent_is_a_ratio_times_a_hundred_and_excludes_target(tmp_path):
    (slo,) = load([write(tmp_path, GOOD.replace("target: 0.95", "targetPercent: 99.9"))]).slos
    assert slo.objective == Decimal("0.999")
    both = check([write(tmp_path, GOOD.replace("target: 0.95", "target: 0.9\n      targetPercent: 90"))])
    assert places(both) == [(19, "spec.objectives[0]", "exclusive")]


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("service: order-api\n  budgeting", "serivce: order-api\n  budgeting", (8, "spec.serivce", "unknown_field")),
        ("name: orders\n", "name: Orders_1\n", (5, "metadata.name", "name")),
        ("Occurrences", "Sometimes", (9, "spec.budgetingMethod", "choice")),
        ("duration: 1h", "duration: 1 hour", (10, "spec.timeWindow[0].duration", "duration")),
        ("isRolling: true", "isRolling: false", (10, "spec.timeWindow[0].calendar", "required")),
        ("target: 0.95", "target: high", (19, "spec.objectives[0].target", "type")),
        ("target: 0.95", "target: .nan", (19, "spec.objectives[0].target", "type")),
        (
            'good: "status != error"',
            "good: often",
            (16, "spec.indicator.spec.ratioMetric.good.metricSource.spec.good", "choice"),
        ),
        (
            "threshold_ms: 300.5",
            "threshold_ms: -1",
            (16, "spec.indicator.spec.ratioMetric.good.metricSource.spec.threshold_ms", "range"),
        ),
        (
            "{good: ",
            "{service: other, good: ",
            (16, "spec.indicator.spec.ratioMetric.good.metricSource.spec.service", "selector"),
        ),
    ],
)
def test_every_wrong_field_is_named_with_its_line(tmp_path, old, new, place):
    assert old in GOOD
    found = check([write(tmp_path, GOOD.replace(old, new, 1))])
    assert place in places(found)
    assert not found.slos


def test_an_error_text_reads_file_line_field_message(tmp_path):
    file = write(tmp_path, GOOD.replace("target: 0.95", "target: 1"))
    with pytest.raises(SpecError) as caught:
        load([file])
    assert str(caught.value) == (
        f"{file}:19: spec.objectives[0].target: must be at least 0 and below 1, got 1:"
        " an objective of 100 % leaves no error budget"
    )


def test_references_are_found_across_files_and_missing_ones_are_named(tmp_path):
    slo = GOOD.split("  indicator:", maxsplit=1)[0] + "  indicatorRef: shared\n  objectives: [{target: 0.9}]\n"
    sli = """
    apiVersion: openslo/v1
    kind: SLI
    metadata: {name: shared}
    spec:
      ratioMetric:
        rawType: success
        raw: {metricSource: {type: spans, spec: {service: order-api}}}
    """
    alone = write(tmp_path, slo)
    assert places(check([alone])) == [(11, "spec.indicatorRef", "reference")]
    nested = tmp_path / "nested"
    nested.mkdir()
    write(nested, sli, "sli.yml")
    (found,) = load([tmp_path]).slos
    assert found.sli == SpanSLI("order-api")


def test_one_name_twice_is_refused_and_says_where_the_first_one_stands(tmp_path):
    first, second = write(tmp_path, GOOD, "a.yaml"), write(tmp_path, GOOD, "b.yaml")
    (problem,) = check([first, second]).problems
    assert problem.kind == "duplicate_name"
    assert str(first) in problem.message


@pytest.mark.parametrize("version", ["openslo/v3", "sre.google.com/v2", "pyrra.dev/v1alpha1"])
def test_another_api_version_is_one_error_that_names_it(tmp_path, version):
    (problem,) = check([write(tmp_path, f"apiVersion: {version}\nkind: SLO\nspec: {{}}\n")]).problems
    assert problem.kind == "api_version"
    assert f"{version!r} is not supported" in problem.message
    assert problem.line == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a: [", "yaml"),
        ("- 1\n", "type"),
        ("just text", "type"),
        ("", "empty"),
        ("a: &a [*a]", "yaml"),
        ("\x00", "yaml"),
        (
            "apiVersion: openslo/v1\napiVersion: openslo/v1\nkind: Service\nmetadata: {name: a}\nspec: {}",
            "duplicate_key",
        ),
    ],
)
def test_what_is_not_a_specification_is_a_problem_not_a_crash(tmp_path, text, kind):
    assert kind in {problem.kind for problem in check([write(tmp_path, text)]).errors}


def test_aliases_cannot_blow_a_small_file_up(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    (problem,) = check([write(tmp_path, "\n".join(lines))]).problems
    assert problem.kind == "yaml"


def test_a_file_that_is_not_there_is_unreadable(tmp_path):
    with pytest.raises(InputError) as caught:
        check([tmp_path / "none.yaml"])
    assert caught.value.kind == "unreadable"


def test_the_good_objects_of_a_file_are_kept_beside_a_bad_one(tmp_path):
    bad = GOOD.replace("name: orders\n", "name: other\n").replace("target: 0.95", "target: 1")
    found = check([write(tmp_path, GOOD + "---" + bad)])
    assert [slo.name for slo in found.slos] == ["orders"]
    assert places(found) == [(38, "spec.objectives[0].target", "range")]


def test_several_objectives_get_names_of_their_own(tmp_path):
    text = GOOD.replace("    - target: 0.95", "    - {displayName: tight, target: 0.95}\n    - {target: 0.5}")
    assert [slo.name for slo in load([write(tmp_path, text)]).slos] == ["orders/tight", "orders/1"]
