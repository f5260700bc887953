"""A real Prometheus in real time: a service fails, and the controller says so one evaluation later."""

from __future__ import annotations

import json
import threading
import time
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pasta_otel.errors import MissingError
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.sources.prometheus import PrometheusConfig, PrometheusSource
from pasta_otel.slo.spec.model import SLO, DurationText, PrometheusSLI, WindowSpec
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.prometheus import PrometheusServer, tool

SECOND = 1_000_000_000
RATE = 40
OBJECTIVE, PERIOD = Decimal("0.95"), WindowSpec(DurationText(1, "h"))
SLI = PrometheusSLI(
    total="sum(increase(req_total[{{.window}}]))", bad='sum(increase(req_total{code="500"}[{{.window}}]))'
)


class Service:
    """Count requests at a steady rate, a share of them failing; expose the counters."""

    def __init__(self) -> None:
        self.good = self.bad = 0
        self.failing = 0.0
        self.log: list[tuple[float, bool]] = []
        self._stop = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                text = f'req_total{{code="200"}} {service.good}\nreq_total{{code="500"}} {service.bad}\n'
                self.wfile.write(b"# TYPE req_total counter\n" + text.encode())

            def log_message(self, *args):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self._threads = [threading.Thread(target=self.http.serve_forever), threading.Thread(target=self._work)]

    def _work(self) -> None:
        owed = 0.0
        while not self._stop.wait(1 / RATE):
            owed += self.failing
            bad = owed >= 1
            owed -= bad
            self.bad += bad
            self.good += not bad
            self.log.append((time.time(), not bad))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *args):
        self._stop.set()
        self.http.shutdown()
        for thread in self._threads:
            thread.join()
        self.http.server_close()


@pytest.fixture
def world(tmp_path):
    """A service, a Prometheus that scrapes it every second, and a controller that ticks every second."""
    try:
        tool("prometheus")
    except MissingError as missing:
        pytest.skip(str(missing))
    with Service() as service:
        target = {"targets": [f"127.0.0.1:{service.http.server_port}"]}
        scrape = {"job_name": "service", "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": [target]}
        with PrometheusServer(tmp_path, json.dumps({"scrape_configs": [scrape]})) as server:
            source = PrometheusSource(PrometheusConfig(server.url))
            slo = SLO("orders", "order-api", OBJECTIVE, SLI, PERIOD)
            yield service, SLOController([slo], load_windows("demo"), Parts(source), grace_ns=2 * SECOND)
            source.close()


def run(controller: SLOController, seconds: float) -> list[tuple[float, str]]:
    """Tick once a second; return (time, verdict) of every change."""
    found, last, due = [], "", time.monotonic()
    for _ in range(int(seconds)):
        now = time.time()
        verdict = controller.tick(int(now * SECOND)).states[0].verdict
        if verdict != last:
            found.append((now, verdict))
        last = verdict
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))
    return found


def crossing(log: list[tuple[float, bool]], after: float) -> float:
    """Return when both windows were first above the factor, from the service's own log."""
    limit = float(load_windows("demo").rows[0].factor(3600 * SECOND) * (1 - OBJECTIVE))
    at = after
    while at < after + 60:
        inside = [[good for t, good in log if at - width <= t < at] for width in (30, 5)]
        if all(window and sum(not good for good in window) / len(window) > limit for window in inside):
            return at
        at += 0.1
    raise AssertionError


@pytest.mark.slow
def test_a_failing_service_is_found_within_one_evaluation_of_the_crossing_and_resolves_on_the_short_window(world):
    service, controller = world
    assert [verdict for _, verdict in run(controller, 40)][-1] == "ok"
    failed_at = time.time()
    service.failing = 0.5
    found = run(controller, 25)
    (burning_at,) = [at for at, verdict in found if verdict == "burning"]
    # the exact crossing, the grace, a scrape, one evaluation
    assert burning_at <= crossing(service.log, failed_at) + 2 + 1 + 1
    service.failing = 0.0
    healed_at = time.time()
    found = run(controller, 25)
    (ok_at,) = [at for at, verdict in found if verdict == "ok"]
    # the 5 s window, the hold of 2 s, grace, a scrape, one evaluation: far below the 30 s of the long window
    assert ok_at - healed_at <= 5 + 2 + 2 + 1 + 2


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_five_minutes_of_oscillation_do_not_flap(world):
    service, controller = world
    run(controller, 35)
    stop = threading.Event()

    def oscillate() -> None:
        while not stop.wait(4.0):  # around the factor: the short window swings from 12 % to 48 % of bad events
            service.failing = 0.6 if service.failing == 0.0 else 0.0

    thread = threading.Thread(target=oscillate)
    thread.start()
    try:
        verdicts = [verdict for _, verdict in run(controller, 300)]
    finally:
        stop.set()
        thread.join()
    assert verdicts in (["ok", "burning"], ["burning"])
