"""What people and machines do to YAML: every file gets an answer, quickly, and none takes the program down."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pasta_otel.slo.spec.load import check

SPEC = """apiVersion: openslo/v1
kind: SLO
metadata: {name: web}
spec:
  service: web
  budgetingMethod: Occurrences
  timeWindow: [{duration: 30d, isRolling: true}]
  indicator:
    metadata: {name: web}
    spec:
      ratioMetric:
        counter: true
        good: {metricSource: {type: spans, spec: {}}}
        total: {metricSource: {type: spans, spec: {service: web}}}
  objectives: [{target: 0.99}]
"""


def problems(tmp_path: Path, text: str | bytes) -> list[tuple[str, str]]:
    file = tmp_path / "slo.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(problem.field, problem.kind) for problem in check([file]).errors]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{', '.join(['*' + chr(97 + i)] * 9)}]}}\n" for i in range(8)
)


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 20_000 + "]" * 20_000,
        "".join(" " * i + "a:\n" for i in range(2000)),
        BOMB,
        "a: &x [*x, *x]\n",
        "a:\n\tb: 1\n",
        "a: " + "9" * 5000,
        b"a: \x00b\n",
        "a: [1\n",
    ],
    ids=["deep list", "deep mapping", "billion laughs", "itself", "tab", "long number", "zero byte", "open"],
)
def test_what_is_no_sane_yaml_is_one_error(tmp_path, text):
    assert problems(tmp_path, text) == [("", "yaml")]


@pytest.mark.parametrize("text", [MERGES, "? [a, b]\n: c\n? {x: y}\n: d\n", '!!python/object/apply:os.system ["x"]\n'])
def test_odd_yaml_is_no_specification_and_runs_nothing(tmp_path, text):
    assert problems(tmp_path, text)


def test_a_key_given_twice_is_an_error_at_its_place(tmp_path):
    text = SPEC.replace("  service: web\n", "  service: web\n  service: other\n", 1)
    assert problems(tmp_path, text) == [("spec.service", "duplicate_key")]


def test_anchors_and_merge_keys_are_plain_yaml(tmp_path):
    text = SPEC.replace("{name: web}\nspec", "&m {name: web}\nspec").replace(
        "    metadata: {name: web}", "    metadata: *m"
    )
    assert problems(tmp_path, text) == []
    merged = SPEC.replace(
        "[{target: 0.99}]", "[{<<: &o {displayName: a}, target: 0.99}, {<<: *o, displayName: b, target: 0.9}]"
    )
    assert problems(tmp_path, merged) == []


def test_a_byte_order_mark_is_no_error(tmp_path):
    assert problems(tmp_path, b"\xef\xbb\xbf" + SPEC.encode()) == []


def test_two_thousand_documents_in_one_file_are_read_in_seconds(tmp_path):
    file = tmp_path / "slo.yaml"
    file.write_text("".join("---\n" + SPEC.replace("name: web", f"name: web{i}") for i in range(2000)))
    began = time.monotonic()
    assert len(check([file]).slos) == 2000
    assert time.monotonic() - began < 60  # half a second alone; the pure-Python reader takes 17


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("0", None),
        ("0.99999", None),
        ("0.999999999999", None),
        ("1", "range"),
        ("1.0", "range"),
        ("-0.1", "range"),
        ("0." + "9" * 40, "range"),
        ("1.0e-9999999", "range"),
        (".nan", "type"),
        (".inf", "type"),
        ("'0.99'", "type"),
        ("true", "type"),
    ],
)
def test_a_target_is_a_ratio_that_can_be_counted_exactly(tmp_path, target, kind):
    wanted = [("spec.objectives[0].target", kind)] if kind else []
    assert problems(tmp_path, SPEC.replace("0.99", target)) == wanted


@pytest.mark.parametrize("duration", ["11Y", "99999999999999999999d", "0d", "-1d", "1.5h", "30", "1s", "٣d"])
def test_a_period_is_at_most_ten_years_of_whole_units(tmp_path, duration):
    assert problems(tmp_path, SPEC.replace("duration: 30d", f"duration: '{duration}'")) == [
        ("spec.timeWindow[0].duration", "duration")
    ]


def test_a_threshold_no_span_can_exceed_is_refused_before_it_reaches_the_store(tmp_path):
    text = SPEC.replace("spec: {}", "spec: {threshold_ms: 100000000000000000}")
    assert [kind for _, kind in problems(tmp_path, text)] == ["range"]


def test_an_objective_named_like_the_number_of_another_is_not_taken_for_it(tmp_path):
    text = SPEC.replace("[{target: 0.99}]", "[{target: 0.99, displayName: '1'}, {target: 0.9}]")
    assert problems(tmp_path, text) == [("spec.objectives[1].displayName", "duplicate_name")]


def test_a_mounted_config_map_holds_every_file_once(tmp_path):
    """Kubernetes mounts a folder ``..2026_...``, a link ``..data`` to it, and links to the files in that."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "slo.yaml").write_text(SPEC)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "slo.yaml").symlink_to("..data/slo.yaml")
    found = check([tmp_path])
    assert found.errors == ()
    assert len(found.slos) == 1


@pytest.mark.parametrize(
    "version", ["openslo/v3", "openslo.com/v2alpha", "pyrra.dev/v1alpha1", "sre.google.com/v2", "v1"]
)
def test_another_api_version_is_one_error_that_names_it(tmp_path, version):
    file = tmp_path / "slo.yaml"
    file.write_text(f"kind: SLO\napiVersion: {version}\nspec: {{nonsense: [1, 2]}}\nmetadata: 7\n")
    (error,) = check([file]).errors
    assert (error.field, error.line, error.kind) == ("apiVersion", 2, "api_version")
    assert repr(version) in error.message
    assert "not supported" in error.message


@pytest.mark.parametrize(
    ("source", "field", "kind"),
    [
        ("{type: Prometheus, spec: {}}", "spec", "required"),
        ("{type: Prometheus, spec: {query: ''}}", "spec.query", "required"),
        ("{type: Prometheus, spec: {qurey: x}}", "spec.query", "required"),
        ("{type: Prometheus}", "spec", "required"),
        ("{spec: {query: x}}", "type", "required"),
    ],
)
def test_a_metric_source_without_a_question_is_refused_at_its_field(tmp_path, source, field, kind):
    wrong = SPEC.replace("{type: spans, spec: {}}", "{type: Prometheus, spec: {query: good}}").replace(
        "{type: spans, spec: {service: web}}", source
    )
    place = "spec.indicator.spec.ratioMetric.total.metricSource"
    assert (f"{place}.{field}", kind) in problems(tmp_path, wrong)
