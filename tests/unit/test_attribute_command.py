"""Questions as JSON and on the command line: parsing, answers, exit codes, and one clear error each."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Self

import pytest
from click.testing import CliRunner, Result

from pasta_otel.cli.attribute import command, lines
from pasta_otel.errors import InputError, MissingError
from pasta_otel.model import SpanSLI, TimeWindow
from pasta_otel.slo.attribution import AttributionEngine
from pasta_otel.slo.attribution.question import answerer, parse_question
from pasta_otel.testing.world import BASELINE, BURNING, SECOND, Trouble, world

NOW = BURNING.end_unix_nano
QUESTION = {"service": "order-api", "operation": "POST /orders", "window": "30s", "baseline": "30s"}


class Server:
    """A sidecar's API, with the real answerer behind it."""

    def __init__(self, trouble: Trouble) -> None:
        store = world(1, trouble)
        self.answer = answerer(AttributionEngine(store, store), lambda: NOW)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.path = self.path
                outer.authorization = self.headers.get("Authorization")
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    status, body = 200, outer.answer(question)
                except InputError as error:
                    status, body = 400, {"error": {"message": str(error), "field": error.field}}
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def ask(url: str, *more: str, env: dict[str, str] | None = None) -> Result:
    arguments = ["--server", url, "--service", "order-api", "--window", "30s", "--baseline", "30s", *more]
    return CliRunner().invoke(command, arguments, env=env)


def test_a_running_server_is_asked_and_its_cause_printed():
    with Server(Trouble(network_ms=40)) as server:
        result = ask(server.url, "--json", env={"PASTA_API_TOKEN": "abc"})
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (answer["causes"][0]["kind"], answer["causes"][0]["target"]) == (
        "edge_latency",
        "order-api -> recommendations",
    )
    assert answer["window"] == {"start": "1970-01-01T00:17:10.000000Z", "end": "1970-01-01T00:17:40.000000Z"}
    assert (server.path, server.authorization) == ("/api/v1/attribute", "Bearer abc")


def test_people_get_a_line_a_cause_with_its_evidence_below():
    with Server(Trouble(network_ms=40)) as server:
        result = ask(server.url)
    assert result.exit_code == 0
    _, cause, evidence, *_ = result.stdout.splitlines()
    assert cause.startswith("1. edge_latency  order-api -> recommendations  (service recommendations, score 0.9")
    assert evidence.startswith("   edge_gap_seconds of order-api -> recommendations: 0.001")


def test_evidence_names_the_span_that_it_is_about_in_text_and_json():
    with Server(Trouble(slow_own_ms=30)) as server:
        text, document = ask(server.url).stdout, json.loads(ask(server.url, "--json").stdout)
    names = [evidence["name"] for evidence in document["causes"][0]["evidence"]]
    assert names
    assert "self_time_seconds of POST /orders: " in text
    assert "POST /orders" in names


def test_no_cause_exits_1_and_says_so():
    with Server(Trouble()) as server:
        result = ask(server.url)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1] == "no cause: nothing shifted that explains it"


def test_too_few_requests_exit_3_with_the_reason():
    with Server(Trouble()) as server:
        result = ask(server.url, "--operation", "GET /unknown")
    assert result.exit_code == 3
    assert (
        "baseline holds 0 requests of order-api 'GET /unknown', fewer than 10; order-api has no operation"
        in result.stdout
    )
    assert "it has 'POST /orders'" in result.stdout


def test_the_servers_refusal_reaches_the_user_in_its_own_words():
    with Server(Trouble()) as server:
        result = ask(server.url, "--threshold-ms", "-5")
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == "threshold_ms: expected a number of milliseconds above 0"


def test_nobody_at_the_address_is_an_environment_that_lacks_something():
    with Server(Trouble()) as server:
        url = server.url
    result = ask(url)
    assert isinstance(result.exception, MissingError)
    assert "nothing answers at" in str(result.exception)


def test_a_server_that_is_something_else_is_refused():
    with Server(Trouble()) as server:
        server.answer = lambda question: {"hello": "world"}
        result = ask(server.url)
    assert isinstance(result.exception, InputError)
    assert "not a pasta-otel server" in str(result.exception)


def test_a_url_of_another_kind_is_refused():
    assert "http" in str(ask("ftp://127.0.0.1").exception)


def test_server_and_store_together_are_wrong_use(tmp_path: Path):
    assert ask("http://127.0.0.1:1", "--store", str(tmp_path / "x")).exit_code == 2


def test_a_store_file_that_does_not_exist_is_named(tmp_path: Path):
    result = CliRunner().invoke(command, ["--service", "a", "--store", str(tmp_path / "none.duckdb")])
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == f"{tmp_path / 'none.duckdb'}: no such file"


def test_durations_end_now_and_the_baseline_comes_before():
    sli, baseline, window = parse_question(QUESTION, NOW)
    assert sli == SpanSLI("order-api", "POST /orders")
    assert (baseline, window) == (BASELINE, BURNING)


def test_explicit_windows_and_a_threshold_are_understood():
    question = {
        "service": "a",
        "window": "1970-01-01T00:10:00Z/1970-01-01T00:11:00+00:00",
        "baseline": "1970-01-01T00:00:00.5Z/1970-01-01T00:05:00Z",
        "threshold_ms": 250,
        "good_status": False,
    }
    sli, baseline, window = parse_question(question, NOW)
    assert sli == SpanSLI("a", None, good_status=False, threshold_ns=250_000_000)
    assert window == TimeWindow(600 * SECOND, 660 * SECOND)
    assert baseline == TimeWindow(SECOND // 2, 300 * SECOND)


def test_an_slo_can_be_asked_about_by_its_name():
    known = SpanSLI("order-api", threshold_ns=5)
    sli, _, window = parse_question(
        {"slo": "orders-fast", "window": "30s", "baseline": "30s"}, NOW, {"orders-fast": known}
    )
    assert (sli, window) == (known, BURNING)


def test_an_unknown_slo_is_not_found():
    with pytest.raises(InputError, match="slo: no such SLO: 'x'") as caught:
        parse_question({"slo": "x"}, NOW)
    assert caught.value.kind == "not_found"


def test_an_slo_and_a_service_contradict_each_other():
    with pytest.raises(InputError, match="service: give an slo or a service"):
        parse_question({"slo": "x", "service": "y"}, NOW, {"x": SpanSLI("z")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"service": None}, "service: expected a text"),
        ({"service": 5}, "service: expected a text"),
        ({"operation": ""}, "operation: expected a text"),
        ({"window": "soon"}, "window: expected a duration such as 5m"),
        ({"window": "0s"}, "window: expected a duration"),
        ({"window": "1970-01-01T00:10:00/1970-01-01T00:11:00Z"}, "window: a time needs its zone"),
        ({"window": "x/y"}, "window: not an RFC 3339 time"),
        ({"window": "1970-01-01T00:11:00Z/1970-01-01T00:10:00Z"}, "window: the end must come after"),
        ({"baseline": "1970-01-01T00:00:00Z/1970-01-01T00:17:30Z"}, "baseline: the baseline must end before"),
        ({"threshold_ms": True}, "threshold_ms: expected a number"),
        ({"threshold_ms": float("inf")}, "threshold_ms: expected a number"),
        ({"good_status": "yes"}, "good_status: expected true or false"),
        ({"widnow": "5m"}, "widnow: unknown field"),
    ],
)
def test_a_wrong_question_names_its_field(change: dict, message: str):
    with pytest.raises(InputError, match=message):
        parse_question({**QUESTION, **change}, NOW)


def test_every_piece_of_evidence_has_a_line():
    store = world(1, Trouble(throttled=True))
    answer = answerer(AttributionEngine(store, store), lambda: NOW)(QUESTION)
    count = sum(1 + len(cause["evidence"]) for cause in answer["causes"])
    assert len(lines(answer)) == 1 + count


def test_without_a_server_pasta_controller_url_is_asked():
    arguments = ["--service", "order-api", "--window", "30s", "--baseline", "30s"]
    with Server(Trouble(network_ms=40)) as server:
        result = CliRunner().invoke(command, arguments, env={"PASTA_CONTROLLER_URL": server.url})
    assert result.exit_code == 0, result.output
    assert server.path == "/api/v1/attribute"
