"""The sidecar watches an SLO over OTLP metrics that a service sends it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from pasta_otel.app.options import SidecarOptions
from pasta_otel.app.sidecar import Sidecar

SPEC = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: orders}
spec:
  service: api
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  indicator:
    metadata: {name: i}
    spec:
      ratioMetric:
        counter: true
        bad: {metricSource: {type: otlp, spec: {metric: requests, where: {service.name: api, code: 500}}}}
        total: {metricSource: {type: otlp, spec: {metric: requests, where: {service.name: api}}}}
  objectives: [{target: 0.95}]
"""


def send(url: str) -> None:
    """Count 200 requests, half of them bad, with the OTel SDK, and export them."""
    exporter = OTLPMetricExporter(f"{url}/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=60_000)
    provider = MeterProvider([reader], Resource({"service.name": "api"}))
    counter = provider.get_meter("test").create_counter("requests")
    for code in (200, 500):
        counter.add(100, {"code": code})
    provider.shutdown()


def states(url: str) -> list[dict]:
    with urllib.request.urlopen(f"{url}/api/v1/slos", timeout=5) as answer:
        return json.load(answer)["slos"]


def burning(url: str) -> dict:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for state in states(url):
            if state["verdict"] == "burning":
                return state
        time.sleep(0.2)
    raise AssertionError(states(url))


async def test_metrics_of_the_sdk_make_an_slo_burn(tmp_path):
    file = tmp_path / "slo.yaml"
    file.write_text(SPEC)
    options = SidecarOptions(
        slo_paths=(str(file),), windows="demo", store=":memory:", state_dir=tmp_path / "state", tick_seconds=0.5,
        grace_seconds=0.5, otlp_http_port=0, otlp_grpc_port=0, api_port=0, host_metrics=False,
    )  # fmt: skip
    sidecar = Sidecar(options, environ={})
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(sidecar.run(stop, lambda event: ready.done() or ready.set_result(event)))
    try:
        addresses = await asyncio.wait_for(ready, 20)
        await asyncio.to_thread(send, addresses["otlp_http"])
        state = await asyncio.to_thread(burning, addresses["api"])
    finally:
        stop.set()
        await task
    assert state["budget"]["total"] == 200
    assert state["burn_rates"][0]["long"] == 10.0
