"""Options that the serving commands share, and how one of them is run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pasta_otel.app.debug import log_when_debugging
from pasta_otel.cli.tokens import token_from
from pasta_otel.errors import MissingError

F = TypeVar("F", bound=Callable[..., Any])
FILE, FOLDER = click.Path(path_type=Path), click.Path(path_type=Path)

_SHARED = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address that everything listens on."),
    click.option("--api-port", default=4320, show_default=True, help="Port of API, OFREP, /metrics and /healthz."),
    click.option("--slo", "slo_paths", multiple=True, metavar="FILE", help="OpenSLO file or directory to watch."),
    click.option(
        "--windows", default="google-30d", show_default=True, help="Burn-rate windows: a shipped name or a file."
    ),
    click.option("--policy", default=None, metavar="FILE", help="Response policy; without one nothing is degraded."),
    click.option("--state", "state_dir", default=None, type=FOLDER, help="Folder for state and audit."),
    click.option("--audit", default=None, type=FILE, help="Audit file.  [STATE/audit.jsonl]"),
    click.option("--flagd-file", default=None, type=FILE, help="Keep a flagd source file written."),
    click.option("--tick", default=10.0, show_default=True, metavar="SECONDS", help="Time between two evaluations."),
    click.option("--grace", default=30.0, show_default=True, metavar="SECONDS", help="How long late spans count."),
    click.option(
        "--drain", default=10.0, show_default=True, metavar="SECONDS", help="How long a stop may take in all, at most."
    ),
    click.option(
        "--token-env",
        default="",
        metavar="NAME",
        help="Variable that holds the bearer token of OTLP and API.  [none for OTLP; the API: PASTA_API_TOKEN]",
    ),
    click.option("--tls-certificate", default="", metavar="FILE", help="PEM certificate chain for all that listens."),
    click.option("--tls-key", default="", metavar="FILE", help="Its PEM key."),
)


def shared_options(command: F) -> F:
    """Add the options that a sidecar and a controller have in common."""
    for option in reversed(_SHARED):
        command = option(command)
    return command


def run_server(*, tick: float, grace: float, drain: float, token_env: str, **rest: Any) -> None:
    """Serve until SIGTERM; prints one JSON line when ready and one when everything is drained.

    Raises:
        MissingError: A package of the ``sidecar`` extra is not installed.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    log_when_debugging()
    try:
        from pasta_otel.app.options import SidecarOptions  # noqa: PLC0415  # --help must not load the sidecar
        from pasta_otel.app.sidecar import serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingError(f"{error.name} is not installed", how="pip install 'pasta-otel[sidecar]'") from error
    token = token_from(token_env)
    options = SidecarOptions(tick_seconds=tick, grace_seconds=grace, drain_seconds=drain, token=token, **rest)
    serve(options, lambda event: click.echo(json.dumps(event)))
