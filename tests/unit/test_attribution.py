"""Each of the demo's faults, and some more, put into synthetic traces with noise."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pasta_otel.errors import InputError
from pasta_otel.model import Attribution, OperationKey, Samples, SpanSLI, TimeWindow
from pasta_otel.semconv import AGENT_SERVICE
from pasta_otel.slo.attribution import AttributionEngine, Thresholds
from pasta_otel.slo.attribution.missing import advice
from pasta_otel.testing.spans import MemorySpan, MemorySpanStore
from pasta_otel.testing.world import BASELINE, BURNING, LAYERS, MS, Trouble, world

AVAILABILITY = SpanSLI("order-api", "POST /orders")
LATENCY = SpanSLI("order-api", "POST /orders", good_status=False, threshold_ns=60 * MS)
BOTH = SpanSLI("order-api", "POST /orders", threshold_ns=60 * MS)
SLIS = [AVAILABILITY, LATENCY, BOTH]
SEEDS = [1, 2, 3]
REC_EDGE = "order-api -> recommendations"


def attribute(store: MemorySpanStore, sli: SpanSLI) -> Attribution:
    return AttributionEngine(store, store).attribute(sli, BASELINE, BURNING)


def first(store: MemorySpanStore, sli: SpanSLI) -> tuple[str, str, str]:
    causes = attribute(store, sli).causes
    assert causes, "no cause found"
    return causes[0].kind, causes[0].service, causes[0].target


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sli", [LATENCY, BOTH])
def test_a_dependency_that_gets_slower_and_slower_is_found_as_its_edge(seed: int, sli: SpanSLI):
    assert first(world(seed, Trouble(slow_dependency_ms=400)), sli) == ("edge_latency", "recommendations", REC_EDGE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sli", SLIS)
def test_timeouts_of_a_slow_dependency_are_blamed_on_its_latency(seed: int, sli: SpanSLI):
    store = world(seed, Trouble(slow_dependency_ms=400, timeout_ms=150))
    assert first(store, sli) == ("edge_latency", "recommendations", REC_EDGE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sli", [AVAILABILITY, BOTH])
def test_a_dependency_that_returns_errors_is_found_as_its_edge(seed: int, sli: SpanSLI):
    assert first(world(seed, Trouble(dependency_errors=0.4)), sli) == ("edge_errors", "recommendations", REC_EDGE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sli", [LATENCY, BOTH])
def test_a_network_delay_is_found_as_its_edge_although_no_server_span_shows_it(seed: int, sli: SpanSLI):
    assert first(world(seed, Trouble(network_ms=40)), sli) == ("edge_latency", "recommendations", REC_EDGE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sli", [LATENCY, BOTH])
def test_a_throttled_model_is_found_by_its_cgroup(seed: int, sli: SpanSLI):
    assert first(world(seed, Trouble(throttled=True)), sli) == ("cpu_throttled", "model", "model")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sli", [LATENCY, BOTH])
def test_a_hog_on_the_models_cpu_is_found_by_run_delay(seed: int, sli: SpanSLI):
    assert first(world(seed, Trouble(contended=True)), sli) == ("cpu_contention", "model", "model")


@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_slow_layer_is_found_by_its_module_path(layer: int):
    store = world(layer, Trouble(slow_layer=layer))
    assert first(store, LATENCY) == ("module_time", "model", f"encoder.layers.{layer}")


@pytest.mark.parametrize("seed", SEEDS)
def test_one_slow_layer_leads_even_when_the_cpu_is_busier(seed: int):
    assert first(world(seed, Trouble(slow_layer=3, contended=True)), LATENCY)[2] == "encoder.layers.3"


def test_more_calls_to_a_dependency_are_found_as_call_structure():
    assert first(world(1, Trouble(extra_calls=6)), LATENCY) == ("call_structure", "order-api", "order-api -> payment")


def test_the_services_own_code_is_found_by_self_time():
    assert first(world(1, Trouble(slow_own_ms=30)), LATENCY) == ("self_time", "order-api", "order-api")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sli", SLIS)
def test_nothing_wrong_means_no_cause(seed: int, sli: SpanSLI):
    answer = attribute(world(seed, Trouble()), sli)
    assert answer.causes == ()
    assert answer.incomplete == ""


def test_too_few_requests_are_said_and_not_guessed_from():
    answer = attribute(world(1, Trouble(slow_dependency_ms=400), requests=9), LATENCY)
    assert answer.causes == ()
    assert answer.incomplete.startswith(
        "baseline holds 9 requests of order-api 'POST /orders', fewer than 10; they are "
    )


QUIET = (TimeWindow(1, 2), TimeWindow(2, 3))


@pytest.mark.parametrize(
    ("sli", "windows", "name", "advised"),
    [
        (
            SpanSLI("order-api", "POST /order"),
            (BASELINE, BURNING),
            "order-api 'POST /order'",
            "order-api has no operation 'POST /order'; it has 'POST /orders'",
        ),
        (
            SpanSLI("order_api"),
            (BASELINE, BURNING),
            "order_api",
            "no requests of order_api are known; there are those of 'order-api', 'model', 'payment', 'recommendations'",
        ),
        (SpanSLI("order-api", "POST /orders"), QUIET, "order-api 'POST /orders'", "they are from 1970-01-01T00:16:4"),
        (SpanSLI("order-api"), QUIET, "order-api", "they are from 1970-01-01T00:16:4"),
    ],
)
def test_a_question_about_nobody_is_told_who_there_is_and_one_about_a_quiet_time_when(sli, windows, name, advised):
    store = world(1, Trouble())
    answer = AttributionEngine(store, store).attribute(sli, *windows)
    assert answer.incomplete.startswith(f"baseline holds 0 requests of {name}, fewer than 10; {advised}")


def test_no_more_than_five_names_are_told_the_nearest_first():
    window = TimeWindow(0, 1)
    known = {OperationKey("a", f"GET /{number}"): window for number in range(9)} | {
        OperationKey("a", "POST /x"): window
    }
    told = advice(OperationKey("a", "POST /y"), known)
    assert told == "a has no operation 'POST /y'; it has 'POST /x', 'GET /0', 'GET /1', 'GET /2', 'GET /3' and 5 more"


def test_spans_of_a_profiler_are_no_requests():
    memory = MemorySpanStore([MemorySpan("t", "1", "", "pytorch", "aten::mm", "internal", 0, 10 * MS)])
    answer = attribute(memory, SpanSLI("pytorch"))
    assert answer.incomplete.endswith("there are no requests at all: only server spans are requests")


def test_a_store_that_answers_only_the_four_questions_is_enough():
    class Plain:
        def __init__(self, store: MemorySpanStore) -> None:
            self.operation_self_times, self.module_self_times = store.operation_self_times, store.module_self_times
            self.edge_gaps, self.edge_durations = store.edge_gaps, store.edge_durations

    answer = AttributionEngine(Plain(world(1, Trouble()))).attribute(SpanSLI("nobody"), BASELINE, BURNING)
    assert answer.incomplete == "baseline holds 0 requests of nobody, fewer than 10"


def test_evidence_shows_both_windows_the_count_and_spans_to_open():
    evidence = attribute(world(1, Trouble(network_ms=40)), LATENCY).causes[0].evidence[0]
    assert (evidence.family, evidence.metric) == ("spans", "edge_gap_seconds")
    assert evidence.before == pytest.approx(0.0012, rel=0.3)
    assert evidence.after == pytest.approx(0.0412, rel=0.3)
    assert evidence.effect == pytest.approx(1.0)
    assert evidence.n == 120
    assert len(evidence.links) == 3
    assert len(evidence.links[0].trace_id) == 32


def test_host_evidence_gives_the_share_of_throttled_periods():
    evidence = attribute(world(1, Trouble(throttled=True)), LATENCY).causes[0].evidence
    shares = {e.metric: (e.before, e.after) for e in evidence if e.family == "host"}
    assert shares["cgroup_throttled_share"] == (0.0, pytest.approx(0.8))
    assert shares["cgroup_throttled_seconds_per_second"] == (0.0, pytest.approx(0.5))


def test_any_operation_of_the_service_can_be_asked_about():
    assert first(world(1, Trouble(network_ms=40)), SpanSLI("order-api"))[2] == REC_EDGE


def test_an_sli_without_a_service_is_refused():
    with pytest.raises(InputError, match="service: attribution needs"):
        AttributionEngine(MemorySpanStore()).attribute(object(), BASELINE, BURNING)


def test_a_negative_threshold_is_refused_by_name():
    with pytest.raises(InputError, match=r"thresholds\.min_z"):
        Thresholds(min_z=-1)


FAULTS = st.sampled_from(
    [
        Trouble(),
        Trouble(slow_dependency_ms=400),
        Trouble(dependency_errors=0.4),
        Trouble(throttled=True),
        Trouble(slow_layer=2),
    ]
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fault=FAULTS, seed=st.integers(0, 50))
def test_the_order_in_which_spans_arrive_does_not_matter(fault: Trouble, seed: int):
    store = world(seed, fault, requests=40)
    spans, host = list(store.spans), list(store.host)
    random.Random(seed).shuffle(spans)
    random.Random(seed).shuffle(host)
    shuffled = MemorySpanStore(spans, host)
    assert attribute(store, BOTH).causes == attribute(shuffled, BOTH).causes


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fault=FAULTS, seed=st.integers(0, 50))
def test_a_window_compared_with_itself_has_no_cause(fault: Trouble, seed: int):
    store = world(seed, fault, requests=40)
    for window in (BASELINE, BURNING):
        assert AttributionEngine(store, store).attribute(BOTH, window, window).causes == ()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fault=FAULTS, seed=st.integers(0, 50))
def test_scores_are_between_zero_and_one_and_sorted(fault: Trouble, seed: int):
    scores = [cause.score for cause in attribute(world(seed, fault, requests=40), BOTH).causes]
    assert all(0.0 < score <= 1.0 for score in scores)
    assert scores == sorted(scores, reverse=True)


def test_a_store_that_knows_nothing_is_incomplete():
    answer = attribute(MemorySpanStore(), LATENCY)
    assert (answer.causes, answer.incomplete[:8]) == ((), "baseline")
    assert Samples((), 0).count == 0


def host_events(store: MemorySpanStore, burning_ms: float) -> MemorySpanStore:
    """Add what the agent sends for every request: an absence from the CPU, in the trace but under no span."""
    roots = [span for span in store.spans if not span.parent_span_id]
    events = []
    for number, root in enumerate(roots, 1):
        begin = root.start_time_unix_nano
        lasted = burning_ms if begin >= BURNING.start_unix_nano else 1.0 + number % 7 / 10
        ids = (root.trace_id, f"{number:016x}", "")
        place = (AGENT_SERVICE, "off_cpu.preempted", "internal")
        events.append(MemorySpan(*ids, *place, begin, begin + int(lasted * MS)))
    return MemorySpanStore([*store.spans, *events], store.host)


@pytest.mark.parametrize("sli", [LATENCY, BOTH])
def test_host_events_of_the_agent_are_no_work_of_a_service(sli: SpanSLI):
    store = world(1, Trouble(slow_dependency_ms=400))
    with_events = host_events(store, 350.0)
    assert first(with_events, sli) == ("edge_latency", "recommendations", REC_EDGE)
    assert AGENT_SERVICE not in {cause.service for cause in attribute(with_events, sli).causes}
    assert attribute(host_events(world(1, Trouble()), 350.0), sli).causes == ()
