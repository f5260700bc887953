"""The demo's ledger stays exact while the collector behind the sidecar goes away and comes back."""

from __future__ import annotations

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.integration.demo.demo_runs import run_demo, spans_due
from tests.support import free_port

pytestmark = pytest.mark.alone
SERVICES = {"order-api", "model", "payment", "recommendations"}


class Collector:
    """Takes OTLP/HTTP at one port, and can be stopped and started again there; counts spans by id."""

    def __init__(self):
        self.port, self.spans, self.starts = free_port(), set(), 0
        self._lock, self._server = threading.Lock(), None

    def start(self):
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        ThreadingHTTPServer.daemon_threads = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.starts += 1
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def take(self, body):
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for group in request.resource_spans:
                names = {pair.value.string_value for pair in group.resource.attributes if pair.key == "service.name"}
                if names & SERVICES:
                    self.spans |= {(s.trace_id, s.span_id) for scope in group.scope_spans for s in scope.spans}

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


def test_the_account_balances_for_both_sinks_when_the_collector_stops_and_starts(tmp_path):
    collector = Collector()
    collector.start()
    seen_before_the_stop = threading.Event()

    def outage():
        while not collector.spans:
            time.sleep(0.1)
        time.sleep(3.0)
        collector.stop()
        seen_before_the_stop.set()
        time.sleep(4.0)
        collector.start()

    threading.Thread(target=outage, daemon=True).start()
    run = run_demo(tmp_path, "none", 0, "--observe", "8", "--upstream", f"http://127.0.0.1:{collector.port}")
    collector.stop()

    spans = run.report["spans"]
    assert run.report["problems"] == []
    assert seen_before_the_stop.is_set()
    assert collector.starts == 2
    assert spans["received"] == spans_due(run.requests, breaker_transitions=0)
    assert set(spans["sinks"]) == {"store", "upstream"}
    for sink in spans["sinks"].values():
        lost = sum(sink["dropped"].values())
        assert spans["received"] - sum(spans["rejected"].values()) == sink["ok"] + lost + sink["pending"]
        assert sink["pending"] == 0
    assert spans["sinks"]["upstream"] == {"ok": spans["received"], "dropped": {}, "pending": 0}
    assert len(collector.spans) == spans["received"]
