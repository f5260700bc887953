"""The flagd file: swapped whole, valid by flagd's structure, reverting by itself."""

from __future__ import annotations

import json
import threading

import pytest

from pasta_otel.errors import InputError
from pasta_otel.exporters.flagd import FlagdFile, to_flagd, validate

EXPIRES = {"expires_at": "2027-01-15T08:00:00.500000Z", "since": "2027-01-15T07:59:00Z"}


def entry(value, key="degrade.x", **metadata):
    return {"key": key, "value": value, "reason": "STATIC", "variant": "on", "metadata": metadata}


def evaluate(definition, now_seconds):
    """What flagd does with a definition of ours: the targeting rule, else the default variant."""
    rule = definition.get("targeting")
    variant = definition["defaultVariant"]
    if rule:
        condition, then, otherwise = rule["if"]
        variant = then if now_seconds < condition["<"][1] else otherwise
        assert condition["<"][0] == {"var": "$flagd.timestamp"}
    return definition["variants"][variant]


def test_a_degradation_reverts_in_flagd_itself_when_its_ttl_is_over():
    definition = to_flagd([entry(True, **EXPIRES)])["flags"]["degrade.x"]
    assert evaluate(definition, 1_800_000_000 - 1) is True
    assert evaluate(definition, 1_800_000_000) is False
    assert definition["metadata"]["expires_at"] == EXPIRES["expires_at"]


def test_a_pin_and_a_default_have_no_end():
    flags = to_flagd([entry(True, pinned=True), entry(False, "degrade.y"), entry({"tier": 2}, "pasta.capture")])[
        "flags"
    ]
    values = [evaluate(flags[key], 10**12) for key in ("degrade.x", "degrade.y", "pasta.capture")]
    assert values == [True, False, {"tier": 2}]


def test_the_file_is_a_link_to_its_present_version_and_old_versions_go(tmp_path):
    path = tmp_path / "flags.json"
    file = FlagdFile(path)
    assert file.write([entry(False)])
    assert not file.write([entry(False)])
    assert file.write([entry(True)])
    FlagdFile(path).write([entry(False)])  # a restarted controller
    assert path.is_symlink()
    assert json.loads(path.read_text())["flags"]["degrade.x"]["defaultVariant"] == "off"
    assert len(list(tmp_path.iterdir())) == 3  # the link, its version, and the one that a reader may be opening


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "flags.json"
    file, done, seen = FlagdFile(path), threading.Event(), set()
    file.write([entry(False)])

    def read():
        while not done.is_set():
            seen.add(json.loads(path.read_text())["flags"]["degrade.x"]["defaultVariant"])

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(200):
        file.write([entry(index % 2 == 0, "degrade.x"), entry(False, "degrade.y" * (1 + index % 7))])
    done.set()
    reader.join()
    assert seen <= {"on", "off"}


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], "flags"),
        ({"flags": []}, "flags"),
        ({"flags": {"x": 1}}, "flags.x"),
        ({"flags": {"x": {"state": "ON"}}}, "flags.x.state"),
        ({"flags": {"x": {"state": "ENABLED"}}}, "flags.x.variants"),
        ({"flags": {"x": {"state": "ENABLED", "variants": {}}}}, "flags.x.variants"),
        ({"flags": {"x": {"state": "ENABLED", "variants": {"a": 1, "b": True}}}}, "flags.x.variants"),
        ({"flags": {"x": {"state": "ENABLED", "variants": {"a": None}}}}, "flags.x.variants"),
        ({"flags": {"x": {"state": "ENABLED", "variants": {"a": 1}, "defaultVariant": "b"}}}, "flags.x.defaultVariant"),
        ({"flags": {"x": {"state": "ENABLED", "variants": {"a": 1}, "targeting": []}}}, "flags.x.targeting"),
        ({"flags": {"x": {"state": "ENABLED", "variants": {"a": 1}, "metadata": []}}}, "flags.x.metadata"),
        ({"flags": {"x": {"state": "ENABLED", "variants": {"a": 1}, "metadata": {"m": {}}}}}, "flags.x.metadata.m"),
    ],
)
def test_what_flagd_would_refuse_is_not_written(document, field):
    with pytest.raises(InputError) as refusal:
        validate(document)
    assert refusal.value.field == field


def test_forms_that_flagd_allows_and_we_do_not_write_are_valid():
    validate({"flags": {"a": {"state": "ENABLED", "variants": {"on": True, "off": False}, "defaultVariant": None}}})
    validate({"flags": {"a": {"state": "DISABLED", "variants": {"x": "1", "y": "2"}, "defaultVariant": "x"}}})
