"""Attribution over the real span store, filled by the receiver, gives what it gives over plain lists."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.otlp_spans import requests
from pasta_otel.cli.attribute import command
from pasta_otel.errors import MissingError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Intake
from pasta_otel.exporters.store import DuckDBSpanStore
from pasta_otel.model import SpanSLI
from pasta_otel.slo.attribution import AttributionEngine
from pasta_otel.testing.spans import MemorySpanStore
from pasta_otel.testing.world import BASELINE, BURNING, MS, Trouble, world

SLI = SpanSLI("order-api", "POST /orders", threshold_ns=60 * MS)
FAULTS = [
    (Trouble(slow_dependency_ms=400), ("edge_latency", "order-api -> recommendations")),
    (Trouble(slow_dependency_ms=400, timeout_ms=150), ("edge_latency", "order-api -> recommendations")),
    (Trouble(dependency_errors=0.4), ("edge_errors", "order-api -> recommendations")),
    (Trouble(network_ms=40), ("edge_latency", "order-api -> recommendations")),
    (Trouble(throttled=True), ("cpu_throttled", "model")),
    (Trouble(contended=True), ("cpu_contention", "model")),
    (Trouble(slow_layer=3), ("module_time", "encoder.layers.3")),
    (Trouble(), None),
]


def fill(path: str, memory: MemorySpanStore) -> DuckDBSpanStore:
    ledger = Ledger(["store"])
    store = DuckDBSpanStore.open(path, ledger)
    intake = Intake([store], ledger)
    for body in requests(memory.spans):
        intake.traces(body)
    store.write_host_samples(memory.host)
    assert store.flush(settle=True)
    assert ledger.snapshot().sinks["store"].ok == len(memory.spans)
    return store


@pytest.mark.parametrize(("trouble", "expected"), FAULTS)
def test_the_store_leads_to_the_same_causes_as_plain_lists(trouble: Trouble, expected: tuple[str, str] | None):
    memory = world(5, trouble)
    store = fill(":memory:", memory)
    try:
        found = AttributionEngine(store, store).attribute(SLI, BASELINE, BURNING)
    finally:
        store.close()
    plain = AttributionEngine(memory, memory).attribute(SLI, BASELINE, BURNING)
    shown = [(cause.kind, cause.service, cause.target, pytest.approx(cause.score, abs=0.02)) for cause in plain.causes]
    assert [(cause.kind, cause.service, cause.target, cause.score) for cause in found.causes] == shown
    assert ((found.causes[0].kind, found.causes[0].target) if found.causes else None) == expected
    assert all(evidence.links for cause in found.causes for evidence in cause.evidence if evidence.family != "host")


def test_a_store_file_is_opened_when_nobody_holds_it(tmp_path: Path):
    path = tmp_path / "spans.duckdb"
    fill(str(path), world(1, Trouble(network_ms=40))).close()
    windows = ["--window", "1970-01-01T00:17:10Z/1970-01-01T00:17:40Z", "--baseline", "30s"]
    result = CliRunner().invoke(command, ["--store", str(path), "--service", "order-api", *windows])
    assert result.exit_code == 0, result.output
    assert "edge_latency" in result.stdout


def test_a_store_file_says_whom_and_when_it_knows(tmp_path: Path):
    memory, path = world(1, Trouble()), tmp_path / "spans.duckdb"
    store = fill(str(path), memory)
    assert store.known_requests() == memory.known_requests()
    store.close()
    for arguments, words in (
        (["--service", "order-apj"], "there are those of 'order-api'"),
        (["--service", "order-api", "--operation", "POST /orderz"], "it has 'POST /orders'"),
        (["--service", "order-api"], "they are from 1970-01-01T00:16:4"),
    ):
        result = CliRunner().invoke(command, ["--store", str(path), *arguments])
        assert result.exit_code == 3
        assert words in result.stdout


def test_a_store_that_a_process_holds_is_not_opened(tmp_path: Path):

    path = tmp_path / "spans.duckdb"
    code = f"from pasta_otel.exporters.store import DuckDBSpanStore as S\ns = S.open({str(path)!r})\nprint(flush=True)\ninput()\ns.close()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        result = CliRunner().invoke(command, ["--store", str(path), "--service", "order-api"])
    finally:
        holder.communicate(b"\n")
    assert isinstance(result.exception, MissingError)
    assert str(holder.pid) in str(result.exception)
