"""What degradation costs a request: flag reads, breaker calls, and a controller that is alive, dead or hung.

Every window is kept. A "request" is what an instrumented one does: read the flag, then call through the breaker.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pasta_otel import slo
from pasta_otel.exporters.api import ApiProviders, ApiServer, create_app

WINDOWS, REQUESTS = 15, 20_000
RESULT = Path(__file__).parent / "results" / "response-request-cost.json"


class Flags:
    """A provider with one flag, off."""

    def evaluate(self, key: str) -> Mapping[str, Any]:
        return {"key": key, "value": False, "reason": "DEFAULT", "variant": "off", "metadata": {}}

    def evaluate_all(self) -> list[Mapping[str, Any]]:
        return [self.evaluate("degrade.recommendations")]

    def pin(self, key: str, value: object, by: str, reason: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def unpin(self, key: str, by: str) -> Mapping[str, Any]:
        raise NotImplementedError


def answer() -> int:
    return 1


def plain() -> int:
    return answer()


def degradable(breaker: slo.CircuitBreaker) -> Callable[[], int]:
    def request() -> int:
        if slo.flag("degrade.recommendations"):
            return 0
        return breaker.call(answer)

    return request


def window(request: Callable[[], int]) -> dict[str, float]:
    """Time every request of one window on its own."""
    clock, took = time.perf_counter_ns, []
    for _ in range(REQUESTS):
        began = clock()
        request()
        took.append(clock() - began)
    took.sort()
    return {
        "p50_us": took[REQUESTS // 2] / 1e3,
        "p99_us": took[REQUESTS * 99 // 100] / 1e3,
        "p999_us": took[REQUESTS * 999 // 1000] / 1e3,
        "max_us": took[-1] / 1e3,
        "mean_us": statistics.fmean(took) / 1e3,
    }


def flag_read_ns() -> list[float]:
    windows = []
    for _ in range(WINDOWS):
        began = time.perf_counter_ns()
        for _ in range(REQUESTS):
            slo.flag("degrade.recommendations", False)
        windows.append((time.perf_counter_ns() - began) / REQUESTS)
    return windows


def with_controller(url: str) -> dict[str, Any]:
    """Measure requests with the poller at its shipped interval's tenth, so that every window meets several polls."""
    slo.configure(url=url, poll_seconds=0.05)
    request = degradable(slo.breaker("recommendations"))
    slo.wait_ready(2.0)
    result = {"windows": [window(request) for _ in range(WINDOWS)], "flag_read_ns": flag_read_ns()}
    slo.shutdown()
    return result


def run() -> dict[str, Any]:
    """Return the result, with a summary whose bar is the issue's: under 1 ms added to a request."""
    controller = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.response", "serve"], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    url = controller.stdout.readline().strip()
    with socket.create_server(("127.0.0.1", 0)) as hung, socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
        taken.close()
        cases = {
            "without": {"windows": [window(plain) for _ in range(WINDOWS)]},
            "alive": with_controller(url),
            "dead": with_controller(dead),
            "hung": with_controller(f"http://127.0.0.1:{hung.getsockname()[1]}"),
        }
    controller.kill()
    controller.communicate()
    summary = {name: summarise(case, cases["without"]) for name, case in cases.items() if name != "without"}
    return {
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "opentelemetry-api": version("opentelemetry-api")},
        "requests_per_window": REQUESTS,
        "summary": summary,
        "cases": cases,
    }


def summarise(case: Mapping[str, Any], without: Mapping[str, Any]) -> dict[str, float]:
    """Return medians over the windows; ``added`` is the difference to the same call without flag and breaker."""
    summary = {
        f"added_{name}": statistics.median(w[name] for w in case["windows"])
        - statistics.median(w[name] for w in without["windows"])
        for name in ("p50_us", "p99_us", "p999_us", "mean_us")
    }
    summary["max_us"] = max(w["max_us"] for w in case["windows"])
    summary["max_without_us"] = max(w["max_us"] for w in without["windows"])
    summary["flag_read_ns"] = statistics.median(case["flag_read_ns"])
    return summary


def serve() -> None:
    """Serve the API in a process of its own: in ours it would compete for the interpreter with the requests."""
    server = ApiServer(create_app(ApiProviders(flags=Flags())), port=0)
    server.start()
    print(server.url, flush=True)
    time.sleep(600)


if __name__ == "__main__" and sys.argv[1:] == ["serve"]:
    serve()
elif __name__ == "__main__":
    document = run()
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["summary"], indent=1))
