"""Documentation is tested: every command, option, setting and metric stands in docs/reference, and nothing else does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pasta_otel.cli import cli
from pasta_otel.config import SETTINGS
from pasta_otel.semconv import METRICS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{path} {name} does not load"
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


def test_every_command_and_option_is_documented() -> None:
    text = (REFERENCE / "commands.md").read_text()
    for path, command in commands(cli, "pasta-otel"):
        assert f"`{path}" in text, f"{path} is not in docs/reference/commands.md"
        section = text.split(f"`{path}", 1)[1].split("\n## ", 1)[0]
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert option in section, f"{path} {option} is not in docs/reference/commands.md"


def test_every_documented_command_exists() -> None:
    documented = set(re.findall(r"^## `(pasta-otel[a-z -]*?)`", (REFERENCE / "commands.md").read_text(), re.MULTILINE))
    assert documented == {path for path, _ in commands(cli, "pasta-otel")}


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| `([^`]*)` \|", (REFERENCE / "settings.md").read_text(), re.MULTILINE))
    assert rows == {setting.env: str(setting.default) for setting in SETTINGS}


def test_every_metric_is_documented_with_its_unit() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9_.]+)` \| ([a-z]+) \| `([^`]*)` \|", (REFERENCE / "metrics.md").read_text(), re.MULTILINE
    )
    assert set(rows) == {(spec.name, spec.instrument, spec.unit) for spec in METRICS.values()}


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", file.read_text()):
        assert (file.parent / target).exists(), f"{page} links to {target}"
