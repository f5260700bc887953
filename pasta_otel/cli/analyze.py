"""``pasta-otel analyze memory -- CMD``: run a program while its GPU kernels' memory accesses are counted on the GPU."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pasta_otel import semconv
from pasta_otel.cli.analyze_run import CONTEXT, IMPOSSIBLE, Request, prepare, run, selecting, why_nothing, write
from pasta_otel.cli.analyze_tool import tool
from pasta_otel.cli.run import resolve
from pasta_otel.errors import MissingError

if TYPE_CHECKING:
    from pasta_otel.app.importing import Delivered
    from pasta_otel.gpu.memory.report import MemoryReport
    from pasta_otel.gpu.memory.results import ProcessResult

DEFAULT_SERVICE = "unknown_service"
"""What OpenTelemetry's SDK calls a service without a name."""


@click.group("analyze")
def command() -> None:
    """Analyse a program's GPU kernels while it runs."""


command.add_command(tool)


@command.command("memory", context_settings=CONTEXT)
@selecting
@click.option("--regions", is_flag=True, help="Only launches inside `with pasta_otel.analyze()` blocks of the program.")
@click.option("--hotness/--no-hotness", default=True, help="Count by 2 MiB range and by tensor too.", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Report as one JSON document; CMD's stdout goes to stderr.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the report there.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write the report as a page there.")
@click.option("--otlp", is_flag=True, help="Send spans and metrics to the server of OTEL_EXPORTER_OTLP_*.")
@click.argument("command", metavar="CMD [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def memory(  # noqa: PLR0913 - one parameter an option
    *,
    names: tuple[str, ...],
    modules: tuple[str, ...],
    every: int,
    count: int,
    device_memory: int,
    regions: bool,
    hotness: bool,
    as_json: bool,
    output: Path | None,
    html: Path | None,
    otlp: bool,
    command: tuple[str, ...],
) -> None:
    """Count on the GPU what each GPU kernel does to memory: coalescing, bank conflicts, divergence, atomics.

    CMD runs in any case and its exit code is ours; where it could not be analysed, a message says why and 3 is
    returned if CMD returned 0.
    """
    words = resolve(command)
    request = Request(names, every, count, device_memory, modules, regions, options={"hotness": hotness})
    with tempfile.TemporaryDirectory(prefix="pasta-analyze-") as folder:
        environ, problem = prepare(Path(folder), request)
        code = run(words, environ, stdout=sys.stderr if as_json and output is None else None)
        results, problem = ([], problem) if problem else _results(Path(folder))
    if problem:
        click.echo(f"pasta-otel: memory not analysed: {problem}", err=True)
    else:
        report = _report(results)
        _publish(report, as_json=as_json, output=output, html=html)
        problem = _sent(report) if otlp else ""
    raise click.exceptions.Exit(code or (IMPOSSIBLE if problem else 0))


def _results(folder: Path) -> tuple[list[ProcessResult], str]:
    """Return the processes' results, and why there is nothing to report."""
    from pasta_otel.gpu.memory.results import read_results  # noqa: PLC0415 - numpy is an optional extra

    results = read_results(folder)
    problems = sorted({problem for result in results for problem in result.problems})
    if any(result.launches for result in results):
        for problem in problems:
            click.echo(f"pasta-otel: {problem}", err=True)
        return results, ""
    seen = sum(result.seen for result in results)
    skipped = sum((Counter(result.skipped) for result in results), Counter[str]())
    return [], why_nothing(len(results), seen, skipped, problems)


def _report(results: list[ProcessResult]) -> MemoryReport:
    from pasta_otel.gpu.memory.report import MemoryReport  # noqa: PLC0415 - numpy is an optional extra

    return MemoryReport(results)


def _sent(report: MemoryReport) -> str:
    """Send spans and metrics, and return why nothing could be sent."""
    try:
        _send(report)
    except MissingError as error:
        click.echo(f"pasta-otel: {error}", err=True)
        return str(error)
    return ""


def _send(report: MemoryReport) -> None:
    """Send spans and metrics.

    Raises:
        MissingError: The server of OTEL_EXPORTER_OTLP_* took nothing.
    """
    from pasta_otel.app.importing import OtlpTarget, import_meter, put_columns  # noqa: PLC0415 - only for --otlp
    from pasta_otel.gpu.memory.spans import MemorySpans  # noqa: PLC0415 - same
    from pasta_otel.gpu.memory.telemetry import record, record_spans  # noqa: PLC0415 - same

    service = os.environ.get("OTEL_SERVICE_NAME", DEFAULT_SERVICE)
    spans, target = MemorySpans(), OtlpTarget()
    try:
        for result in report.results:
            resource: dict[str, str | int] = {semconv.SERVICE_NAME: service, semconv.PROCESS_PID: result.pid}
            for columns in spans.columns(result):
                put_columns(target, columns, resource)
    finally:
        delivered = target.close()
        with import_meter(service) as meter:
            record(meter, report.results, report.tensors)
            record_spans(meter, spans.counts)
    _say_delivered(delivered, spans.counts.capped)


def _say_delivered(delivered: Delivered, capped: int) -> None:
    parts = [f"{delivered.ok:,} spans sent"]
    if capped:
        parts.append(f"{capped:,} launches left out (a trace has 1,000: those that touch most)")
    parts += [f"{count:,} lost ({reason})" for reason, count in delivered.dropped.items()]
    click.echo(f"pasta-otel: {', '.join(parts)}", err=True)


def _publish(report: MemoryReport, *, as_json: bool, output: Path | None, html: Path | None) -> None:
    from pasta_otel.gpu.memory import page, text  # noqa: PLC0415 - numpy is an optional extra

    if html is not None:
        write(html, page.as_html(report), "--html")
    shown: Iterable[str] = [text.as_text(report)]
    if as_json:  # in pieces: 10,000 launches are 30 MB
        shown = json.JSONEncoder(indent=2).iterencode(report.as_dict())
    if output is None:
        sys.stdout.writelines(chain(shown, "\n"))
    else:
        write(output, chain(shown, "\n"), "--output")
