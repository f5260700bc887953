"""Write docs/reference/{commands,settings,metrics}.md from the code's own tables: `.venv/bin/python tests/reference.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from pasta_otel.cli.group import cli
from pasta_otel.config import SETTINGS
from pasta_otel.semconv import METRICS

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
EXIT_CODES = """Exit codes: 0 fine; 1 the answer is no; 2 wrong use or bad input, naming file, line or field; 3 the environment lacks
something, saying what and how to get it. `run` and `analyze` return the program's own code. `--json` prints one JSON document on
stdout; logs go to stderr."""


def walk(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{path} {name} does not load"
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from walk(command, f"{path} {name}")


def option_row(option: click.Option) -> str:
    record = option.get_help_record(click.Context(click.Command("x")))
    assert record is not None
    names, text = record
    cell = names.replace("|", "\\|")  # a bar inside a table cell
    return f"| `{cell}` | {' '.join(text.split())} |"


def section(path: str, command: click.Command) -> str:
    arguments = " ".join(
        p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument)
    )
    lines = [
        f"## `{path}`",
        "",
        *([f"`{path} {arguments}`", ""] if arguments else []),
        " ".join((command.help or "").split()),
        "",
    ]
    options = [p for p in command.params if isinstance(p, click.Option)]
    if options:
        lines += ["| option | meaning |", "|---|---|", *map(option_row, options), ""]
    return "\n".join(lines)


def commands() -> str:
    return "\n".join(["# Commands", "", EXIT_CODES, "", *(section(*entry) for entry in walk(cli, "pasta-otel"))])


def settings() -> str:
    rows = [f"| `{s.env}` | `{s.default}` | {f'`{s.yaml}`' if s.yaml else ''} | {s.meaning} |" for s in SETTINGS]
    head = [
        "# Settings",
        "",
        "Standard `OTEL_*` variables hold first, then these, then the YAML file that `PASTA_CONFIG` names.",
        "",
        "| variable | default | in YAML | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def metrics() -> str:
    rows = [f"| `{m.name}` | {m.instrument} | `{m.unit}` | {m.description} |" for m in sorted(METRICS.values())]
    head = [
        "# Metrics",
        "",
        "OpenTelemetry names; on `/metrics` they appear with `_` for `.`, the unit and `_total` as the OpenTelemetry-to-Prometheus",
        "rules say. Every instrument holds at most 2000 attribute sets, then `otel.metric.overflow=true`.",
        "",
        "| metric | instrument | unit | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


PAGES = {"commands.md": commands, "settings.md": settings, "metrics.md": metrics}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (REFERENCE / page).write_text(write())
