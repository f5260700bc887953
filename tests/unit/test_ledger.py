"""The account balances at every instant."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pasta_otel import semconv
from pasta_otel.errors import StateError
from pasta_otel.exporters.ledger import Ledger

STEP = st.one_of(
    st.tuples(st.just("receive"), st.integers(0, 20), st.integers(0, 25)),
    st.tuples(st.sampled_from(["store", "upstream"]), st.integers(0, 20), st.integers(0, 20)),
)


@given(st.lists(STEP, max_size=40))
def test_received_minus_rejected_is_ok_plus_dropped_plus_pending_after_every_step(steps):
    ledger = Ledger(["store", "upstream"])
    for what, first, second in steps:
        before = ledger.snapshot()
        try:
            if what == "receive":
                ledger.receive(first, {"bad": second})
            else:
                ledger.settle(what, ok=first, dropped={"lost": second})
        except StateError:
            assert ledger.snapshot() == before
        assert ledger.snapshot().balanced


def test_more_cannot_be_settled_than_is_pending():
    ledger = Ledger(["store"])
    ledger.receive(3, {"bad": 1})
    with pytest.raises(StateError, match="settles 3 items but 2 are pending"):
        ledger.settle("store", ok=3)


def test_a_snapshot_balances_while_many_threads_write():
    ledger = Ledger(["a", "b"])

    def work(sink: str) -> None:
        for number in range(500):
            ledger.receive(4, {"bad": number % 2})
            ledger.settle(sink, ok=1, dropped={"lost": 2})

    threads = [threading.Thread(target=work, args=(sink,)) for sink in ("a", "b") for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert ledger.snapshot().balanced
    for thread in threads:
        thread.join()
    assert ledger.snapshot().received == 8000


def test_the_report_form_is_the_one_of_the_design():
    ledger = Ledger(["store", "upstream"])
    ledger.receive(5, {"invalid_trace_id": 1})
    ledger.settle("store", ok=4)
    ledger.settle("upstream", ok=1, dropped={"queue_full": 2})
    assert ledger.snapshot().as_dict() == {
        "received": 5,
        "rejected": {"invalid_trace_id": 1},
        "sinks": {
            "store": {"ok": 4, "dropped": {}, "pending": 0},
            "upstream": {"ok": 1, "dropped": {"queue_full": 2}, "pending": 1},
        },
    }


def test_the_account_is_exported_as_metrics():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    ledger = Ledger(["store"], provider.get_meter("test"))
    ledger.receive(5, {"bad": 1})
    ledger.settle("store", ok=2, dropped={"lost": 1})
    metrics = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    found = {
        (metric.name, *sorted((point.attributes or {}).values())): point.value
        for metric in metrics
        for point in metric.data.data_points
    }
    assert found == {
        (semconv.SPANS_RECEIVED,): 5,
        (semconv.SPANS_REJECTED, "bad"): 1,
        (semconv.SINK_OK, "store"): 2,
        (semconv.SINK_DROPPED, "lost", "store"): 1,
        (semconv.SINK_PENDING, "store"): 1,
    }
    provider.shutdown()
