"""The span store at scale: a tick of 1,000 SLOs over 10 M spans, the attribution's questions, how soon a span counts.

The rows are written to the tables directly, as the writer would have written them: one day of 1,000 server operations
of 50 services, evenly spread. The visibility is that of single requests through decoder, queue and writer of an idle
store.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Intake
from pasta_otel.exporters.store import DuckDBSpanStore, StoreConfig
from pasta_otel.model import CountRequest, OperationKey, SpanSLI, TimeWindow

RESULT = Path(__file__).parent / "results" / "store-scale.json"
ROWS, CHUNK, OPERATIONS, SERVICES = 10_000_000, 1_000_000, 1000, 50
SECOND = 1_000_000_000
DAY = 86_400 * SECOND
T0 = 1_700_000_000 * SECOND
WINDOWS_S = (300, 1800, 3600, 7200, 21_600, 86_400)  # the distinct windows of the workbook's alerts within one day
BAR_S = 1.0  # a tick of 1,000 SLOs
REPEATS = 7


def _fill(store: DuckDBSpanStore) -> None:
    rng = np.random.default_rng(1)
    dimensions, connection = store._dimensions, store._connection
    for number in range(OPERATIONS):
        dimensions.operations.id_of((f"s{number % SERVICES}", f"op{number}", 2))
        dimensions.edges.id_of((f"s{number % SERVICES}", f"s{number % 7}"))
        dimensions.routes.id_of(frozenset({number}))
    dimensions.write_new(connection)
    dimensions.written()
    for first in range(0, ROWS, CHUNK):
        end = np.sort(T0 + (first + np.arange(CHUNK)) * (DAY // ROWS) + rng.integers(0, SECOND, CHUNK))
        operation = rng.integers(0, OPERATIONS, CHUNK).astype(np.int32)
        common = {
            "end_unix_nano": end,
            "duration_ns": rng.exponential(1e8, CHUNK).astype(np.int64),
            "trace_hi": rng.integers(0, 2**63, CHUNK).astype(np.uint64),
            "trace_lo": rng.integers(0, 2**63, CHUNK).astype(np.uint64),
            "span_id": rng.integers(1, 2**63, CHUNK).astype(np.uint64),
            "flags": np.zeros(CHUNK, np.uint8),
        }
        failed = rng.random(CHUNK) < 0.01
        spans = {
            "op_id": operation,
            "status": failed.astype(np.uint8) * 2,
            "weight": np.ones(CHUNK),
            "lateness_ns": rng.integers(0, SECOND, CHUNK),
        }
        role = rng.integers(1, 3, CHUNK).astype(np.uint8)
        key = np.where(role == 1, operation, operation % len(dimensions.edges.keys())).astype(np.int32)
        times = {
            "role": role,
            "key_id": key,
            "route_id": operation,
            "self_ns": common["duration_ns"] // 2,
            "gap_ns": common["duration_ns"] // 3,
            "error": failed,
        }
        for table, own in (("spans", spans), ("span_times", times)):
            connection.register("incoming", common | own)
            connection.execute(f"insert into {table} by name select * from incoming")
            connection.unregister("incoming")


def _timed(work: Callable[[], Any]) -> list[float]:
    work()
    took = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return took


def _tick(windows_s: tuple[int, ...]) -> list[CountRequest]:
    now = T0 + DAY
    return [
        CountRequest(
            SpanSLI(f"s{number % SERVICES}", f"op{number}", threshold_ns=300_000_000 if number % 2 else None),
            TimeWindow(now - seconds * SECOND, now),
        )
        for number in range(OPERATIONS)
        for seconds in windows_s
    ]


def _visibility_s() -> list[float]:
    """Return, for single requests, the time from handing in the body until the count sees it."""
    ledger = Ledger(["store"])
    store = DuckDBSpanStore.open(":memory:", ledger)
    intake, took = Intake([store], ledger), []
    for number in range(1, 101):
        message = ExportTraceServiceRequest()
        resource = message.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = "api"
        now = time.time_ns()
        resource.scope_spans.add().spans.add(
            trace_id=os.urandom(16), span_id=os.urandom(8), name="GET", kind=2, start_time_unix_nano=now,
            end_time_unix_nano=now,
        )  # fmt: skip
        asked = [CountRequest(SpanSLI("api"), TimeWindow(0, now + 3600 * SECOND))]
        body = message.SerializeToString()
        begin = time.perf_counter()
        intake.traces(body)
        while store.count_spans(asked, time.time_ns(), 2**62)[0].total < number:
            time.sleep(0.001)
        took.append(time.perf_counter() - begin)
    store.close()
    return took


def run() -> dict[str, Any]:
    """Fill a store, ask, and return medians, maxima and all repeats."""
    store = DuckDBSpanStore.open(":memory:", config=StoreConfig(memory_limit_bytes=8 * 1024**3, max_bytes=2**40))
    store._retention.stop()
    _fill(store)
    now, last_hour = T0 + DAY, TimeWindow(T0 + DAY - 3600 * SECOND, T0 + DAY)
    through = OperationKey("s1", "*")
    tick, short = _tick(WINDOWS_S), _tick(WINDOWS_S[:3])
    repeats = {
        "tick_1000_slos_6_windows_to_1_day": _timed(lambda: store.count_spans(tick, now, 30 * SECOND)),
        "tick_1000_slos_3_windows_to_1_hour": _timed(lambda: store.count_spans(short, now, 30 * SECOND)),
        "edge_gaps_1_hour": _timed(lambda: store.edge_gaps(last_hour)),
        "edge_gaps_1_hour_through_one_service": _timed(lambda: store.edge_gaps(last_hour, through=through)),
        "operation_self_times_1_hour": _timed(lambda: store.operation_self_times(last_hour)),
        "operation_self_times_1_day": _timed(lambda: store.operation_self_times(TimeWindow(T0, now))),
    }
    store.close()
    repeats["visible_after"] = _visibility_s()
    return {
        "rows": ROWS,
        "median_s": {name: round(statistics.median(all_), 4) for name, all_ in repeats.items()},
        "max_s": {name: round(max(all_), 4) for name, all_ in repeats.items()},
        "bar_s": {"tick_1000_slos_6_windows_to_1_day": BAR_S, "visible_after": 0.2},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {"python": platform.python_version(), "duckdb": version("duckdb"), "numpy": version("numpy")},
        "load_average_after": os.getloadavg(),
        "windows_s": repeats,
    }


if __name__ == "__main__":
    result = run()
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "windows_s"}, indent=1))
