"""What module spans cost on a CPU transformer, beside an empty hook pair, SDK span objects and torch.profiler.

Every comparison is a quad of windows in one process, off-on-on-off or on-off-off-on at random, kinds shuffled. The
ratio of each quad is kept; the interval is a bootstrap over quads. Wall time is what a user sees; the thread's own CPU
time is kept beside it, because a shared machine moves wall time by more than what is measured here.
``python -m benchmarks.modules [quads]``.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import opentelemetry.version
import torch
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from torch import nn
from torch.nn.modules import module as torch_module

import pasta_otel
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.row_exporter import RowExporter

RESULT = Path(__file__).parent / "results" / "modules-cpu.json"
WINDOW_S = 0.2
SINK = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class Forget(SpanProcessor):
    """Forgets SDK spans, so that only their making is measured."""


class Program:
    """A program with its own provider, instrumented; a window runs requests with one kind of recording."""

    def __init__(self, endpoint: str) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.tracer = self.provider.get_tracer("program")
        self.kept: collections.deque = collections.deque(maxlen=8192)
        self.exporter = RowExporter(OtlpConfig(endpoint=endpoint), resource=lambda: {"service.name": "bench"})
        self.running = pasta_otel.instrument(tracer_provider=self.provider, sink=self, row_limit=10**9)
        sdk = TracerProvider(shutdown_on_exit=False)
        sdk.add_span_processor(Forget())
        self.sdk_tracer = sdk.get_tracer("modules")
        self.sdk = sdk

    def offer(self, row: object) -> None:
        self.kept.append(row)

    def close(self) -> None:
        pasta_otel.uninstrument()
        self.exporter.shutdown()
        self.sdk.shutdown()

    @contextlib.contextmanager
    def recording(self, kind: str) -> Iterator[None]:
        """Set one kind of recording up for a window."""
        rows = kind in {"rows", "exported"}
        self.running.capture.default_tier = 2 if rows else 1
        self.running.pipeline.offer = self.exporter.offer if kind == "exported" else self.kept.append
        with contextlib.ExitStack() as stack:
            if kind == "empty_hooks":
                stack.enter_context(hooks(lambda *_: None, lambda *_: None))
            elif kind == "sdk_spans":
                stack.enter_context(self._sdk_spans())
            elif kind == "torch_profiler":
                stack.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
            yield

    def _sdk_spans(self) -> contextlib.AbstractContextManager[None]:
        open_spans: list = []

        def before(module: nn.Module, _: object) -> None:
            manager = self.sdk_tracer.start_as_current_span(
                "module",
                attributes={
                    "pasta.torch.module.path": "encoder.layers.3",
                    "pasta.torch.module.class": type(module).__name__,
                    "code.file.path": __file__,
                    "code.function.name": "forward",
                    "code.line.number": 1,
                    "thread.id": 1,
                },
            )
            manager.__enter__()
            open_spans.append(manager)

        def after(*_: object) -> None:
            open_spans.pop().__exit__(None, None, None)

        return hooks(before, after)

    def window(self, kind: str, forward: Callable[[], object], seconds: float) -> dict[str, float]:
        """Run requests for a while; returns seconds a forward pass, and with what happens after the window."""
        self.kept.clear()
        gc.collect()  # what torch.profiler left behind would be collected in, and counted to, some later window
        begin = time.perf_counter()
        with self.recording(kind):
            count, start, cpu = 0, time.perf_counter(), time.thread_time()
            while (elapsed := time.perf_counter() - start) < seconds:
                with self.tracer.start_as_current_span("request"):
                    forward()
                count += 1
            cpu = time.thread_time() - cpu
        whole = time.perf_counter() - begin
        return {
            "forward_s": elapsed / count,
            "forward_cpu_s": cpu / count,
            "with_processing_s": whole / count,
            "forwards": count,
        }


@contextlib.contextmanager
def hooks(before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    handles = [
        torch_module.register_module_forward_pre_hook(before),
        torch_module.register_module_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def encoder(width: int, tokens: int, batch: int) -> tuple[Callable[[], object], int]:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(
        layer, 4, enable_nested_tensor=False
    )  # training mode: the fused path calls no modules
    x = torch.randn(batch, tokens, width)

    @torch.no_grad()
    def forward() -> object:
        return model(x)

    calls: list[object] = []
    with hooks(lambda *_: None, lambda module, *_: calls.append(module)):
        forward()
    return forward, len(calls)


def flat(count: int = 200) -> tuple[Callable[[], object], int]:
    """Nothing but module calls, to see the cost of one."""
    model, x = nn.Sequential(*(nn.Identity() for _ in range(count))), torch.ones(1)
    return (lambda: model(x)), count + 1


def compare(program: Program, kinds: list[str], forward: Callable[[], object], quads: int, rng: random.Random) -> dict:
    plan = [kind for kind in kinds for _ in range(quads)]
    rng.shuffle(plan)
    for kind in kinds:
        program.window(kind, forward, WINDOW_S)  # warm up
    found: dict[str, list] = {kind: [] for kind in kinds}
    for kind in plan:
        order = ["off", kind, kind, "off"] if rng.random() < 0.5 else [kind, "off", "off", kind]
        found[kind].append([{"kind": step, **program.window(step, forward, WINDOW_S)} for step in order])
    return found


def mean_of(quad: list[dict], kind: str, field: str) -> float:
    return statistics.fmean(window[field] for window in quad if window["kind"] == kind)


def interval(values: list[float], rng: random.Random, rounds: int = 4000) -> dict[str, float]:
    """Median with a bootstrap 95 % interval."""
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return {"median": statistics.median(values), "low": medians[rounds // 40], "high": medians[-rounds // 40 - 1]}


def summary(found: dict[str, list], modules: int, rng: random.Random) -> dict:
    out = {}
    for kind, quads in found.items():
        rows = {}
        for field in ("forward_s", "forward_cpu_s", "with_processing_s"):
            pairs = [(mean_of(quad, kind, field), mean_of(quad, "off", field)) for quad in quads]
            rows[field] = {
                "ratio": interval([on / off for on, off in pairs], rng),
                "us_per_module": interval([(on - off) / modules * 1e6 for on, off in pairs], rng),
            }
        out[kind] = rows
    return out


def run(quads: int = 30, seed: int = 20261129) -> dict:
    """Run all comparisons and write the result file."""
    torch.set_num_threads(1)  # two cores: one for torch, one for whoever else is on the machine
    rng = random.Random(seed)
    sink = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    program = Program(f"http://127.0.0.1:{int(sink.stdout.readline())}/v1/traces")
    kinds = ["rows", "exported", "empty_hooks", "sdk_spans", "torch_profiler"]
    cases = {
        "encoder_256x64x4": encoder(256, 64, 4),
        "encoder_64x16x1": encoder(64, 16, 1),
        "module_calls_only": flat(),
    }
    result: dict = {"machine": machine(), "window_s": WINDOW_S, "quads": quads, "seed": seed, "cases": {}}
    try:
        for name, (forward, modules) in cases.items():
            found = compare(program, kinds, forward, quads, rng)
            result["cases"][name] = {"modules": modules, "summary": summary(found, modules, rng), "quads": found}
        result["exporter"] = exported(program)
    finally:
        program.close()
        sink.kill()
        sink.wait()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return result


def exported(program: Program) -> dict:
    program.exporter.force_flush()
    counts = program.exporter.counts()
    return {"received": counts.received, "ok": counts.ok, "dropped": counts.dropped, "pending": counts.pending}


def machine() -> dict:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "platform": platform.platform(),
        "cpu": cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "opentelemetry": opentelemetry.version.__version__,
        "torch_threads": 1,
        "load_before": Path("/proc/loadavg").read_text().split()[:3],
    }


if __name__ == "__main__":
    answer = run(*(int(word) for word in sys.argv[1:2]))
    for case, data in answer["cases"].items():
        print(case, data["modules"], "modules")
        for kind, rows in data["summary"].items():
            wall, ratio, cost = rows["forward_s"]["ratio"], *rows["forward_cpu_s"].values()
            print(
                f"  {kind:15s} wall x{wall['median']:.3f} [{wall['low']:.3f}, {wall['high']:.3f}]"
                f"  cpu x{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
                f"  {cost['median']:6.2f} us/module [{cost['low']:.2f}, {cost['high']:.2f}]"
                f"  with processing x{rows['with_processing_s']['ratio']['median']:.2f}"
            )
    print(answer["exporter"])
