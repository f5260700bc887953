"""``pasta-otel controller`` as a process: it watches, answers and stops, and opens no OTLP port."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

SPEC = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: checkout}
spec:
  service: shop
  budgetingMethod: Occurrences
  indicator:
    metadata: {name: checkout-ok}
    spec:
      ratioMetric:
        counter: true
        good: {metricSource: {type: Prometheus, spec: {query: 'sum(increase(ok_total[{{.window}}]))'}}}
        total: {metricSource: {type: Prometheus, spec: {query: 'sum(increase(all_total[{{.window}}]))'}}}
  timeWindow: [{duration: 30d, isRolling: true}]
  objectives: [{displayName: a, target: 0.99}]
"""


def start(*arguments: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pasta_otel", "controller", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def test_a_controller_whose_prometheus_is_down_says_no_data_and_stops_in_order(tmp_path: Path) -> None:
    spec = tmp_path / "slo.yaml"
    spec.write_text(SPEC)
    environ = {"PATH": "/usr/bin:/bin", "PASTA_PROMETHEUS_URL": "http://127.0.0.1:9"}  # the discard port: nobody there
    process = start("--slo", str(spec), "--api-port", "0", "--tick", "0.2", "--state", str(tmp_path), environ=environ)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert set(ready) == {"event", "api"}
        state = None
        while state is None:
            with urllib.request.urlopen(f"{ready['api']}/api/v1/slos", timeout=10) as answer:
                (state,) = json.load(answer)["slos"] or [None]
        assert (state["verdict"], state["reason"]) == ("no_data", "absent")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        assert json.loads(out.splitlines()[-1])["event"] == "stopped"
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_a_controller_without_slo_files_says_which_option_is_missing() -> None:
    process = start(environ={"PATH": "/usr/bin:/bin"})
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "--slo" in err


def test_the_page_of_a_running_controller_plots_what_it_has_seen(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(SPEC)
    environ = {"PATH": "/usr/bin:/bin", "PASTA_PROMETHEUS_URL": "http://127.0.0.1:9"}
    process = start("--slo", str(tmp_path / "slo.yaml"), "--api-port", "0", "--tick", "0.1", environ=environ)
    try:
        assert process.stdout is not None
        api = json.loads(process.stdout.readline())["api"]
        points: list[dict[str, object]] = []
        while len(points) < 3:
            with urllib.request.urlopen(f"{api}/api/v1/slos/history", timeout=10) as answer:
                points = json.load(answer)["history"].get("checkout", [])
        assert points[0]["remaining"] is None
        asked = subprocess.run(
            [sys.executable, "-m", "pasta_otel", "slo", "status", "--server", api, "--html", str(tmp_path / "p.html")],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert asked.returncode == 3
        text = (tmp_path / "p.html").read_text()
        assert re.search(r"As of 20\d\d-", text)
        assert "Over time" in text
        assert "budget left: no data" in text
    finally:
        process.kill()
        process.communicate()
