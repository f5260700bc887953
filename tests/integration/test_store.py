"""The span store: what goes in can be counted, asked and traced, also after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pasta_otel import semconv
from pasta_otel.errors import InputError, MissingError, StateError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Intake
from pasta_otel.exporters.store import Closing, DuckDBSpanStore, StoreConfig
from pasta_otel.model import CountRequest, EdgeKey, HostSample, ModuleKey, OperationKey, SpanSLI, TimeWindow
from pasta_otel.slo.attribution.ports import HostSeries, SpanStore
from tests.support import CASES, case, wait_for
from tests.telemetry import CLIENT, SECOND, SERVER, T0, request, span

ALWAYS = TimeWindow(0, 2**62)
NO_GRACE_LIMIT = 2**62
MS = 1_000_000


class HandClock:
    """Wall and monotonic time that move when told."""

    def __init__(self, now: int = T0 + 10 * SECOND):
        self.now = now

    def unix_nano(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now


class Bench:
    """A store, what feeds it, and the account."""

    def __init__(self, path: str = ":memory:", config: StoreConfig | None = None, **options: Any):
        self.ledger = Ledger(["store"])
        self.clock = HandClock()
        self.store = DuckDBSpanStore.open(path, self.ledger, config, clock=self.clock, **options)
        self.intake = Intake([self.store], self.ledger, clock=self.clock)

    def send(self, *spans: dict[str, Any], service: str = "demo", **resource: Any) -> None:
        self.intake.traces(request(*spans, service=service, **resource).SerializeToString())

    def settle(self) -> None:
        assert self.store.flush(60, settle=True)

    def count(self, *requests: CountRequest, grace_ns: int = NO_GRACE_LIMIT):
        assert self.store.flush()
        return self.store.count_spans(requests, self.clock.now, grace_ns)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.close()
    assert made.ledger.snapshot().balanced
    assert made.ledger.snapshot().sinks["store"].pending == 0


def call(trace: int = 1, *, start: int = T0, gap: int = 30 * MS, inner: int = 50 * MS, error: bool = False):
    """Return a server span that calls another service, and that service's server span."""
    end = start + 20 * MS + gap + inner
    return (
        [
            span("GET /order", trace=trace, identifier=1, kind=SERVER, start=start, end=end + 10 * MS),
            span(
                "GET", trace=trace, identifier=2, parent=1, kind=CLIENT, start=start + 20 * MS, end=end, error=error,
                attributes={"server.address": "127.0.0.1", "server.port": 9001},
            ),
        ],
        span("GET /recs", trace=trace, identifier=3, parent=2, kind=SERVER, start=start + 20 * MS, end=start + 20 * MS + inner),
    )  # fmt: skip


def test_the_store_answers_the_attributions_protocols(bench):
    as_spans: SpanStore = bench.store
    as_hosts: HostSeries = bench.store
    assert as_spans.operation_self_times(ALWAYS) == {}
    assert as_hosts.host_samples(ALWAYS) == []


def test_self_time_and_edge_gap_are_written_when_a_trace_closes(bench):
    (server, client), callee = call()
    bench.send(server, client, service="orders")
    bench.send(callee, service="recommendations")
    bench.settle()
    own = bench.store.operation_self_times(ALWAYS)
    assert own[OperationKey("orders", "GET /order")].values_ns == (30 * MS,)
    assert own[OperationKey("recommendations", "GET /recs")].values_ns == (50 * MS,)
    edge = EdgeKey("orders", "recommendations")
    assert bench.store.edge_gaps(ALWAYS)[edge].values_ns == (30 * MS,)
    assert bench.store.edge_durations(ALWAYS)[edge].values_ns == (80 * MS,)
    assert bench.store.edge_durations(ALWAYS)[edge].examples[0] == (f"{1:032x}", f"{2:016x}")


def test_a_server_span_that_comes_late_replaces_what_was_written(bench):
    (server, client), callee = call()
    bench.send(server, client, service="orders")
    assert bench.store.flush()
    bench.clock.now += SECOND
    wait_for(lambda: EdgeKey("orders", "127.0.0.1") in bench.store.edge_gaps(ALWAYS))
    bench.send(callee, service="recommendations")
    assert bench.store.flush()
    bench.clock.now += SECOND
    edge = EdgeKey("orders", "recommendations")
    wait_for(lambda: edge in bench.store.edge_gaps(ALWAYS))
    assert set(bench.store.edge_gaps(ALWAYS)) == {edge}
    assert bench.store.edge_gaps(ALWAYS)[edge].values_ns == (30 * MS,)
    assert bench.store.edge_gaps(ALWAYS)[edge].count == 1
    assert bench.store.operation_self_times(ALWAYS)[OperationKey("orders", "GET /order")].count == 1


def test_a_trace_with_a_missing_parent_waits_until_it_is_quiet_for_long(bench):
    bench.send(span("part", parent=99))
    assert bench.store.flush()
    bench.clock.now += 2 * SECOND
    bench.send(span("other", trace=2))
    assert bench.store.flush()
    bench.clock.now += 2 * SECOND
    wait_for(lambda: OperationKey("demo", "other") in bench.store.operation_self_times(ALWAYS))
    assert OperationKey("demo", "part") not in bench.store.operation_self_times(ALWAYS)
    bench.clock.now += 10 * SECOND
    wait_for(lambda: OperationKey("demo", "part") in bench.store.operation_self_times(ALWAYS))


def test_a_request_whose_caller_is_not_traced_settles_at_once(bench):
    bench.send(span("GET /order", kind=SERVER, parent=99))
    assert bench.store.flush()
    bench.clock.now += SECOND // 2
    wait_for(lambda: OperationKey("demo", "GET /order") in bench.store.operation_self_times(ALWAYS))


def test_a_call_to_a_service_that_sends_spans_waits_for_its_server_span_but_not_for_ever(bench):
    (server, client), callee = call(1)
    bench.send(server, client, service="orders")
    bench.send(callee, service="recommendations")
    bench.settle()  # from now on the address is known
    (server, client), callee = call(2)
    bench.send(server, client, service="orders")
    bench.send(span("other", trace=3))
    assert bench.store.flush()
    bench.clock.now += SECOND
    edge = EdgeKey("orders", "recommendations")
    wait_for(lambda: OperationKey("demo", "other") in bench.store.operation_self_times(ALWAYS))
    assert bench.store.edge_gaps(ALWAYS)[edge].count == 1
    bench.clock.now += 2 * SECOND
    wait_for(lambda: bench.store.edge_gaps(ALWAYS)[edge].count == 2)
    assert sorted(bench.store.edge_gaps(ALWAYS)[edge].values_ns) == [30 * MS, 80 * MS]


def test_a_callee_without_spans_is_named_by_peer_service_then_address_then_what_the_address_was(bench):
    def client(trace: int, **attributes: Any) -> dict[str, Any]:
        return span("GET", trace=trace, identifier=trace, kind=CLIENT, attributes=attributes)

    bench.send(client(11, **{"peer.service": "payments", "server.address": "10.0.0.7"}), service="orders")
    bench.send(client(12, **{"server.address": "10.0.0.8"}), service="orders")
    bench.send(client(13, **{"http.url": "http://10.0.0.9:80/x"}), service="orders")
    bench.send(client(14), service="orders")
    (server, called), callee = call(15)
    bench.send(server, called, service="orders")
    bench.send(callee, service="recommendations")
    bench.settle()
    bench.send(client(16, **{"server.address": "127.0.0.1", "server.port": 9001}), service="orders")
    bench.send(client(17, **{"http.url": "http://127.0.0.1:9001/x"}), service="orders")
    bench.settle()
    counts = {key.callee: samples.count for key, samples in bench.store.edge_gaps(ALWAYS).items()}
    assert counts == {"payments": 1, "10.0.0.8": 1, "10.0.0.9": 1, "unknown": 1, "recommendations": 3}


def test_an_edges_errors_are_those_of_its_client_spans(bench):
    for trace in range(1, 5):
        (server, client), callee = call(trace, error=trace == 2)
        bench.send(server, client, service="orders")
        bench.send(callee, service="recommendations")
    bench.settle()
    samples = bench.store.edge_durations(ALWAYS)[EdgeKey("orders", "recommendations")]
    assert (samples.count, samples.errors, samples.requests) == (4, 1, 4)
    assert samples.examples[0].trace_id == f"{2:032x}"  # the failed one first


def test_through_keeps_the_traces_that_the_operation_served(bench):
    for trace, name in enumerate(["GET /order", "GET /order", "GET /health"], 1):
        bench.send(
            span(name, trace=trace, identifier=1, kind=SERVER), span("work", trace=trace, identifier=2, parent=1)
        )
    bench.settle()

    def works(through: OperationKey | None) -> int:
        found = bench.store.operation_self_times(ALWAYS, through=through)
        return found[OperationKey("demo", "work")].count if found else 0

    assert works(None) == 3
    assert works(OperationKey("demo", "GET /order")) == 2
    assert works(OperationKey("demo", "*")) == 3
    assert works(OperationKey("demo", "work")) == 0  # not a server span
    assert works(OperationKey("elsewhere", "*")) == 0


def test_modules_are_apart_from_operations(bench):
    path = {semconv.MODULE_PATH: "encoder.layers.3"}
    bench.send(
        span("POST /v1/rank", identifier=1, kind=SERVER, end=T0 + 100),
        span("TransformerEncoderLayer", identifier=2, parent=1, start=T0 + 10, end=T0 + 90, attributes=path),
        span("inside", identifier=3, parent=2, start=T0 + 20, end=T0 + 50),
        service="model",
    )
    bench.settle()
    assert bench.store.module_self_times(ALWAYS)[ModuleKey("model", "encoder.layers.3")].values_ns == (50,)
    operations = bench.store.operation_self_times(ALWAYS)
    assert {key.operation: samples.values_ns for key, samples in operations.items()} == {
        "POST /v1/rank": (20,),
        "inside": (30,),
    }


def test_at_most_limit_values_are_returned_and_all_are_counted(bench):
    bench.send(*(span(identifier=number, end=T0 + number) for number in range(1, 501)))
    bench.settle()
    samples = bench.store.operation_self_times(ALWAYS, limit=100)[OperationKey("demo", "op")]
    assert (samples.count, len(samples.values_ns)) == (500, 100)
    assert 150 < sum(samples.values_ns) / 100 < 350  # a uniform sample, not the first hundred


@pytest.mark.case("O04")
def test_a_span_that_ends_before_it_starts_lasts_zero_and_one_without_end_is_in_no_figure(bench):
    bench.intake.traces((CASES / "O04" / "trace.json").read_bytes(), is_json=True)
    bench.settle()
    expected = case("O04", "expected.json")
    durations = [value for samples in bench.store.operation_self_times(ALWAYS).values() for value in samples.values_ns]
    assert len(durations) == expected["hist_count"]
    assert sum(durations) / 1e9 == expected["hist_sum_s"]
    assert max(durations) == 500_000
    records = {record["name"]: record for record in bench.store.trace("5b8efff798038103d269b633813fc60c")}
    assert [name for name, record in records.items() if "clock_anomaly" in record["flags"]] == expected["anomalies"]
    assert [name for name, record in records.items() if "unfinished" in record["flags"]] == expected["unfinished"]
    back = records["back"]
    assert (back["start_time_unix_nano"], back["end_time_unix_nano"]) == (1700000000000191305, 1700000000000000000)
    sli = SpanSLI("demo", None, "internal", threshold_ns=100)
    (counts,) = bench.count(CountRequest(sli, ALWAYS))
    assert (counts.good, counts.total) == (2, 3)


@pytest.mark.case("O06")
def test_a_disorderly_trace_is_stored_whole_with_its_flags(bench):
    bench.intake.traces((CASES / "O06" / "trace.json").read_bytes(), is_json=True)
    bench.settle()
    records = bench.store.trace("5b8efff798038103d269b633813fc60c")
    assert {record["name"]: record["flags"] for record in records} == {
        "A": [], "B": [], "C": [], "D": ["cycle"], "E": ["self_parent"], "F": ["orphan"],
    }  # fmt: skip
    assert len(records) == 6


def test_a_trace_is_returned_as_it_was_sent(bench):
    event = {"name": "exception", "time_unix_nano": T0 + 5}
    bench.send(
        span(kind=SERVER, error=True, attributes={"http.route": "/x", "n": 1, "f": 0.5, "b": True}, events=[event]),
        **{"service.instance.id": "i-1", "process.pid": 7},
    )
    bench.settle()
    (record,) = bench.store.trace(f"{1:032x}")
    assert record["attributes"] == {"http.route": "/x", "n": 1, "f": 0.5, "b": True}
    assert record["events"] == [{"name": "exception", "time_unix_nano": T0 + 5, "attributes": {}}]
    assert record["resource"] == {"service.name": "demo", "service.instance.id": "i-1", "process.pid": 7}
    assert (record["status"], record["kind"], record["parent_span_id"]) == ("error", SERVER, None)
    assert json.dumps(record, allow_nan=False)
    with pytest.raises(InputError, match="trace_id"):
        bench.store.trace("xyz")


def test_the_slowest_requests_come_first(bench):
    for number in range(1, 6):
        bench.send(span("GET /order", trace=number, kind=SERVER, end=T0 + number * MS, error=number == 5))
    assert bench.store.flush()
    found = bench.store.slow_requests("demo", "GET /order", ALWAYS, 2)
    assert [(entry["ref"].trace_id, entry["duration_ns"], entry["error"]) for entry in found] == [
        (f"{5:032x}", 5 * MS, True),
        (f"{4:032x}", 4 * MS, False),
    ]


def test_host_samples_come_back_in_order(bench):
    samples = [
        HostSample("model", 7, semconv.RUN_DELAY, T0 + 2, 0.5),
        HostSample("model", 7, semconv.RUN_DELAY, T0 + 1, 0.25),
        HostSample("model", 3, semconv.CPU_TIME, T0 + 1, 1.0),
        HostSample("api", 9, semconv.CPU_TIME, T0 + 9, 1.0),
    ]
    bench.store.write_host_samples(samples)
    assert bench.store.flush()
    assert bench.store.host_samples(TimeWindow(T0, T0 + 9)) == [samples[2], samples[1], samples[0]]


def test_processes_of_this_host_are_observed_and_forgotten(bench):
    import socket

    bench.send(span(), service="near", **{"process.pid": 1, "host.name": socket.gethostname()})
    bench.send(span(), service="local", **{"process.pid": 2})
    bench.send(span(), service="far", **{"process.pid": 3, "host.name": "another-host"})
    bench.send(span(), service="nameless")
    assert dict(bench.store.observed_processes()) == {1: "near", 2: "local"}
    bench.clock.now += 61 * SECOND
    assert dict(bench.store.observed_processes()) == {}


# ---- files


def test_a_file_is_taken_up_again_where_it_ended(tmp_path):
    path = str(tmp_path / "spans.duckdb")
    first = Bench(path)
    first.send(span("a", identifier=1), span("b", identifier=2))
    first.store.close()
    second = Bench(path)
    second.send(span("c", identifier=3), span("a", identifier=4), service="demo")
    second.settle()
    found = second.store.operation_self_times(ALWAYS)
    assert {key.operation: samples.count for key, samples in found.items()} == {"a": 2, "b": 1, "c": 1}
    second.store.close()
    second.store.close()
    with pytest.raises(StateError):
        second.store.trace(f"{1:032x}")


KILLED = """
import os, signal, sys, time
from tests.integration.test_store import Bench, call
from pasta_otel.exporters.store import Closing, StoreConfig
bench = Bench(sys.argv[1], StoreConfig(closing=Closing(settle_quiet_ns=10**18, root_grace_ns=10**18)))
(server, client), callee = call()
bench.send(server, client, service="orders")
bench.send(callee, service="recommendations")
assert bench.store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_flushed_survives_a_kill_and_open_traces_are_closed_afterwards(tmp_path):
    path = str(tmp_path / "spans.duckdb")
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, path], cwd=root, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    again = Bench(path)
    assert len(again.store.trace(f"{1:032x}")) == 3
    again.settle()
    assert again.store.edge_gaps(ALWAYS)[EdgeKey("orders", "recommendations")].values_ns == (30 * MS,)
    again.store.close()


HOLDER = """
import sys, time
from pasta_otel.exporters.store import DuckDBSpanStore
store = DuckDBSpanStore.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
store.close()
"""


def test_a_file_that_another_process_holds_is_refused_naming_its_pid(tmp_path):
    path = str(tmp_path / "spans.duckdb")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(MissingError, match=f"held by process {holder.pid}") as error:
            DuckDBSpanStore.open(path)
        assert error.value.exit_code == 3
        holder.communicate("", timeout=30)
    DuckDBSpanStore.open(path).close()


def test_what_is_no_store_of_this_version_is_refused(tmp_path):
    import duckdb

    other, newer, garbage = (tmp_path / name for name in ("other.duckdb", "newer.duckdb", "garbage.duckdb"))
    with duckdb.connect(str(other)) as connection:
        connection.execute("create table mine (x integer)")
    DuckDBSpanStore.open(str(newer)).close()
    with duckdb.connect(str(newer)) as connection:
        connection.execute("update meta set value = '99' where key = 'schema_version'")
    garbage.write_bytes(os.urandom(5000))
    for path, words in ((other, "not a span store"), (newer, "schema version 99"), (garbage, "cannot be opened")):
        with pytest.raises(InputError, match=words) as error:
            DuckDBSpanStore.open(str(path))
        assert error.value.file == str(path)
    with pytest.raises(InputError, match="folder does not exist"):
        DuckDBSpanStore.open(str(tmp_path / "nowhere" / "x.duckdb"))


def test_an_older_schema_is_migrated_once(tmp_path, monkeypatch):
    from pasta_otel.exporters.store import schema

    path = str(tmp_path / "spans.duckdb")
    DuckDBSpanStore.open(path).close()
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(schema, "MIGRATIONS", {1: "alter table host_samples add column extra integer"})
    for _ in range(2):
        store = DuckDBSpanStore.open(path)
        columns = store._cursor().execute("select column_name from duckdb_columns() where table_name = 'host_samples'")
        assert ("extra",) in columns.fetchall()
        store.close()
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(schema, "MIGRATIONS", {2: "alter table nowhere add column x integer"})
    with pytest.raises(Exception, match="nowhere"):
        DuckDBSpanStore.open(path)
    monkeypatch.setattr(schema, "MIGRATIONS", {})
    with pytest.raises(InputError, match="schema version 2"):
        DuckDBSpanStore.open(path)


# ---- bounds


def test_old_spans_are_deleted_by_age():
    bench = Bench(config=StoreConfig(max_age_s=60, retention_interval_s=3600))
    bench.send(span("old", identifier=1), span("new", identifier=2, start=T0 + 50 * SECOND, end=T0 + 51 * SECOND))
    bench.send(span("open", identifier=3, end=0))
    bench.store.write_host_samples([HostSample("s", 1, semconv.CPU_TIME, T0, 1.0)])
    bench.settle()
    bench.clock.now = T0 + 62 * SECOND
    assert bench.store._retention.round() == 2
    assert [record["name"] for record in bench.store.trace(f"{1:032x}")] == ["new"]
    assert set(bench.store.operation_self_times(ALWAYS)) == {OperationKey("demo", "new")}
    assert bench.store.host_samples(ALWAYS) == []
    bench.store.close()


def test_the_oldest_spans_are_deleted_when_the_file_grows_over_its_bound(tmp_path):
    limit = 8 * 1024**2  # DuckDB frees whole row groups of 122,880 rows, here about 10 MB
    bench = Bench(
        str(tmp_path / "spans.duckdb"), StoreConfig(max_bytes=limit, retention_interval_s=3600, max_age_s=10**8)
    )
    text = [os.urandom(60).hex() for _ in range(6000)]
    message = request(*(span(identifier=i + 1, attributes={"text": text[i]}) for i in range(6000)))
    for number in range(25):
        for i, one in enumerate(message.resource_spans[0].scope_spans[0].spans):
            one.name, one.trace_id = f"op-{number}", (number + 1).to_bytes(16, "big")
            one.end_time_unix_nano = T0 + number * SECOND + i
            one.attributes[0].value.string_value = text[(i + number) % 6000]
        bench.intake.traces(message.SerializeToString())
    bench.settle()
    bench.store._cursor().execute("checkpoint")
    assert bench.store._retention.size_bytes() > limit
    assert bench.store._retention.round() > 0
    for _ in range(6):
        bench.store._retention.round()
    assert bench.store._retention.size_bytes() <= limit
    left = {key.operation for key in bench.store.operation_self_times(ALWAYS)}
    assert "op-24" in left
    assert "op-0" not in left
    bench.store.close()


def test_held_spans_are_bounded(bench):
    closing = Closing(max_open_spans=100)
    small = Bench(config=StoreConfig(closing=closing))
    for trace in range(1, 31):
        small.send(*(span(trace=trace, identifier=i + 1, parent=99) for i in range(10)))
        small.clock.now += MS
        assert small.store.flush()
    wait_for(lambda: small.store._traces.spans <= 100)
    small.settle()
    assert small.store.operation_self_times(ALWAYS)[OperationKey("demo", "op")].count == 300
    assert small.store._traces.spans == 0
    small.store.close()


def test_a_full_queue_pushes_back_and_what_is_offered_anyway_is_counted():
    bench = Bench(config=StoreConfig(queue_spans=10))
    writer = bench.store._writer
    with writer._wake:  # the writer cannot take anything meanwhile
        assert bench.store.has_room(100)  # an empty queue takes one batch of any size
        writer._waiting = 5
        assert bench.store.has_room(5)
        assert not bench.store.has_room(6)
        bench.ledger.receive(6)
        assert not bench.store.offer(_batch(6))
        writer._waiting = 0
    assert dict(bench.ledger.snapshot().sinks["store"].dropped) == {"queue_full": 6}
    bench.store.close()
    assert not bench.store.has_room(1)
    bench.ledger.receive(2)
    bench.store.offer(_batch(2))
    assert dict(bench.ledger.snapshot().sinks["store"].dropped) == {"queue_full": 6, "shutdown": 2}
    assert bench.ledger.snapshot().balanced


def _batch(size: int):
    from pasta_otel.exporters.receiver import TraceDecoder

    return TraceDecoder().decode(request(*(span(identifier=i + 1) for i in range(size))).SerializeToString(), T0).batch


def test_spans_that_cannot_be_written_are_counted_and_the_store_goes_on(bench, caplog):
    bench.store._cursor().execute("alter table spans rename to hidden")
    bench.send(span("lost"))
    assert bench.store.flush()
    bench.store._cursor().execute("alter table hidden rename to spans")
    bench.send(span("kept", identifier=2))
    assert bench.store.flush()
    account = bench.ledger.snapshot().sinks["store"]
    assert (account.ok, dict(account.dropped)) == (1, {"write_error": 1})
    assert "could not be stored" in caplog.text


def test_late_spans_size_and_expiry_are_metrics():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    bench = Bench(config=StoreConfig(grace_s=5, max_age_s=60), meter=provider.get_meter("tests"))
    bench.send(span(), span(identifier=2, end=T0 + 9 * SECOND))
    bench.settle()
    bench.clock.now += 1000 * SECOND
    bench.store._retention.round()
    data = reader.get_metrics_data()
    values = {
        metric.name: metric.data.data_points[0].value
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.data.data_points
    }
    assert values[semconv.STORE_LATE] == 1
    assert values[semconv.STORE_EXPIRED] == 2
    assert values[semconv.STORE_SIZE] > 0
    assert values[semconv.STORE_OPEN_SPANS] == 0
    bench.store.close()
    provider.shutdown()


def test_a_bound_that_makes_no_sense_names_its_field():
    with pytest.raises(InputError) as error:
        StoreConfig(max_bytes=0)
    assert error.value.field == "store.max_bytes"


def test_what_lies_in_the_write_ahead_log_counts_for_the_size(tmp_path: Path):
    made = Bench(str(tmp_path / "s.duckdb"))
    for batch in range(10):
        made.send(*(span(trace=1000 * batch + n, identifier=n, attributes={"a": "x" * 500}) for n in range(1, 200)))
    assert made.store.flush()
    log = (tmp_path / "s.duckdb.wal").stat().st_size
    assert log > 500_000
    assert made.store._retention.size_bytes() >= log
    made.store.close()


def test_a_store_whose_log_alone_is_above_its_size_is_shrunk(tmp_path: Path):
    made = Bench(str(tmp_path / "s.duckdb"), StoreConfig(max_bytes=900_000, retention_interval_s=3600))
    for batch in range(20):
        noise = os.urandom(400).hex()
        made.send(*(span(trace=1000 * batch + n, identifier=n, attributes={"a": f"{n}{noise}"}) for n in range(1, 200)))
    made.settle()
    assert made.store._retention.size_bytes() > 900_000
    made.store._retention.round()
    assert not (tmp_path / "s.duckdb.wal").exists() or (tmp_path / "s.duckdb.wal").stat().st_size < 900_000
    made.store.close()
