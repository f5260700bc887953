"""``pasta-otel analyze tool FILE.py:CLASS -- CMD``: run a program under a user's own analysis of its GPU kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pasta_otel.cli.analyze_out import Targets
from pasta_otel.cli.analyze_run import (
    IMPOSSIBLE,
    Request,
    prepare,
    reporting,
    run,
    selecting,
    unfinished,
    why_nothing,
    workspace,
)
from pasta_otel.cli.run import resolve
from pasta_otel.errors import InputError

if TYPE_CHECKING:
    from pasta_otel.gpu.memory.tool import Tool


@click.command("tool")
@selecting
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Argument of the class; repeats.")
@reporting
@click.argument("tool", metavar="FILE.py:CLASS")
@click.argument("command", metavar="CMD [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def tool(  # noqa: PLR0913 - one parameter an option
    *,
    names: tuple[str, ...],
    modules: tuple[str, ...],
    every: int,
    count: int,
    device_memory: int,
    regions: bool,
    options: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    tool: str,
    command: tuple[str, ...],
) -> None:
    """Run CMD under an analysis of your own: a class with its device functions (docs/reference/memory-tools.md).

    CMD runs in any case once the class loads, and its exit code is ours; where it could not be analysed, a message says
    why and 3 is returned if CMD returned 0.
    """
    from pasta_otel.gpu.memory.tool import absolute, load_tool  # noqa: PLC0415 - not for help

    arguments = dict(map(_argument, options))
    reference = absolute(tool)
    loaded = load_tool(reference, arguments)
    request = Request(names, every, count, device_memory, modules, regions, reference, Path(loaded.source), arguments)
    targets = Targets(as_json, output)
    targets.check()
    words = resolve(command)
    with workspace() as folder:
        environ, problem = prepare(folder, request)
        code = run(words, environ, stdout=targets.of_program())
        problem, failed = _publish(loaded, folder, targets, problem)
    if problem:
        click.echo(f"pasta-otel: not analysed by {loaded.name}: {problem}", err=True)
    raise click.exceptions.Exit(code or (IMPOSSIBLE if problem or failed else 0))


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InputError(f"expected NAME=VALUE, got {text!r}", field="--option")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _publish(tool: Tool[Any], folder: Path, targets: Targets, problem: str) -> tuple[str, str]:
    """Report what the processes left behind; return why there is nothing, and what failed beside that."""
    from pasta_otel.gpu.memory.tool_report import ToolReport  # noqa: PLC0415 - not for help

    files = {int(path.stem): path for path in sorted(folder.glob("*.json")) if path.stem.isdecimal()}
    documents = {pid: json.loads(path.read_bytes()) for pid, path in files.items()}
    report = ToolReport(tool, documents)
    report.problems = sorted({*report.problems, *unfinished(folder)})
    refused = [name for document in documents.values() for name in document.get("refused", ())]
    if not problem and not report.launches:
        problem = why_nothing(len(files), report.seen, report.skipped, report.problems, refused)
    if problem:
        report.problems = sorted({*report.problems, problem})
        if not targets.wanted_in_any_case:
            return problem, ""
        only = json.dumps(report.as_dict(), indent=2) if targets.as_json else f"not analysed by {tool.name}: {problem}"
        return problem, targets.show(lambda: [only, "\n"])
    for one in report.problems:
        click.echo(f"pasta-otel: {one}", err=True)
    try:
        shown = json.dumps(report.as_dict(), indent=2) if targets.as_json else report.as_text()
    except InputError as error:  # the tool's own report
        click.echo(f"pasta-otel: {error}", err=True)
        failed, shown = str(error), f"no report by {tool.name}: {error}"
        return "", failed + (targets.show(lambda: [shown, "\n"]) if targets.wanted_in_any_case else "")
    return "", targets.show(lambda: [shown, "\n"])
