"""OpenSLO v1alpha, Sloth, and what becomes of every sample file of other projects."""

from __future__ import annotations

import csv
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from pasta_otel.slo.periods import duration_ns
from pasta_otel.slo.spec.load import check, load
from pasta_otel.slo.spec.model import PrometheusSLI

FIXTURES = Path(__file__).parents[1] / "fixtures"
SAMPLES = FIXTURES / "samples"
ORIGINS = ("OpenSLO+OpenSLO", "OpenSLO+go-sdk", "OpenSLO+oslo", "slok+sloth", "pyrra-dev+pyrra", "google+slo-generator")


def table() -> dict[str, list[tuple[str, ...]]]:
    rows = defaultdict(list)
    with (SAMPLES / "specs.tsv").open() as file:
        for row in csv.reader(file, delimiter="\t"):
            rows[row[0]].append(tuple(row[1:]))
    return dict(rows)


@pytest.mark.parametrize("name", sorted(table()))
def test_every_sample_is_accepted_or_refused_where_the_table_says(name):
    found = check([SAMPLES / name])
    verdict = "refused" if found.errors else "accepted"
    rows = [(verdict, p.severity, str(p.line), p.field, p.kind) for p in found.problems] or [(verdict, "", "", "", "")]
    assert rows == table()[name]


def test_the_table_holds_every_specification_among_the_samples():
    files = {
        str(file.relative_to(SAMPLES))
        for origin in ORIGINS
        for file in (SAMPLES / origin).rglob("*.y*ml")
        if "_gen" not in file.parts
    }
    assert files == table().keys()
    assert len(files) >= 100


@pytest.mark.parametrize("name", sorted(table()))
def test_no_message_names_a_field_below_one_that_the_file_does_not_hold(name):
    for problem in check([SAMPLES / name]).problems:
        parent = problem.field.rpartition(".")[0] if "." in problem.field else ""
        leaf = parent.rpartition(".")[2].split("[")[0]
        assert leaf in (SAMPLES / name).read_text()


@pytest.mark.case("S05")
def test_an_old_file_is_refused_in_the_words_of_its_author(tmp_path):
    source = (FIXTURES / "cases" / "S05" / "spec.yaml").read_text()
    found = check([FIXTURES / "cases" / "S05" / "spec.yaml"])
    assert [problem.field for problem in found.errors] == [
        "spec.objectives[0].timeSliceTarget",
        "spec.objectives[0].timeSliceWindow",
    ]
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text(
        source.replace(
            "      target: 0.25", "      target: 0.25\n      timeSliceTarget: 0.25\n      timeSliceWindow: 5m"
        )
    )
    (slo,) = load([fixed]).slos
    assert duration_ns(slo.window.duration) == 86_400 * 10**9
    assert (slo.method, slo.slice_target, slo.slice_window.text) == ("Timeslices", Decimal("0.25"), "5m")
    assert isinstance(slo.sli, PrometheusSLI)
    gauge = tmp_path / "gauge.yaml"
    gauge.write_text(source.replace("Timeslices", "Occurrences"))
    warned = check([gauge])
    assert not warned.errors
    assert [(p.field, p.kind) for p in warned.problems] == [
        ("spec.objectives[0].ratioMetrics.good.query", "instant_gauge"),
        ("spec.objectives[0].ratioMetrics.total.query", "instant_gauge"),
    ]


@pytest.mark.case("S03")
def test_a_sloth_file_with_a_low_objective_is_valid(tmp_path):
    (slo,) = load([FIXTURES / "cases" / "S03" / "spec.yaml"]).slos
    assert (slo.name, slo.objective) == ("gpu-pool-gpu-busy", Decimal("0.1"))
    assert slo.sli == PrometheusSLI(raw="avg_over_time(gpu_busy_ratio[{{.window}}])", raw_failure=True)


def test_a_sloth_file_and_its_custom_resource_mean_the_same():
    file = load([SAMPLES / "slok+sloth" / "examples" / "getting-started.yml"]).slos
    resource = load([SAMPLES / "slok+sloth" / "examples" / "k8s-getting-started.yml"]).slos
    assert [(slo.name, slo.objective, slo.sli, slo.alerting, slo.labels) for slo in file] == [
        (slo.name, slo.objective, slo.sli, slo.alerting, slo.labels) for slo in resource
    ]
    (slo,) = file
    assert slo.objective == Decimal("0.999")
    assert slo.alerting.name == "MyServiceHighErrorRate"
    assert dict(dict(slo.alerting.severity_labels)["page"]) == {"severity": "pageteam", "routing_key": "myteam"}


@pytest.mark.parametrize(
    ("old", "new", "field", "kind"),
    [
        ("objective: 99.9", "objective: 100", "slos[0].objective", "range"),
        ("objective: 99.9", "objective: 0", "slos[0].objective", "range"),
        ("[{{.window}}]))\n        total", "[5m]))\n        total", "slos[0].sli.events.error_query", "window"),
        ('name: "requests-availability"', "name: a", "slos[0].name", "name"),
        ('service: "myservice"', 'service: ""', "service", "required"),
        (
            "alerting:\n      name: MyServiceHighErrorRate",
            "alerting:\n      name: ''",
            "slos[0].alerting.name",
            "required",
        ),
    ],
)
def test_a_wrong_sloth_file_is_refused_at_its_field(tmp_path, old, new, field, kind):
    text = (SAMPLES / "slok+sloth" / "examples" / "getting-started.yml").read_text()
    assert old in text
    file = tmp_path / "slo.yml"
    file.write_text(text.replace(old, new, 1))
    assert (field, kind) in {(problem.field, problem.kind) for problem in check([file]).errors}


def test_the_good_slos_of_a_sloth_file_are_kept_beside_a_bad_one():
    found = check([SAMPLES / "slok+sloth/test/integration/prometheus/testdata/validate/bad/bad-aa.yaml"])
    assert [slo.name for slo in found.slos] == ["svc01-slo1"]
    assert [problem.field for problem in found.errors] == ["slos[1].objective"]


def test_the_samples_are_read_by_a_second_parser_with_the_same_names():
    """Against reading the wrong thing: names found by our reader are those in the plain YAML."""
    for name in ("in-base.yaml", "in-multifile.yaml"):
        file = SAMPLES / "slok+sloth" / "test" / "integration" / "prometheus" / "testdata" / name
        plain = [f"{d['service']}-{s['name']}" for d in yaml.safe_load_all(file.read_text()) for s in d["slos"]]
        assert [slo.name for slo in load([file]).slos] == plain
