"""Spans that could not be written or came too late: said by counts, by health and in the log, never as "no traffic"."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Intake
from pasta_otel.exporters.store import DuckDBSpanStore
from pasta_otel.exporters.store.missing import Missing, with_lost
from pasta_otel.model import CountRequest, EventCounts, SpanSLI, TimeWindow
from pasta_otel.slo.sources.spans import SpanSource
from tests.telemetry import SECOND, SERVER, request, span

MINUTE = 60 * SECOND
NOW = 1_700_000_000 * SECOND
SLI = SpanSLI("demo")


class HandClock:
    def __init__(self) -> None:
        self.now = NOW

    def unix_nano(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now


class Bench:
    def __init__(self, path: str = ":memory:") -> None:
        self.clock, self.ledger = HandClock(), Ledger(["store"])
        self.store = DuckDBSpanStore.open(path, self.ledger, clock=self.clock)
        self.intake = Intake([self.store], self.ledger, clock=self.clock)
        self._trace = 0

    def send(self, spans: int, *, behind_ns: int = 0, service: str = "demo", padding: int = 0) -> None:
        self._trace += 1
        start = self.clock.now - behind_ns - SECOND
        made = [
            span(identifier=number + 1, trace=self._trace, kind=SERVER, start=start, end=start + SECOND // 2,
                 attributes={"padding": f"{self._trace}-{number}-" + "x" * padding})
            for number in range(spans)
        ]  # fmt: skip
        self.intake.traces(request(*made, service=service).SerializeToString())
        assert self.store.flush(60)

    def counts(self, length_ns: int, sli: SpanSLI = SLI) -> EventCounts:
        window = TimeWindow(self.clock.now - length_ns, self.clock.now)
        (answer,) = SpanSource(self.store, 30 * SECOND).counts([CountRequest(sli, window)], self.clock.now)
        return answer


@contextmanager
def no_larger_files(limit: int) -> Iterator[None]:
    """Let no file of this process grow further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_no_idle_service(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    bench = Bench(str(tmp_path / "s.duckdb"))
    try:
        assert bench.store.trouble() == ""
        with no_larger_files(200_000), caplog.at_level(logging.WARNING):
            while not bench.ledger.snapshot().as_dict()["sinks"]["store"]["dropped"]:
                bench.send(50, padding=2000)
                bench.clock.now += SECOND
            bench.clock.now += 40 * SECOND  # what was stored before has left the window
            bench.send(50, padding=20_000)
        lost = bench.ledger.snapshot().as_dict()["sinks"]["store"]["dropped"]["write_error"]
        assert lost >= 100
        assert f"spans are lost: {lost} could not be stored so far: " in bench.store.trouble()
        answer = bench.counts(10 * SECOND)
        assert answer.no_data in {"partial", "absent"}
        assert answer.detail
        assert "no event" not in answer.detail
        assert "spans are lost: 50 could not be stored so far" in caplog.text
    finally:
        bench.store.close()


def broken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def insert(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.store._writer, "_insert", insert)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.close()


def test_while_spans_are_lost_counts_are_partial_and_name_the_error(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    bench.send(10)
    assert bench.counts(10 * SECOND).no_data is None
    with monkeypatch.context() as patch:
        broken(bench, patch)
        for _ in range(20):
            bench.clock.now += SECOND
            bench.send(10)
        short, other = bench.counts(10 * SECOND), bench.counts(10 * SECOND, SpanSLI("other"))
        assert short.no_data == "partial"
        assert short.detail.endswith("spans could not be stored: [Errno 28] No space left on device")
        assert bench.counts(30 * SECOND).no_data == "partial"
        assert other.no_data == "no_traffic"
        long = bench.counts(60 * MINUTE)
        assert (long.no_data, long.total, long.degraded) == (None, 10, True)
        assert bench.store.trouble() != ""
    bench.clock.now += SECOND
    bench.send(10)
    assert bench.store.trouble() == ""
    bench.clock.now += 30 * SECOND
    bench.send(10)
    assert bench.counts(10 * SECOND) == EventCounts(10, 10, coverage=1.0)


def test_a_failure_of_which_nothing_is_heard_for_a_minute_does_not_keep_health_failing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    broken(bench, monkeypatch)
    bench.send(1)
    bench.clock.now += MINUTE
    assert bench.store.trouble() != ""
    bench.clock.now += 1
    assert bench.store.trouble() == ""


def test_losses_are_logged_at_once_every_minute_and_at_their_end_also_after_other_failures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    bench.store._writer._failed = True  # as after host samples that could not be stored
    with monkeypatch.context() as patch:
        broken(bench, patch)
        for _ in range(121):
            bench.send(1)
            bench.clock.now += SECOND
    bench.send(1)
    text = [record.message for record in caplog.records if "lost" in record.message]
    assert [line.partition(" could")[0] for line in text] == [
        "spans are lost: 1", "spans are lost: 61", "spans are lost: 121", "spans are stored again; 121 were lost",
    ]  # fmt: skip


def test_spans_of_a_clock_that_is_behind_are_named_where_nothing_came_in_time(bench: Bench):
    for _ in range(5):
        bench.clock.now += SECOND
        bench.send(10, behind_ns=3 * MINUTE)
    answer = bench.counts(MINUTE)
    assert answer.no_data == "no_traffic"
    assert answer.detail.startswith("no events in time, but 50 late spans")
    assert "--grace" in answer.detail
    assert bench.counts(MINUTE, SpanSLI("other")).detail == "no event ended in the window"


def test_the_account_of_what_is_missing_is_bounded_and_keeps_its_sum():
    missing = Missing()
    for number in range(5000):
        missing.add("a", number * MINUTE, number * MINUTE + SECOND, 1)
    assert len(missing._runs["a"]) <= 2001
    assert missing.within("a", TimeWindow(0, 5000 * MINUTE))[0] == 5000
    assert missing.within("a", TimeWindow(4990 * MINUTE, 5000 * MINUTE)) == (10, 10 * SECOND)
    for number in range(3000):
        missing.add(f"s{number}", 0, SECOND, 1)
    assert len(missing._runs) <= 1001
    assert missing.within("s2999", TimeWindow(0, SECOND))[0] >= 1


def test_what_a_source_refuses_for_another_reason_stays_refused():
    refused = EventCounts(0, 0, "sampled", "why")
    assert with_lost(refused, 5, SECOND, TimeWindow(0, SECOND), "disk") is refused
