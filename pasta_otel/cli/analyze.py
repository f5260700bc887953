"""``pasta-otel analyze memory -- CMD``: run a program while its GPU kernels' memory accesses are counted on the GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from pasta_otel import semconv
from pasta_otel.cli.run import resolve
from pasta_otel.config import load_settings
from pasta_otel.errors import InputError, MissingError

if TYPE_CHECKING:
    from pasta_otel.app.importing import Delivered
    from pasta_otel.gpu.memory.report import MemoryReport
    from pasta_otel.gpu.memory.results import ProcessResult
    from pasta_otel.gpu.memory.selection import Selection

IMPOSSIBLE = 3
DEFAULT_SERVICE = "unknown_service"
"""What OpenTelemetry's SDK calls a service without a name."""
_SETTINGS = ("PASTA_SANITIZER_LIBRARY", "PASTA_SANITIZER_PATCH")
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


@click.group("analyze")
def command() -> None:
    """Analyse a program's GPU kernels while it runs."""


@command.command("memory", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--kernel", "names", multiple=True, metavar="PATTERN", help="Shell pattern of GPU kernel names; repeats.")
@click.option("--every", default=1, show_default=True, help="Analyse every N-th launch of each GPU kernel.")
@click.option("--count", default=10_000, show_default=True, help="Analyse at most so many launches a process.")
@click.option("--device-memory", default=64, show_default=True, help="MiB of device memory for results, a process.")
@click.option("--json", "as_json", is_flag=True, help="Report as one JSON document; CMD's stdout goes to stderr.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the report there.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write the report as a page there.")
@click.option("--otlp", is_flag=True, help="Send spans and metrics to the server of OTEL_EXPORTER_OTLP_*.")
@click.argument("command", metavar="CMD [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def memory(  # noqa: PLR0913 - one parameter an option
    *,
    names: tuple[str, ...],
    every: int,
    count: int,
    device_memory: int,
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
    with tempfile.TemporaryDirectory(prefix="pasta-analyze-") as folder:
        environ, problem = _prepare(Path(folder), names, every, count, device_memory << 20)
        code = _run(words, environ, stdout=sys.stderr if as_json and output is None else None)
        results, problem = ([], problem) if problem else _results(Path(folder))
    if problem:
        click.echo(f"pasta-otel: memory not analysed: {problem}", err=True)
    else:
        report = _report(results)
        _publish(report, as_json=as_json, output=output, html=html)
        problem = _sent(report) if otlp else ""
    raise click.exceptions.Exit(code or (IMPOSSIBLE if problem else 0))


def _prepare(
    out: Path, names: tuple[str, ...], every: int, count: int, device_bytes: int
) -> tuple[Mapping[str, str], str]:
    """Return the program's environment, and why it cannot be analysed."""
    try:
        from pasta_otel.gpu.memory import child, library  # noqa: PLC0415 - numpy is an optional extra
        from pasta_otel.gpu.memory.selection import Selection  # noqa: PLC0415 - same

        selection = Selection(names, every, count, device_bytes)
        settings = load_settings()
        environ = {**os.environ, **{name: settings[name] for name in _SETTINGS}}
        job = _job(out, selection, library.find_library(environ), library.find_patch(environ))
    except MissingError as error:
        return os.environ, str(error)
    except ImportError as error:
        return os.environ, f"{error.name} is not installed; pip install 'pasta-otel[gpu]'"
    return child.command_environment(os.environ, job), ""


def _job(out: Path, selection: Selection, library: str, patch: str) -> dict[str, object]:
    from pasta_otel.gpu.memory.session import Job  # noqa: PLC0415 - numpy is an optional extra

    return {"out": str(out), **Job(library, patch, selection).to_json()}


def _run(words: Sequence[str], environ: Mapping[str, str], stdout: object) -> int:
    """Run the program and return its code as a shell would: 128 and the signal's number where one ended it."""
    sys.stdout.flush()
    try:
        process = subprocess.Popen(words, env=environ, stdout=stdout)  # type: ignore[call-overload]  # a stream or None
    except OSError as error:
        raise InputError(f"cannot be executed: {error.strerror}", file=words[0], field="CMD") from error
    with _forwarding(process):
        code: int = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hand signals that end us to the program; the terminal itself sends SIGINT to both."""

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _results(folder: Path) -> tuple[list[ProcessResult], str]:
    """Return the processes' results, and why there is nothing to report."""
    from pasta_otel.gpu.memory.results import read_results  # noqa: PLC0415 - numpy is an optional extra

    results = read_results(folder)
    problems = sorted({problem for result in results for problem in result.problems})
    if any(result.launches for result in results):
        for problem in problems:
            click.echo(f"pasta-otel: {problem}", err=True)
        return results, ""
    if problems:
        return [], "; ".join(problems)
    if not results:
        return [], "no Python process of the program ended in order (only Python programs are analysed)"
    seen = sum(result.seen for result in results)
    return [], f"none of {seen} launches was chosen by --kernel" if seen else "the program launched no GPU kernel"


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
        _write(html, page.as_html(report), "--html")
    shown = json.dumps(report.as_dict(), indent=2) if as_json else text.as_text(report)
    if output is None:
        click.echo(shown)
    else:
        _write(output, shown + "\n", "--output")


def _write(target: Path, text: str, option: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(error.strerror or str(error), file=str(target), field=option) from error
