"""What `pasta-otel demo` refuses before it starts anything, and what it says when it cannot go on."""

from __future__ import annotations

import fcntl
import json
import os
import sys

import pytest
from click.testing import CliRunner

from pasta_otel.demo import command, processes
from pasta_otel.demo.processes import DemoError, TooBusyError
from pasta_otel.errors import InputError

REPORT = {"passed": True}


@pytest.fixture
def plays(monkeypatch):
    """Play nothing: each attempt takes the next outcome; what is left was not asked for."""
    outcomes = []

    def play(options, console):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(command, "_play", play)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    return outcomes


def demo(out, *words, **env):
    return CliRunner().invoke(command.demo, ["--out", str(out), *words], env=env)


@pytest.mark.parametrize("option", ["--baseline", "--rate", "--observe"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN", "Infinity"])
def test_no_number_that_is_not_finite_is_taken(plays, tmp_path, option, value):
    plays.append(REPORT)
    done = demo(tmp_path, option, value)
    assert done.exit_code == 2
    assert option in done.output
    assert plays == [REPORT], "nothing was started"


@pytest.mark.parametrize(
    ("words", "env", "named"),
    [
        (["--upstream", "junk:port"], {}, "--upstream"),
        (["--upstream", "http://"], {}, "--upstream"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a b"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ([], {"PASTA_SAMPLING_RATE": "5"}, "PASTA_SAMPLING_RATE"),
        ([], {"PASTA_DEBUG": "perhaps"}, "PASTA_DEBUG"),
        ([], {"PASTA_CONFIG": "/does/not/exist"}, "/does/not/exist"),
        (["--upstream", "http://a:1"], {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(plays, tmp_path, words, env, named):
    plays.append(REPORT)
    done = demo(tmp_path / "out", *words, **env)
    assert isinstance(done.exception, InputError)
    assert named in str(done.exception)
    assert plays == [REPORT]
    assert not (tmp_path / "out").exists()


def test_a_second_demo_in_one_folder_is_refused_and_touches_nothing(plays, tmp_path):
    plays.append(REPORT)
    (tmp_path / "load.jsonl").write_text("of the first")
    first = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    done = demo(tmp_path)
    assert isinstance(done.exception, InputError)
    assert f"another demo runs in {tmp_path}" in str(done.exception)
    assert (tmp_path / "load.jsonl").read_text() == "of the first"
    os.close(first)
    assert demo(tmp_path).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_on_a_busy_machine_it_starts_once_more_by_itself(plays, tmp_path):
    plays += [TooBusyError("an SLO burned"), REPORT]
    done = demo(tmp_path, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == REPORT
    assert "an SLO burned; starting once more" in done.stderr


def test_on_a_machine_that_stays_busy_it_says_what_helps_and_prints_the_error_as_json(plays, tmp_path):
    plays += [TooBusyError("an SLO burned"), TooBusyError("an SLO burned")]
    done = demo(tmp_path, "--json")
    assert isinstance(done.exception, TooBusyError)
    document = json.loads(done.stdout)
    assert document["passed"] is False
    assert document["error"]["exit_code"] == 3
    assert "--rate 2" in document["error"]["message"]


@pytest.mark.parametrize("error", [DemoError("model ended"), InputError("no", field="--out")])
def test_every_failure_is_a_document_with_json_and_none_without(plays, tmp_path, error):
    plays += [error, error]
    assert json.loads(demo(tmp_path, "--json").stdout)["error"]["exit_code"] == error.exit_code
    assert demo(tmp_path).stdout == ""


def test_the_users_own_token_does_not_reach_the_demos_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PASTA_API_TOKEN", "secret")
    words = [sys.executable, "-c", "import os, json; print(json.dumps({'event': 'ready', 'env': dict(os.environ)}))"]
    child = processes.start("child", words, tmp_path / "log", {"MINE": "1"})
    env = child.wait_ready()["env"]
    child.stop()
    assert env["MINE"] == "1"
    assert "PASTA_API_TOKEN" not in env
