"""A small OTLP receiver over HTTP and gRPC that answers as a script says and keeps what it got."""

from __future__ import annotations

import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Answer:
    """One scripted answer; ``hang`` keeps the request until the receiver closes."""

    def __init__(
        self,
        status: int = 200,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        hang: bool = False,
        slow_body_s: float = 0.0,
    ):
        self.status, self.body, self.headers, self.hang = status, body, headers or {}, hang
        self.slow_body_s = slow_body_s


class Receiver:
    """Requests are decoded as they come; ``script`` answers the first ones, then 200."""

    def __init__(self, script: list[Answer] | None = None):
        self.script = list(script or [])
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def take(self, body: bytes, headers: dict[str, str]) -> Answer:
        with self.lock:
            self.times.append(time.monotonic())
            self.requests.append(ExportTraceServiceRequest.FromString(body))
            self.headers.append(headers)
            return self.script.pop(0) if self.script else Answer()

    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        """Every span with its resource attributes."""
        with self.lock:
            requests = list(self.requests)
        return [
            (attributes(group.resource.attributes), span)
            for request in requests
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in pairs}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind) if kind else None


class HttpReceiver(Receiver):
    def __enter__(self):
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = receiver.take(body, {"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
                if answer.hang:
                    receiver.closing.wait(60)
                    return
                data = b"" if answer.body is None else json.dumps(answer.body).encode()
                head = (
                    f"HTTP/1.1 {answer.status} x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
                )
                head += "".join(f"{k}: {v}\r\n" for k, v in answer.headers.items())
                self.wfile.write(head.encode() + b"\r\n")
                if answer.slow_body_s:
                    self.wfile.flush()
                    receiver.closing.wait(answer.slow_body_s)
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


class GrpcReceiver(Receiver):
    """``status`` of an answer is a grpc.StatusCode name, or 200."""

    def __enter__(self):
        import grpc

        def export(body: bytes, context: Any) -> bytes:
            answer = self.take(body, dict(context.invocation_metadata()))
            if answer.hang:
                self.closing.wait(60)
            if answer.status != 200:
                context.abort(getattr(grpc.StatusCode, str(answer.status)), "scripted")
            partial = (answer.body or {}).get("partialSuccess") or {}
            response = ExportTraceServiceResponse()
            response.partial_success.rejected_spans = int(partial.get("rejectedSpans", 0))
            response.partial_success.error_message = partial.get("errorMessage", "")
            return response.SerializeToString()

        method = grpc.unary_unary_rpc_method_handler(export)
        handler = grpc.method_handlers_generic_handler(
            "opentelemetry.proto.collector.trace.v1.TraceService", {"Export": method}
        )
        self.server = grpc.server(ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((handler,))
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.stop(0).wait()
