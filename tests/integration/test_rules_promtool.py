"""The rules we write, beside Sloth's, on the real engine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import pasta_otel
from pasta_otel import cli
from pasta_otel.errors import MissingError
from pasta_otel.slo.rules.build import build
from pasta_otel.slo.rules.render import dump, render
from pasta_otel.slo.rules.scenario import read_scenario
from pasta_otel.slo.spec.document import SpecError
from pasta_otel.slo.spec.load import check, load
from pasta_otel.slo.spec.model import PrometheusSLI
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.prometheus import tool

FIXTURES = Path(__file__).parents[1] / "fixtures"
SLOTH = FIXTURES / "samples" / "slok+sloth"
MYSERVICE = FIXTURES / "scenarios" / "myservice.yaml"
IDS = '{sloth_id="myservice-requests-availability"}'


def need(name: str) -> str:
    try:
        return tool(name)
    except MissingError as missing:
        pytest.skip(str(missing))


def ours(path: Path = MYSERVICE) -> str:
    return render(group for slo in load([path]).slos for group in build(slo, load_windows(), "X"))


def sloths() -> str:
    return (SLOTH / "examples" / "_gen" / "getting-started.yml").read_text()


def promtool_test(folder: Path, rules: str, series: list[tuple[str, str]], true: list[tuple[str, str]], **more) -> str:
    """Return promtool's complaint, empty when every (time, expression) is 1."""
    (folder / "rules.yml").write_text(rules)
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series],
                "promql_expr_test": [
                    {"eval_time": at, "expr": expr, "exp_samples": [{"labels": "{}", "value": 1}]} for at, expr in true
                ],
                **more,
            }
        ],
    }
    (folder / "test.yml").write_text(dump(document))
    done = subprocess.run(
        [need("promtool"), "test", "rules", str(folder / "test.yml")], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def requests(good: str, bad: str | None = None) -> list[tuple[str, str]]:
    name = 'http_request_duration_seconds_count{job="myservice",code="%s"}'
    return [(name % "200", good)] + ([(name % "500", bad)] if bad is not None else [])


UNEVEN = requests("0+5940x60 356400+6x540", "0+60x60 3600+0x540")
IDLE = requests("0+600x60 36000+0x60 36000+600x60", "0x180")
NO_ERROR_SERIES = requests("0+600x120")


def test_uneven_traffic_sloth_is_nine_times_under_and_ours_is_right(tmp_path):
    """An hour at 6000 a minute with 1 % errors, then nine hours at 6 a minute without."""
    ratio = f"sum(slo:sli_error:ratio_rate30d{IDS})"
    truth = 3600 / (356400 + 3600 + 6 * 540)
    assert promtool_test(tmp_path, ours(), UNEVEN, [("600m", f"abs({ratio} - {truth}) <= bool {truth * 0.002}")]) == ""
    assert promtool_test(tmp_path, sloths(), UNEVEN, [("600m", f"{truth} / {ratio} > bool 9")]) == ""


def test_after_an_idle_hour_sloth_knows_no_budget_and_ours_does(tmp_path):
    left = f"sum(slo:period_error_budget_remaining:ratio{IDS})"
    for at in ("115m", "175m"):
        assert promtool_test(tmp_path, ours(), IDLE, [(at, f"{left} == bool 1")]) == ""
        # NaN equals nothing, itself included
        assert promtool_test(tmp_path, sloths(), IDLE, [(at, f"1 - ({left} == bool {left})")]) == ""


def test_without_an_error_series_sloth_says_nothing_and_ours_says_zero(tmp_path):
    ratio = f"sum(slo:sli_error:ratio_rate5m{IDS})"
    assert promtool_test(tmp_path, ours(), NO_ERROR_SERIES, [("100m", f"{ratio} == bool 0")]) == ""
    assert promtool_test(tmp_path, sloths(), NO_ERROR_SERIES, [("100m", f"absent({ratio})")]) == ""


def test_a_test_that_must_fail_fails(tmp_path):
    assert "FAILED" in promtool_test(tmp_path, ours(), NO_ERROR_SERIES, [("100m", "vector(0)")])


def test_alerts_name_the_window_pairs_that_fired_without_changing_their_identity(tmp_path):
    (alerting,) = [group for group in yaml.safe_load(ours())["groups"] if "alerts" in group["name"]]
    page = alerting["rules"][0]
    expected = {
        "exp_labels": page["labels"],
        "exp_annotations": {
            "summary": "High error rate on 'myservice' requests responses",
            "title": "(page) myservice requests-availability SLO error budget burn rate is too fast.",
            "windows": "1h/5m 6h/30m ",
            "owner": "myteam",
        },
    }
    labels = {key: page["labels"][key] for key in ("sloth_severity",)}
    assert labels == {"sloth_severity": "page"}
    ticket_rule = alerting["rules"][1]
    ticket = {
        "exp_labels": ticket_rule["labels"],
        "exp_annotations": expected["exp_annotations"]
        | {"title": expected["exp_annotations"]["title"].replace("page", "ticket"), "windows": "1d/2h 3d/6h "},
    }
    both = {
        "alert_rule_test": [
            {"eval_time": "175m", "alertname": "MyServiceHighErrorRate", "exp_alerts": [
                {**expected, "exp_labels": expected["exp_labels"] | {"owner": "myteam", "repo": "myorg/myservice", "tier": "2"}},
                {**ticket, "exp_labels": ticket["exp_labels"] | {"owner": "myteam", "repo": "myorg/myservice", "tier": "2"}},
            ]}
        ]
    }  # fmt: skip
    outage = requests("0+600x120 72000+570x60", "0x120 0+30x60")
    assert promtool_test(tmp_path, ours(), outage, [("175m", "vector(1)")], **both) == ""


def test_a_total_that_is_absent_alerts(tmp_path):
    absent = 'count(ALERTS{alertname="MyServiceHighErrorRateAbsent",alertstate="firing",sloth_severity="ticket"})'
    series = requests("0+600x60 _x60")
    assert promtool_test(tmp_path, ours(), series, [("100m", f"{absent} == bool 1")]) == ""
    assert promtool_test(tmp_path, ours(), series, [("50m", f"absent({absent})")]) == ""


@pytest.mark.parametrize(
    "file",
    sorted((SLOTH / "examples").glob("*.yml")) + sorted((SLOTH / "test").rglob("in-*.yaml")),
    ids=lambda f: f.name,
)
def test_rules_of_every_sloth_sample_have_its_names_and_are_clean_in_promtool(tmp_path, file):
    found = check([file])
    slos = [slo for slo in found.slos if isinstance(slo.sli, PrometheusSLI)]
    if not slos or "victoria" in file.name:
        return  # refused by version or by plugin (another test), or MetricsQL, which Prometheus does not read
    text = render(group for slo in slos for group in build(slo, load_windows(), "X"))
    (tmp_path / "rules.yml").write_text(text)
    done = subprocess.run(
        [need("promtool"), "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    generated = SLOTH / "examples" / "_gen" / file.name
    if generated.exists() and "plugin" not in file.name and "openslo" not in file.name:
        assert names(text) >= names(generated.read_text())


def names(text: str) -> set[tuple[str, str, str]]:
    """Return (group, record or alert, window) of every rule in a file, PrometheusRule resources included."""
    found = set()
    for document in yaml.safe_load_all(text):
        for group in ((document or {}).get("spec") or document or {}).get("groups", []):
            for rule in group["rules"]:
                window = rule.get("labels", {}).get("sloth_window", "")
                found.add((group["name"], rule.get("record") or rule["alert"], window))
    return found


def test_the_rules_are_those_of_the_golden_file():
    assert ours() == re.sub(
        "sloth_version: .*", "sloth_version: X", (FIXTURES / "golden" / "rules-myservice.yml").read_text()
    )


def test_no_number_in_the_rules_carries_float_noise():
    assert not re.search(r"\d\.\d*(0000000|9999999)", ours())


def pasta(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["slo", *args])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_slo_rules_writes_only_rules_to_stdout_and_warns_of_what_it_cannot_express(capsys, tmp_path):
    assert pasta(capsys, "rules", str(MYSERVICE))[:2] == (
        0,
        ours().replace("sloth_version: X", f"sloth_version: {pasta_otel.__version__}"),
    )
    code, _, err = pasta(capsys, "rules", str(FIXTURES / "cases" / "S01" / "spec.yaml"))
    assert code == 0
    assert "longer than the SLO's period" in err
    spans = tmp_path / "spans.yaml"
    spans.write_text(
        "apiVersion: openslo/v1\nkind: SLO\nmetadata: {name: x}\nspec:\n  service: web\n  budgetingMethod: Occurrences\n"
        "  timeWindow: [{duration: 30d, isRolling: true}]\n  objectives: [{target: 0.9}]\n  indicator: {metadata: {name: i},"
        " spec: {ratioMetric: {rawType: success, raw: {metricSource: {type: spans, spec: {service: web}}}}}}\n"
    )
    code, out, err = pasta(capsys, "rules", str(spans))
    assert (code, out) == (2, "")
    assert "rules need a Prometheus indicator" in err


@pytest.mark.parametrize("name", ["outage", "idle"])
def test_slo_test_runs_a_scenario_file(capsys, name):
    code, out, err = pasta(capsys, "test", "--promtool", need("promtool"), str(FIXTURES / "scenarios" / f"{name}.yaml"))
    assert (code, err) == (0, "")
    assert out.startswith("ok")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("error_ratio: 0.05", "error_ratio: 0.0501"),
        ("alerts: [page, ticket]", "alerts: [page]"),
        ("alerts: [page, ticket]", "alerts: []"),
        ("burn_rate: 50", "burn_rate: 49"),
        (
            "{at: 119m, slo: myservice-requests-availability, budget_remaining: 1}",
            "{at: 119m, slo: myservice-requests-availability, absent: budget_remaining}",
        ),
    ],
)
def test_slo_test_fails_when_an_expectation_does_not_hold(capsys, tmp_path, old, new):
    text = (FIXTURES / "scenarios" / "outage.yaml").read_text()
    assert old in text
    (tmp_path / "myservice.yaml").write_text(MYSERVICE.read_text())
    (tmp_path / "wrong.yaml").write_text(text.replace(old, new))
    code, out, err = pasta(capsys, "test", "--promtool", need("promtool"), str(tmp_path / "wrong.yaml"))
    assert code == 1
    assert out.startswith("FAILED")
    assert "FAILED" in err


def test_slo_test_without_promtool_exits_3(capsys):
    code, _, err = pasta(capsys, "test", "--promtool", "/nowhere/promtool", "x.yaml")
    assert code == 3
    assert "not installed" in err


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("at: 119m", "at: soon", "expect[0].at"),
        ("error_ratio: 0, window: 5m", "error_ratio: 0", "expect[0].window"),
        ("error_ratio: 0, window", "error_ratio: 0, burn_rate: 1, window", "expect[0]"),
        ("kind: SLOScenario", "kind: Scenario", "kind"),
        ("interval: 1m", "intervall: 1m", "intervall"),
    ],
)
def test_a_wrong_scenario_is_refused_at_its_field(tmp_path, old, new, field):
    text = (FIXTURES / "scenarios" / "outage.yaml").read_text()
    assert old in text
    (tmp_path / "s.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        read_scenario(tmp_path / "s.yaml")
    assert field in {problem.field for problem in caught.value.problems}


def test_the_alertmanager_example_is_clean_in_amtool():
    example = Path(__file__).parents[2] / "docs" / "reference" / "alertmanager-example.yml"
    done = subprocess.run([need("amtool"), "check-config", str(example)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


POLICIES = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: web-availability, labels: {team: a, "k8s.io/x": c}, annotations: {owner: team-web}}
spec:
  service: web
  budgetingMethod: Occurrences
  timeWindow: [{duration: 30d, isRolling: true}]
  indicator: {metadata: {name: i}, spec: {ratioMetric: {counter: true, bad: {metricSource: {type: Prometheus, spec: {query: 'sum(increase(req_total{code="500"}[{{.window}}])) # bad'}}}, total: {metricSource: {type: Prometheus, spec: {query: 'sum(increase(req_total[{{.window}}])) # all'}}}}}}
  objectives: [{target: 0.99}]
  alertPolicies:
    - kind: AlertPolicy
      metadata: {name: on-call}
      spec:
        alertWhenBreaching: true
        conditions:
          - kind: AlertCondition
            metadata: {name: fast}
            spec: {severity: wake-up, condition: {kind: burnrate, op: gte, threshold: 2, lookbackWindow: 10m, alertAfter: 5m}}
        notificationTargets: [{kind: AlertNotificationTarget, metadata: {name: mail}, spec: {target: email}}]
    - kind: AlertPolicy
      metadata: {name: silent}
      spec:
        conditions:
          - kind: AlertCondition
            metadata: {name: quiet}
            spec: {severity: none, condition: {kind: burnrate, op: gt, threshold: 1, lookbackWindow: 1h, alertAfter: 0m}}
        notificationTargets: [{kind: AlertNotificationTarget, metadata: {name: mail}, spec: {target: email}}]
"""


def test_an_alert_condition_becomes_an_alert_that_waits_for_alert_after(tmp_path):
    (tmp_path / "slo.yaml").write_text(POLICIES)
    text = ours(tmp_path / "slo.yaml")
    series = [('req_total{code="200"}', "0+97x120"), ('req_total{code="500"}', "0x60 0+3x60")]
    firing = 'ALERTS{alertname="WebAvailabilityOnCallFast",sloth_severity="wake-up",alertstate="%s"}'
    # a burn rate of 3 x share of the 10 minutes >= 2 after 7 minutes, then 5 more
    true = [
        ("66m", f"absent(count({firing % 'pending'}))"),
        ("69m", f"count({firing % 'pending'})"),
        ("72m", f"absent(count({firing % 'firing'}))"),
        ("75m", f"count({firing % 'firing'})"),
        ("100m", 'absent(count(ALERTS{alertname=~".*Quiet.*"}))'),
        ("100m", "count(slo:sli_error:ratio_rate10m)"),
    ]
    assert promtool_test(tmp_path, text, series, true) == ""
    labels = {key for group in yaml.safe_load(text)["groups"] for rule in group["rules"] for key in rule["labels"]}
    assert "team" in labels
    assert "k8s.io/x" not in labels


def test_two_slos_of_one_sloth_id_are_refused(capsys, tmp_path):
    two = POLICIES + "---" + POLICIES.replace("web-availability", "availability")
    (tmp_path / "slo.yaml").write_text(two)
    code, out, err = pasta(capsys, "rules", str(tmp_path))
    assert (code, out) == (2, "")
    assert "two SLOs make the rule group sloth-slo-sli-recordings-web-availability" in err


def test_a_name_with_quotes_stays_inside_its_string(tmp_path):
    """OpenSLO v1alpha only warns of such names."""
    (tmp_path / "slo.yaml").write_text(
        "apiVersion: openslo/v1alpha\nkind: SLO\nmetadata: {name: 'a\"} or vector(1) # `b`'}\nspec:\n  service: 'w\\eb'\n"
        "  budgetingMethod: Occurrences\n  timeWindows: [{unit: Day, count: 30, isRolling: true}]\n  objectives:\n"
        "    - {target: 0.99, ratioMetrics: {good: {source: prometheus, queryType: promql, query: 'sum(increase(g[{{.window}}]))'},"
        " total: {source: prometheus, queryType: promql, query: 'sum(increase(t[{{.window}}]))'}}}\n"
    )
    (tmp_path / "rules.yml").write_text(ours(tmp_path / "slo.yaml"))
    done = subprocess.run(
        [need("promtool"), "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_absent_data_alerts_within_the_long_window_even_where_a_factor_is_out_of_reach(tmp_path):
    (tmp_path / "slo.yaml").write_text(POLICIES.replace("target: 0.99", "target: 0.1"))
    rules = [rule for group in yaml.safe_load(ours(tmp_path / "slo.yaml"))["groups"] for rule in group["rules"]]
    (absent,) = [rule for rule in rules if rule.get("alert", "").endswith("Absent")]
    assert absent["for"] == "3600s"


def test_a_calendar_period_is_written_as_a_rolling_one_and_says_so(capsys, tmp_path):
    calendar = "{duration: 1M, calendar: {startTime: '2026-01-01 00:00:00', timeZone: Europe/Berlin}}"
    (tmp_path / "slo.yaml").write_text(POLICIES.replace("{duration: 30d, isRolling: true}", calendar))
    code, out, err = pasta(capsys, "rules", str(tmp_path))
    assert code == 0
    assert "ratio_rate30d" in out
    assert "a calendar period, which rules cannot express, counts as the last 1M" in err
