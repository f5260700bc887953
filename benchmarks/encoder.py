"""Spans/s of the columnar OTLP encoder beside the SDK's own encoder and the machine's memory bandwidth.

Both encode the same spans, in alternating windows of one process; rates are of the thread's CPU time, because a shared
machine moves wall time by more than what is compared (wall times are kept beside it). The SDK encoder is measured
twice: with serialisation (what an exporter pays) and without (``encode_spans`` alone, the stricter base). The bandwidth
limit is the time of one copy of the bytes that come out.
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

import numpy as np
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as sdk_encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from pasta_otel.exporters.otlp.encoder import Scope, encode_spans
from pasta_otel.model import SpanColumns, SpanSite, StringColumn

SPANS = 8192  # one batch of the row exporter
WINDOWS = 15
BAR = 30.0  # times the SDK encoder's spans/s
RESOURCE = {"service.name": "bench", "process.pid": 1}
RESULT = Path(__file__).parent / "results" / "encoder-sdk.json"


def build() -> tuple[SpanColumns, list[ReadableSpan]]:
    """Return the same spans as columns and as SDK spans: six attributes each, as a kernel span has."""
    rng = np.random.default_rng(7)
    sites = [
        SpanSite(f"layers.{n}.attn", 1, (("pasta.torch.module.path", f"layers.{n}.attn"), ("code.line.number", n)))
        for n in range(96)
    ]
    kernels = [f"sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize{n}x64" for n in range(60)]
    start = np.uint64(1_800_000_000_000_000_000) + np.arange(SPANS, dtype=np.uint64) * np.uint64(5000)
    columns = SpanColumns(
        trace_id=rng.integers(0, 256, (SPANS, 16), np.uint8),
        span_id=rng.integers(0, 256, (SPANS, 8), np.uint8),
        parent_span_id=rng.integers(0, 256, (SPANS, 8), np.uint8),
        start_time_unix_nano=start,
        end_time_unix_nano=start + rng.integers(1000, 100_000, SPANS).astype(np.uint64),
        site=rng.integers(0, len(sites), SPANS).astype(np.int32),
        sites=sites,
        attributes={
            "thread.id": rng.integers(1, 4_000_000, SPANS),
            "gpu.kernel.name": StringColumn(rng.integers(0, len(kernels), SPANS).astype(np.int32), kernels),
            "gpu.kernel.occupancy": rng.random(SPANS),
            "gpu.kernel.captured": rng.random(SPANS) > 0.5,
        },
        error=rng.random(SPANS) > 0.99,
    )
    return columns, _sdk_spans(columns)


def _sdk_spans(columns: SpanColumns) -> list[ReadableSpan]:
    resource, scope = Resource(RESOURCE), InstrumentationScope("pasta_otel", "1")
    assert columns.error is not None
    kernels = columns.attributes["gpu.kernel.name"]
    spans = []
    for row in range(SPANS):
        site = columns.sites[columns.site[row]]
        trace = int.from_bytes(columns.trace_id[row].tobytes(), "big")
        parent = int.from_bytes(columns.parent_span_id[row].tobytes(), "big")
        varying = {key: values[row].item() for key, values in columns.attributes.items() if key != "gpu.kernel.name"}
        spans.append(
            ReadableSpan(
                name=site.name,
                context=SpanContext(trace, int.from_bytes(columns.span_id[row].tobytes(), "big"), False, TraceFlags(1)),
                parent=SpanContext(trace, parent, False, TraceFlags(1)),
                resource=resource,
                attributes={**dict(site.attributes), **varying, "gpu.kernel.name": kernels.values[kernels.codes[row]]},
                kind=SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR if columns.error[row] else StatusCode.UNSET),
                start_time=int(columns.start_time_unix_nano[row]),
                end_time=int(columns.end_time_unix_nano[row]),
                instrumentation_scope=scope,
            )
        )
    return spans


def _assert_same(columns: SpanColumns, spans: list[ReadableSpan]) -> int:
    body = encode_spans(columns, RESOURCE, Scope("pasta_otel", "1"))
    ours, theirs = ExportTraceServiceRequest.FromString(body), sdk_encode_spans(spans)
    for one, other in zip(
        ours.resource_spans[0].scope_spans[0].spans, theirs.resource_spans[0].scope_spans[0].spans, strict=True
    ):
        for span in (one, other):
            span.attributes.sort(key=lambda pair: pair.key)
            if not span.status.ByteSize():
                span.ClearField("status")
        assert one == other
    return len(body)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - wall, time.thread_time() - cpu


def run(windows: int = WINDOWS) -> dict[str, object]:
    """Measure in alternating windows and return every one of them, in seconds for the whole batch."""
    columns, spans = build()
    size = _assert_same(columns, spans)
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    work = {
        "columnar": lambda: encode_spans(columns, RESOURCE, Scope("pasta_otel", "1")),
        "sdk": lambda: sdk_encode_spans(spans),
        "sdk_serialised": lambda: sdk_encode_spans(spans).SerializeToString(),
        "memcpy": lambda: np.copyto(target, source),
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    wall: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(windows):
        for name, call in work.items():
            wall_s, cpu_s = _timed(call)
            taken[name].append(cpu_s)
            wall[name].append(wall_s)
    rate = {name: SPANS / statistics.median(values) for name, values in taken.items()}
    return {
        "spans": SPANS,
        "bytes_per_span": size / SPANS,
        "spans_per_second": {name: round(value) for name, value in rate.items()},
        "ratio_to_sdk": rate["columnar"] / rate["sdk"],
        "ratio_to_sdk_by_window": [round(b / a, 1) for a, b in zip(taken["columnar"], taken["sdk"], strict=True)],
        "ratio_to_sdk_serialised": rate["columnar"] / rate["sdk_serialised"],
        "share_of_memory_bandwidth": rate["columnar"] / rate["memcpy"],
        "bar": BAR,
        "windows_cpu_s": taken,
        "windows_wall_s": wall,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("numpy", "protobuf", "opentelemetry-exporter-otlp-proto-common")},
    }


def main() -> None:
    """Print the comparison and keep it."""
    result = run()
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"columnar encoder: {result['spans_per_second']['columnar']:,} spans/s,"
        f" {result['bytes_per_span']:.0f} bytes/span\n"
        f"  {result['ratio_to_sdk']:.1f} x the SDK's encode_spans alone (bar: {BAR:.0f} x),"
        f" {result['ratio_to_sdk_serialised']:.1f} x with serialisation\n"
        f"  {result['share_of_memory_bandwidth']:.1%} of the memory bandwidth limit (one copy of the bytes out)"
    )


if __name__ == "__main__":
    main()
