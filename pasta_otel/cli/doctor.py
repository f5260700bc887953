"""``pasta-otel doctor``: what this machine can do for pasta-otel, and how to get what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from pasta_otel.cli.probes import Capability, World, examine

MARKS = {"there": "ok", "missing": "--", "unknown": "??"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(*, as_json: bool) -> None:
    """Print one line per capability: there, or missing and how to get it. Exits 0: nothing here is required."""
    found = examine(World())
    if as_json:
        click.echo(json.dumps({"capabilities": [asdict(capability) for capability in found]}, indent=2))
        return
    for line in lines(found):
        click.echo(line)


def lines(found: Sequence[Capability]) -> list[str]:
    """Return the report for people, one line a capability."""
    width = max(len(capability.name) for capability in found)
    return [_line(capability, width) for capability in found]


def _line(capability: Capability, width: int) -> str:
    how = f"; {capability.how}" if capability.how else ""
    return f"{MARKS[capability.state]}  {capability.name:<{width}}  {capability.detail}{how}"
