"""``pasta-otel slo`` as a user runs it."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from pasta_otel import cli
from pasta_otel.cli.slo import command, states_table
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.report import evaluation_to_json
from pasta_otel.slo.spec.load import load
from pasta_otel.slo.windows import load_windows
from pasta_otel.testing.slo import EventListSource

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND
SPEC = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: orders, annotations: {owner: team-orders}}
spec:
  service: order-api
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  indicator:
    metadata: {name: right}
    spec: {ratioMetric: {rawType: success, raw: {metricSource: {type: spans, spec: {service: order-api}}}}}
  objectives: [{target: 0.95}]
"""


def pasta(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["slo", *args])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_a_valid_file_exits_0(capsys, tmp_path):
    (tmp_path / "a.yaml").write_text(SPEC)
    code, out, err = pasta(capsys, "validate", "--windows", "demo", str(tmp_path))
    assert (code, err) == (0, "")
    assert out == "1 object, 1 objective, 0 errors\n"


def test_a_status_without_a_source_says_which_option_gives_one(capsys, tmp_path):
    (tmp_path / "a.yaml").write_text(SPEC)
    code, out, _ = pasta(capsys, "status", "--json", "--slo", str(tmp_path / "a.yaml"))
    (state,) = json.loads(out)["slos"]
    assert code == 3
    assert "give --store FILE, or --server URL" in state["detail"]
    assert "SpanSLI" not in out


def test_an_invalid_file_exits_1_and_names_file_line_and_field(capsys):
    file = CASES / "S07" / "03_raw_without_type.yaml"
    code, _, err = pasta(capsys, "validate", str(file))
    assert code == 1
    assert err == f"error: {file}:5: spec.ratioMetric.rawType: required with raw: success or failure\n"


def test_an_unreadable_file_exits_2(capsys):
    code, _, err = pasta(capsys, "validate", "/nowhere.yaml")
    assert code == 2
    assert "/nowhere.yaml: No such file" in err


def test_validation_as_json_is_one_document(capsys):
    code, out, _ = pasta(capsys, "validate", "--json", str(CASES / "S07"))
    document = json.loads(out)
    assert code == 1
    assert document["valid"] is False
    assert {problem["kind"] for problem in document["problems"]} >= {"meaningless_ratio", "exclusive", "required"}
    assert all(problem["line"] for problem in document["problems"])


@pytest.fixture
def server(request, tmp_path):
    """A server that answers as the controller's API does, with the states of a real controller."""
    (tmp_path / "slo.yaml").write_text(SPEC)
    share = request.param
    events = (
        [(NOW - 60 * SECOND + i * SECOND // 10, (i * share) % 1 + share < 1) for i in range(600)] if share >= 0 else []
    )
    controller = SLOController(
        load([tmp_path / "slo.yaml"]).slos, load_windows("demo"), Parts(EventListSource(events)), grace_ns=0
    )
    body = json.dumps(evaluation_to_json(controller.tick(NOW))).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/api/v1/slos" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(("server", "code"), [(0.0, 0), (0.5, 1), (-1, 3)], indirect=["server"])
def test_status_asks_the_server_and_exits_by_verdict(capsys, server, code):
    assert pasta(capsys, "status", "--server", server)[0] == code
    json_code, out, _ = pasta(capsys, "status", "--server", server, "--json")
    (state,) = json.loads(out)["slos"]
    assert json_code == code
    assert state["verdict"] == {0: "ok", 1: "burning", 3: "no_data"}[code]


@pytest.mark.parametrize("server", [0.5], indirect=True)
def test_the_table_shows_verdict_budget_burn_rate_and_owner(capsys, monkeypatch, server):
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = pasta(capsys, "status", "--server", server)
    for text in ("orders", "95 %", "burning", "10.00 / 10.00 (>2.4)", "team-orders"):
        assert text in out


@pytest.mark.parametrize("server", [0.5], indirect=True)
def test_status_asks_the_controller_of_the_settings_where_none_is_named(capsys, monkeypatch, server):
    monkeypatch.setenv("PASTA_CONTROLLER_URL", server)
    assert pasta(capsys, "status")[0] == 1


def test_status_without_a_server_exits_3_and_says_what_to_do(capsys):
    code, _, err = pasta(capsys, "status", "--server", "http://127.0.0.1:1")
    assert code == 3
    assert "start pasta-otel sidecar" in err


@pytest.mark.parametrize(
    "args",
    [
        ("--slo", "a.yaml"),
        ("--store", "a.db"),
        ("--server", "http://x", "--slo", "a", "--store", "b"),
        ("--server", "ftp://x"),
    ],
)
def test_wrong_use_exits_2(capsys, args):
    assert pasta(capsys, "status", *args)[0] == 2


def test_help_names_every_subcommand():
    text = CliRunner().invoke(command, ["--help"]).output
    assert "validate" in text
    assert "status" in text


class Odd(BaseHTTPRequestHandler):
    """Answers what it is told to, which no controller would."""

    body = b""

    def do_GET(self) -> None:
        self.wfile.write(self.body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", 3),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{}", 2),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", 2),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", 2),
        (b'HTTP/1.1 200 OK\r\n\r\n{"slos": {}}', 2),
        (b'HTTP/1.1 200 OK\r\n\r\n{"slos": [7]}', 2),
        (b'HTTP/1.1 200 OK\r\n\r\n{"slos": [{"name": "x", "verdict": "fine"}]}', 2),
    ],
)
def test_what_is_no_controller_is_said_to_be_none(capsys, body, code):
    listener = HTTPServer(("127.0.0.1", 0), type("Told", (Odd,), {"body": body}))
    threading.Thread(target=listener.handle_request, daemon=True).start()
    try:
        found, _, err = pasta(capsys, "status", "--server", f"http://127.0.0.1:{listener.server_address[1]}")
    finally:
        listener.server_close()
    assert found == code
    assert err.startswith("pasta-otel: ")
    assert "Traceback" not in err


def test_square_brackets_in_a_reason_are_words_not_markup():
    state = {
        "name": "a[/b]", "service": "[red]", "objective": 0.99, "verdict": "no_data", "reason": "invalid",
        "detail": "bad_data: unexpected [/x] in [5m]", "burn_rates": [], "attribution": None, "annotations": {"owner": "[/]"},
        "budget": {"remaining": None, "coverage": 1.0, "exhausted_in_seconds": None},
    }  # fmt: skip
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(states_table([state]))
    text = console.export_text()
    for words in ("a[/b]", "[red]", "unexpected [/x] in [5m]", "[/]"):
        assert words in text
