"""``pasta-otel sidecar``: everything for one pod."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import click

DEFAULT_GRACE = 30.0


@click.command(help="Receive OTLP, store spans, watch SLOs, say why they burn, and act within the policy.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that everything listens on.")
@click.option("--otlp-grpc-port", default=4317, show_default=True, help="OTLP/gRPC port; 0 takes a free one.")
@click.option("--otlp-http-port", default=4318, show_default=True, help="OTLP/HTTP port; 0 takes a free one.")
@click.option("--api-port", default=4320, show_default=True, help="Port of API, OFREP, /metrics and /healthz.")
@click.option("--store", default=":memory:", show_default=True, metavar="FILE", help="DuckDB file for spans.")
@click.option("--store-max-mib", default=4096, show_default=True, help="The oldest spans go above this size, MiB.")
@click.option("--store-max-hours", default=48.0, show_default=True, help="Spans go after this long, hours.")
@click.option("--slo", "slo_paths", multiple=True, metavar="FILE", help="OpenSLO file or directory to watch.")
@click.option("--windows", default="google-30d", show_default=True, help="Burn-rate windows: a shipped name or a file.")
@click.option("--policy", default=None, metavar="FILE", help="Response policy; without one nothing is degraded.")
@click.option("--state", "state_dir", default=None, type=click.Path(path_type=Path), help="Folder for state and audit.")
@click.option("--audit", default=None, type=click.Path(path_type=Path), help="Audit file.  [STATE/audit.jsonl]")
@click.option("--upstream", default="", envvar="OTEL_EXPORTER_OTLP_ENDPOINT", metavar="URL", help="Forward OTLP there.")
@click.option(
    "--upstream-protocol",
    default="http/protobuf",
    envvar="OTEL_EXPORTER_OTLP_PROTOCOL",
    show_default=True,
    type=click.Choice(["http/protobuf", "grpc"]),
    help="How to forward.",
)
@click.option("--flagd-file", default=None, type=click.Path(path_type=Path), help="Keep a flagd source file written.")
@click.option("--tick", default=10.0, show_default=True, metavar="SECONDS", help="Time between two evaluations.")
@click.option("--grace", default=DEFAULT_GRACE, show_default=True, metavar="SECONDS", help="How long late spans count.")
@click.option("--host-metrics/--no-host-metrics", default=True, help="Read CPU throttling and run delay of senders.")
@click.option("--token-env", default="", metavar="NAME", help="Variable that holds the bearer token for all clients.")
@click.option("--tls-certificate", default="", metavar="FILE", help="PEM certificate chain for all that listens.")
@click.option("--tls-key", default="", metavar="FILE", help="Its PEM key.")
def command(  # one parameter an option
    store_max_mib: int, store_max_hours: float, tick: float, grace: float, token_env: str, **rest: Any
) -> None:
    """Serve until SIGTERM; prints one JSON line when ready and one when everything is drained."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        from pasta_otel.app.options import SidecarOptions  # noqa: PLC0415  # --help must not load the sidecar
        from pasta_otel.app.sidecar import serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        from pasta_otel.errors import MissingError  # noqa: PLC0415

        raise MissingError(f"the sidecar needs {error.name}", how="pip install 'pasta-otel[sidecar]'") from error
    options = SidecarOptions(
        store_max_bytes=store_max_mib * 1024**2,
        store_max_age_seconds=store_max_hours * 3600.0,
        tick_seconds=tick,
        grace_seconds=grace,
        token=os.environ.get(token_env, "") if token_env else "",
        **rest,
    )
    serve(options, lambda event: click.echo(json.dumps(event)))
