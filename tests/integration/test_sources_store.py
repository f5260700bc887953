"""Both ways in which the span store counts give the same answers."""

from __future__ import annotations

import random

import pytest

from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Intake
from pasta_otel.exporters.store import DuckDBSpanStore, counts
from pasta_otel.model import CountRequest, SpanSLI, TimeWindow
from pasta_otel.slo.sources.spans import SpanSource
from tests.telemetry import SECOND, SERVER, T0, request, span


@pytest.fixture(scope="module")
def source():
    rng = random.Random(5)
    ledger = Ledger(["store"])
    store = DuckDBSpanStore.open(":memory:", ledger)
    intake = Intake([store], ledger)
    for number in range(1, 500):
        start = T0 + rng.randrange(100) * SECOND
        fields = span(
            rng.choice(("GET /a", "GET /b")), identifier=number, kind=SERVER, start=start,
            end=start + rng.randrange(1, 20) * SECOND // 10, error=rng.random() < 0.3,
            trace_state=rng.choice(("", "ot=th:8")),
        )  # fmt: skip
        intake.traces(request(fields, service=rng.choice(("api", "model"))).SerializeToString())
    assert store.flush()
    yield SpanSource(store, 10**19)
    store.close()


def test_few_thresholds_and_many_thresholds_are_counted_alike(source, monkeypatch):
    requests = [
        CountRequest(
            SpanSLI(service, operation, good_status=status, threshold_ns=threshold),
            TimeWindow(T0 + start * SECOND, T0 + end * SECOND),
        )
        for service in ("api", "model", "nobody")
        for operation in ("GET /a", None)
        for status in (True, False)
        for threshold in (None, 1, SECOND // 2, SECOND, SECOND + 1, 2 * SECOND)
        for start, end in ((0, 110), (20, 40), (39, 41))
    ]
    binned = source.counts(requests, T0 + 200 * SECOND)
    monkeypatch.setattr(counts, "MAX_BINS", 0)
    assert binned == source.counts(requests, T0 + 200 * SECOND)
    assert {answer.no_data for answer in binned} == {None, "no_traffic"}
    assert any(0 < answer.good < answer.total for answer in binned)


def test_bad_events_are_named_failed_ones_first(source):
    window = TimeWindow(T0, T0 + 110 * SECOND)
    sli = SpanSLI("api", threshold_ns=SECOND)
    (counted,) = source.counts([CountRequest(SpanSLI("api", threshold_ns=SECOND), window)], T0 + 200 * SECOND)
    found = source.bad_spans(sli, window, 5)
    assert len({ref.span_id for ref in found}) == 5
    assert all(len(ref.trace_id) == 32 for ref in found)
    everything = source.bad_spans(sli, window, 10_000)
    assert 0 < len(everything) <= counted.bad  # sampled spans stand for more than one event
    assert source.bad_spans(SpanSLI("nobody"), window, 5) == []
    assert source.bad_spans("another kind", window, 5) == ()


def test_many_slices_and_few_windows_are_counted_alike(source, monkeypatch):
    windows = [TimeWindow(T0 + i * SECOND // 2, T0 + (i + 1) * SECOND // 2) for i in range(220)]
    requests = [CountRequest(SpanSLI(service), window) for service in ("api", "model") for window in windows]
    requests.append(CountRequest(SpanSLI("api", threshold_ns=SECOND), TimeWindow(T0, T0 + 110 * SECOND)))
    joined = source.counts(requests, T0 + 200 * SECOND)
    monkeypatch.setattr(counts, "MAX_CUTS", 1000)
    assert joined == source.counts(requests, T0 + 200 * SECOND)
    (whole,) = source.counts([CountRequest(SpanSLI("api"), TimeWindow(T0, T0 + 110 * SECOND))], T0 + 200 * SECOND)
    assert sum(answer.total for answer in joined[:220]) == whole.total > 0
    monkeypatch.setattr(counts, "MAX_CUTS", 4)
    monkeypatch.setattr(counts, "MAX_BINS", 0)
    assert joined == source.counts(requests, T0 + 200 * SECOND)
