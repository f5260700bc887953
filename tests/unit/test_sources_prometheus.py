"""The Prometheus source against every wrong answer a server can give, and P01's definition of an increase."""

from __future__ import annotations

import csv
import json
import threading
import time
from decimal import Decimal
from pathlib import Path
from urllib.parse import parse_qs

import httpx
import pytest

from pasta_otel.errors import InputError
from pasta_otel.model import CountRequest, SpanSLI, TimeWindow
from pasta_otel.slo.budget import burn_rate, checked, error_ratio
from pasta_otel.slo.sources import prometheus_http
from pasta_otel.slo.sources.buckets import read_bounds
from pasta_otel.slo.sources.prometheus import PrometheusConfig, PrometheusSource
from pasta_otel.slo.sources.promql import expressions
from pasta_otel.slo.sources.router import RoutedSource
from pasta_otel.slo.spec.load import check
from pasta_otel.slo.spec.model import Bucket, PrometheusSLI
from pasta_otel.testing.promql import increase
from pasta_otel.testing.slo import EventListSource

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
SECOND = 1_000_000_000
AT = 1_700_000_000
NOW = AT * SECOND
HOUR = TimeWindow(NOW - 3600 * SECOND, NOW)
RAW = PrometheusSLI(raw="slo:ratio{{.window}}", raw_failure=True)
BAD = PrometheusSLI(total="sum(increase(req_total[{{.window}}]))", bad='sum(increase(req_total{c="5"}[{{ .window }}]))')
GOOD = PrometheusSLI(total=BAD.total, good='sum(increase(req_total{c="2"}[{{.window}}]))')


def source(handler, **config) -> PrometheusSource:
    return PrometheusSource(PrometheusConfig("http://prometheus.test", **config), httpx.MockTransport(handler))


def ask(handler, sli=RAW, **config):
    (counts,) = source(handler, **config).counts([CountRequest(sli, HOUR)], NOW)
    return checked(counts)


def vector(*series: tuple[dict[str, str], str], **more) -> httpx.Response:
    result = [{"metric": metric, "value": [float(AT), value]} for metric, value in series]
    return httpx.Response(200, json={"status": "success", "data": {"resultType": "vector", "result": result}, **more})


@pytest.mark.case("P07")
def test_nan_inf_nothing_and_a_warning_become_what_the_case_says(caplog):
    folder = CASES / "P07"
    expected = json.loads((folder / "expected.json").read_text())
    objective = Decimal(1) - Decimal(str(expected["budget"]))
    found = {
        name: ask(lambda _, name=name: httpx.Response(200, text=(folder / f"{name}.json").read_text()))
        for name in ("nan", "inf", "empty", "ok", "warning")
    }
    assert found["nan"].no_data == "nan"
    assert found["inf"].no_data == expected["inf"]
    assert found["empty"].no_data == "absent"
    for name in ("ok", "warning"):
        assert burn_rate(found[name], objective) == pytest.approx(20.0)
        assert burn_rate(found[name], objective) > 14.4
    assert found["warning"].degraded
    assert not found["ok"].degraded
    assert "partial response: store timed out" in caplog.text
    for counts in found.values():
        json.dumps([counts.good, counts.total, burn_rate(counts, objective), counts.no_data], allow_nan=False)


@pytest.mark.case("S09")
@pytest.mark.parametrize("name", ["bad_absent", "good_absent", "total_absent", "all_bad"])
def test_a_series_that_does_not_exist_yet_counts_as_zero_while_the_total_exists(name):
    case = json.loads((CASES / "S09" / f"{name}.json").read_text())
    expected = json.loads((CASES / "S09" / "expected.json").read_text())[name]
    sli = GOOD if "good" in case else BAD
    parts = ["total", "good" if "good" in case else "bad"]

    def handler(request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.content.decode())["query"][0]
        assert query.count("label_replace") == 2
        return vector(*(({"pasta_query": str(i)}, v) for i, part in enumerate(parts) for _, v in case[part]))

    counts = ask(handler, sli)
    if expected == "no_data":
        assert counts.no_data == "absent"
    else:
        assert 1 - error_ratio(counts) == expected
        assert counts.total == 500


@pytest.mark.case("P01")
def test_a_counter_reset_counts_the_value_after_it_whole():
    expected = json.loads((CASES / "P01" / "expected.json").read_text())
    with (CASES / "P01" / "samples.csv").open() as file:
        samples = [(int(row["t_seconds"]) * 1000, float(row["value"])) for row in csv.DictReader(file)]
    found = increase(samples, 0, 360_000)
    assert found is not None
    assert (found.value, found.resets) == (expected["increase"], expected["resets"])


def boom(error):
    def handler(request):
        raise error

    return handler


ANSWERS = {
    "down": (boom(httpx.ConnectError("refused")), "absent"),
    "slow": (boom(httpx.ReadTimeout("timed out")), "absent"),
    "500": (lambda _: httpx.Response(500, text="oops"), "absent"),
    "502 html": (lambda _: httpx.Response(502, text="<html>"), "absent"),
    "not json": (lambda _: httpx.Response(200, text="{"), "absent"),
    "401": (lambda _: httpx.Response(401, text="who?"), "absent"),
    "list": (lambda _: httpx.Response(200, json=[]), "absent"),
    "error": (lambda _: httpx.Response(503, json={"status": "error", "errorType": "timeout", "error": "t"}), "absent"),
    "bad query": (
        lambda _: httpx.Response(400, json={"status": "error", "errorType": "bad_data", "error": "parse error"}),
        "invalid",
    ),
    "scalar": (
        lambda _: httpx.Response(
            200, json={"status": "success", "data": {"resultType": "scalar", "result": [AT, "1"]}}
        ),
        "invalid",
    ),
    "no data": (lambda _: httpx.Response(200, json={"status": "success"}), "invalid"),
    "text value": (lambda _: vector(({}, "N/A")), "invalid"),
    "negative": (lambda _: vector(({}, "-0.5")), "invalid"),
    "above one": (lambda _: vector(({}, "1.5")), "invalid"),
    "two series": (lambda _: vector(({"replica": "a"}, "0.1"), ({"replica": "b"}, "0.1")), "invalid"),
    "old sample": (
        lambda _: httpx.Response(
            200,
            json={
                "status": "success",
                "data": {"resultType": "vector", "result": [{"metric": {}, "value": [AT - 90, "0"]}]},
            },
        ),
        "stale",
    ),
    "clock ahead": (
        lambda _: httpx.Response(200, headers={"Date": "Wed, 15 Nov 2023 22:13:20 GMT"}, text=vector(({}, "0")).text),
        "future",
    ),
    "clock behind": (
        lambda _: httpx.Response(200, headers={"Date": "Mon, 13 Nov 2023 22:13:20 GMT"}, text=vector(({}, "0")).text),
        "stale",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_server_that_is_down_slow_wrong_or_lying_is_no_data_with_a_reason(name):
    handler, reason = ANSWERS[name]
    counts = ask(handler)
    assert counts.no_data == reason
    assert counts.detail


def test_duplicate_series_are_named_by_what_tells_them_apart():
    counts = ask(lambda _: vector(({"replica": "a"}, "0.1"), ({"replica": "b"}, "0.2")))
    assert "replica" in counts.detail


def test_a_right_clock_is_accepted():
    answer = vector(({}, "0.25"))
    answer.headers["Date"] = "Tue, 14 Nov 2023 22:13:25 GMT"
    assert ask(lambda _: answer).good == 0.75


def test_secrets_are_sent_and_never_shown():
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(dict(request.headers))
        return httpx.Response(500, text="no")

    config = PrometheusConfig("http://p", headers={"X-Scope-OrgID": "secret-tenant"}, bearer_token="secret-token")
    (counts,) = PrometheusSource(config, httpx.MockTransport(handler)).counts([CountRequest(RAW, HOUR)], NOW)
    assert seen[0]["authorization"] == "Bearer secret-token"
    assert seen[0]["x-scope-orgid"] == "secret-tenant"
    assert "secret" not in repr(config) + counts.detail


def test_a_wrong_url_or_certificate_is_refused_at_once():
    with pytest.raises(InputError, match="http"):
        PrometheusConfig("localhost:9090")
    with pytest.raises(InputError, match="TLS"):
        PrometheusSource(PrometheusConfig("https://p", ca_file="/nowhere.pem"))


def test_one_wrong_query_does_not_spoil_the_others_and_is_not_tried_again():
    """The server refuses every request that holds the wrong query; halving finds it."""
    slis = [PrometheusSLI(raw=f"ratio{i}") for i in range(16)]
    sent = []

    def handler(request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.content.decode())["query"][0]
        sent.append(query)
        if "ratio5\n" in query or query == "ratio5":
            return httpx.Response(400, json={"status": "error", "errorType": "bad_data", "error": "parse error"})
        numbers = range(query.count("label_replace"))
        return vector(*(({"pasta_query": str(i)}, "0.5") for i in numbers)) if numbers else vector(({}, "0.5"))

    prometheus = source(handler)
    requests = [CountRequest(sli, HOUR) for sli in slis]
    for expected_requests in (9, 1):
        sent.clear()
        answers = prometheus.counts(requests, NOW)
        assert [answer.no_data for answer in answers] == [None if i != 5 else "invalid" for i in range(16)]
        assert len(sent) == expected_requests


def test_a_thousand_slos_with_nine_windows_take_at_most_200_requests():
    def handler(request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.content.decode())["query"][0]
        return vector(*(({"pasta_query": str(i)}, "7") for i in range(query.count("label_replace"))))

    prometheus = source(handler)
    seconds = (300, 3600, 1800, 21600, 7200, 86400, 21600, 259200, 2592000)
    requests = [
        CountRequest(
            PrometheusSLI(total=f"sum(increase(r{i}[{{{{.window}}}}]))", bad=f"sum(increase(e{i}[{{{{.window}}}}]))"),
            TimeWindow(NOW - s * SECOND, NOW),
        )
        for i in range(1000)
        for s in seconds
    ]
    answers = prometheus.counts(requests, NOW)
    assert prometheus.requests_sent <= 200
    assert {(answer.good, answer.total) for answer in answers} == {(0.0, 7.0)}


def test_rate_is_per_second_and_increase_is_not():
    rate = PrometheusSLI(total="sum(rate(r[{{.window}}]))", bad="sum(rate(e[{{.window}}]))")
    handler = lambda _: vector(({"pasta_query": "0"}, "2"), ({"pasta_query": "1"}, "0.5"))  # noqa: E731
    assert ask(handler, rate).total == 7200
    assert ask(handler, BAD).total == 2


def test_a_threshold_is_looked_at_thirty_times_a_window():
    sli = PrometheusSLI(threshold="lag", op="lte", bound=Decimal("2.50"))
    total, good = expressions(sli, 300 * SECOND)
    assert total.text == "count_over_time((lag)[300s:10s])"
    assert good.text == "sum_over_time(((lag) <= bool 2.50)[300s:10s])"


def test_the_router_asks_every_source_once_and_contains_their_failures():
    spans = EventListSource([(NOW - SECOND, True)])
    routed = RoutedSource({SpanSLI: spans, PrometheusSLI: source(boom(httpx.ConnectError("refused")))})
    requests = [CountRequest(SpanSLI("a"), HOUR), CountRequest(RAW, HOUR), CountRequest(None, HOUR)]
    first, second, third = routed.counts(requests, NOW)
    assert first.total == 1
    assert (second.no_data, third.no_data) == ("absent", "absent")
    spans.error = RuntimeError("gone")
    assert routed.counts(requests, NOW)[0].no_data == "absent"


HISTOGRAM = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: fast}
spec:
  service: web
  budgetingMethod: Occurrences
  timeWindow: [{duration: 30d, isRolling: true}]
  objectives: [{target: 0.9}]
  indicator:
    metadata: {name: i}
    spec:
      ratioMetric:
        counter: true
        good: {metricSource: {type: Prometheus, spec: {histogram: lat_seconds, selector: 'job="a"', threshold: 1}}}
        total: {metricSource: {type: Prometheus, spec: {histogram: lat_seconds, selector: 'job="a"'}}}
"""


def histogram(tmp_path, threshold: str = "1") -> PrometheusSLI:
    (tmp_path / "slo.yaml").write_text(HISTOGRAM.replace("threshold: 1", f"threshold: {threshold}"))
    found = check([tmp_path])
    assert not found.problems
    return found.slos[0].sli


def bounds_then(*spellings: str):
    """Answer the question for bounds, then every number with 5, and keep the queries."""
    queries: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.content.decode())["query"][0]
        queries.append(query)
        if query.startswith("count by (le)"):
            return vector(*(({"le": text}, "1") for text in spellings))
        return vector(({"pasta_query": "0"}, "20"), ({"pasta_query": "1"}, "5"))

    return handler, queries


@pytest.mark.case("P03")
def test_bounds_are_compared_as_numbers_however_they_are_spelled(tmp_path):
    texts = [(CASES / "P03" / f"target_{name}.prom").read_text() for name in ("a", "b")]
    spellings = [
        line.split('le="')[1].split('"')[0] for text in texts for line in text.split("\n") if "_bucket" in line
    ]
    assert len(read_bounds(spellings)) == 3
    handler, queries = bounds_then(*dict.fromkeys(spellings))
    prometheus = source(handler)
    (counts,) = prometheus.counts([CountRequest(histogram(tmp_path), HOUR)], NOW)
    assert (counts.good, counts.total, counts.detail) == (5, 20, "")
    assert 'lat_seconds_bucket{job="a", le=~"1|1\\\\.0"}' in queries[1]
    assert 'lat_seconds_count{job="a"}' in queries[1]
    prometheus.counts([CountRequest(histogram(tmp_path), HOUR)], NOW)
    assert len(queries) == 3


def test_a_threshold_inside_a_bucket_is_a_stated_lower_bound(tmp_path):
    handler, queries = bounds_then("0.25", "0.5", "+Inf")
    counts = ask(handler, histogram(tmp_path, "0.3"))
    assert counts.good == 5
    assert "0.3 lies between the bounds 0.25 and 0.5" in counts.detail
    assert 'le=~"0\\\\.25"' in queries[1]


@pytest.mark.parametrize(
    ("spellings", "reason", "words"),
    [
        ((), "absent", "no series lat_seconds_bucket"),
        (("2.5", "+Inf"), "invalid", "above the threshold"),
        (("x",), "absent", ""),
    ],
)
def test_a_histogram_without_the_bound_is_no_data_and_says_why(tmp_path, spellings, reason, words):
    counts = ask(bounds_then(*spellings)[0], histogram(tmp_path))
    assert counts.no_data == reason
    assert words in counts.detail


def test_a_histogram_on_a_server_that_is_down_is_absent(tmp_path):
    assert ask(boom(httpx.ConnectError("refused")), histogram(tmp_path)).no_data == "absent"


def test_a_histogram_needs_its_fields(tmp_path):
    (tmp_path / "slo.yaml").write_text(HISTOGRAM.replace("threshold: 1", "threshold: -1"))
    assert {problem.kind for problem in check([tmp_path]).errors} == {"range"}
    assert Bucket("h", Decimal(1)) == Bucket("h", Decimal("1.0"))


def matrix(*series: tuple[dict[str, str], list]) -> httpx.Response:
    result = [{"metric": metric, "values": values} for metric, values in series]
    return httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": result}})


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        (matrix(({}, [[AT - 60, "0.5"], [AT, "NaN"]])), ["absent", None, "nan"]),
        (matrix(({}, [[AT, "Inf"], [AT - 60, "0.1"]])), ["absent", None, "invalid"]),
        (matrix(({"a": "1"}, [[AT, "0"]]), ({"a": "2"}, [[AT, "0"]])), ["invalid"] * 3),
        (matrix(({}, "junk")), ["invalid"] * 3),
        (matrix(({}, [[AT]])), ["invalid"] * 3),
        (matrix(), ["absent"] * 3),
        (httpx.Response(500, text=""), ["absent"] * 3),
        (httpx.Response(400, json={"status": "error", "errorType": "bad_data", "error": "x"}), ["invalid"] * 3),
    ],
)
def test_a_range_answer_is_read_as_carefully(answer, reasons):
    paths = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return answer

    windows = [TimeWindow(NOW - (60 * i + 60) * SECOND, NOW - 60 * i * SECOND) for i in (2, 1, 0)]
    answers = source(handler).counts([CountRequest(RAW, window) for window in windows], NOW)
    assert paths == ["/api/v1/query_range"]
    assert [checked(item).no_data for item in answers] == reasons


def test_a_thousand_histograms_with_nine_windows_take_at_most_200_requests_even_in_the_first_cycle():
    def handler(request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.content.decode())["query"][0]
        count = query.count("label_replace")
        if "count by (le)" in query:
            return vector(*(({"pasta_query": str(i), "le": le}, "1") for i in range(count) for le in ("0.5", "+Inf")))
        return vector(*(({"pasta_query": str(i)}, "7") for i in range(count)))

    prometheus = source(handler)
    seconds = (300, 3600, 1800, 21600, 7200, 86400, 21600, 259200, 2592000)
    requests = [
        CountRequest(
            PrometheusSLI(total=f"sum(increase(r{i}_count[{{{{.window}}}}]))", bucket=Bucket(f"r{i}", Decimal("0.5"))),
            TimeWindow(NOW - s * SECOND, NOW),
        )
        for i in range(1000)
        for s in seconds
    ]
    sent = []
    for _ in range(3):
        before = prometheus.requests_sent
        answers = prometheus.counts(requests, NOW)
        sent.append(prometheus.requests_sent - before)
        assert {(answer.good, answer.total, answer.no_data) for answer in answers} == {(7.0, 7.0, None)}
    assert max(sent) <= 200
    assert sent[1] <= 150


def test_a_thousand_slos_that_count_slices_share_range_queries():
    asked: list[dict[str, list[str]]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        form = parse_qs(request.content.decode())
        asked.append(form)
        times = [float(form["start"][0]) + 60 * i for i in range(60)] if "start" in form else []
        values = [[at, str(at % 7 + 1)] for at in times]
        count = form["query"][0].count("label_replace")
        return matrix(*(({"pasta_query": str(i)}, values) for i in range(count)))

    prometheus = source(handler)
    requests = [
        CountRequest(
            PrometheusSLI(
                total=f"sum(increase(r{i}[{{{{.window}}}}]))", bad=f"sum(increase(e{i}[{{{{.window}}}}])) * 0.5"
            ),
            TimeWindow(NOW - (s + 1) * 60 * SECOND, NOW - s * 60 * SECOND),
        )
        for i in range(1000)
        for s in range(60)
    ]
    answers = prometheus.counts(requests, NOW)
    assert prometheus.requests_sent <= 20
    assert {answer.no_data for answer in answers} == {None}
    assert [answers[s].total for s in range(60)] == [(AT - s * 60) % 7 + 1 for s in range(60)]


def test_a_query_that_cannot_be_executed_is_left_alone_for_a_minute():
    refused = {"status": "error", "errorType": "execution", "error": "many-to-many matching not allowed"}

    def handler(request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.content.decode())["query"][0]
        if "both" in query:
            return httpx.Response(422, json=refused)
        return vector(*(({"pasta_query": str(i)}, "7") for i in range(query.count("label_replace"))))

    prometheus = source(handler)
    slis = [PrometheusSLI(total=f"sum(r{i})", bad=f"sum(e{i})" if i != 20 else "both") for i in range(40)]
    requests = [CountRequest(sli, HOUR) for sli in slis]
    first = prometheus.counts(requests, NOW)
    assert [i for i, answer in enumerate(first) if answer.no_data == "invalid"] == [20]
    assert "many-to-many" in first[20].detail
    before = prometheus.requests_sent
    again = prometheus.counts(requests, NOW)
    assert [answer.no_data for answer in again] == [answer.no_data for answer in first]
    assert prometheus.requests_sent == before + 1


@pytest.mark.parametrize(
    "query", ["sum(x) # who reads this", 'sum(x{a="#1"}) # "and this', "sum(x{a='#'})", "# first\nsum(x{a=`#`})"]
)
def test_a_comment_in_a_query_ends_nothing_but_itself(query):
    text = expressions(PrometheusSLI(threshold=query, op="lte", bound=Decimal(1)), 3600 * SECOND)[0].text
    inside = text.removeprefix("count_over_time((").rsplit(")[", 1)[0]
    assert inside.startswith("sum(x")
    assert inside.endswith(")")
    assert ("#" in inside) == ("a=" in query)


class Dripping(httpx.SyncByteStream):
    """A body that comes a byte at a time, always in time for the next read."""

    def __iter__(self):
        while True:
            time.sleep(0.05)
            yield b" "


def test_a_server_that_drips_does_not_hold_the_tick_up():
    began = time.monotonic()
    counts = ask(lambda _: httpx.Response(200, stream=Dripping()), timeout_seconds=0.3)
    assert counts.no_data == "absent"
    assert "had not ended" in counts.detail
    assert time.monotonic() - began < 20


def test_an_answer_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(prometheus_http, "ANSWER_LIMIT", 1000)
    counts = ask(lambda _: httpx.Response(200, content=b"[" * 5000))
    assert (counts.no_data, "1000 bytes" in counts.detail) == ("absent", True)


def test_a_server_that_never_answers_costs_its_own_slos_one_deadline_not_more():
    stuck = threading.Event()

    def handler(_: httpx.Request) -> httpx.Response:
        stuck.wait(30)
        return httpx.Response(200)

    prometheus = source(handler, timeout_seconds=0.2, deadline_seconds=0.3)
    began = time.monotonic()
    answers = prometheus.counts([CountRequest(RAW, HOUR)] * 3, NOW)
    assert time.monotonic() - began < 20
    assert {answer.no_data for answer in answers} == {"absent"}
    stuck.set()
    prometheus.close()


@pytest.mark.parametrize(
    "document",
    [
        {"status": "success", "warnings": 5, "data": {"resultType": "vector", "result": [7, None, [], {"metric": 3}]}},
        {"status": "success", "data": {"resultType": "vector", "result": [{"metric": [], "value": "ab"}, {}]}},
        {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, 2, 3]}]}},
        {"status": "success", "data": []},
        {"status": ["success"]},
    ],
)
def test_json_of_no_known_shape_is_no_data(document):
    counts = ask(lambda _: httpx.Response(200, json=document))
    assert counts.no_data in {"invalid", "absent"}


def test_a_long_backfill_is_asked_in_pieces_and_a_late_piece_costs_only_itself():
    asked: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        form = parse_qs(request.content.decode())
        if "start" not in form:
            return vector(*(({"pasta_query": str(i)}, "1") for i in range(2)))
        start, end = float(form["start"][0]), float(form["end"][0])
        asked.append(end - start)
        if start < AT - 3000 * 60:
            raise httpx.ReadTimeout("late")
        values = [[start + 60 * i, "5"] for i in range(round((end - start) / 60) + 1)]
        return matrix(({"pasta_query": "0"}, values), ({"pasta_query": "1"}, values))

    sli = PrometheusSLI(total="sum(increase(r[{{.window}}]))", bad="sum(increase(e[{{.window}}]))")
    requests = [CountRequest(sli, TimeWindow(NOW - (s + 1) * 60 * SECOND, NOW - s * 60 * SECOND)) for s in range(5000)]
    answers = source(handler).counts(requests, NOW)
    assert len(asked) == 5
    assert max(asked) <= 1000 * 60
    assert {answer.no_data for answer in answers[:3000]} == {None}
    assert {answer.no_data for answer in answers[3001:]} == {"absent"}
