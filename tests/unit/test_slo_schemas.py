"""The published schemas say what the readers say."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]


def schema(name: str) -> dict:
    return json.loads((ROOT / "docs" / "reference" / f"{name}.schema.json").read_text())


@pytest.mark.parametrize("file", sorted((ROOT / "slo" / "data" / "windows").glob("*.yaml")), ids=lambda f: f.name)
def test_shipped_windows_follow_the_schema(file):
    jsonschema.validate(yaml.safe_load(file.read_text()), schema("slo-windows"))


@pytest.mark.parametrize("name", ["outage", "idle"])
def test_scenarios_follow_the_schema(name):
    text = (ROOT / "tests" / "fixtures" / "scenarios" / f"{name}.yaml").read_text()
    jsonschema.validate(yaml.safe_load(text), schema("slo-scenario"))


@pytest.mark.parametrize("change", [{"kind": "X"}, {"expect": []}, {"more": 1}, {"interval": "soon"}])
def test_what_the_reader_refuses_the_schema_refuses_too(change):
    text = (ROOT / "tests" / "fixtures" / "scenarios" / "outage.yaml").read_text()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text) | change, schema("slo-scenario"))
