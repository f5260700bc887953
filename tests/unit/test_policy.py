"""Policy files: what they mean, and the one error that a wrong one gets; the schema says the same."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from pasta_otel.errors import InputError
from pasta_otel.slo.policy import Channel, Dependency, Policy, load_policy, parse_policy

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/policy.schema.json").read_text())
EXAMPLE = """
mode: enforce
dwell_seconds: 5
cooldown_seconds: 30
ttl_seconds: 20
max_hold_seconds: 600
blast_radius: {max_flags: 2, max_share: 1.0}
capture: {tier: 3, seconds: 30}
dependencies:
  recommendations:
    critical: false
    flag: degrade.recommendations
    breaker: order-api -> recommendations
    healthy_below_seconds: 0.2
  payment: {critical: true}
  model:
notify:
  - type: log
  - {type: webhook, name: oncall, url_env: ONCALL_URL}
pins: {degrade.recommendations: false, pasta.capture: {tier: 2}}
"""


def test_a_policy_is_read_whole(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(EXAMPLE)
    policy = load_policy(file)
    assert policy == Policy(
        mode="enforce",
        dependencies={
            "recommendations": Dependency(
                "recommendations",
                "recommendations",
                critical=False,
                flag="degrade.recommendations",
                breaker="order-api -> recommendations",
                healthy_below_seconds=0.2,
            ),
            "payment": Dependency("payment", "payment"),
            "model": Dependency("model", "model"),
        },
        dwell_ns=5 * 10**9,
        cooldown_ns=30 * 10**9,
        ttl_ns=20 * 10**9,
        max_hold_ns=600 * 10**9,
        max_flags=2,
        max_share=1.0,
        notify=(Channel("log", "log"), Channel("oncall", "webhook", url_env="ONCALL_URL")),
        pins={"degrade.recommendations": False, "pasta.capture": {"tier": 2}},
        capture_tier=3,
        capture_ns=30 * 10**9,
    )
    jsonschema.validate(yaml.safe_load(EXAMPLE), SCHEMA)


def test_nothing_acts_until_configured():
    policy = parse_policy(None)
    assert policy == Policy()
    assert policy.mode == "off"
    assert not parse_policy({"dependencies": {"x": {"flag": "degrade.x"}}}).dependencies["x"].degradable
    assert parse_policy(yaml.safe_load("mode: off")).mode == "off"


def test_a_webhook_address_is_never_printed():
    policy = parse_policy({"notify": [{"type": "webhook", "url": "https://hooks.example/s3cret"}]})
    assert "s3cret" not in repr(policy)


@pytest.mark.parametrize(
    ("degradable", "limits", "allowed"),
    [(1, {}, 1), (4, {}, 1), (4, {"max_flags": 9}, 2), (4, {"max_flags": 9, "max_share": 0}, 1), (0, {}, 1)],
)
def test_the_blast_radius_is_a_number_and_a_share_and_at_least_one(degradable, limits, allowed):
    names = [f"d{index}" for index in range(degradable)]
    dependencies = {name: {"critical": False, "flag": f"degrade.{name}"} for name in names}
    assert parse_policy({"dependencies": dependencies, "blast_radius": limits}).allowed_flags == allowed


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], None),
        ({"mode": "on"}, "mode"),
        ({"mode": True}, "mode"),
        ({"mood": "off"}, "mood"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"ttl_seconds": "60s"}, "ttl_seconds"),
        ({"ttl_seconds": True}, "ttl_seconds"),
        ({"dwell_seconds": float("nan")}, "dwell_seconds"),
        ({"cooldown_seconds": -1}, "cooldown_seconds"),
        ({"blast_radius": {"max_flags": 1.5}}, "blast_radius.max_flags"),
        ({"blast_radius": {"max_share": 2}}, "blast_radius.max_share"),
        ({"blast_radius": {"flags": 2}}, "blast_radius.flags"),
        ({"dependencies": []}, "dependencies"),
        ({"dependencies": {"a": {"critical": "no"}}}, "dependencies.a.critical"),
        ({"dependencies": {"a": {"flag": "recommendations"}}}, "dependencies.a.flag"),
        ({"dependencies": {"a": {"flag": "degrade."}}}, "dependencies.a.flag"),
        ({"dependencies": {"a": {"breaker": "a->b"}}}, "dependencies.a.breaker"),
        ({"dependencies": {"a": {"owner": "me"}}}, "dependencies.a.owner"),
        ({"notify": {}}, "notify"),
        ({"notify": [{"type": "mail"}]}, "notify[0].type"),
        ({"notify": [{"type": "log"}, {"type": "webhook"}]}, "notify[1].url"),
        ({"notify": [{"type": "webhook", "url": "ftp://x"}]}, "notify[0].url"),
        ({"notify": [{"type": "webhook", "url": "http://x", "url_env": "X"}]}, "notify[0].url"),
        ({"capture": {"tier": 5}}, "capture.tier"),
        ({"capture": {"until": 5}}, "capture.until"),
        ({"pins": {"recommendations": True}}, "pins.recommendations"),
        ({"pins": {"degrade.x": "on"}}, "pins.degrade.x"),
        ({"pins": {"pasta.capture": 3}}, "pins.pasta.capture"),
    ],
)
def test_a_wrong_policy_gets_one_error_that_names_the_field_and_the_schema_refuses_it_too(document, field):
    with pytest.raises(InputError) as refusal:
        parse_policy(document, "policy.yaml")
    assert (refusal.value.file, refusal.value.field) == ("policy.yaml", field)
    if "dwell_seconds" not in document:  # JSON has no NaN, so the schema cannot meet it
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document, SCHEMA)


def test_what_the_schema_cannot_say_is_refused_as_well():
    twice = {"a": {"flag": "degrade.x"}, "b": {"flag": "degrade.x"}}
    with pytest.raises(InputError, match=r"dependencies.b.flag: degrade.x belongs to a already"):
        parse_policy({"dependencies": twice})
    with pytest.raises(InputError, match=r"notify\[1\].name: 'log' is used twice"):
        parse_policy({"notify": [{"type": "log"}, {"type": "log"}]})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("mode: [", 1),
        ("mode: off\nmode: enforce\n", 2),
        ("a: b: c", 1),
        ("pins:\n  degrade.x: true\n  degrade.x: no", 3),
    ],
)
def test_what_is_not_yaml_is_refused_with_its_line(tmp_path, text, line):
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as refusal:
        load_policy(file)
    assert (refusal.value.file, refusal.value.line) == (str(file), line)


def test_a_file_that_is_not_there_or_not_text_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml: No such file"):
        load_policy(tmp_path / "nowhere.yaml")
    file = tmp_path / "policy.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load_policy(file)
