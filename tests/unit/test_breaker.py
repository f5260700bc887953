"""The breaker's states, rates and accounting, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pasta_otel import semconv
from pasta_otel.errors import InputError
from pasta_otel.slo.breaker import BreakerConfig, BreakerState, BreakerTelemetry, CircuitBreaker, CircuitOpenError

CASE = Path(__file__).parents[1] / "fixtures/cases/B01"


class ManualClock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return int(self.seconds * 1e9)


class Telemetry:
    """A real SDK that keeps what it is given."""

    def __init__(self):
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        meters = MeterProvider(metric_readers=[self.reader])
        self.tracer = tracers.get_tracer(semconv.SCOPE)
        self.breaker = BreakerTelemetry(self.tracer, meters.get_meter(semconv.SCOPE))

    def transitions(self):
        spans = [span for span in self.exporter.get_finished_spans() if span.name == semconv.BREAKER_SPAN]
        return [span.attributes[semconv.BREAKER_TO] for span in spans]

    def counts(self, metric, key):
        data = self.reader.get_metrics_data()
        points = [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for found in scope.metrics
            if found.name == metric
            for point in found.data.data_points
        ]
        total = Counter()
        for point in points:
            total[point.attributes[key]] += point.value
        return dict(total)


@pytest.fixture
def clock():
    return ManualClock()


def breaker(clock, telemetry=None, **config):
    return CircuitBreaker("dep", BreakerConfig(**config), monotonic_ns=clock, telemetry=telemetry)


def fail():
    raise ConnectionError("no answer")


def outcome(circuit, result):
    with pytest.raises(ConnectionError) if result == "fail" else nothing():
        circuit.call(fail if result == "fail" else lambda: None)


class nothing:  # noqa: N801 - reads as contextlib.nullcontext
    def __enter__(self): ...
    def __exit__(self, *_): ...


def concurrent_calls(circuit, calls, results):
    """Start all calls before any of them ends; return how many were admitted."""
    admitted = []
    for _ in range(calls):
        try:
            admitted.append(circuit.guard().__enter__())
        except CircuitOpenError:
            continue
    assert len(admitted) == len(results)
    for guard, result in zip(admitted, results, strict=True):
        error = ConnectionError() if result == "fail" else None
        guard.__exit__(type(error) if error else None, error, None)
    return len(admitted)


@pytest.mark.case("B01")
def test_half_open_neither_opens_the_flood_gates_nor_flaps(clock):
    case = json.loads((CASE / "events.json").read_text())
    expected = json.loads((CASE / "expected.json").read_text())
    policy, telemetry = case["policy"], Telemetry()
    circuit = breaker(clock, telemetry.breaker, **policy)
    events = {event["t"]: event for event in case["events"]}

    clock.seconds = 0
    assert events[0]["burn"] > 14.4
    circuit.open("slo burn 20", half_open_policy="any_failure")
    assert circuit.state is BreakerState.OPEN
    clock.seconds = 10
    with pytest.raises(CircuitOpenError) as refusal:
        circuit.call(lambda: None)
    assert refusal.value.retry_after_seconds == 20.0

    clock.seconds = 30
    assert concurrent_calls(circuit, events[30]["calls"], events[30]["results"]) == expected["admitted_t30"]
    assert circuit.state is BreakerState.OPEN
    clock.seconds = (
        58  # the SLO has recovered; only probes close the breaker, and refused calls do not restart the timer
    )
    with pytest.raises(CircuitOpenError) as refusal:
        circuit.call(lambda: None)
    assert refusal.value.retry_after_seconds == 2.0

    clock.seconds = 60
    assert concurrent_calls(circuit, events[60]["calls"], events[60]["results"]) == expected["admitted_t60"]
    assert circuit.state is BreakerState.CLOSED
    clock.seconds = 61
    assert circuit.call(lambda: "x") == "x"

    assert telemetry.transitions() == expected["transitions"]
    assert telemetry.counts(semconv.BREAKER_TRANSITIONS, semconv.BREAKER_TO) == Counter(expected["transitions"])
    assert telemetry.counts(semconv.BREAKER_CALLS, "outcome") == {"ok": 6, "failed": 1, "refused": 16}


def test_it_opens_at_the_failure_rate_and_not_before_the_minimum(clock):
    circuit = breaker(clock, minimum_calls=4, window_size=10, failure_rate=0.5)
    for result in ("ok", "fail", "fail"):
        outcome(circuit, result)
    assert circuit.state is BreakerState.CLOSED
    outcome(circuit, "ok")
    assert circuit.state is BreakerState.OPEN


def test_a_count_window_smaller_than_the_minimum_is_judged_when_it_is_full(clock):
    circuit = breaker(clock, minimum_calls=100, window_size=2)
    outcome(circuit, "fail")
    outcome(circuit, "fail")
    assert circuit.state is BreakerState.OPEN


def test_it_opens_at_the_slow_call_rate(clock):
    circuit = breaker(clock, minimum_calls=2, slow_call_rate=0.5, slow_call_seconds=0.2)
    for duration in (0.2, 0.21):
        with circuit.guard():
            clock.seconds += duration
    assert circuit.state is BreakerState.OPEN


def test_a_time_window_forgets_old_failures(clock):
    circuit = breaker(clock, minimum_calls=2, window_type="time", window_size=10)
    outcome(circuit, "fail")
    clock.seconds = 10.5
    outcome(circuit, "ok")
    outcome(circuit, "ok")
    assert circuit.totals == (2, 0, 0)
    assert circuit.state is BreakerState.CLOSED


def test_rates_do_not_open_a_breaker_that_is_left_to_the_slo(clock):
    circuit = breaker(clock, minimum_calls=1, open_by_rate=False, open_seconds=1, half_open_max_calls=1)
    for _ in range(5):
        outcome(circuit, "fail")
    assert (circuit.state, circuit.totals.failed) == (BreakerState.CLOSED, 5)
    circuit.open("slo", half_open_policy="any_failure")
    clock.seconds = 1
    outcome(circuit, "fail")
    assert circuit.state is BreakerState.OPEN


def test_rate_policy_waits_for_all_probes(clock):
    circuit = breaker(clock, half_open_max_calls=4, open_seconds=1, failure_rate=0.6)
    circuit.open()
    clock.seconds = 1
    for result in ("fail", "fail", "ok"):
        outcome(circuit, result)
    assert circuit.state is BreakerState.HALF_OPEN
    outcome(circuit, "ok")  # 2 of 4 is under 60 %
    assert circuit.state is BreakerState.CLOSED


def test_a_slow_probe_opens_again_when_an_slo_opened_it(clock):
    circuit = breaker(clock, half_open_max_calls=2, open_seconds=5, slow_call_seconds=0.1)
    circuit.open("slo", half_open_policy="any_failure")
    clock.seconds = 5
    with circuit.guard():
        clock.seconds += 0.2
    assert circuit.state is BreakerState.OPEN
    with pytest.raises(CircuitOpenError) as refusal:
        circuit.call(lambda: None)
    assert refusal.value.retry_after_seconds == pytest.approx(5.0)


def test_an_answer_to_a_call_from_before_says_nothing_about_the_probes(clock):
    circuit = breaker(clock, half_open_max_calls=1, open_seconds=1)
    old = circuit.guard().__enter__()
    circuit.open("slo", half_open_policy="any_failure")
    clock.seconds = 1
    with circuit.guard():
        old.__exit__(ConnectionError, ConnectionError(), None)
        assert circuit.state is BreakerState.HALF_OPEN
    assert circuit.state is BreakerState.CLOSED


@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit, SystemExit, asyncio.CancelledError])
def test_an_abandoned_probe_gives_its_permit_back(clock, stop):
    circuit = breaker(clock, half_open_max_calls=1, open_seconds=1)
    circuit.open()
    clock.seconds = 1

    def abandoned():
        raise stop

    with pytest.raises(stop):
        circuit.call(abandoned)
    assert circuit.state is BreakerState.HALF_OPEN
    assert circuit.totals.calls == 0
    circuit.call(lambda: None)
    assert circuit.state is BreakerState.CLOSED


async def test_a_cancelled_async_probe_gives_its_permit_back(clock):
    circuit = breaker(clock, half_open_max_calls=1, open_seconds=1)
    circuit.open()
    clock.seconds = 1
    task = asyncio.ensure_future(circuit.acall(asyncio.Event().wait))
    await asyncio.sleep(0)
    with pytest.raises(CircuitOpenError):
        await circuit.acall(asyncio.sleep, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await circuit.acall(asyncio.sleep, 0)
    assert circuit.state is BreakerState.CLOSED


async def test_decorators_keep_the_function_sync_or_async(clock):
    circuit = breaker(clock)

    @circuit
    def plain(x):
        return x + 1

    @circuit
    async def coroutine(x):
        return x + 2

    assert plain(1) == 2
    assert await coroutine(1) == 3
    async with circuit.guard() as call:
        call.judge(1)
    assert (plain.__name__, coroutine.__name__, circuit.totals.calls) == ("plain", "coroutine", 3)


def test_ignored_errors_count_as_nothing_and_others_by_the_list(clock):
    circuit = breaker(clock, failures=(OSError,), ignored=(FileNotFoundError,))
    for error in (FileNotFoundError, ConnectionError, ValueError):
        with pytest.raises(error), circuit.guard():
            raise error
    assert circuit.totals == (2, 1, 0)


def test_a_returned_value_may_count_as_failed(clock):
    circuit = breaker(clock, is_failure=lambda status: status >= 500)
    assert [circuit.call(lambda status=status: status) for status in (200, 503)] == [200, 503]
    assert circuit.totals == (2, 1, 0)


def test_what_a_person_set_is_not_opened_by_an_slo(clock):
    circuit = breaker(clock, minimum_calls=1)
    for move in (circuit.disable, circuit.metrics_only, circuit.force_open):
        move()
        state = circuit.state
        assert not circuit.open("slo")
        assert circuit.state is state
    with pytest.raises(CircuitOpenError):
        circuit.call(lambda: None)
    circuit.metrics_only()
    outcome(circuit, "fail")
    assert (circuit.state, circuit.totals.failed) == (BreakerState.METRICS_ONLY, 1)
    circuit.disable()
    outcome(circuit, "fail")
    assert circuit.totals.calls == 0
    circuit.close()
    outcome(circuit, "fail")
    assert circuit.state is BreakerState.OPEN


def test_a_half_open_phase_can_be_limited(clock):
    circuit = breaker(clock, half_open_max_calls=1, open_seconds=1, half_open_max_wait_seconds=3)
    circuit.open()
    clock.seconds = 1
    circuit.guard().__enter__()  # a probe that never comes back
    clock.seconds = 4
    with pytest.raises(CircuitOpenError) as refusal:
        circuit.call(lambda: None)
    assert refusal.value.state is BreakerState.OPEN


def test_a_transition_span_is_a_root_that_links_to_the_request(clock):
    telemetry = Telemetry()
    circuit = breaker(clock, telemetry.breaker, minimum_calls=1)
    with telemetry.tracer.start_as_current_span("GET /order") as request:
        outcome(circuit, "fail")
    (span,) = [span for span in telemetry.exporter.get_finished_spans() if span.name == semconv.BREAKER_SPAN]
    assert span.parent is None
    assert span.links[0].context == request.get_span_context()
    assert span.attributes[semconv.BREAKER_REASON] == "failure rate 1/1"


def test_no_lock_is_held_around_user_code(clock):
    circuit = breaker(clock)
    inside = circuit.call(lambda: circuit.call(lambda: circuit.state))  # re-entrant: a held lock would hang here
    assert inside is BreakerState.CLOSED


def test_many_threads_lose_no_call_and_repeat_no_transition():
    telemetry, changes = Telemetry(), []
    circuit = CircuitBreaker(
        "hammer",
        BreakerConfig(minimum_calls=5, window_size=20, open_seconds=0.001, half_open_max_calls=3),
        telemetry=telemetry.breaker,
        listeners=[lambda _, change: changes.append(change)],
    )
    threads, calls = 8, 400

    def hammer(seed):
        for index in range(calls):
            try:
                circuit.call(fail if (index * 7 + seed) % 5 < 2 + seed % 2 else int)
            except (ConnectionError, CircuitOpenError):
                continue

    workers = [threading.Thread(target=hammer, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ordered = sorted(changes)
    assert [change.sequence for change in ordered] == list(range(1, len(changes) + 1))
    assert all(a.after is b.before for a, b in itertools.pairwise(ordered))
    assert len(changes) > 2
    assert sum(telemetry.counts(semconv.BREAKER_CALLS, "outcome").values()) == threads * calls
    assert len(telemetry.transitions()) == len(changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("failure_rate", 0),
        ("failure_rate", 1.5),
        ("slow_call_rate", 0),
        ("open_seconds", 0),
        ("half_open_max_calls", 0),
        ("close_after_successes", 11),
        ("half_open_policy", "sometimes"),
        ("window_type", "moon"),
        ("half_open_max_wait_seconds", -1),
    ],
)
def test_a_bad_threshold_is_refused_by_name(field, value):
    with pytest.raises(InputError, match=f"breaker.{field}"):
        BreakerConfig(**{field: value})
