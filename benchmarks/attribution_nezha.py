"""Adapter: Nezha OnlineBoutique traces and pod metrics as the attribution's store and host series."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from pasta_otel.model import HostSample, SpanSLI, TimeWindow
from pasta_otel.semconv import CPU_TIME
from pasta_otel.testing.spans import Kind, MemorySpan, MemorySpanStore

SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class NezhaCase:
    """One injected fault with at least one trace file."""

    kind: str
    service: str
    injected_unix: int
    files: tuple[str, ...]


def service_of(pod: str) -> str:
    return pod.split("-", 1)[0]


def cases(folder: Path) -> list[NezhaCase]:
    faults = json.loads((folder / "faults.json").read_text())
    return [
        NezhaCase(f["inject_type"], service_of(f["inject_pod"]), int(f["inject_timestamp"]), tuple(f["trace_files"]))
        for f in faults
        if f["trace_files"]
    ]


def load_spans(folder: Path, files: tuple[str, ...]) -> list[MemorySpan]:
    """Read trace files; a span with its parent in another pod is a server span, and that parent a client span."""
    columns = "TraceID, SpanID, ParentID, PodName, OperationName, StartTimeUnixNano, EndTimeUnixNano"
    rows = []
    for name in files:
        rows += duckdb.execute(f"select {columns} from read_parquet(?)", [str(folder / "traces" / name)]).fetchall()
    return make_spans(list(dict.fromkeys(rows)))


def make_spans(rows: list[tuple]) -> list[MemorySpan]:
    pods = {(row[0], row[1]): row[3] for row in rows}
    called = defaultdict(str)
    for row in rows:
        parent = pods.get((row[0], row[2]))
        if parent is not None and parent != row[3]:
            called[row[0], row[2]] = row[3]
    spans = []
    for trace, span, parent, pod, operation, start, end in rows:
        above, below = pods.get((trace, parent)), called.get((trace, span), "")
        kind: Kind = "server" if above is None or above != pod else "client" if below else "internal"
        spans.append(
            MemorySpan(trace, span, parent, service_of(pod), operation, kind, start, end, peer=service_of(below))
        )
    return spans


def load_host(folder: Path) -> dict[int, dict[str, float]]:
    """Return minute -> service -> CPU cores used (``CpuUsage(m)``); ``Time`` is right where ``TimeStamp`` is not."""
    usage: dict[int, dict[str, float]] = defaultdict(dict)
    for path in sorted((folder / "metrics").glob("*_metric.parquet")):
        query = 'select Time, PodName, "CpuUsage(m)" from read_parquet(?) where "CpuUsage(m)" is not null'
        for text, pod, milli in duckdb.execute(query, [str(path)]).fetchall():
            at = datetime.fromisoformat(text.split(".")[0].replace(" +0000 UTC", "")).replace(tzinfo=UTC)
            usage[int(at.timestamp()) // 60][service_of(pod)] = milli / 1000.0
    return usage


def host_samples(usage: dict[int, dict[str, float]], minutes: list[int], at_unix_nano: int) -> list[HostSample]:
    """Return a cumulative counter that grew at the recorded rate over these minutes."""
    rates: dict[str, list[float]] = defaultdict(list)
    for minute in minutes:
        for service, cores in usage.get(minute, {}).items():
            rates[service].append(cores)
    return [
        HostSample(service, 1, CPU_TIME, at_unix_nano + step * SECOND_NS, step * sum(cores) / len(cores))
        for service, cores in sorted(rates.items())
        for step in (0, 60)
    ]


def window_of(spans: list[MemorySpan]) -> TimeWindow:
    ends = [span.end_time_unix_nano for span in spans]
    return TimeWindow(min(ends), max(ends) + 1)


def entry(normal: list[MemorySpan]) -> SpanSLI:
    """Return the SLI of the system's front door: the most common root, and any operation unless it is nearly all."""
    roots = Counter((span.service, span.operation) for span in normal if span.parent_span_id == "root")
    (service, operation), count = roots.most_common(1)[0]
    return SpanSLI(service, operation if count >= 0.9 * roots.total() else None)


def store_of(normal: list[MemorySpan], burning: list[MemorySpan], host: list[HostSample]) -> MemorySpanStore:
    return MemorySpanStore([*normal, *burning], host)
