"""Host probes: cost of a hit with and without the link, the agent's start, size and CPU, and a flood.

``python -m benchmarks.ebpf``; needs root, clang, gcc. A C library that exports the CUDA driver's names stands in for
libcuda. Times of programs are CPU times, so that other work on the machine does not count; what is wall time says so.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from pasta_otel.ebpf.build import build
from pasta_otel.ebpf.layout import LIMIT
from pasta_otel.ebpf.loaders.core import CoreLoader
from pasta_otel.ebpf.observer import HostObserver, Thresholds
from pasta_otel.ebpf.probes import Probe, load_probes
from pasta_otel.ebpf.syscall import enable_run_time, run_time
from pasta_otel.publish import publish_context, withdraw_context

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "ebpf-agent.json"
CALLS, ROUNDS = 100_000, 7
STARTS = 21
PYTHON = os.environ.get("PASTA_BENCH_PYTHON", sys.executable)
"""An installed wheel starts faster than a checkout: the variable names the interpreter of one."""
RATE, RATE_SECONDS = 20_000, 10.0
FLOOD_SECONDS = 4.0
BARS = {"hit_us": 1.3, "attached_ms": 100, "resident_mb": 60, "agent_cpu_share": 0.01, "flood_events_per_s": 1_000_000}


def run() -> dict[str, Any]:
    """Return and keep all results."""
    with tempfile.TemporaryDirectory() as folder:
        library, objects = _prepare(Path(folder))
        result: dict[str, Any] = {
            "machine": {
                "cpus": os.cpu_count(),
                "load": os.getloadavg(),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "versions": {"pasta-otel": version("pasta-otel"), "opentelemetry-api": version("opentelemetry-api")},
            "bars": BARS,
            "hit": hits(library, objects),
            "publish": publishing(),
            "agent": agent(library, objects),
            "flood": flood(library, objects),
        }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _prepare(folder: Path) -> tuple[Path, Path]:
    library = folder / "libcuda.so.1"
    # functions begin with a push, as the driver's do: the kernel emulates that, while others cost a second trap
    flags = ["-O1", "-fno-omit-frame-pointer", "-fcf-protection=none", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", library, ROOT / "tests/ebpf/standin.c"], check=True)
    build(folder / "objects")
    return library, folder / "objects"


def only(*names: str) -> tuple[Probe, ...]:
    return tuple(probe for probe in load_probes() if probe.name in names)


# ---- cost of a hit


def hits(library: Path, objects: Path) -> dict[str, Any]:
    """Cost of a probe hit in the probed program, by what the probe does; variants in random order each round."""
    loaded = ctypes.CDLL(str(library))
    publish_context({"service.name": "bench"})
    span = SpanContext(random.getrandbits(128), random.getrandbits(64), False, TraceFlags(1))
    context.attach(trace.set_span_in_context(NonRecordingSpan(span)))
    observer = HostObserver(CoreLoader(objects), only("cuda"), launch_timing="off", thresholds=Thresholds(0, 0))
    observer.start()
    key = os.getpid().to_bytes(4, "little")
    registered = observer._process_map.get(key)
    windows: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order = [*VARIANTS]
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            timing, link = VARIANTS[name]
            observer.time_launches(timing)
            if link and registered is not None:
                observer._process_map.put(key, registered)
            else:
                observer._process_map.delete(key)
            loaded.pasta_flood(2000)
            begin = time.process_time_ns()
            loaded.pasta_flood(CALLS)
            windows[name].append((time.process_time_ns() - begin) / CALLS)
            observer.harvest()
    own = _program_time(observer, loaded, key, registered)
    observer.close()
    return {**_per_hit(windows), "program_alone_ns": own, "windows_ns_per_call": windows}


VARIANTS: dict[str, tuple[Any, bool]] = {
    "none": ("off", True),
    "entry": ("count", False),
    "entry_linked": ("count", True),
    "entry_return": ("duration", False),
    "entry_return_linked": ("duration", True),
}


def _per_hit(windows: dict[str, list[float]]) -> dict[str, float]:
    base = statistics.median(windows["none"])
    cost = {name: statistics.median(values) - base for name, values in windows.items() if name != "none"}
    return {
        "entry_us": cost["entry"] / 1e3,
        "entry_linked_us": cost["entry_linked"] / 1e3,
        "entry_return_us_per_hit": cost["entry_return"] / 2e3,
        "entry_return_linked_us_per_hit": cost["entry_return_linked"] / 2e3,
    }


def _program_time(observer: HostObserver, loaded: Any, key: bytes, registered: bytes | None) -> dict[str, float]:
    """Run time of the entry program alone, as the kernel measures it, with and without the link."""
    fd = enable_run_time()
    found = {}
    observer.time_launches("count")
    program = observer.loaded.program_fds()["cuda/call_count"]
    for name, link in (("without_link", False), ("with_link", True)):
        if link and registered is not None:
            observer._process_map.put(key, registered)
        else:
            observer._process_map.delete(key)
        before = run_time(program)
        loaded.pasta_flood(CALLS)
        after = run_time(program)
        found[name] = (after[0] - before[0]) / max(after[1] - before[1], 1)
    os.close(fd)
    return found


def publishing() -> dict[str, float]:
    """Cost of attach and detach in the application, with and without publishing, ns."""

    def pair() -> float:
        target = trace.set_span_in_context(NonRecordingSpan(SpanContext(1 << 100, 5, False, TraceFlags(1))))
        attach, detach = context.attach, context.detach
        begin = time.process_time_ns()
        for _ in range(100_000):
            detach(attach(target))
        return (time.process_time_ns() - begin) / 100_000

    with_it = min(pair() for _ in range(5))
    withdraw_context()
    return {"attach_detach_published_ns": with_it, "attach_detach_ns": min(pair() for _ in range(5))}


# ---- the agent


class Sink(ThreadingHTTPServer):
    """Takes OTLP and throws it away."""

    daemon_threads = True

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class AgentProcess:
    """An agent, and what it has used."""

    def __init__(self, objects: Path, *arguments: str, python: str = PYTHON) -> None:
        self.sink = Sink()
        environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.sink.server_port}"}
        command = [python, "-m", "pasta_otel", "agent", "--port", "0", "--objects", str(objects), *arguments]
        begin = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, cwd="/")  # not the checkout
        assert self.process.stdout is not None
        self.attached = json.loads(self.process.stdout.readline())
        self.attached_ms = (time.perf_counter() - begin) * 1e3
        self.attached_cpu_ms = self.cpu_s() * 1e3
        self.ready = json.loads(self.process.stdout.readline())

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, field: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.sink.shutdown()


PACED = """
import ctypes, random, sys, time
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from pasta_otel.publish import publish_context
library = ctypes.CDLL(sys.argv[1])
rate, seconds = int(sys.argv[2]), float(sys.argv[3])
publish_context({"service.name": "bench"})
print("ready", flush=True); sys.stdin.readline()
begin, sent = time.monotonic(), 0
while (now := time.monotonic() - begin) < seconds:
    due = int(now * rate) - sent
    if due > 0:
        span = SpanContext(random.getrandbits(128), random.getrandbits(64), False, TraceFlags(0))
        token = context.attach(trace.set_span_in_context(NonRecordingSpan(span)))
        library.pasta_flood(ctypes.c_long(due))
        context.detach(token)
        sent += due
    time.sleep(0.01)
print(sent, flush=True); sys.stdin.readline()
"""


class Load:
    """A program that calls the stand-in."""

    def __init__(self, library: Path, *arguments: str) -> None:
        command = [sys.executable, "-c", PACED, str(library), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def sent(self) -> int:
        return int(self._read())

    def close(self) -> None:
        self.go_on()
        self.process.wait(20)


def starts(objects: Path) -> dict[str, Any]:
    """How long until all probes are attached, those on the driver included, which this process maps; in turns."""
    pythons = {"": PYTHON} if sys.executable == PYTHON else {"": PYTHON, "checkout_": sys.executable}
    wall: dict[str, list[float]] = {name: [] for name in pythons}
    used: dict[str, list[float]] = {name: [] for name in pythons}
    load = os.getloadavg()
    for _ in range(STARTS):
        for name, python in pythons.items():
            started = AgentProcess(objects, python=python)
            wall[name].append(started.attached_ms)
            used[name].append(started.attached_cpu_ms)
            assert any(probe == "cuda" for probe, _ in started.attached["attached"])
            started.close()
    return {
        "load_before_starts": load,
        "installed": sys.executable != PYTHON,
        **{f"{name}attached_wall_ms": sorted(values) for name, values in wall.items()},
        **{f"{name}attached_cpu_ms": sorted(values) for name, values in used.items()},
    }


def agent(library: Path, objects: Path) -> dict[str, Any]:
    """Start, size, and CPU share at 20,000 aggregated events a second."""
    started = starts(objects)
    load = Load(library, str(RATE), str(RATE_SECONDS))
    running = AgentProcess(objects, "--budget", "1")
    time.sleep(3)
    idle_begin, idle_cpu = time.monotonic(), running.cpu_s()
    time.sleep(5)
    idle = (running.cpu_s() - idle_cpu) / (time.monotonic() - idle_begin)
    begin, cpu = time.monotonic(), running.cpu_s()
    load.go_on()
    sent = load.sent()
    seconds = time.monotonic() - begin
    share = (running.cpu_s() - cpu) / seconds
    result = {
        **started,
        "attached": running.attached["attached"],
        "events_per_s": sent / seconds,
        "cpu_share": share,
        "cpu_share_idle": idle,
        "processes": len([path for path in Path("/proc").iterdir() if path.name.isdigit()]),
        "resident_mb": running.memory_mb("VmRSS"),
        "anonymous_mb": running.memory_mb("RssAnon"),
    }
    load.close()
    running.close()
    return result


# ---- a flood


def flood(library: Path, objects: Path) -> dict[str, Any]:
    """As many events as the machine makes, every one also to leave as a record, while nobody reads the ring."""
    loads = [Load(library, "100000000", str(FLOOD_SECONDS)) for _ in range(2)]
    observer = HostObserver(CoreLoader(objects), only("cuda", "critical"), launch_timing="count")
    for number in observer.apis:
        observer._limits.put(number.to_bytes(4, "little"), LIMIT.pack(0, 0, 0))
    observer.start()
    before = observer.counters()
    begin = time.monotonic()
    for load in loads:
        load.go_on()
    started = []
    while time.monotonic() - begin < FLOOD_SECONDS:
        child = subprocess.Popen(["true"])
        child.wait()
        started.append(child.pid)
        time.sleep(0.02)
    seconds = time.monotonic() - begin
    at_end = observer.counters()[1]
    harvest = observer.harvest()
    for load in loads:
        load.process.kill()
        load.process.wait()
    seen = {event.tgid for event in harvest.critical if event.kind == 1}
    result = {
        "events_per_s": (at_end.seen - before[1].seen) / seconds,
        "launch": at_end._asdict(),
        "accounted": at_end.seen == at_end.filtered + at_end.submitted + at_end.full + at_end.unpaired
        or observer.counters()[1].balanced,
        "execs": len(started),
        "execs_in_critical_ring": len(set(started) & seen),
    }
    observer.close()
    return result


def report(result: dict[str, Any]) -> str:
    hit, found, flooded = result["hit"], result["agent"], result["flood"]
    wall, used = statistics.median(found["attached_wall_ms"]), statistics.median(found["attached_cpu_ms"])
    checkout = [
        f"       attached {statistics.median(values):.0f} ms after exec from a checkout (editable install)"
        for values in [found.get("checkout_attached_wall_ms")]
        if values
    ]
    linked, plain = hit["entry_return_linked_us_per_hit"], hit["entry_return_us_per_hit"]
    lines = [
        f"hit: entry alone {hit['entry_us']:.2f} us, with the link {hit['entry_linked_us']:.2f} us (bar 1.3)",
        f"     entry and return, a hit: {plain:.2f} us, with the link {linked:.2f} us (bar 1.3)",
        f"     the entry program alone, ns: {hit['program_alone_ns']}",
        f"publish: {result['publish']}",
        f"agent: attached {wall:.0f} ms after exec, {used:.0f} ms of CPU (bar 100); installed: {found['installed']}",
        *checkout,
        f"       {found['resident_mb']:.1f} MB resident (bar 60)",
        f"       {found['cpu_share']:.2%} of a core at {found['events_per_s']:,.0f} events/s (bar 1 %)",
        f"       {found['cpu_share_idle']:.2%} of a core without events",
        f"flood: {flooded['events_per_s']:,.0f} events/s, all accounted for: {flooded['accounted']}",
        f"       {flooded['execs_in_critical_ring']} of {flooded['execs']} execs in the critical ring",
        f"load of the machine meanwhile: {result['machine']['load']}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(run()))
