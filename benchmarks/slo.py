"""1,000 SLOs: over 10 million stored spans in one pass, and against Prometheus, beside Sloth's rules evaluated by it.

``python -m benchmarks.slo [SLOS [SPANS]]``
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from pasta_otel.errors import MissingError
from pasta_otel.exporters.store import DuckDBSpanStore, StoreConfig
from pasta_otel.model import CountRequest, SpanSLI, TimeWindow
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.rules.build import build
from pasta_otel.slo.rules.render import render
from pasta_otel.slo.sources.prometheus import PrometheusConfig, PrometheusSource
from pasta_otel.slo.sources.spans import SpanSource
from pasta_otel.slo.spec.model import SLO, DurationText, PrometheusSLI, WindowSpec
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.prometheus import PrometheusServer, tool

RESULTS = Path(__file__).parent / "results" / "slo-scale.json"
SLOTH = Path(__file__).parents[1] / "tests" / "fixtures" / "samples" / "slok+sloth" / "examples" / "_gen"
SECOND = 1_000_000_000
PERIOD = WindowSpec(DurationText(30, "d"))
OPERATIONS, TICKS = 200, 7


def run(slos: int = 1000, spans: int = 10_000_000) -> dict[str, Any]:
    """Return and keep both results."""
    result: dict[str, Any] = {
        "machine": {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "kernel": platform.release(),
        },
        "versions": {name: version(name) for name in ("duckdb", "pasta-otel")},
        "slos": slos,
        "spans": over_spans(slos, spans),
    }
    try:
        tool("prometheus")
        result["prometheus"] = over_prometheus(slos)
    except MissingError as missing:
        result["prometheus"] = {"skipped": str(missing)}
    result["ratios"] = ratios(result)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    return result


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Return how the parts stand to their bars and to Sloth's rules on the same server: below 1 is better."""
    spans, prometheus = result["spans"], result["prometheus"]
    found = {
        "span_tick_to_bar_of_1_s": spans["tick_seconds_median"],
        "beside_the_store_to_bar_of_300_mb": spans["beside_the_store_bytes"] / 300e6,
    }
    if "skipped" in prometheus:
        return found
    controller, sloth = prometheus["controller"], prometheus["sloth_rules"]["evaluation_seconds"]
    return found | {
        "requests_to_bar_of_200": max(controller["requests"]) / 200,
        "our_rules_to_sloth_rules_seconds": prometheus["our_rules"]["evaluation_seconds"] / sloth,
        "controller_tick_to_sloth_rules_seconds": controller["tick_seconds_median"] / sloth,
    }


def rss_bytes(key: str = "VmRSS") -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


# ---- spans


def over_spans(slos: int, spans: int) -> dict[str, Any]:
    """Time ticks of a controller over a store file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans.duckdb"
        config = StoreConfig(max_age_s=1e10, max_bytes=1 << 40, memory_limit_bytes=512 << 20)
        now = time.time_ns()
        store = DuckDBSpanStore.open(str(path), config=config)
        began = time.perf_counter()
        fill(store, spans, now)
        store.close()
        filled = time.perf_counter() - began
        store = DuckDBSpanStore.open(str(path), config=config)
        try:
            return {"rows": spans, "fill_seconds": filled, "file_bytes": path.stat().st_size} | time_ticks(
                store, slos, now
            )
        finally:
            store.close()


def fill(store: DuckDBSpanStore, spans: int, now: int) -> None:
    """Write spans straight into the tables: 200 operations over 30 days, 1 % errors, in order of their end."""
    cursor = store._cursor()
    cursor.execute(f"insert into operations select i, 'svc-' || i, 'GET /', 2 from range({OPERATIONS}) t(i)")
    step = 30 * 86_400 * SECOND // spans
    end = f"{now} - ({spans} - i) * {step}"
    cursor.execute(f"""
        insert into spans
        select {end}, i % {OPERATIONS}, (hash(i) % 1000) * 1000000, if(hash(i + 1) % 100 = 0, 2, 0), 0, 1.0, 0, 0,
               0, i, i, 0, {end}, {end}, '', '', '', '{{}}', null, null
        from range({spans}) t(i)""")


def time_ticks(store: DuckDBSpanStore, slos: int, now: int) -> dict[str, Any]:
    watched = [SLO(f"slo-{i}", f"svc-{i % OPERATIONS}", Decimal("0.99"), span_sli(i), PERIOD) for i in range(slos)]
    source = SpanSource(store, 30 * SECOND)
    controller = SLOController(watched, load_windows(), Parts(source), grace_ns=0)
    before, seconds, asked = rss_bytes(), [], []
    controller.tick(now)  # the first one reads the file
    for number in range(TICKS):
        began = time.perf_counter()
        evaluation = controller.tick(now + number * SECOND)
        seconds.append(time.perf_counter() - began)
    requests = [request for slo in watched for request in window_requests(slo, now)]
    for _ in range(TICKS):
        began = time.perf_counter()
        source.counts(requests, now)
        asked.append(time.perf_counter() - began)
    cache = store._cursor().execute("select sum(memory_usage_bytes) from duckdb_memory()").fetchone()[0]
    total = sum(state.total for state in evaluation.states if state.name == "slo-0")
    last = now + (TICKS - 1) * SECOND
    where = f"op_id = 0 and end_unix_nano >= {last - 30 * 86_400 * SECOND} and end_unix_nano < {last}"
    truth = store._cursor().execute(f"select count(*) from spans where {where}").fetchone()[0]
    return {
        "tick_seconds": sorted(seconds),
        "tick_seconds_median": statistics.median(seconds),
        "counts_seconds_median": statistics.median(asked),
        "rss_growth_bytes": rss_bytes("VmHWM") - before,
        "duckdb_memory_bytes": cache,
        "beside_the_store_bytes": max(0, rss_bytes("VmHWM") - before - cache),
        "counted": total,
        "truth": truth,
    }


def span_sli(i: int) -> SpanSLI:
    """Return one of up to five indicators of an operation: by status, then by status and ever longer durations."""
    threshold_ms = i // OPERATIONS * 200 + 100
    return SpanSLI(f"svc-{i % OPERATIONS}", threshold_ns=threshold_ms * 1_000_000 if i >= OPERATIONS else None)


def window_requests(slo: SLO, now: int) -> list[CountRequest]:
    rows = load_windows().rows
    spans = [30 * 86_400 * SECOND, *(ns for row in rows for ns in (row.long_ns, row.short_ns))]
    return [CountRequest(slo.sli, TimeWindow(now - ns, now)) for ns in spans]


# ---- Prometheus


def over_prometheus(slos: int) -> dict[str, Any]:
    """Time a controller's ticks, our rules and Sloth's, on one server with an hour and a half of samples."""
    now = int(time.time()) // 60 * 60
    watched = [prometheus_slo(i) for i in range(slos)]
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder, "rules")
        rules.mkdir()
        (rules / "ours.yml").write_text(render(g for slo in watched for g in build(slo, load_windows(), "bench")))
        (rules / "sloth.yml").write_text(sloth_rules(slos))
        results = {}
        for name, files in (("controller", []), ("our_rules", ["ours.yml"]), ("sloth_rules", ["sloth.yml"])):
            config = json.dumps(
                {"global": {"evaluation_interval": "60s"}, "rule_files": [str(rules / f) for f in files]}
            )
            place = Path(folder, name)
            place.mkdir()
            server = PrometheusServer(place, config)
            server.backfill(samples(slos, now))
            with server:
                results[name] = time_controller(server, watched, now) if not files else time_rules(server)
        return results


def prometheus_slo(i: int) -> SLO:
    name = f"myservice{i}"
    selector = f'http_request_duration_seconds_count{{job="{name}"'
    sli = PrometheusSLI(
        total=f"sum(rate({selector}}}[{{{{.window}}}}]))",
        bad=f'sum(rate({selector},code=~"(5..|429)"}}[{{{{.window}}}}]))',
    )
    return SLO(f"{name}-requests-availability", name, Decimal("0.999"), sli, PERIOD)


def sloth_rules(slos: int) -> str:
    """Return the rules that Sloth generated for its own example, once for every service."""
    text = (SLOTH / "getting-started.yml").read_text().split("groups:\n", 1)[1]
    return "groups:\n" + "".join(text.replace("myservice", f"myservice{i}") for i in range(slos))


def samples(slos: int, now: int) -> list[Any]:
    times = range(now - 5400, now + 1, 60)
    return [
        (
            "http_request_duration_seconds_count",
            {"job": f"myservice{i}", "code": code},
            [(at, (at - times[0]) * per) for at in times],
        )
        for i in range(slos)
        for code, per in (("200", 10), ("500", 0.01))
    ]


def time_controller(server: PrometheusServer, watched: list[SLO], now: int) -> dict[str, Any]:
    source = PrometheusSource(
        PrometheusConfig(server.url, timeout_seconds=60, deadline_seconds=300, clock_tolerance_seconds=1e6)
    )
    controller = SLOController(watched, load_windows(), Parts(source), grace_ns=0)
    seconds, requests = [], []
    for _ in range(3):
        sent, began = source.requests_sent, time.perf_counter()
        evaluation = controller.tick(now * SECOND)
        seconds.append(time.perf_counter() - began)
        requests.append(source.requests_sent - sent)
    source.close()
    verdicts = {state.verdict for state in evaluation.states}
    return {
        "requests": requests,
        "tick_seconds": seconds,
        "tick_seconds_median": statistics.median(seconds),
        "verdicts": sorted(verdicts),
    }


def time_rules(server: PrometheusServer, wait_seconds: float = 150.0) -> dict[str, Any]:
    """Return how long one evaluation of every rule took, as the server itself says; groups are spread over a minute."""
    deadline = time.monotonic() + wait_seconds
    while True:
        groups = httpx.get(f"{server.url}/api/v1/rules", timeout=60).json()["data"]["groups"]
        done = [group for group in groups if group["evaluationTime"] > 0]
        if len(done) == len(groups) or time.monotonic() > deadline:
            break
        time.sleep(2)
    took = [rule["evaluationTime"] for group in done for rule in group["rules"]]
    return {"groups": len(groups), "groups_evaluated": len(done), "rules": len(took), "evaluation_seconds": sum(took)}


if __name__ == "__main__":
    print(json.dumps(run(*(int(text) for text in sys.argv[1:])), indent=2))
