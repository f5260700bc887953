"""``pasta-otel demo``."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console

from pasta_otel.errors import InputError, MissingError, PastaError

NEEDED = {"torch": "torch", "duckdb": "duckdb", "starlette": "starlette", "uvicorn": "uvicorn", "httpx": "httpx"}
OURS = (
    "load.jsonl",
    "slo.yaml",
    "report.json",
    "report.html",
    "spans.duckdb",
    "spans.duckdb.wal",
    "audit.jsonl",
    "state",
    "logs",
)
ATTEMPTS = 2
FAULT_NAMES = ("slow-dependency", "failing-dependency", "cpu-throttle", "model-sync", "none")


class FiniteRange(click.FloatRange):
    """A range of real numbers: NaN is in no range, though no comparison says so, and nothing lasts for ever."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail as click does."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


@click.command("demo")
@click.option(
    "--fault", type=click.Choice(FAULT_NAMES), default=FAULT_NAMES[0], show_default=True, help="What goes wrong."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Weights, orders, choice of layer."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("demo-out"), show_default=True,
              help="Folder for logs and the report.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document on stdout.")
@click.option(
    "--upstream",
    metavar="URL",
    envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
    help="OTLP endpoint to which the sidecar forwards spans.",
)
@click.option("--rate", type=FiniteRange(1.0, 100.0), default=4.0, show_default=True, help="Orders a second.")
@click.option("--baseline", type=FiniteRange(min=5.0), default=10.0, show_default=True,
              help="Seconds of normal service before the fault.")  # fmt: skip
@click.option("--observe", type=FiniteRange(min=1.0), default=15.0, show_default=True,
              help="Seconds to watch with --fault none.")  # fmt: skip
def demo(**options: Any) -> None:
    """Run a small AI service under load, break one thing, and watch pasta-otel find it and act.

    Takes about a minute, and needs no GPU, no privilege and no other service. DIR/report.html shows what happened.

    Exit code: 0 the expected cause and action; 1 not; 2 wrong options; 3 something is missing here, or broke.
    """
    try:
        report = _checked_run(options, Console(stderr=True))
    except PastaError as error:
        if options["as_json"]:
            click.echo(json.dumps(_failure(error), indent=2))
        raise
    if options["as_json"]:
        click.echo(json.dumps(report, indent=2))
    sys.exit(0 if report["passed"] else 1)


def _checked_run(options: dict[str, Any], console: Console) -> dict[str, Any]:
    """Refuse what is wrong before anything starts, then run; once more where the machine was too busy."""
    _require()
    _check(options["upstream"] or "", os.environ)
    out: Path = options["out"]
    signal.signal(signal.SIGTERM, _interrupt)  # leave through every `finally`, as with Ctrl-C
    with _only_demo_in(out):
        return _play_again(options, console)


def _play_again(options: dict[str, Any], console: Console) -> dict[str, Any]:
    from pasta_otel.demo.processes import TooBusyError  # noqa: PLC0415 - as in _play

    for attempt in range(1, ATTEMPTS + 1):
        _prepare(options["out"])
        try:
            return _play(options, console)
        except TooBusyError as error:
            if attempt == ATTEMPTS:
                raise
            console.print(f"{error.problem}; starting once more", highlight=False)
    raise AssertionError("the last attempt returns or raises")


def _play(options: dict[str, Any], console: Console) -> dict[str, Any]:
    # imported here: `pasta-otel --help` lists this command, and must stay quick
    from pasta_otel.demo import faults, live, page, report  # noqa: PLC0415
    from pasta_otel.demo.load import read_log  # noqa: PLC0415
    from pasta_otel.demo.scenario import Pace, Scenario  # noqa: PLC0415
    from pasta_otel.demo.stage import Stage, StageOptions  # noqa: PLC0415
    from pasta_otel.slo.spec.load import load  # noqa: PLC0415
    from pasta_otel.slo.windows import load_windows  # noqa: PLC0415

    out: Path = options["out"]
    name = cast("faults.FaultName", options["fault"])
    fault = faults.make(name, options["seed"])
    set_up = StageOptions(out=out, seed=options["seed"], rate=options["rate"], upstream=options["upstream"])
    pace = Pace(baseline=options["baseline"])
    if name == "none":
        pace = replace(pace, detect=options["observe"])
    with Stage(set_up) as stage, live.LiveView(console) as view:
        scenario = Scenario(stage, fault, pace, view)
        story = scenario.play()
    slos, windows = load([stage.slo_file]).slos, load_windows(set_up.windows)
    run = report.Run(name, fault, set_up, story, scenario.watch, read_log(stage.load_log), slos, windows)
    document = report.build(run)
    (out / "report.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (out / "report.html").write_text(page.render(run, document), encoding="utf-8")
    live.summary(console, document, str(out / "report.html"))
    return document


def _failure(error: PastaError) -> dict[str, Any]:
    """Return what ``--json`` prints where there is no report."""
    return {"passed": False, "error": {"message": str(error), "exit_code": error.exit_code}}


def _check(upstream: str, environ: Mapping[str, str]) -> None:
    """Check what the demo's processes would refuse one by one: settings in the environment, and the upstream."""
    from pasta_otel.app.options import SidecarOptions  # noqa: PLC0415 - as in _play
    from pasta_otel.app.upstream import forward_config  # noqa: PLC0415 - as in _play
    from pasta_otel.config import load_settings  # noqa: PLC0415 - as in _play

    load_settings(environ)
    protocol = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    options = SidecarOptions(otlp_grpc_port=0, otlp_http_port=0, upstream=upstream, upstream_protocol=protocol)
    forward_config(options, environ)


@contextlib.contextmanager
def _only_demo_in(out: Path) -> Iterator[None]:
    """Hold the folder itself locked, so that two demos do not write into it at once; nothing is left of that."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(error.strerror or str(error), file=str(out), field="--out") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder)
        raise InputError(f"another demo runs in {out}", field="--out") from error
    except OSError:  # a file system without locks: the demo does without
        pass
    try:
        yield
    finally:
        os.close(folder)


def _require() -> None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingError(f"the demo needs {', '.join(missing)}", how="pip install 'pasta-otel[demo]', or `make demo`")


def _prepare(out: Path) -> None:
    """Empty the folder of an earlier run's files, and of nothing else."""
    try:
        for name in OURS:
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(error.strerror or str(error), file=str(out), field="--out") from error


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
