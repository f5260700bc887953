"""``pasta-otel slo``: check SLO files, and show how the SLOs stand."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pasta_otel
from pasta_otel.app.sources import build_sources, planned_maintenance
from pasta_otel.clock import SystemClock
from pasta_otel.config import load_settings
from pasta_otel.errors import InputError, MissingError
from pasta_otel.slo.controller import DEFAULT_GRACE_NS, Parts, SLOController
from pasta_otel.slo.history import with_history
from pasta_otel.slo.page import duration_words, page, worst_pair
from pasta_otel.slo.periods import length_ns
from pasta_otel.slo.report import evaluation_to_json
from pasta_otel.slo.rules.build import build, refuse_twins
from pasta_otel.slo.rules.render import dump, render
from pasta_otel.slo.rules.scenario import promtool_document, read_scenario
from pasta_otel.slo.sources.remote import fetch_states, with_remote_history
from pasta_otel.slo.sources.spans import SpanCounter
from pasta_otel.slo.spec.document import Problem
from pasta_otel.slo.spec.load import SpecSet, check, load
from pasta_otel.slo.windows import DEFAULT, lint, load_windows

KEEP_ALL_SECONDS, KEEP_ALL_BYTES = 4e9, 2**60  # since 1970, 1 EiB: looking at a store must not delete from it
EXIT_FINE, EXIT_NO, EXIT_NO_DATA = 0, 1, 3


@click.group(help="Validate SLO files and show their state.")
def command() -> None:
    """Group the subcommands."""


@command.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE...")
@click.option("--windows", default=DEFAULT, show_default=True, help="Burn-rate windows: a shipped name or a file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def validate(ctx: click.Context, paths: tuple[str, ...], windows: str, *, as_json: bool) -> None:
    """Check SLO files and directories: exit 0 when all are valid, 1 when one is not, 2 when one cannot be read."""
    found = check(paths)
    problems = (*found.problems, *_lint(found, windows))
    errors = [problem for problem in problems if problem.severity == "error"]
    if as_json:
        click.echo(json.dumps(_validation_json(found, problems), indent=2))
    else:
        for problem in problems:
            click.echo(f"{problem.severity}: {problem}", err=True)
        counts = (len(found.objects), "object"), (len(found.slos), "objective"), (len(errors), "error")
        click.echo(", ".join(f"{number} {word}{'' if number == 1 else 's'}" for number, word in counts))
    ctx.exit(EXIT_NO if errors else EXIT_FINE)


def _lint(found: SpecSet, windows: str) -> list[Problem]:
    rows, now = load_windows(windows), time.time_ns()
    return [
        Problem(f"{slo.name}: {message}", slo.file, None, "", "burn_rate", "warning")
        for slo in found.slos
        for message in lint(rows, slo.objective, length_ns(slo.window, now))
    ]


def _validation_json(found: SpecSet, problems: tuple[Problem, ...]) -> dict[str, Any]:
    return {
        "valid": not found.errors,
        "slos": [
            {"name": slo.name, "service": slo.service, "objective": float(slo.objective), "file": slo.file}
            for slo in found.slos
        ],
        "problems": [
            {
                "severity": problem.severity,
                "file": problem.file,
                "line": problem.line,
                "field": problem.field,
                "kind": problem.kind,
                "message": problem.message,
            }
            for problem in problems
        ],
    }


@command.command()
@click.option("--server", default=None, metavar="URL", help="Ask this sidecar or controller.  [PASTA_CONTROLLER_URL]")
@click.option("--slo", "slo_paths", multiple=True, metavar="FILE", help="Evaluate this SLO file once, here.")
@click.option("--store", default=None, metavar="FILE", help="With --slo: the span store, when nobody holds it.")
@click.option("--prometheus", default=None, metavar="URL", help="With --slo: the Prometheus server.")
@click.option("--windows", default=DEFAULT, show_default=True, help="Burn-rate windows: a shipped name or a file.")
@click.option("--grace", default=None, type=float, metavar="SECONDS", help="How long late spans count.  [30]")
@click.option("--html", "html_file", default=None, metavar="FILE", help="Also write a self-contained page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def status(  # noqa: PLR0913, PLR0917  # one parameter an option
    ctx: click.Context,
    server: str | None,
    slo_paths: tuple[str, ...],
    store: str | None,
    prometheus: str | None,
    windows: str,
    grace: float | None,
    html_file: str | None,
    *,
    as_json: bool,
) -> None:
    """Show every SLO: exit 0 when none burns, 1 when one burns, 3 when nothing is known of any."""
    if (server and slo_paths) or ((store or prometheus) and not slo_paths):
        raise click.UsageError("give --server URL, or --slo FILE with --store FILE or --prometheus URL")
    settings = load_settings()
    if slo_paths:
        settings["PASTA_PROMETHEUS_URL"] = prometheus or settings["PASTA_PROMETHEUS_URL"]
        document = evaluate_once(slo_paths, Path(store) if store else None, windows, grace, settings)
    else:
        token = settings["PASTA_API_TOKEN"] or None
        url = server or settings["PASTA_CONTROLLER_URL"]
        document = fetch_states(url, token=token)
        if html_file:
            document = with_remote_history(document, url, token=token)
    if html_file:
        _write(Path(html_file), page(document))
    if as_json:
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    elif document["slos"]:
        Console().print(states_table(document["slos"]))
    else:
        click.echo("no SLO is watched, or none has been evaluated yet")
    ctx.exit(exit_code(document["slos"]))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # JSON may hold half a surrogate pair
    except OSError as error:
        raise InputError(error.strerror or str(error), file=str(path)) from error


def evaluate_once(
    slo_paths: tuple[str, ...],
    store_path: Path | None,
    windows: str,
    grace_seconds: float | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the states of SLO files as of now, over a span store, Prometheus, or both."""
    slos, now = load(slo_paths).slos, time.time_ns()
    grace_ns = DEFAULT_GRACE_NS if grace_seconds is None else int(grace_seconds * 1e9)
    with ExitStack() as undo:
        store = _open_store(store_path, undo) if store_path else None
        sources = build_sources(slos, settings, SystemClock(), store=(store, grace_ns) if store else None)
        undo.callback(sources.close)
        maintenance = planned_maintenance(settings)
        parts = Parts(sources.source, maintenance=maintenance)
        controller = SLOController(slos, load_windows(windows), parts, grace_ns=grace_ns)
        return with_history(evaluation_to_json(controller.tick(now)), slos, sources.source, now, maintenance)


def _open_store(path: Path, undo: ExitStack) -> SpanCounter:
    from pasta_otel.exporters.store import DuckDBSpanStore, StoreConfig  # noqa: PLC0415  # duckdb is an optional extra

    if not path.exists():
        raise InputError("no such file", file=str(path))
    store = DuckDBSpanStore.open(str(path), config=StoreConfig(max_age_s=KEEP_ALL_SECONDS, max_bytes=KEEP_ALL_BYTES))
    undo.callback(store.close)
    return store


def exit_code(states: list[dict[str, Any]]) -> int:
    """Return 1 when an SLO burns, 3 when there is no data for any, else 0."""
    verdicts = [state["verdict"] for state in states]
    if "burning" in verdicts:
        return EXIT_NO
    return EXIT_NO_DATA if all(verdict == "no_data" for verdict in verdicts) else EXIT_FINE


def states_table(states: list[dict[str, Any]]) -> Table:
    """Return the states as a table for people."""
    table = Table(title="Service level objectives", expand=False)
    for heading in ("SLO", "verdict", "budget left", "burn rate", "why"):
        table.add_column(heading, overflow="fold")
    for state in states:
        table.add_row(
            _name_text(state),
            _verdict_text(state),
            _budget_text(state["budget"]),
            _burn_text(state["burn_rates"]),
            Text(_why(state)),
        )
    return table


def _name_text(state: dict[str, Any]) -> Text:
    owner = state["annotations"].get("owner")
    about = [state["service"], f"{state['objective'] * 100:.10g} %", *([str(owner)] if owner else [])]
    return Text(state["name"]).append("\n" + ", ".join(about), style="dim")


def _verdict_text(state: dict[str, Any]) -> Text:
    colour = {"ok": "green", "burning": "bold red", "no_data": "yellow"}[state["verdict"]]
    reason = f" ({state['reason']})" if state["reason"] else ""
    firing = [alert for alert in state.get("alerts", ()) if alert["state"] == "firing"]
    alerts = "".join(f"\nalert {alert['policy']} ({alert['severity']})" for alert in firing)
    return Text(f"{state['verdict']}{reason}{alerts}", style=colour)


def _budget_text(budget: dict[str, Any]) -> str:
    left = budget["remaining"]
    if left is None:
        return "-"
    lines = [f"{left * 100:.1f} %"]
    if budget["coverage"] < 1:
        lines.append(f"{budget['coverage'] * 100:.0f} % covered")
    if budget["exhausted_in_seconds"] is not None and left > 0:
        lines.append(f"gone in {duration_words(budget['exhausted_in_seconds'])}")
    return "\n".join(lines)


def _burn_text(rates: list[dict[str, Any]]) -> str:
    """Return the pairs that burn, or else the one nearest to its factor; ``--json`` has them all."""
    nearest = worst_pair(rates)
    shown = [rate for rate in rates if rate["active"]] or ([nearest] if nearest is not None else [])
    parts = [
        f"{rate['long_window']}/{rate['short_window']} "
        + " / ".join("-" if value is None else f"{value:.2f}" for value in (rate["long"], rate["short"]))
        + f" (>{rate['factor']:.4g})"
        for rate in shown
    ]
    return "\n".join(parts) or "-"


def _why(state: dict[str, Any]) -> str:
    causes = (state["attribution"] or {}).get("causes", [])
    return f"{causes[0]['kind']} {causes[0]['target']}" if causes else str(state["detail"])


@command.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE...")
@click.option("--windows", default=DEFAULT, show_default=True, help="Burn-rate windows: a shipped name or a file.")
@click.pass_context
def rules(ctx: click.Context, paths: tuple[str, ...], windows: str) -> None:
    """Write Prometheus recording and alerting rules for SLO files to stdout, under Sloth's names."""
    found, rows, groups, refused = load(paths), load_windows(windows), [], 0
    for slo in found.slos:
        try:
            groups += build(slo, rows, pasta_otel.__version__)
            if slo.window.calendar_start is not None:
                period = f"a calendar period, which rules cannot express, counts as the last {slo.window.duration.text}"
                click.echo(f"warning: {slo.file}: {slo.name}: {period}", err=True)
        except InputError as error:
            refused += 1
            click.echo(f"warning: {error}", err=True)
    for problem in (*found.problems, *_lint(found, windows)):
        click.echo(f"{problem.severity}: {problem}", err=True)
    if not groups:
        raise InputError("no SLO in these files can be expressed as rules", file=paths[0])
    refuse_twins(groups)
    click.echo(render(groups).encode(), nl=False)  # YAML is UTF-8 whatever the terminal's encoding is
    ctx.exit(EXIT_NO if refused else EXIT_FINE)


@command.command()
@click.argument("paths", nargs=-1, required=True, metavar="SCENARIO...")
@click.option("--promtool", default=None, metavar="FILE", help="The promtool to use.  [found on the path]")
@click.pass_context
def test(ctx: click.Context, paths: tuple[str, ...], promtool: str | None) -> None:
    """Run scenario files through promtool: exit 0 when all hold, 1 when one does not, 3 without promtool."""
    program = shutil.which(promtool or "promtool")
    if program is None:
        raise MissingError(
            f"{promtool or 'promtool'} is not installed", how="it comes with Prometheus (apt: prometheus)"
        )
    failed = 0
    for path in paths:
        passed, text = run_scenario(Path(path), program)
        click.echo(f"{'ok' if passed else 'FAILED'}  {path}")
        if not passed:
            click.echo(text, err=True)
            failed += 1
    ctx.exit(EXIT_NO if failed else EXIT_FINE)


def run_scenario(path: Path, promtool: str) -> tuple[bool, str]:
    """Return whether a scenario holds, and promtool's own words."""
    scenario = read_scenario(path)
    slos, rows = load(scenario.slo_files).slos, load_windows(scenario.windows)
    groups = [group for slo in slos for group in build(slo, rows, pasta_otel.__version__)]
    refuse_twins(groups)
    with tempfile.TemporaryDirectory() as folder:
        rules_file, test_file = Path(folder, "rules.yml"), Path(folder, "test.yml")
        rules_file.write_text(render(groups), encoding="utf-8")
        test_file.write_text(dump(promtool_document(scenario, "rules.yml", slos)), encoding="utf-8")
        done = subprocess.run(
            [promtool, "test", "rules", str(test_file)], capture_output=True, text=True, check=False, timeout=600
        )
    return done.returncode == 0, (done.stdout + done.stderr).strip()
