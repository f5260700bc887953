"""``pasta-otel controller``: SLOs over Prometheus, flags and the API, but no receiver and no span store."""

from __future__ import annotations

from typing import Any

import click

from pasta_otel.cli.serving import run_server, shared_options


@click.command(help="Watch SLOs over Prometheus servers, serve flags and the API, and act within the policy.")
@shared_options
def command(**rest: Any) -> None:
    """Serve until SIGTERM."""
    run_server(receive=False, host_metrics=False, device_metrics=False, **rest)
