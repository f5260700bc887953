"""``pasta-otel controller`` as a process: it watches, answers and stops, and opens no OTLP port."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
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


def leads(api: str) -> bool:
    request = urllib.request.Request(
        f"{api}/api/v1/flags/degrade.x/pin", b'{"value": true, "by": "test", "reason": "who leads"}', method="PUT"
    )
    try:
        with urllib.request.urlopen(request, timeout=10):
            return True
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
        return "only watches" not in message


def test_of_two_controllers_with_one_state_directory_one_acts_and_the_other_takes_over(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(SPEC)
    environ = {"PATH": "/usr/bin:/bin", "PASTA_PROMETHEUS_URL": "http://127.0.0.1:9"}
    arguments = (
        "--slo",
        str(tmp_path / "slo.yaml"),
        "--api-port",
        "0",
        "--tick",
        "0.1",
        "--state",
        str(tmp_path / "st"),
    )
    processes = [start(*arguments, environ=environ)]
    try:
        assert processes[0].stdout is not None
        first = json.loads(processes[0].stdout.readline())["api"]
        processes.append(start(*arguments, environ=environ))
        assert processes[1].stdout is not None
        second = json.loads(processes[1].stdout.readline())["api"]
        assert (leads(first), leads(second)) == (True, False)
        lock = tmp_path / "st" / "slo.lock"
        assert int(lock.read_text()) == processes[0].pid
        processes[0].kill()
        processes[0].wait()
        while not leads(second):
            assert processes[1].poll() is None
        assert int(lock.read_text()) == processes[1].pid
    finally:
        for process in processes:
            process.kill()
            process.communicate()
