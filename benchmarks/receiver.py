"""Spans/s of the receiver beside rotel, a collector in Rust, under the same load generator in one run.

Every subject is a process of its own that gets the same requests (OTLP/HTTP, protobuf, 512 spans each, the SDK's
default batch) over two kept connections for one window; subjects alternate, in rotated order, over all rounds. Beside
spans/s the CPU time of the subject per span is kept, which says more on a machine that is shared.

The load: 64 distinct requests of 512 spans in traces of 8 with six attributes, made for each window, sent again and
again with other trace ids: the store leaves out what it has already. The rate is that of accepted spans; what our sinks
did with them stands in ``accounts``.
The limit: one Python process holds the GIL for decoding and columns, so receiver and store share one core; rotel has
both.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pasta_otel.exporters.forward import ForwardConfig, Forwarder
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.receiver import Receiver, ReceiverConfig, SpanBatch
from pasta_otel.exporters.store import DuckDBSpanStore
from tests.support import free_port, rotel_binary, wait_for

RESULT = Path(__file__).parent / "results" / "receiver-rotel.json"
ROUNDS, WINDOW_S, CONNECTIONS = 5, 3.0, 2
REQUESTS, SPANS, SPANS_PER_TRACE = 64, 512, 8
SUBJECTS = ("rotel blackhole", "receiver", "receiver+store", "rotel otlp", "receiver+forward")
RATIOS = {
    "receiver / rotel blackhole": ("receiver", "rotel blackhole"),
    "receiver+store / rotel blackhole": ("receiver+store", "rotel blackhole"),
    "receiver+forward / rotel otlp": ("receiver+forward", "rotel otlp"),
}


def bodies() -> list[bytes]:
    """Return the load's requests."""
    rng = random.Random(7)
    return [_body(rng) for _ in range(REQUESTS)]


def _body(rng: random.Random) -> bytes:
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    for key, value in (("service.name", "bench"), ("service.instance.id", "bench-1"), ("host.name", "bench-host")):
        resource.resource.attributes.add(key=key).value.string_value = value
    scope = resource.scope_spans.add()
    scope.scope.name = "bench"
    now = time.time_ns()
    trace, parent = b"", b""
    for number in range(SPANS):
        if number % SPANS_PER_TRACE == 0:
            trace, parent = rng.randbytes(16), b""
        one = scope.spans.add(
            trace_id=trace, span_id=rng.randbytes(8), parent_span_id=parent, name=f"GET /item/{number % 20}",
            kind=2 if number % 2 == 0 else 3, start_time_unix_nano=now, end_time_unix_nano=now + rng.randrange(10**9),
        )  # fmt: skip
        parent = one.span_id
        for key, text in (("http.request.method", "GET"), ("url.path", f"/item/{rng.randrange(500)}")):
            one.attributes.add(key=key).value.string_value = text
        one.attributes.add(key="server.address").value.string_value = f"10.0.0.{rng.randrange(20)}"
        one.attributes.add(key="user_agent.original").value.string_value = "bench/1.0"
        one.attributes.add(key="http.response.status_code").value.int_value = rng.choice((200, 200, 200, 503))
        one.attributes.add(key="request.number").value.int_value = rng.randrange(10**6)
    return message.SerializeToString()


# ---- the load generator


class Post:
    """One HTTP request whose trace ids can be changed in place.

    Args:
        port: Where it is sent.
        body: The OTLP request.
    """

    def __init__(self, port: int, body: bytes) -> None:
        head = f"POST /v1/traces HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/x-protobuf\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self.data = bytearray(head.encode() + body)
        spans = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
        found, position = [], 0
        for span in spans:
            position = self.data.index(b"\x0a\x10" + span.trace_id, position) + 2
            found.append(position)
        self._places = np.add.outer(np.array(found), np.arange(8))
        self._bytes = np.frombuffer(self.data, dtype=np.uint8)
        self._bytes.flags.writeable = True

    def renew(self, key: bytes) -> None:
        """Change every trace id, by eight bytes, alike within each trace."""
        self._bytes[self._places] ^= np.frombuffer(key, dtype=np.uint8)


def _posts(port: int, requests: list[bytes]) -> list[Post]:
    return [Post(port, body) for body in requests]


def _drive(port: int, posts: list[Post], until: float, done: list[int]) -> None:
    accepted = number = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while time.monotonic() < until:
            post = posts[number % len(posts)]
            post.renew(os.urandom(8))
            connection.sendall(post.data)
            number += 1
            if _status(connection) == 200:
                accepted += SPANS
            else:
                time.sleep(0.005)  # the queue is full: come back later, as a client should
    done.append(accepted)


def _status(connection: socket.socket) -> int:
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(65536) or _closed()
    head, _, rest = answer.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0
    )
    while len(rest) < length:
        rest += connection.recv(65536) or _closed()
    return int(head.split(b" ", 2)[1])


def _closed() -> bytes:
    raise ConnectionError("the subject closed the connection")


def window(port: int, pid: int, requests: list[bytes]) -> dict[str, float]:
    """Send for one window and return what was accepted and what it cost."""
    posts = [_posts(port, requests[n::CONNECTIONS]) for n in range(CONNECTIONS)]
    done: list[int] = []
    begin, cpu = time.monotonic(), _cpu_s(pid)
    threads = [threading.Thread(target=_drive, args=(port, own, begin + WINDOW_S, done)) for own in posts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, spans = time.monotonic() - begin, sum(done)
    return {"spans": spans, "seconds": took, "spans_per_second": spans / took, "cpu_seconds": _cpu_s(pid) - cpu}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- the subjects


class _Blackhole:
    name = "blackhole"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def has_room(self, spans: int) -> bool:
        return spans >= 0

    def offer(self, batch: SpanBatch) -> bool:
        self._ledger.settle(self.name, ok=len(batch))
        return True


async def serve(kind: str, port: int, upstream: int) -> None:
    """Run our receiver with one sink until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with tempfile.TemporaryDirectory() as folder:
        name = {"receiver": "blackhole", "receiver+store": "store", "receiver+forward": "upstream"}[kind]
        ledger = Ledger([name])
        sink: Any
        if name == "store":
            sink = DuckDBSpanStore.open(f"{folder}/spans.duckdb", ledger)
        elif name == "upstream":
            sink = Forwarder(ForwardConfig(OtlpConfig(f"http://127.0.0.1:{upstream}/v1/traces")), ledger)
            sink.start()
        else:
            sink = _Blackhole(ledger)
        receiver = Receiver(ReceiverConfig(None, f"127.0.0.1:{port}"), [sink], ledger)
        await receiver.start()
        await stop.wait()
        await receiver.stop()
        getattr(sink, "close", getattr(sink, "stop", lambda: None))()
        print(json.dumps(ledger.snapshot().as_dict()), flush=True)


@contextmanager
def subject(kind: str, upstream: int, folder: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start one subject and yield its HTTP port and process."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.receiver", kind, str(port), str(upstream)]
    if kind.startswith("rotel"):
        command = [
            rotel_binary(), "start", "--otlp-http-endpoint", f"127.0.0.1:{port}",
            "--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}",
            "--pid-file", f"{folder}/{port}.pid", "--log-file", f"{folder}/{port}.log",
        ]  # fmt: skip
        if kind == "rotel otlp":
            command += ["--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-compression", "none"]
            command += ["--otlp-exporter-endpoint", f"http://127.0.0.1:{upstream}"]
        else:
            command += ["--exporter", "blackhole"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            wait_for(lambda: _listens(port))
            yield port, process
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run() -> dict[str, Any]:
    """Run all rounds and return rates, ratios and every window."""
    requests = bodies()
    windows: dict[str, list[dict[str, float]]] = {kind: [] for kind in SUBJECTS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        upstream, _ = stack.enter_context(subject("rotel blackhole", 0, folder))
        running = {kind: stack.enter_context(subject(kind, upstream, folder)) for kind in SUBJECTS}
        for kind in SUBJECTS:  # connections, caches and code paths once before anything counts
            window(running[kind][0], running[kind][1].pid, requests)
        for number in range(ROUNDS):
            for kind in (*SUBJECTS[number % len(SUBJECTS) :], *SUBJECTS[: number % len(SUBJECTS)]):
                port, process = running[kind]
                windows[kind].append(window(port, process.pid, bodies()))
                time.sleep(1.0)  # queues run dry, so that one subject does not pay for another
        accounts = {kind: _account(running[kind][1]) for kind in SUBJECTS if not kind.startswith("rotel")}
    return _report(windows, len(requests[0]) / SPANS) | {"accounts": accounts, "windows": windows}


def _account(process: subprocess.Popen[str]) -> dict[str, Any]:
    process.terminate()
    account: dict[str, Any] = json.loads(process.communicate(timeout=60)[0])
    return account


def _report(windows: dict[str, list[dict[str, float]]], bytes_per_span: float) -> dict[str, Any]:
    rates = {kind: statistics.median(one["spans_per_second"] for one in all_) for kind, all_ in windows.items()}
    costs = {
        kind: sum(one["cpu_seconds"] for one in all_) / max(1.0, sum(one["spans"] for one in all_))
        for kind, all_ in windows.items()
    }
    return {
        "spans_per_second": {kind: round(rate) for kind, rate in rates.items()},
        "cpu_microseconds_per_span": {kind: round(cost * 1e6, 3) for kind, cost in costs.items()},
        "ratios": {name: round(rates[ours] / rates[theirs], 3) for name, (ours, theirs) in RATIOS.items()},
        "cpu_ratios": {name: round(costs[ours] / costs[theirs], 2) for name, (ours, theirs) in RATIOS.items()},
        "limit": "one Python process: decoding, columns and settling share the GIL, so one core; rotel has both",
        "load": {
            "bytes_per_span": round(bytes_per_span, 1), "spans_per_request": SPANS, "connections": CONNECTIONS,
            "window_seconds": WINDOW_S,
        },
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("rotel", "duckdb", "uvicorn", "httptools", "protobuf", "pasta-otel")},
        },
        "load_average_after": os.getloadavg(),
    }  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    else:
        result = run()
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({key: value for key, value in result.items() if key != "windows"}, indent=1))
