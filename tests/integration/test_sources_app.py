"""Which source answers for which SLO, through the command line and a real Prometheus."""

from __future__ import annotations

import json
import time

import pytest

from pasta_otel import cli
from pasta_otel.app.sources import build_sources, url_of, watches_points
from pasta_otel.clock import SystemClock
from pasta_otel.config import load_settings
from pasta_otel.errors import InputError, MissingError
from pasta_otel.model import CountRequest, TimeWindow
from pasta_otel.slo.spec.load import load
from pasta_otel.slo.spec.model import OtlpSLI, PrometheusSLI
from pasta_otel.testing.prometheus import PrometheusServer, tool

SLO = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: %s}
spec:
  service: web
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  indicator: {metadata: {name: i}, spec: {ratioMetric: {counter: true, bad: {metricSource: %s}, total: {metricSource: %s}}}}
  objectives: [{target: 0.9}]
"""
BAD = """{type: Prometheus%s, spec: {query: 'sum(increase(req_total{code="500"}[{{.window}}]))'}}"""
TOTAL = "{type: Prometheus%s, spec: {query: 'sum(increase(req_total[{{.window}}]))'}}"
SOURCE = """
apiVersion: openslo/v1
kind: DataSource
metadata: {name: main}
spec: {type: Prometheus, connectionDetails: {url: "%s"}}
"""


def prometheus_slo(name: str = "web-availability", ref: str = "") -> str:
    return SLO % (name, BAD % ref, TOTAL % ref)


def settings(**values: str):
    return load_settings({f"PASTA_PROMETHEUS_{key}": value for key, value in values.items()})


def test_an_slo_over_prometheus_without_a_server_is_refused_by_name(tmp_path):
    (tmp_path / "slo.yaml").write_text(prometheus_slo())
    with pytest.raises(InputError, match=r"web-availability: needs a Prometheus server"):
        build_sources(load([tmp_path]).slos, settings(), SystemClock())


def test_a_data_source_names_its_own_server(tmp_path):
    (tmp_path / "slo.yaml").write_text(
        prometheus_slo(ref=", metricSourceRef: main") + "---" + SOURCE % "http://own:9090"
    )
    (slo,) = load([tmp_path]).slos
    assert url_of(slo.sli, settings(URL="http://other:9090")) == "http://own:9090"
    assert url_of(PrometheusSLI(), settings(URL="http://other:9090")) == "http://other:9090"


@pytest.mark.parametrize(
    ("key", "value"), [("HEADERS", "novalue"), ("CA_FILE", "/nowhere.pem"), ("URL", "localhost:9090")]
)
def test_a_wrong_setting_is_refused(tmp_path, key, value):
    (tmp_path / "slo.yaml").write_text(prometheus_slo())
    with pytest.raises(InputError):
        build_sources(load([tmp_path]).slos, settings(**({"URL": "http://p"} | {key: value})), SystemClock())


def test_otlp_indicators_need_a_sink_and_others_do_not(tmp_path):
    otlp = "{type: otlp, spec: {metric: %s}}"
    (tmp_path / "slo.yaml").write_text(SLO % ("o", otlp % "bad", otlp % "all"))
    slos = load([tmp_path]).slos
    assert isinstance(slos[0].sli, OtlpSLI)
    assert watches_points(slos)
    sources = build_sources(slos, settings(), SystemClock())
    assert sources.otlp is not None
    now = time.time_ns()
    (answer,) = sources.source.counts([CountRequest(slos[0].sli, TimeWindow(now - 10**9, now))], now)
    assert answer.no_data == "absent"
    sources.close()


def test_status_over_a_real_prometheus(capsys, tmp_path):
    try:
        tool("prometheus")
    except MissingError as missing:
        pytest.skip(str(missing))
    now = int(time.time())
    times = range(now - 3600, now)
    (tmp_path / "data").mkdir()
    server = PrometheusServer(tmp_path / "data")
    server.backfill(
        [
            ("req_total", {"code": c}, [(at, (at - times[0]) * per) for at in times])
            for c, per in (("200", 1.0), ("500", 1.0))
        ]
    )
    (tmp_path / "slo.yaml").write_text(prometheus_slo())
    with server, pytest.raises(SystemExit) as caught:
        cli.main(
            ["slo", "status", "--slo", str(tmp_path / "slo.yaml"), "--prometheus", server.url, "--windows", "demo",
             "--grace", "10", "--json"]
        )  # fmt: skip
    assert caught.value.code == 1
    (state,) = json.loads(capsys.readouterr().out)["slos"]
    assert state["verdict"] == "burning"
    assert state["burn_rates"][0]["long"] == pytest.approx(5.0)
    assert any(point["burn"] for point in state["history"])
