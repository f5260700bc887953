"""``pasta-otel analyze memory -- CMD``: run a program while its GPU kernels' memory accesses are counted on the GPU."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pasta_otel import semconv
from pasta_otel.cli.analyze_out import Targets
from pasta_otel.cli.analyze_run import (
    CONTEXT,
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
from pasta_otel.cli.analyze_tool import tool
from pasta_otel.cli.run import resolve
from pasta_otel.errors import PastaError

if TYPE_CHECKING:
    from pasta_otel.app.importing import Delivered
    from pasta_otel.exporters.otlp.config import OtlpConfig, Signal
    from pasta_otel.gpu.memory.report import MemoryReport
    from pasta_otel.gpu.memory.results import ProcessResult
    from pasta_otel.gpu.memory.spans import MemorySpans

DEFAULT_SERVICE = "unknown_service"
"""What OpenTelemetry's SDK calls a service without a name."""

SDK_DISABLED = "OTEL_SDK_DISABLED"
"""With ``true`` nothing is sent (opentelemetry-specification, configuration/sdk-environment-variables.md)."""


@click.group("analyze")
def command() -> None:
    """Analyse a program's GPU kernels while it runs."""


command.add_command(tool)


@command.command("memory", context_settings=CONTEXT)
@selecting
@click.option("--hotness/--no-hotness", default=True, help="Count by 2 MiB range and by tensor too.", show_default=True)
@reporting
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
    targets = Targets(as_json, output, html)
    targets.check()
    wanted = _signals() if otlp else frozenset()
    words = resolve(command)
    request = Request(names, every, count, device_memory, modules, regions, options={"hotness": hotness})
    with workspace() as folder:
        environ, problem = prepare(folder, request)
        code = run(words, environ, stdout=targets.of_program())
        results, problems = ([], []) if problem else _results(folder)
    problem = problem or _why_nothing(results, problems)
    if problem:
        problems = [problem]
        click.echo(f"pasta-otel: memory not analysed: {problem}", err=True)
    for one in () if problem else problems:
        click.echo(f"pasta-otel: {one}", err=True)
    report = _report(results, problems) if not problem or targets.wanted_in_any_case else None
    failed = problem + _publish(report, targets, problem)
    if wanted and report is not None and not problem:
        failed += _sent(report, wanted)
    raise click.exceptions.Exit(code or (IMPOSSIBLE if failed else 0))


def _signals() -> frozenset[Signal]:
    """Return which of traces and metrics are to be sent, and say why others are not.

    Raises:
        InputError: A value of OTEL_EXPORTER_OTLP_* cannot be used; names the variable.
    """
    from pasta_otel.app.chosen import exporters  # noqa: PLC0415 - only for --otlp

    if os.environ.get(SDK_DISABLED, "").strip().lower() == "true":
        click.echo(f"pasta-otel: --otlp sends nothing: {SDK_DISABLED}=true", err=True)
        return frozenset()
    wanted: set[Signal] = set()
    both: tuple[Signal, ...] = "traces", "metrics"
    for signal in both:
        if "otlp" in exporters(signal, os.environ):
            _destination(signal)
            wanted.add(signal)
        else:
            variable = f"OTEL_{signal.upper()}_EXPORTER"
            click.echo(f"pasta-otel: --otlp sends no {signal}: {variable}={os.environ[variable]}", err=True)
    return frozenset(wanted)


def _destination(signal: Signal) -> OtlpConfig:
    from pasta_otel.app.chosen import exporter_environment  # noqa: PLC0415 - only for --otlp
    from pasta_otel.exporters.otlp.config import OtlpConfig  # noqa: PLC0415 - same

    return OtlpConfig.from_env(exporter_environment(signal, os.environ), signal)


def _results(folder: Path) -> tuple[list[ProcessResult], list[str]]:
    """Return the processes' results, and their problems with those of processes that left none."""
    from pasta_otel.gpu.memory.results import read_results  # noqa: PLC0415 - numpy is an optional extra

    results = read_results(folder)
    return results, sorted({*unfinished(folder), *(problem for result in results for problem in result.problems)})


def _why_nothing(results: list[ProcessResult], problems: list[str]) -> str:
    """Return why there is nothing to report; empty = there is something."""
    if any(result.launches for result in results):
        return ""
    seen = sum(result.seen for result in results)
    skipped = sum((Counter(result.skipped) for result in results), Counter[str]())
    refused = [name for result in results for name in result.refused]
    return why_nothing(len(results), seen, skipped, problems, refused)


def _report(results: list[ProcessResult], problems: list[str]) -> MemoryReport | None:
    """Return the report; None without numpy, which a problem says."""
    try:
        from pasta_otel.gpu.memory.report import MemoryReport  # noqa: PLC0415 - numpy is an optional extra
    except ImportError:
        return None
    return MemoryReport(results, problems)


def _sent(report: MemoryReport, wanted: frozenset[Signal]) -> str:
    """Send spans and metrics, and return why nothing could be sent."""
    try:
        _send(report, wanted)
    except (PastaError, OSError) as error:
        click.echo(f"pasta-otel: {error}", err=True)
        return str(error)
    return ""


def _send(report: MemoryReport, wanted: frozenset[Signal]) -> None:
    """Send spans and metrics, or one of them.

    Raises:
        MissingError: The server of OTEL_EXPORTER_OTLP_* took nothing.
    """
    from pasta_otel.app.importing import import_meter  # noqa: PLC0415 - only for --otlp
    from pasta_otel.gpu.memory.spans import MemorySpans  # noqa: PLC0415 - same
    from pasta_otel.gpu.memory.telemetry import record, record_spans  # noqa: PLC0415 - same

    service, spans = os.environ.get("OTEL_SERVICE_NAME", DEFAULT_SERVICE), MemorySpans()
    try:
        if "traces" in wanted:
            _send_spans(report, spans, service)
    finally:
        if "metrics" in wanted:
            with import_meter(service, _destination("metrics")) as meter:
                record(meter, report.results, report.tensors)
                record_spans(meter, spans.counts)


def _send_spans(report: MemoryReport, spans: MemorySpans, service: str) -> None:
    from pasta_otel.app.importing import OtlpTarget, put_columns  # noqa: PLC0415 - only for --otlp

    target = OtlpTarget(_destination("traces"))
    try:
        for result in report.results:
            resource: dict[str, str | int] = {semconv.SERVICE_NAME: service, semconv.PROCESS_PID: result.pid}
            for columns in spans.columns(result):
                put_columns(target, columns, resource)
    finally:
        delivered = target.close()
    _say_delivered(delivered, spans.counts.capped)


def _say_delivered(delivered: Delivered, capped: int) -> None:
    parts = [f"{delivered.ok:,} spans sent"]
    if capped:
        parts.append(f"{capped:,} launches left out (a trace has 1,000: those that touch most)")
    parts += [f"{count:,} lost ({reason})" for reason, count in delivered.dropped.items()]
    click.echo(f"pasta-otel: {', '.join(parts)}", err=True)


def _publish(report: MemoryReport | None, targets: Targets, problem: str) -> str:
    """Show what there is, and return what failed."""
    if report is None:
        only = json.dumps({"problems": [problem]}) if targets.as_json else f"memory not analysed: {problem}"
        return targets.show(lambda: [only, "\n"]) if targets.wanted_in_any_case else ""
    from pasta_otel.gpu.memory import page, text  # noqa: PLC0415 - numpy is an optional extra

    def shown() -> Iterable[str]:
        if targets.as_json:  # in pieces: 10,000 launches are 30 MB
            return chain(json.JSONEncoder(indent=2).iterencode(report.as_dict()), "\n")
        return [f"memory not analysed: {problem}\n" if problem else "", text.as_text(report), "\n"]

    # where nothing was analysed, stdout is for programs that read JSON
    failed = targets.show(shown) if not problem or targets.as_json or targets.output is not None else ""
    return failed + targets.show_page(lambda: page.as_html(report))
