"""``pasta-otel import``: traces that other tools wrote, into a store, an OTLP server, or a report."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pasta_otel import semconv
from pasta_otel.errors import InputError, MissingError

if TYPE_CHECKING:
    from pasta_otel.app.importing import SpanTarget
    from pasta_otel.gpu.kineto.ranks import Job

_JSON_NAME = re.compile(r"\.json(\.gz|\.zst)?$")
FORMATS = ("auto", "kineto", "otlp-json", "jaeger")
DEFAULT_STORE = "pasta-otel.duckdb"
DEFAULT_SERVICE = "pytorch"


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format", "format_", type=click.Choice(FORMATS), default="auto", show_default=True, help="What they are."
)
@click.option(
    "--to",
    type=click.Choice(["store", "otlp", "json"]),
    default="json",
    show_default=True,
    help="A store file, the OTLP server of OTEL_EXPORTER_OTLP_*, or analysis and findings on stdout.",
)
@click.option("--store", default=None, metavar="FILE", help=f"With --to store: the file.  [default: {DEFAULT_STORE}]")
@click.option("--service", default=DEFAULT_SERVICE, show_default=True, help="service.name of imported profiler traces.")
@click.option("--strict", is_flag=True, help="Refuse a damaged trace instead of keeping what can be read.")
@click.option("--python-frames", is_flag=True, help="Also make spans of Python frames.")
@click.option(
    "--max-events",
    default=20_000_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Refuse a trace with more; 64 bytes each.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document about what was imported.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.pass_context
def command(  # noqa: PLR0913 - one parameter an option
    ctx: click.Context,
    *,
    files: tuple[Path, ...],
    format_: str,
    to: str,
    store: str | None,
    service: str,
    strict: bool,
    python_frames: bool,
    max_events: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Import FILES (or folders): PyTorch profiler (Kineto) traces of one job, OTLP JSON, or Jaeger JSON."""
    if store is not None and to != "store":
        raise click.UsageError(f"--store FILE needs --to store; this is --to {to}")
    try:
        from pasta_otel.gpu.kineto import ReadOptions  # noqa: PLC0415 - msgspec and numpy are an optional extra
    except ImportError as error:
        raise MissingError(f"{error.name} is not installed", how="pip install 'pasta-otel[gpu]'") from error
    kinds, unread = _kinds(files, format_, strict=strict)
    options = ReadOptions(strict=strict, most_rows=max_events)
    profiles = [path for path in kinds if kinds[path] == "kineto"]
    requests = [path for path in kinds if kinds[path] != "kineto"]
    report: dict[str, Any]
    with _progress(list(kinds), quiet=quiet) as advance:
        if to == "json":
            report = _report(profiles, requests, kinds, options, advance)
        else:
            report = _deliver(
                to,
                _target(to, store or DEFAULT_STORE),
                profiles,
                requests,
                kinds,
                options,
                advance,
                service,
                python_frames,
            )
    if unread:
        report["unread"] = [{"file": str(refusal.file), "why": refusal.message} for refusal in unread]
        for refusal in unread:
            click.echo(f"warning: {refusal}; not imported", err=True)
    text = json.dumps(report, indent=2, allow_nan=False) if as_json or to == "json" else "\n".join(_lines(report))
    click.echo(text)
    ctx.exit(_end(report.get("delivered")))


def _end(delivered: dict[str, Any] | None) -> int:
    """Say what went wrong with what was sent or stored; return the exit code."""
    if not delivered:
        return 0
    if delivered["aged"]:
        click.echo(
            f"warning: {delivered['aged']} spans ended more than 48 h ago: a sidecar deletes such spans at once, unless"
            " its --store-max-hours is larger",
            err=True,
        )
    if not delivered["lost"]:
        return 0
    why = f": {delivered['why']}" if delivered["why"] else ""
    click.echo(f"pasta-otel: {delivered['lost']} of {delivered['spans']} spans are lost{why}", err=True)
    return MissingError.exit_code


def _kinds(given: Sequence[Path], format_: str, *, strict: bool) -> tuple[dict[Path, str], list[InputError]]:
    """Return each file's format, and why files of a folder are none of ours; one that was named must be one.

    Raises:
        InputError: A file that was named is no trace, or no file of a folder is.
    """
    kinds: dict[Path, str] = {}
    unread: list[InputError] = []
    for path in given:
        before = len(kinds)
        for file in _expand([path]):
            try:
                kinds[file] = format_ if format_ != "auto" else _detect(file)
            except InputError as error:
                if strict or not path.is_dir():
                    raise
                unread.append(error)
        if path.is_dir() and len(kinds) == before:
            raise InputError(f"no trace in this folder; the first file: {unread[-1].message}", file=str(path))
    return kinds, unread


def _expand(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files; of a folder those that are JSON by name, compressed or not."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(file for file in path.iterdir() if file.is_file() and _JSON_NAME.search(file.name))
        if not inside:
            raise InputError("no .json, .json.gz or .json.zst file in this folder", file=str(path))
        yield from inside


def _detect(path: Path) -> str:
    from pasta_otel.gpu.imports.detect import detect  # noqa: PLC0415 - optional extra, checked by the caller

    return detect(path)


@contextmanager
def _progress(files: Sequence[Path], *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show how much of the files was read, on stderr when that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - only for people
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn  # noqa: PLC0415

    columns = ("import", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    total = sum(path.stat().st_size for path in files if path.is_file())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("import", total=total)
        yield lambda count: progress.advance(task, count)


def _report(
    profiles: Sequence[Path],
    requests: Sequence[Path],
    kinds: dict[Path, str],
    options: Any,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    from pasta_otel.gpu.analysis.report import analyze  # noqa: PLC0415 - optional extra
    from pasta_otel.gpu.findings import find  # noqa: PLC0415
    from pasta_otel.gpu.imports.traces import TraceCollector  # noqa: PLC0415
    from pasta_otel.gpu.kineto import read_job  # noqa: PLC0415

    report: dict[str, Any] = {"files": [_file(path, kinds) for path in (*profiles, *requests)]}
    if profiles:
        job = read_job(profiles, options, advance)
        timelines = [trace.timeline for trace in job.traces]
        report |= {"profile": analyze(timelines), "import": _read(job)}
        report["findings"] = [finding.as_dict() for finding in find(timelines)]
    if requests:
        collector = TraceCollector()
        for path in requests:
            for request in _requests(path, kinds[path], options, advance, report):
                collector.add(request)
        report["traces"] = collector.document()
    return report


def _file(path: Path, kinds: dict[Path, str]) -> dict[str, str]:
    return {"file": str(path), "format": kinds[path]}


def _read(job: Job) -> dict[str, Any]:
    """Return what reading noticed."""
    return {
        "warnings": [*job.warnings, *(f"{t.timeline.source}: {remark}" for t in job.traces for remark in t.remarks)],
        "ranks": [
            {
                "rank": trace.timeline.rank,
                "events": trace.total,
                "categories": dict(trace.categories),
                "unfinished": trace.unfinished,
                "without_time": trace.without_time,
                "skipped": trace.skipped,
                "partial": trace.partial,
                "non_finite": trace.non_finite,
                "truncated": trace.truncated,
            }
            for trace in job.traces
        ],
    }


def _target(to: str, store: str) -> SpanTarget:
    try:
        from pasta_otel.app.importing import OtlpTarget, StoreTarget  # noqa: PLC0415 - optional extra
    except ImportError as error:
        raise MissingError(f"{error.name} is not installed", how="pip install 'pasta-otel[sidecar]'") from error
    return StoreTarget(store) if to == "store" else OtlpTarget()


def _deliver(  # noqa: PLR0913, PLR0917 - what the command was asked
    to: str,
    target: SpanTarget,
    profiles: Sequence[Path],
    requests: Sequence[Path],
    kinds: dict[Path, str],
    options: Any,
    advance: Callable[[int], None],
    service: str,
    python: bool,
) -> dict[str, Any]:
    from pasta_otel.app.importing import put_columns, put_json  # noqa: PLC0415 - optional extra
    from pasta_otel.gpu.imports.spans import timeline_spans  # noqa: PLC0415
    from pasta_otel.gpu.kineto import read_job  # noqa: PLC0415

    report: dict[str, Any] = {"files": [_file(path, kinds) for path in (*profiles, *requests)]}
    try:
        if profiles:
            job = read_job(profiles, options, advance)
            report["import"] = _read(job)
            for trace in job.traces:
                resource: dict[str, str | int] = {
                    semconv.SERVICE_NAME: service,
                    semconv.TORCH_RANK: trace.timeline.rank,
                }
                for columns in timeline_spans(trace.timeline, python=python):
                    put_columns(target, columns, resource)
        for path in requests:
            for request in _requests(path, kinds[path], options, advance, report):
                _put_json(put_json, target, request, path)
    finally:
        report["delivered"] = target.close().as_dict()
    if profiles and to == "otlp":
        _export_coverage(job, service)
    return report


def _export_coverage(job: Job, service: str) -> None:
    from pasta_otel.app.importing import import_meter  # noqa: PLC0415 - optional extra
    from pasta_otel.gpu.analysis.link import coverage, link, record_coverage  # noqa: PLC0415

    with import_meter(service) as meter:
        for trace in job.traces:
            record_coverage(meter, trace.timeline.rank, coverage(link(trace.timeline)))


def _put_json(put: Callable[[SpanTarget, bytes], None], target: SpanTarget, request: bytes, path: Path) -> None:
    try:
        put(target, request)
    except InputError as error:
        if error.file:
            raise
        raise InputError(error.message, file=str(path), field=error.field, kind="trace_format") from error


def _requests(
    path: Path, kind: str, options: Any, advance: Callable[[int], None], report: dict[str, Any]
) -> Iterator[bytes]:
    """Yield a file's requests; spans left out are counted in the report, with the first one's place."""
    from pasta_otel.gpu.imports.jaeger import read_jaeger  # noqa: PLC0415 - optional extra
    from pasta_otel.gpu.imports.otlp import read_otlp  # noqa: PLC0415

    left_out: list[InputError] = []
    read = read_jaeger if kind == "jaeger" else read_otlp
    yield from read(path, advance, None if options.strict else left_out)
    if left_out:
        entry = {"file": str(path), "spans": len(left_out), "first": left_out[0].message, "field": left_out[0].field}
        report.setdefault("left_out", []).append(entry)


def _lines(report: dict[str, Any]) -> list[str]:
    done = report["delivered"]
    lines = [*report.get("import", {}).get("warnings", ())]
    lines += [f"{entry['file']}: {entry['format']}" for entry in report["files"]]
    for rank in report.get("import", {}).get("ranks", ()):
        odd = [
            f"{rank[key]} {key}"
            for key in ("skipped", "partial", "unfinished", "without_time", "non_finite")
            if rank[key]
        ]
        lines.append(f"rank {rank['rank']}: {rank['events']} events" + "".join(f", {part}" for part in odd))
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in done["dropped"].items())
    for entry in report.get("left_out", ()):
        lines.append(f"{entry['file']}: {entry['spans']} spans left out; the first: {entry['field']}: {entry['first']}")
    return [*lines, f"{done['ok']} of {done['spans']} spans imported{dropped}"]
