"""``pasta-otel agent``: what the host does to spans, on one node."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import click

from pasta_otel.app.agent import LOADER_CHOICES, AgentOptions, serve
from pasta_otel.cli.tokens import token_from
from pasta_otel.ebpf.probes import OBJECT_FOLDER
from pasta_otel.errors import MissingError


@click.command(help="Observe the host by eBPF and files, link what happens to the spans of instrumented processes.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of /metrics and /healthz.")
@click.option("--port", default=4321, show_default=True, help="Their port; 0 takes a free one.")
@click.option(
    "--loader",
    default="auto",
    show_default=True,
    type=click.Choice(LOADER_CHOICES),
    help="How probes are loaded; auto tries core, then bcc, then goes on with files alone.",
)
@click.option("--probes", default="", metavar="NAMES", help="Which of our probes, comma-separated.  [all]")
@click.option(
    "--probe",
    "programs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE.c",
    help="Load a bcc program of your own and export its events; may be repeated.",
)
@click.option("--interval", default=1.0, show_default=True, metavar="SECONDS", help="Time between two readings.")
@click.option("--slow-ms", default=1.0, show_default=True, help="What lasts longer becomes a span of its own, ms.")
@click.option(
    "--budget",
    default=0.01,
    show_default=True,
    envvar="PASTA_OVERHEAD_BUDGET",
    help="Share of time that launch probes may cost; 0 = never, 1 = always attached.",
)
@click.option("--export/--no-export", "exports", default=True, help="Send spans and metrics by OTLP (OTEL_* settings).")
@click.option(
    "--objects",
    default=OBJECT_FOLDER,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where built probes lie, if not in the package (python -m pasta_otel.ebpf.build DIR).",
)
@click.option("--token-env", default="", metavar="NAME", help="Variable that holds the bearer token of /metrics.")
def command(probes: str, interval: float, token_env: str, **rest: Any) -> None:  # one parameter an option
    """Observe until SIGTERM; prints JSON lines: what is attached and refused, where /metrics is, that all was sent."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    options = AgentOptions(
        probes=tuple(name for name in probes.split(",") if name),
        interval_seconds=interval,
        token=token_from(token_env),
        **rest,
    )
    try:
        serve(options, lambda event: click.echo(json.dumps(event)))
    except ModuleNotFoundError as error:
        raise MissingError(f"the agent needs {error.name}", how="pip install 'pasta-otel[ebpf]'") from error
