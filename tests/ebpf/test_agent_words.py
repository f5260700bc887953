"""How the agent's words are read, and what is imported before its probes are attached: modules are counted, not time."""

import os
import socket
import subprocess
import sys
import urllib.request
from ast import literal_eval
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.app.agent_start import AgentOptions
from pasta_otel.cli.agent import command, with_settings
from pasta_otel.cli.agent_words import OPTIONS, options_of, plain_options
from pasta_otel.ebpf.probes import OBJECT_FOLDER
from pasta_otel.errors import InputError
from tests.ebpf.scenario import ROOT
from tests.support import wait_for

NEEDED = {
    *("", ".__main__", ".bearer", ".errors", ".cli", ".cli.agent_words", ".cli.tokens", ".app", ".app.agent_start"),
    *(".ebpf", ".ebpf.choose", ".ebpf.elf", ".ebpf.layout", ".ebpf.loaders", ".ebpf.loaders.core", ".ebpf.observer"),
    *(".ebpf.ports", ".ebpf.probes", ".ebpf.process_context", ".ebpf.processes", ".ebpf.return_probes", ".ebpf.ring"),
    *(".ebpf.start_reason", ".ebpf.syscall", ".ebpf.uname"),
}
DEAR = {"asyncio", "click", "dataclasses", "email", "inspect", "logging", "numpy", "opentelemetry", "platform", "yaml"}
"""What costs milliseconds to import, and has been imported here before."""
MOST = 60
"""Modules of the standard library, packages' parts counted; there were 55 with Python 3.11."""
LIST_WHEN_ATTACHED = """
import sys
before = {*sys.modules}
import pasta_otel.cli.agent_words as words

def say(event):
    print([event["event"], sorted({*sys.modules} - before)])
    raise SystemExit

words._say = say
import pasta_otel.__main__
pasta_otel.__main__.main(["agent", "--port", "0", *sys.argv[1:]])
"""


def imported_before_attachment(*words: str) -> set[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PASTA_TEST_TOKEN": "secret"}
    command_line = [sys.executable, "-S", "-c", LIST_WHEN_ATTACHED, *words]  # -S: no installed package
    event, modules = literal_eval(subprocess.check_output(command_line, text=True, env=environ))
    assert event == "attached"
    return set(modules)


@pytest.mark.parametrize("words", [(), ("--budget", "1", "--no-export", "--token-env=PASTA_TEST_TOKEN")])
def test_nothing_but_what_attaching_needs_is_imported_before_probes_are_attached(words):
    modules = imported_before_attachment("--loader", "core", *words)
    ours = {name for name in modules if name.partition(".")[0] == "pasta_otel"}
    assert {name.removeprefix("pasta_otel") for name in ours} <= NEEDED
    tops = {name.partition(".")[0] for name in modules - ours}
    assert tops <= sys.stdlib_module_names
    assert not tops & DEAR
    assert len(modules - ours) <= MOST


def read_by_click(words: list[str]) -> AgentOptions | None:
    """Return what click makes of these words; None where it refuses them or only explains."""
    try:
        return options_of(command.make_context("agent", [*words]).params, os.environ)
    except (click.ClickException, click.exceptions.Exit, InputError):
        return None


NAMES = st.sampled_from([name for option in OPTIONS for name in (option.name, option.off) if name])
TEXTS = st.sampled_from(
    [
        "",
        "0",
        "1",
        "0.5",
        "-1",
        "nan",
        "inf",
        "core",
        "bcc",
        "other",
        "cuda",
        "cuda,sched",
        "--port",
        "/",
        "a=b",
        "PATH",
        "HOME",
        __file__,
    ]
)
WORDS = st.lists(
    st.one_of(
        st.tuples(NAMES, TEXTS),
        st.tuples(NAMES),
        st.builds("{}={}".format, NAMES, TEXTS).map(lambda word: (word,)),
        st.sampled_from([("--help",), ("-h",), ("--",), ("--por", "1"), ("extra",)]),
    ),
    max_size=4,
).map(lambda groups: [word for group in groups for word in group])


@given(words=WORDS)
def test_words_that_are_read_without_click_mean_what_click_makes_of_them(words):
    plain = plain_options(words, os.environ)
    assert plain is None or plain == read_by_click(words)


PLAIN = [
    ([], AgentOptions()),
    (["--port", "0", "--no-export", "--export"], AgentOptions(port=0)),
    (["--loader=core", "--probes", "cuda,sched"], AgentOptions(loader="core", probes=("cuda", "sched"))),
    (["--interval=0.5", "--slow-ms", "0", "--budget", "1"], AgentOptions(interval_seconds=0.5, slow_ms=0, budget=1)),
]


@pytest.mark.parametrize(("words", "options"), PLAIN)
def test_ordinary_words_need_no_click(words, options):
    if not (OBJECT_FOLDER / "probes.json").exists():
        pytest.skip("the probes are not built")
    assert plain_options(words, {}) == options == read_by_click(words)


def test_the_budget_may_stand_in_the_environment_and_a_word_counts_more():
    environ = {"PASTA_OVERHEAD_BUDGET": "0.25"}
    assert plain_options([], environ) == AgentOptions(budget=0.25)
    assert plain_options(["--budget", "0"], environ) == AgentOptions(budget=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prot", "1"], "No such option"),
        (["--port", "x"], "not a valid integer"),
        (["--port"], "requires an argument"),
        (["--loader", "other"], "'other' is not one of"),
        (["more"], "unexpected extra argument"),
        (["--probes", "nothing"], "--probes: no probe 'nothing'"),
        (["--interval", "nan"], "--interval: must be above 0"),
        (["--slow-ms", "-1"], "--slow-ms: must be from 0"),
        (["--budget", "2"], "--budget: must be a share"),
        (["--token-env", "NOT_THERE"], "NOT_THERE is not set"),
        (["--host", ""], "--host: expected an address"),
        (["--host="], "--host: expected an address"),
        (["--port", "99999"], "--port: must be from 0"),
        (["--port=-1"], "--port: must be from 0"),
    ],
)
def test_a_wrong_word_is_explained_and_nothing_starts(words, said):
    command_line = [sys.executable, "-m", "pasta_otel", "agent", *words]
    done = subprocess.run(
        command_line, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def read_with(folder: Path, monkeypatch, yaml: str, *words: str) -> AgentOptions:
    """Return the options with a settings file, as the agent gets them."""
    path = folder / "settings.yaml"
    path.write_text(yaml)
    monkeypatch.setenv("PASTA_CONFIG", str(path))
    assert plain_options([*words], os.environ) is None  # YAML is click's
    context = command.make_context("agent", [*words])
    return options_of(with_settings(context, context.params), os.environ)


def test_the_budget_may_stand_in_the_settings_file_and_variables_and_words_count_more(tmp_path, monkeypatch):
    assert read_with(tmp_path, monkeypatch, "overhead_budget: 0").budget == 0
    assert read_with(tmp_path, monkeypatch, "overhead_budget: 0", "--budget", "0.5").budget == 0.5
    assert read_with(tmp_path, monkeypatch, "{}").budget == AgentOptions().budget
    monkeypatch.setenv("PASTA_OVERHEAD_BUDGET", "0.25")
    assert read_with(tmp_path, monkeypatch, "overhead_budget: 0").budget == 0.25


@pytest.mark.parametrize(("yaml", "field"), [("overhead_budget: much", "overhead_budget"), ("nosuch: 1", "nosuch")])
def test_a_settings_file_that_cannot_be_used_is_refused(tmp_path, monkeypatch, yaml, field):
    with pytest.raises(InputError) as refused:
        read_with(tmp_path, monkeypatch, yaml)
    assert refused.value.field == field


def test_a_settings_file_that_is_not_there_ends_the_agent(tmp_path):
    command_line = [sys.executable, "-m", "pasta_otel", "agent", "--loader", "files", "--no-export", "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PASTA_CONFIG": str(tmp_path / "nosuch.yaml")}
    done = subprocess.run(command_line, check=False, capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nosuch.yaml" in done.stderr


def test_an_output_without_room_ends_the_agent_without_a_traceback():
    command_line = [sys.executable, "-m", "pasta_otel", "agent", "--loader", "files", "--no-export", "--port", "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command_line,
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "pasta-otel: cannot write to standard output: No space left on device; send it where there is room"
    ]


def test_without_an_output_the_agent_works():
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command_line = [*closed, sys.executable, "-m", "pasta_otel", "agent", "--no-export", "--port", str(port)]
    with subprocess.Popen(command_line, env={**os.environ, "PYTHONPATH": str(ROOT)}) as running:
        try:
            wait_for(lambda: answers(f"http://127.0.0.1:{port}/healthz"))
            outputs = {Path(f"/proc/{running.pid}/fd/{number}").readlink() for number in (1, 2)}
            assert outputs == {Path("/dev/null")}
        finally:
            running.terminate()
        assert running.wait(30) == 0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_a_reader_that_goes_away_ends_the_agent_without_a_traceback():
    command_line = [sys.executable, "-m", "pasta_otel", "agent", "--loader", "files", "--no-export", "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(30) == 1
        assert b"Traceback" not in running.stderr.read()
