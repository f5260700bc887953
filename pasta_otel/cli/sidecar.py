"""``pasta-otel sidecar``: everything for one pod."""

from __future__ import annotations

from typing import Any

import click

from pasta_otel.cli.serving import run_server, shared_options


@click.command(help="Receive OTLP, store spans, watch SLOs, say why they burn, and act within the policy.")
@click.option("--otlp-grpc-port", default=4317, show_default=True, help="OTLP/gRPC port; 0 takes a free one.")
@click.option("--otlp-http-port", default=4318, show_default=True, help="OTLP/HTTP port; 0 takes a free one.")
@click.option("--store", default=":memory:", show_default=True, metavar="FILE", help="DuckDB file for spans.")
@click.option("--store-max-mib", default=4096, show_default=True, help="The oldest spans go above this size, MiB.")
@click.option("--store-max-hours", default=48.0, show_default=True, help="Spans go after this long, hours.")
@click.option(
    "--upstream",
    default="",
    envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
    metavar="URL",
    help="Forward OTLP there.  [OTEL_EXPORTER_OTLP_ENDPOINT; none where that is not set either]",
)
@click.option(
    "--upstream-protocol",
    default="http/protobuf",
    envvar="OTEL_EXPORTER_OTLP_PROTOCOL",
    show_default=True,
    type=click.Choice(["http/protobuf", "grpc"]),
    help="How to forward.  [OTEL_EXPORTER_OTLP_PROTOCOL]",
)
@click.option("--host-metrics/--no-host-metrics", default=True, help="Read CPU throttling and run delay of senders.")
@click.option("--device-metrics/--no-device-metrics", default=True, help="Read the state of GPUs, if there are any.")
@shared_options
def command(store_max_mib: int, store_max_hours: float, **rest: Any) -> None:
    """Serve until SIGTERM."""
    run_server(store_max_bytes=store_max_mib * 1024**2, store_max_age_seconds=store_max_hours * 3600.0, **rest)
