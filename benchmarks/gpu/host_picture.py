"""Record one PyTorch request with its modules, its GPU kernels and what the host did to it, and draw it.

On the GPU machine, as root, from the repository's root (objects of ``python -m pasta_otel.ebpf.build`` carried along):
``python3 -m benchmarks.gpu.host_picture OUT.json OUT.svg``. Without a GPU: ``--draw IN.json OUT.svg``.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 12.0
WIDTH, ROW, LABEL = 1100, 16, 330
COLOURS = {"request": "#3b6ea5", "module": "#7aa6d6", "gpu": "#5a9e4b", "host": "#c8702a"}

APP = """
import sys, time, torch, pasta_otel
from opentelemetry import trace
model = torch.nn.Sequential(*[layer for _ in range(3) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())])
model = model.half().cuda()
pasta_otel.instrument(models={"mlp": model})
tracer = trace.get_tracer("app")
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    with tracer.start_as_current_span("request"):
        with torch.inference_mode():
            answer = model(torch.randn(64, 2048).half().cuda())
            answer.float().sum().item()
    time.sleep(0.02)
trace.get_tracer_provider().force_flush()
"""


class Spans(ThreadingHTTPServer):
    """Takes OTLP/HTTP traces and keeps their spans as documents."""

    daemon_threads = True

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path.endswith("/v1/traces"):
                self.server.take(body)  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.spans: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in group.scope_spans:
                self.spans += map(_document, scope.spans)


def _document(span: Any) -> dict[str, Any]:
    values = {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in span.attributes
    }
    return {
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_span_id": span.parent_span_id.hex(),
        "name": span.name,
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "attributes": {key: value for key, value in values.items() if isinstance(value, (str, int, float, bool))},
        "links": [link.span_id.hex() for link in span.links],
    }


def kind(span: Mapping[str, Any]) -> str:
    """Return ``host``, ``gpu``, ``module`` or ``request``."""
    names = span["attributes"]
    if "pasta.host.event" in names:
        return "host"
    if "gpu.kernel.class" in names:
        return "gpu"
    return "module" if "pasta.torch.module.path" in names else "request"


def record(seconds: float = SECONDS) -> list[dict[str, Any]]:
    """Run the program and the agent; return all spans that both sent."""
    sink = Spans()
    environ = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{sink.server_port}",
        "OTEL_SERVICE_NAME": "model",
        "PASTA_OVERHEAD_BUDGET": "1",
    }
    command = [sys.executable, "-m", "pasta_otel", "agent", "--port", "0", "--interval", "0.5", "--slow-ms", "0.02"]
    agent = subprocess.Popen([*command, "--budget", "1"], cwd=ROOT, env=environ)
    try:
        subprocess.run(
            [sys.executable, "-c", APP, str(seconds)], cwd=ROOT, env=environ, check=True, timeout=seconds + 90
        )
    finally:
        agent.terminate()
        agent.wait(30)
    sink.shutdown()
    return sink.spans


def best_trace(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the trace with the most kinds of spans, then the most host events; of several the last."""
    traces: dict[str, list[Mapping[str, Any]]] = {}
    for span in spans:
        traces.setdefault(span["trace_id"], []).append(span)

    def worth(trace: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        kinds = [kind(span) for span in trace]
        return len(set(kinds)), len({span["name"] for span in trace if kind(span) == "host"})

    return max(traces.values(), key=worth, default=[])


def draw(trace: Sequence[Mapping[str, Any]]) -> str:
    """Return the trace as SVG: request and modules, GPU kernels, host events, on one time axis."""
    order = {"request": 0, "module": 1, "gpu": 2, "host": 3}
    start = min(span["start"] for span in trace if kind(span) == "request")
    end = max(span["end"] for span in trace if kind(span) == "request")
    shown = sorted(
        (span for span in trace if span["end"] >= start and span["start"] <= end),
        key=lambda span: (order[kind(span)], span["start"]),
    )
    scale = (WIDTH - LABEL) / max(end - start, 1)
    rows = []
    for place, span in enumerate(shown):
        left = LABEL + max(span["start"] - start, 0) * scale
        width = max((min(span["end"], end) - max(span["start"], start)) * scale, 1.0)
        name = str(span["attributes"].get("pasta.torch.module.path") or span["name"])[:44]
        times = f"{(span['end'] - span['start']) / 1e3:.0f} us"
        y = 24 + place * ROW
        rows.append(
            f'<text x="4" y="{y + 11}">{kind(span)}: {escape(name)}</text>'
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}" fill="{COLOURS[kind(span)]}">'
            f"<title>{escape(span['name'])}: {times}</title></rect>"
        )
    height = 32 + len(shown) * ROW
    title = f"one request, {(end - start) / 1e6:.2f} ms: modules, GPU kernels, and the host events linked to them"
    box = f'viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="11"'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="4" y="14">{title}</text>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{ground}{"".join(rows)}</svg>\n'


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--draw"]:
        trace = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    else:
        trace = best_trace(record())
        Path(arguments[0]).write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")
    Path(arguments[-1]).write_text(draw(trace), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
