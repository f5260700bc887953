"""SLI counts of the span store against counting span by span."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Intake
from pasta_otel.exporters.store import DuckDBSpanStore
from pasta_otel.exporters.store.columns import adjusted_count
from pasta_otel.exporters.store.counts import KINDS, segment_expression
from pasta_otel.model import CountRequest, EventCounts, SpanSLI, TimeWindow
from tests.telemetry import CLIENT, INTERNAL, SECOND, SERVER, T0, request, span

NOW = T0 + 100 * SECOND
SERVICES, OPERATIONS, ROUTES = ("api", "model"), ("GET /a", "GET /b", "work"), ("/x", "/y")
STATES = {"": 1.0, "ot=th:0": 1.0, "ot=th:8": 2.0, "a=b,ot=th:c;rv:abcdef": 4.0, "ot=p:3": 8.0}


class Clock:
    now = NOW

    def unix_nano(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now


def random_spans(seed: int, count: int):
    rng = random.Random(seed)
    for identifier in range(1, count + 1):
        start = T0 + rng.randrange(0, 100) * SECOND
        yield rng.choice(SERVICES), span(
            rng.choice(OPERATIONS), identifier=identifier, kind=rng.choice((INTERNAL, SERVER, CLIENT)), start=start,
            end=rng.choice((0, start - 5, start + rng.randrange(0, 10) * SECOND // 2)), error=rng.random() < 0.2,
            trace_state=rng.choice(list(STATES)),
            attributes={"http.route": rng.choice(ROUTES), "http.response.status_code": rng.choice((200, 503))},
        )  # fmt: skip


SPANS = list(random_spans(7, 600))


@pytest.fixture(scope="module")
def store() -> Iterator[DuckDBSpanStore]:
    ledger = Ledger(["store"])
    opened = DuckDBSpanStore.open(":memory:", ledger, clock=Clock())
    intake = Intake([opened], ledger, clock=Clock())
    for service, fields in SPANS:
        intake.traces(request(fields, service=service).SerializeToString())
    assert opened.flush()
    yield opened
    opened.close()


def by_hand(sli: SpanSLI, window: TimeWindow, grace_ns: int) -> tuple[float, float]:
    good = total = 0.0
    for service, fields in SPANS:
        end = fields["end_time_unix_nano"]
        duration = max(0, end - fields["start_time_unix_nano"])
        values = {pair.key: pair.value.string_value or str(pair.value.int_value) for pair in fields["attributes"]}
        if (
            service != sli.service
            or sli.operation not in (None, fields["name"])
            or fields["kind"] != KINDS[sli.kind]
            or not end
            or not window.start_unix_nano <= end < window.end_unix_nano
            or NOW - end > grace_ns
            or any(values.get(key) != str(value) for key, value in sli.where)
        ):
            continue
        weight = STATES[fields["trace_state"]]
        total += weight
        failed = sli.good_status and fields["status"] is not None
        slow = sli.threshold_ns is not None and duration > sli.threshold_ns
        good += weight * (not failed and not slow)
    return good, total


SECONDS = st.integers(0, 110).map(lambda second: T0 + second * SECOND)
WHERE = st.sampled_from(
    [
        (),
        (("http.route", "/x"),),
        (("http.response.status_code", 503),),
        (("http.route", "/y"), ("http.response.status_code", "200")),
    ]
)
SLI = st.builds(
    SpanSLI,
    service=st.sampled_from([*SERVICES, "nobody"]),
    operation=st.sampled_from([None, *OPERATIONS, "nothing"]),
    kind=st.sampled_from(["server", "client", "internal"]),
    where=WHERE,
    good_status=st.booleans(),
    threshold_ns=st.sampled_from([None, 0, SECOND, 3 * SECOND]),
)
REQUEST = st.builds(
    lambda sli, one, other: CountRequest(sli, TimeWindow(min(one, other), max(one, other) + 1)), SLI, SECONDS, SECONDS
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(REQUEST, max_size=12), grace_s=st.sampled_from([0, 30, 10_000]))
def test_many_requests_at_once_give_what_counting_span_by_span_gives(store, requests, grace_s):
    answers = store.count_spans(requests, NOW, grace_s * SECOND)
    assert len(answers) == len(requests)
    for asked, answer in zip(requests, answers, strict=True):
        if asked.window.start_unix_nano >= NOW:
            assert answer.no_data == "future"
            continue
        good, total = by_hand(asked.sli, asked.window, grace_s * SECOND)
        if total == 0:
            assert answer.no_data == "no_traffic"
        else:
            assert (answer.good, answer.total, answer.no_data) == (pytest.approx(good), pytest.approx(total), None)


def test_no_requests_have_no_answers(store):
    assert store.count_spans([], NOW, 0) == []


def test_what_cannot_be_asked_is_answered_as_invalid(store):
    window = TimeWindow(T0, NOW)
    answers = store.count_spans(
        [
            CountRequest("not spans", window),
            CountRequest(SpanSLI("api", kind="weird"), window),
            CountRequest(SpanSLI("api"), TimeWindow(T0, T0)),
            CountRequest(SpanSLI("api"), TimeWindow(NOW, NOW + 1)),
            CountRequest(SpanSLI("api"), window),
        ],
        NOW,
        10_000 * SECOND,
    )
    assert [answer.no_data for answer in answers] == ["invalid", "invalid", "invalid", "future", None]
    assert all(answer.detail for answer in answers[:4])


def test_an_attribute_value_cannot_break_out_of_the_query(store):
    evil = (("http.route'; drop table spans; --", "x' or '1'='1"), ("a/b~c", "\\"))
    (answer,) = store.count_spans([CountRequest(SpanSLI("api", where=evil), TimeWindow(T0, NOW))], NOW, 0)
    assert answer.no_data == "no_traffic"


def one(**fields) -> EventCounts:
    ledger = Ledger(["store"])
    opened = DuckDBSpanStore.open(":memory:", ledger, clock=Clock())
    Intake([opened], ledger, clock=Clock()).traces(
        request(span(kind=SERVER, **fields), service="api").SerializeToString()
    )
    assert opened.flush()
    (answer,) = opened.count_spans([CountRequest(SpanSLI("api"), TimeWindow(T0, NOW))], NOW, 10_000 * SECOND)
    opened.close()
    return answer


@pytest.mark.parametrize(
    "fields",
    [
        {"trace_state": "ot=rv:6e6d1a75832a2f"},
        {"trace_state": "ot=th:xyz"},
        {"attributes": {"sampler.type": "ratelimiting", "sampler.param": 2.0}},
        {"attributes": {"sampler.type": "probabilistic"}},
    ],
)
def test_a_sampler_whose_probability_is_unknown_gives_no_data(fields):
    answer = one(**fields)
    assert answer.no_data == "sampled"
    assert "1 spans" in answer.detail


@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({"attributes": {"sampler.type": "probabilistic", "sampler.param": 0.25}}, 4),
        ({"attributes": {"sampler.type": "const", "sampler.param": True}}, 1),
        ({"trace_state": "vendor=th:8"}, 1),
        ({"trace_state": "ot=th:ffffffffffffff"}, 2**56),
    ],
)
def test_a_sampled_span_weighs_what_it_stands_for(fields, weight):
    assert one(**fields).total == weight


@given(st.integers(0, 2**56 - 1))
def test_a_threshold_means_the_share_above_it(rejected):
    digits = f"{rejected:014x}".rstrip("0") or "0"
    assert adjusted_count(f"ot=th:{digits}") == pytest.approx(2**56 / (2**56 - rejected))


def test_a_store_that_was_not_there_says_how_much_of_the_window_it_covers():
    opened = DuckDBSpanStore.open(":memory:", clock=Clock())
    window = TimeWindow(NOW - 10 * SECOND, NOW + 10 * SECOND)
    (answer,) = opened.count_spans([CountRequest(SpanSLI("api"), window)], NOW + 5 * SECOND, 0)
    opened.close()
    assert answer.coverage == pytest.approx(5 / 15)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=12, unique=True), st.integers(0, 50))
def test_bisection_finds_the_segment(cuts, end):
    import duckdb

    cuts.sort()
    if not cuts[0] <= end < cuts[-1]:
        return
    query = f"select {segment_expression(cuts)} from (select {end} as end_unix_nano) s"
    (found,) = duckdb.execute(query).fetchall()[0]
    assert cuts[found] <= end < cuts[found + 1]
