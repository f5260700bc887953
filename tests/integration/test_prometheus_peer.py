"""A real Prometheus scrapes our page and keeps the exemplars."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from opentelemetry.sdk.trace import TracerProvider

from pasta_otel.exporters.metrics import build_meter_provider
from pasta_otel.exporters.prometheus import MetricsServer, PrometheusReader
from tests.support import free_port, tool, wait_for


@pytest.fixture
def page():
    reader = PrometheusReader()
    provider = build_meter_provider(readers=[reader], attributes={"service.name": "orders"})
    server = MetricsServer(reader.render)
    yield provider.get_meter("t"), server.port
    server.close()
    provider.shutdown()


@pytest.fixture
def prometheus(page, tmp_path):
    binary, port = tool("prometheus"), free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: pasta, static_configs: [{{targets: ['127.0.0.1:{page[1]}']}}]}}]\n"
    )
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [
            binary, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
        ],
        stdout=log, stderr=log,
    )  # fmt: skip
    yield port
    process.terminate()
    process.wait(20)
    log.close()


def ask(port, path, **query):
    try:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        pass
    return None


def test_prometheus_keeps_values_and_exemplars_of_our_page(page, prometheus):
    meter, _ = page
    histogram = meter.create_histogram("lag", "s", "Lag.", explicit_bucket_boundaries_advisory=[0.1, 1.0])
    counter = meter.create_counter("jobs", "{job}", "Jobs.")
    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("request") as span:
        histogram.record(0.5)
        counter.add(1)
    trace_id = f"{span.get_span_context().trace_id:032x}"

    def exemplars(query):
        now = time.time()
        found = ask(prometheus, "query_exemplars", query=query, start=now - 300, end=now + 60) or []
        return {item["labels"].get("trace_id") for series in found for item in series["exemplars"]}

    wait_for(lambda: trace_id in exemplars("lag_seconds_bucket"), 60)
    wait_for(lambda: trace_id in exemplars("jobs_total"), 60)
    count = ask(prometheus, "query", query='lag_seconds_bucket{le="+Inf"} - on() lag_seconds_count')
    assert [result["value"][1] for result in count["result"]] == ["0"]
    (target,) = ask(prometheus, "targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    info = ask(prometheus, "query", query="target_info")["result"][0]["metric"]
    assert info["service_name"] == "orders"
