"""pasta-otel run: real programs, real servers, their own exit codes and signals."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from pasta_otel.cli.run import AUTOLOAD, command, environment, resolve
from pasta_otel.errors import InputError
from tests.otlp_receiver import HttpReceiver, attributes
from tests.support import ROOT, wait_for

RUN = [sys.executable, "-m", "pasta_otel", "run", "--"]
INSTRUMENT = str(Path(sys.executable).with_name("opentelemetry-instrument"))
SERVER = """
import socket, sys
import torch, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 2)))

async def predict(request):
    return JSONResponse(model(torch.ones(1, 4)).tolist())

app = Starlette(routes=[Route("/predict", predict)])

if __name__ == "__main__":
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""


def start(words, **env):
    return subprocess.Popen(
        words,
        env={
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            **env,
        },
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(words, **env):
    process = start(words, **env)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def server_file(tmp_path):
    path = tmp_path / "serve.py"
    path.write_text(SERVER)
    return path


def serve_and_ask(words, receiver, **env):
    """Start a server, send two requests, end it by SIGTERM, and return what was exported and how it ended."""
    process = start(
        words,
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        OTEL_EXPORTER_OTLP_TIMEOUT="5",
        OTEL_SERVICE_NAME="ranker",
        **env,
    )
    port = int(process.stdout.readline())
    url = f"http://127.0.0.1:{port}/predict"
    wait_for(lambda: answers(url))
    header = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert httpx.get(url, headers=header).status_code == 200
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    wanted = bytes.fromhex("0af7651916cd43dd8448eb211c80319c")
    return process.returncode, err, [(res, span) for res, span in receiver.spans() if span.trace_id == wanted]


def answers(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def check_request(spans):
    """Exactly one server span, under the caller's, and the model's rows below it, from one resource."""
    (server,) = [span for _, span in spans if span.kind == 2]
    assert server.parent_span_id.hex() == "b7ad6b7169203331"
    rows = {
        attributes(span.attributes)["pasta.torch.module.path"]: span
        for _, span in spans
        if "pasta.torch.module.path" in attributes(span.attributes)
    }
    assert set(rows) == {"Sequential", "0", "1", "1.0", "1.1"}
    assert rows["Sequential"].parent_span_id == server.span_id
    assert rows["1.1"].parent_span_id == rows["1"].span_id
    assert server.start_time_unix_nano <= rows["Sequential"].start_time_unix_nano
    assert rows["Sequential"].end_time_unix_nano <= server.end_time_unix_nano
    assert {resource["service.name"] for resource, _ in spans} == {"ranker"}
    assert len({resource["service.instance.id"] for resource, _ in spans}) == 1


@pytest.mark.parametrize(
    "words", [RUN, [*RUN, sys.executable], [INSTRUMENT, *RUN, sys.executable]], ids=["file", "python", "both"]
)
def test_a_server_is_instrumented_and_drained_on_sigterm(server_file, words):
    with HttpReceiver() as receiver:
        code, err, spans = serve_and_ask([*words, str(server_file)], receiver)
    check_request(spans)
    assert code == -signal.SIGTERM, err


@pytest.mark.parametrize("words", [RUN, [INSTRUMENT, sys.executable]], ids=["run", "opentelemetry-instrument"])
def test_a_program_with_its_own_provider_keeps_it(tmp_path, words):
    program = tmp_path / "own.py"
    program.write_text(
        textwrap.dedent("""
        import torch
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        mine = TracerProvider(resource=Resource.create({"service.name": "mine"}))
        mine.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(mine)
        assert trace.get_tracer_provider() is mine
        with trace.get_tracer("x").start_as_current_span("request"):
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
        """)
    )
    with HttpReceiver() as receiver:
        code, _, err = run([*words, str(program)], OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
    assert (code, err) == (0, "")
    assert sorted((resource["service.name"], span.name) for resource, span in receiver.spans()) == [
        ("mine", "Linear"),
        ("mine", "request"),
    ]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([sys.executable, "-c", "import sys; sys.exit(7)"], 7),
        (["-c", "import sys; sys.exit(8)"], 8),
        (["sh", "-c", "exit 5"], 5),
        (["sh", "-c", "kill -KILL $$"], -signal.SIGKILL),
        ([sys.executable, "-c", "raise SystemError"], 1),
    ],
)
def test_the_exit_code_is_the_programs_own(words, code):
    assert run([*RUN, *words])[0] == code


@pytest.mark.skipif(
    importlib.util.find_spec("pasta_otel.termination._deadline") is None, reason="built without a C compiler"
)
def test_sigterm_ends_a_program_that_is_in_a_c_call_for_ever():
    process = start([*RUN, sys.executable, "-c", "print('up', flush=True); sum(range(10**12))"])
    assert process.stdout.readline() == "up\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGTERM


def test_a_module_and_its_arguments(tmp_path):
    (tmp_path / "greets.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    code, out, _ = run([*RUN, "-m", "greets", "--name", "x", "--", "y"], PYTHONPATH=str(tmp_path))
    assert (code, out) == (0, "['--name', 'x', '--', 'y'] __main__\n")


def test_a_python_without_pasta_otel_runs_and_one_line_says_so(tmp_path):
    code, out, err = run([*RUN, sys.executable, "-S", "-c", "import site; site.main(); print('ran')"])
    assert (code, out) == (0, "ran\n")
    code, out, err = run([*RUN, sys.executable, "-c", "print('ran')"], PYTHONPATH=str(_broken(tmp_path)))
    assert (code, out) == (0, "ran\n")
    assert err.count("\n") == 1
    assert err.startswith("pasta-otel: not instrumented: ")


def _broken(tmp_path):
    """A pasta_otel that cannot be imported, as in an environment that lacks what it needs."""
    broken = tmp_path / "opentelemetry"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('not here')\n")
    return tmp_path


def test_a_bad_setting_does_not_stop_the_program():
    code, out, err = run([*RUN, sys.executable, "-c", "print('ran')"], PASTA_SAMPLING_RATE="seven")
    assert (code, out) == (0, "ran\n")
    assert "PASTA_SAMPLING_RATE" in err
    assert err.count("\n") == 1


def test_the_programs_own_sitecustomize_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = __file__\n")
    code, out, err = run([*RUN, sys.executable, "-c", "print(customized)"], PYTHONPATH=str(tmp_path))
    assert (code, out, err) == (0, f"{tmp_path}/sitecustomize.py\n", "")


def test_instrumentation_can_be_disabled_as_any_other():
    code, out, _ = run(
        [
            *RUN,
            sys.executable,
            "-c",
            "import sys; print('pasta_otel.gpu.torch.hooks' in sys.modules, sys.modules.get('starlette'))",
        ],
        OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="pasta_otel,starlette",
    )
    assert code == 0
    assert out.split()[1] == "None"


def test_a_program_that_does_not_exist_is_a_wrong_use():
    code, _, err = run([*RUN, "no-such-program"])
    assert code == 2
    assert "no-such-program" in err
    with pytest.raises(InputError):
        resolve(["no-such-program"])
    assert CliRunner().invoke(command, []).exit_code == 2


def test_the_environment_is_not_extended_twice():
    once = environment({"PYTHONPATH": "/a", "X": "1"})
    assert once == {"PYTHONPATH": os.pathsep.join([AUTOLOAD, "/a"]), "X": "1"}
    assert environment(once) == once


def test_without_a_collector_what_is_lost_at_the_end_is_said_once_and_nobody_waits_for_long(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
from opentelemetry import metrics, trace
from pasta_otel.exporters.otlp import sender
limits = []
def noting(self, seconds, before=sender.Sender.limit):
    before(self, seconds)
    limits.append(self._limit_s)
sender.Sender.limit = noting
import atexit, time
started = time.monotonic()
atexit.register(lambda: print(len(limits) > 2, max(limits) - min(limits) < 1.9))  # registered first: runs last
metrics.get_meter("m").create_counter("c").add(1)
with trace.get_tracer("t").start_as_current_span("request"):
    pass
""")
    code, out, err = run([*RUN, sys.executable, str(program)], OTEL_EXPORTER_OTLP_TIMEOUT="10")
    assert (code, out.split()) == (0, ["True", "True"])
    assert err.count("dropped") == 1, err


def test_a_python_without_pasta_otel_says_which_it_is_and_what_to_do(tmp_path):
    bare = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare.parents[1])], check=True)
    code, out, err = run([*RUN, str(bare), "-c", "print('ran')"])
    assert (code, out) == (0, "ran\n")
    assert f"not instrumented: {bare} has no pasta-otel" in err
    assert f"`{bare} -m pip install pasta-otel`" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_HEADERS": "authorization: Bearer S3CR3T"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "u:S3CR3T@127.0.0.1"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://u:S3CR3T@127.0.0.1"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://u:S3CR3T@127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2"},
        {"PASTA_CONTROLLER_URL": "http://u:S3CR3T@127.0.0.1:9"},
        {"PASTA_CONTROLLER_URL": "http://u:S3CR3T@127.0.0.1:notaport"},
    ],
    ids=str,
)
def test_a_program_prints_no_credentials_of_its_settings(tmp_path: Path, environ: dict[str, str]):
    program = tmp_path / "program.py"
    program.write_text(
        "from opentelemetry import trace\nfrom pasta_otel import slo\n"
        "with trace.get_tracer('t').start_as_current_span('a'):\n    slo.flag('degrade.a')\nslo.wait_ready(0.3)\n"
    )
    code, out, err = run(
        [*RUN, sys.executable, str(program)], PASTA_DEBUG="true", OTEL_METRICS_EXPORTER="none", **environ
    )
    assert code == 0, err
    assert "S3CR3T" not in out + err
    if next(iter(environ)).startswith("OTEL") and ":9" not in str(environ):
        assert f"{next(iter(environ))}: expected" in err
