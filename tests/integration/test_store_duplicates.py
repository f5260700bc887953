"""A span counts once however often it comes: a request sent again, a file imported twice, a restart in between."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.cli import main
from pasta_otel.exporters.store import StoreConfig
from pasta_otel.exporters.store.duplicates import KEY, MOST_RANGES, _ranges, repeated
from pasta_otel.model import CountRequest, SpanSLI
from tests.integration.test_store import ALWAYS, Bench
from tests.telemetry import CLIENT, SECOND, SERVER, T0, request, span

HOUR = 3600 * SECOND


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.close()
    assert made.ledger.snapshot().balanced


def servers(number: int = 3, *, at: int = T0, first: int = 1) -> list[dict[str, Any]]:
    return [span("GET", trace=n, identifier=n, kind=SERVER, start=at, end=at + n) for n in range(first, first + number)]


def total(bench: Bench) -> float:
    return bench.count(CountRequest(SpanSLI("demo"), ALWAYS))[0].total


def dropped(bench: Bench) -> dict[str, int]:
    assert bench.store.flush()
    return dict(bench.ledger.snapshot().sinks["store"].dropped)


def test_a_request_that_is_sent_again_counts_once(bench: Bench):
    body = request(*servers(at=T0 + 11 * SECOND), service="demo").SerializeToString()
    bench.clock.now = T0 + 12 * SECOND
    for _ in range(3):
        bench.intake.traces(body)
    assert total(bench) == 3
    assert dropped(bench) == {"duplicate": 6}


def test_a_request_that_is_sent_again_after_it_was_written_counts_once(bench: Bench):
    body = request(*servers(at=T0 + 11 * SECOND), service="demo").SerializeToString()
    for second in (12, 40, 71, 129):
        bench.clock.now = T0 + second * SECOND
        bench.intake.traces(body)
        assert total(bench) == 3
    assert dropped(bench) == {"duplicate": 9}


def test_spans_that_come_again_among_others_and_late_count_once(bench: Bench):
    bench.send(*servers(at=T0 + 11 * SECOND))
    bench.clock.now = T0 + HOUR
    bench.send(*servers(at=T0 + 11 * SECOND), *servers(at=T0 + HOUR, first=10))
    assert total(bench) == 6
    assert dropped(bench) == {"duplicate": 3}


def test_what_an_earlier_process_stored_is_not_stored_again(tmp_path: Path):
    path = str(tmp_path / "s.duckdb")
    for after in (10, 20):
        made = Bench(path)
        made.clock.now = T0 + after * SECOND
        made.send(*servers())
        assert total(made) == 3
        made.store.close()
    assert made.ledger.snapshot().sinks["store"].ok == 0


def test_self_times_and_edges_are_not_doubled_either(bench: Bench):
    calls = [
        span("GET /order", trace=1, identifier=1, kind=SERVER, start=T0, end=T0 + 100),
        span("call", trace=1, identifier=2, parent=1, kind=CLIENT, start=T0 + 10, end=T0 + 90),
    ]
    for _ in range(2):
        bench.send(*calls)
        bench.settle()
    (samples,) = bench.store.operation_self_times(ALWAYS).values()
    assert list(samples.values_ns) == [20]


def test_client_and_server_that_share_an_id_are_two_spans(bench: Bench):
    shared = {"trace": 1, "identifier": 1, "start": T0, "end": T0 + 5}
    bench.send(span("GET", kind=SERVER, **shared), span("GET", kind=CLIENT, **shared))
    bench.send(span("GET", kind=SERVER, **shared), service="other")
    assert bench.store.flush()
    assert bench.ledger.snapshot().sinks["store"].ok == 3


keys = st.tuples(*[st.integers(0, 2)] * len(KEY))


@given(st.lists(keys, max_size=40))
def test_of_equal_rows_all_but_the_first_are_repeated(rows):
    columns = {
        name: np.array([row[number] + 1 for row in rows], dtype=np.int64 if name == "end_unix_nano" else np.uint64)
        for number, name in enumerate(KEY)
    }
    seen: set[tuple[int, ...]] = set()
    expected = [row in seen or bool(seen.add(row)) for row in rows]
    assert repeated(columns).tolist() == expected


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=50))
def test_few_ranges_hold_all_times(times):
    ends = np.sort(np.array(times, dtype=np.int64))
    ranges = list(_ranges(ends))
    assert len(ranges) <= MOST_RANGES
    assert all(any(first <= end <= last for first, last in ranges) for end in times)


# ---- the commands


def import_(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["import", *map(str, words)])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def write_spans(path: Path, number: int = 7, at: int = T0) -> Path:
    spans = [
        {
            "traceId": f"{n + 1:032x}", "spanId": f"{n + 1:016x}", "name": "GET", "kind": 2,
            "startTimeUnixNano": str(at), "endTimeUnixNano": str(at + n + 1),
        }
        for n in range(number)
    ]  # fmt: skip
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "svc"}}]}
    path.write_text(json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]}))
    return path


def test_importing_a_file_twice_stores_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, store = write_spans(tmp_path / "a.json"), tmp_path / "s.duckdb"
    assert "7 of 7 spans imported\n" in import_(capsys, file, "--to", "store", "--store", store)[1]
    code, out, _ = import_(capsys, file, "--to", "store", "--store", store)
    assert (code, out.splitlines()[-1]) == (0, "0 of 7 spans imported, 7 dropped (duplicate)")
    with duckdb.connect(str(store), read_only=True) as connection:
        assert connection.execute("select count(*) from spans").fetchall() == [(7,)]


def test_an_import_that_loses_spans_fails_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from pasta_otel.exporters.store.writer import Writer

    def full(self, table, columns, times=None):
        raise OSError("No space left on device")

    monkeypatch.setattr(Writer, "_insert", full)
    code, out, err = import_(
        capsys, write_spans(tmp_path / "a.json"), "--to", "store", "--store", tmp_path / "s.duckdb"
    )
    assert code == 3
    assert "0 of 7 spans imported, 7 dropped (write_error)" in out
    assert "7 of 7 spans are lost" in err
    assert "No space left on device" in err


def test_importing_spans_older_than_a_sidecar_keeps_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = import_(capsys, write_spans(tmp_path / "a.json"), "--to", "store", "--store", tmp_path / "s.duckdb")
    assert code == 0
    assert "7 spans ended more than 48 h ago" in err
    assert "--store-max-hours" in err


# ---- age


def test_spans_too_old_to_be_kept_are_said_in_the_log_once_a_minute(caplog: pytest.LogCaptureFixture):
    made = Bench(config=StoreConfig(max_age_s=3600))
    with caplog.at_level(logging.WARNING):
        for second in (0, 1, 61):
            made.clock.now = T0 + 2 * HOUR + second * SECOND
            made.send(*servers(first=1 + 10 * second))
            assert made.store.flush()
    made.store.close()
    said = [line for line in caplog.messages if "are deleted again" in line]
    assert [line.partition(" spans")[0] for line in said] == ["3", "9"]
    assert "--store-max-hours" in said[0]


def test_opening_a_store_that_holds_older_spans_says_that_they_go(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = str(tmp_path / "s.duckdb")
    made = Bench(path, StoreConfig(max_age_s=4e9))
    made.send(*servers(at=1_500_000_000 * SECOND))
    made.store.flush()
    made.store.close()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Bench(path).store.close()
    (line,) = caplog.messages
    assert "3 spans in it are older than 48 h and will be deleted" in line
