"""``analyze memory -- CMD`` from the command line to the report, over a Sanitizer library that runs on the CPU."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import venv
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pasta_otel.errors import MissingError
from pasta_otel.gpu.memory import library
from tests.sanitizer import build

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "memory.schema.json"
PROGRAM = """
import ctypes, os, sys
fake = ctypes.CDLL(os.environ["FAKE_SANITIZER"])
fake.fake_allocated.restype = ctypes.c_size_t
context = ctypes.c_void_p(16)
def stream(number): return ctypes.c_void_p(number)
def launch(number, name, warps, stride): fake.fake_launch(context, stream(number), name.encode(), warps, stride)
def module(cubin): fake.fake_module(context, cubin, ctypes.c_size_t(len(cubin)))
module(b'')
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return str(build("fake", tmp_path_factory.mktemp("fake"), driver=True))


@pytest.fixture
def analyze(fake, tmp_path):
    patch = tmp_path / "patch.fatbin"
    patch.touch()

    def run(program, *options, before=(), **environ):
        script = tmp_path / "program.py"
        script.write_text(PROGRAM + program)
        words = [
            *before,
            sys.executable,
            "-m",
            "pasta_otel",
            "analyze",
            "memory",
            *options,
            "--",
            sys.executable,
            str(script),
        ]
        settings = {"PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": str(patch), "FAKE_SANITIZER": fake}
        environment = {**os.environ, **settings, **environ}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


def kernels(done):
    return {kernel["symbol"]: kernel for kernel in json.loads(done.stdout)["gpu_kernels"]}


def test_what_is_destroyed_after_the_interpreter_calls_nobody(analyze):
    done = analyze('launch(1, "strided", 10, 8); fake.fake_stream_at_exit()', "--json")
    assert done.returncode == 0, done.stderr
    assert kernels(done)["strided"]["launches"] == 1


def test_what_is_destroyed_after_the_interpreter_calls_nobody_where_analysis_was_impossible(analyze):
    done = analyze("launch(1, 'strided', 10, 8); fake.fake_stream_at_exit()", FAKE_REFUSES_PATCHES="1")
    assert done.returncode == 3, done.stderr
    assert "cannot be analysed" in done.stderr


def test_two_streams_are_counted_apart_from_one_another_and_summed_by_gpu_kernel(analyze):
    done = analyze(
        """
for round in range(3):
    launch(1, "contiguous", 100, 1)
    launch(2, "strided", 100, 8)
    launch(2, "contiguous", 100, 1)
fake.fake_synchronize(context, stream(1))
launch(1, "strided", 100, 8)
""",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert report["launches"] == {"seen": 10, "analysed": 10, "skipped": {}}
    assert report["problems"] == []
    strided, contiguous = report["gpu_kernels"]
    assert strided["global"]["load"] == {"requests": 400, "lanes": 12800, "sectors": 12800, "bytes": 51200}
    assert contiguous["global"]["load"] == {"requests": 600, "lanes": 19200, "sectors": 2400, "bytes": 76800}
    assert [finding["kind"] for finding in strided["findings"]] == ["coalescing"]
    assert strided["findings"][0]["value"] == 0.125
    assert contiguous["findings"] == []


def test_the_text_report_names_the_stride_and_what_to_do(analyze):
    done = analyze('launch(1, "strided", 200, 32)\nprint("from the program")')
    assert done.stdout.startswith("from the program\n")
    assert "12% of the bytes moved" in done.stdout
    assert "lanes are 32 elements of 4 bytes apart" in done.stdout
    assert "structure of arrays" in done.stdout
    assert "6,400 -> 800 sectors (88% fewer)" in done.stdout
    assert re.search(r"  line .*program.py:\d+ launch", done.stdout)


def test_the_report_names_the_programs_line_and_not_the_librarys(analyze, tmp_path):
    package = tmp_path / "site-packages" / "cupy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def call(function, *arguments): function(*arguments)\n")
    program = """
import cupy
class Layer:
    def forward(self): cupy.call(fake.fake_launch, context, stream(1), b"k", 1, 1)
layer = Layer()
for _ in range(3): layer.forward()
cupy.call(fake.fake_launch, context, stream(1), b"k", 1, 1)
"""
    done = analyze(program, "--json", PYTHONPATH=str(package.parent))
    lines = (PROGRAM + program).splitlines()
    script = tmp_path / "program.py"
    assert kernels(done)["k"]["sources"] == [
        {"source": f"{script}:{len(lines) - 3} Layer.forward", "launches": 3},
        {"source": f"{script}:{len(lines)} <module>", "launches": 1},
    ]
    text = analyze(program, PYTHONPATH=str(package.parent)).stdout
    assert "Layer.forward (3)" in text


def test_launches_name_the_span_that_they_were_made_in(analyze):
    done = analyze(
        """
from opentelemetry.sdk.trace import TracerProvider
tracer = TracerProvider().get_tracer("t")
launch(1, "k", 1, 1)
with tracer.start_as_current_span("request") as span:
    launch(1, "k", 1, 1)
    launch(1, "k", 1, 1)
    own = span.get_span_context()
print(f"{own.trace_id:032x} {own.span_id:016x}")
""",
        "--json",
    )
    trace_id, span_id = done.stderr.split()[:2]
    assert kernels(done)["k"]["spans"] == [{"trace_id": trace_id, "span_id": span_id, "launches": 2}]


@contextmanager
def otlp_server():
    """Yield what an OTLP server is sent over HTTP, decoded, and the environment that names it."""
    received = {"/v1/metrics": [], "/v1/traces": []}
    forms = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received[self.path].append(forms[self.path].FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        yield received, {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_SERVICE_NAME": "svc"}
    finally:
        server.shutdown()
        server.server_close()


def plain(attributes):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


def points(received):
    return {
        metric.name: metric.sum.data_points or metric.gauge.data_points
        for request in received["/v1/metrics"]
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
    }


def test_metrics_by_gpu_kernel_class_reach_an_otlp_server(analyze):
    with otlp_server() as (received, environ):
        done = analyze('launch(1, "ampere_sgemm_128x64_nn", 10, 8)', "--otlp", **environ)
    assert done.returncode == 0, done.stderr
    metrics = points(received)
    (sectors,), (asked,) = metrics["gpu.cuda.kernel.memory.sectors"], metrics["gpu.cuda.kernel.memory.requested"]
    assert (sectors.as_int, asked.as_int) == (320, 1280)
    assert plain(sectors.attributes) == {"gpu.kernel.class": "gemm", "gpu.memory.access": "load"}
    (pages,) = metrics["gpu.cuda.kernel.memory.working_set"]
    assert pages.as_int == 4096
    assert plain(pages.attributes) == {"gpu.kernel.class": "gemm"}
    (spans,) = metrics["pasta.gpu.spans"]
    assert (spans.as_int, plain(spans.attributes)) == (1, {"outcome": "ok"})


def test_launches_are_spans_below_the_span_that_launched_them_or_below_a_root(analyze):
    program = """
from opentelemetry.sdk.trace import TracerProvider
tracer = TracerProvider().get_tracer("t")
launch(1, "alone", 10, 1)
launch(2, "alone", 10, 1)
with tracer.start_as_current_span("request") as span:
    launch(1, "inside", 200, 8)
    own = span.get_span_context()
print(f"{own.trace_id:032x} {own.span_id:016x} {os.getpid()}")
"""
    with otlp_server() as (received, environ):
        done = analyze(program, "--otlp", **environ)
    assert done.returncode == 0, done.stderr
    assert "4 spans sent" in done.stderr
    trace_id, span_id, pid = done.stdout.splitlines()[0].split()
    resources = [group for request in received["/v1/traces"] for group in request.resource_spans]
    for group in resources:
        attributes = plain(group.resource.attributes)
        assert (attributes["service.name"], attributes["process.pid"]) == ("svc", int(pid))
    spans = [span for group in resources for scope in group.scope_spans for span in scope.spans]
    (root,) = (span for span in spans if span.name == "analyze memory")
    (inside,) = (span for span in spans if span.name == "inside")
    alone = [span for span in spans if span.name == "alone"]
    assert (inside.trace_id.hex(), inside.parent_span_id.hex()) == (trace_id, span_id)
    assert {(span.trace_id, span.parent_span_id) for span in alone} == {(root.trace_id, root.span_id)}
    assert not root.parent_span_id
    assert root.start_time_unix_nano == min(span.start_time_unix_nano for span in alone)
    assert root.end_time_unix_nano == max(span.end_time_unix_nano for span in alone)
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in spans)
    assert len({span.span_id for span in spans}) == len(spans)
    found = plain(inside.attributes)
    assert found["gpu.cuda.kernel.memory.coalescing_efficiency"] == 0.125
    assert found["gpu.cuda.kernel.memory.load.sectors_per_request"] == 32
    assert found["gpu.cuda.kernel.memory.findings"] == "coalescing"
    assert found["pasta.analysis.slowed"] is True
    assert found["pasta.link.method"] == "id"
    assert found["code.function.name"] == "launch"
    assert "pasta.link.method" not in plain(alone[0].attributes)


def test_what_a_gpu_kernel_touches_is_named_in_every_output(analyze, tmp_path):
    page = tmp_path / "page.html"
    program = """
def allocate(): fake.fake_memory(context, ctypes.c_uint64(0x7f0000000000), ctypes.c_uint64(1 << 20))
allocate()
launch(1, "strided", 200, 32)
launch(1, "strided", 200, 32)
"""
    with otlp_server() as (received, environ):
        done = analyze(program, "--json", "--html", str(page), "--otlp", **environ)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    (tensor,) = report["tensors"]
    assert (tensor["bytes"], tensor["accesses"], tensor["share"]) == (1 << 20, 12_800, 1.0)
    assert report["ranges"] == [{"pid": report["processes"][0]["pid"], "address": 0x7F0000000000, "accesses": 12_800}]
    (finding,) = kernels(done)["strided"]["findings"]
    assert finding["tensor"] == tensor["label"]
    spans = [s for r in received["/v1/traces"] for g in r.resource_spans for c in g.scope_spans for s in c.spans]
    hottest = {plain(span.attributes).get("gpu.cuda.kernel.memory.hottest_tensor") for span in spans}
    assert hottest == {None, tensor["label"]}
    assert f"{tensor['label']} (1 MiB): " in "".join(tree(page).itertext())


def test_where_no_otlp_server_listens_the_report_is_still_there(analyze):
    done = analyze(
        'launch(1, "k", 200, 32)',
        "--otlp",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_EXPORTER_OTLP_TIMEOUT="1",
    )
    assert done.returncode == 3
    assert "12% of the bytes moved" in done.stdout
    assert "nothing reached" in done.stderr


def tree(page):
    return ET.fromstring(page.read_text().replace('<meta charset="utf-8">', "").replace("<!doctype html>", ""))


def test_the_page_shows_plots_findings_and_escaped_names(analyze, tmp_path):
    target = tmp_path / "report.html"
    done = analyze('launch(1, "a<b>&c\\"", 200, 32)', "--html", str(target))
    assert done.returncode == 0, done.stderr
    page = tree(target)
    text = "".join(page.itertext())
    assert 'a<b>&c"' in [element.get("title") for element in page.iter("b")]
    assert "12% of the bytes moved are asked for" in text
    assert "800 sectors needed, 5,600 sectors that coalescing saves" in text
    assert "0x7f0000000000" in text
    assert not list(page.iter("script"))


@pytest.mark.parametrize("option", ["--output", "--html"])
@pytest.mark.parametrize(("file", "why"), [("missing/report", "No such file or directory"), (".", "Is a directory")])
def test_a_report_that_cannot_be_written_is_refused_before_the_program_runs(analyze, tmp_path, option, file, why):
    done = analyze('launch(1, "k", 1, 1); print("ran")', option, str(tmp_path / file))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / file}: {option}: {why}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["patch.fatbin", "program.py"] or not (
        tmp_path / file
    ).is_file()


def test_a_wrong_server_is_refused_before_the_program_runs(analyze):
    done = analyze('launch(1, "k", 1, 1); print("ran")', "--otlp", OTEL_EXPORTER_OTLP_ENDPOINT="foo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in done.stderr


@pytest.mark.parametrize(("code", "expected"), [(0, 3), (7, 7)])
@pytest.mark.parametrize("option", ["--output", "--html"])
def test_a_report_whose_file_fails_after_the_program_is_on_stdout_and_the_code_is_the_programs(
    analyze, option, code, expected
):
    done = analyze(f'launch(1, "k", 200, 32); raise SystemExit({code})', option, "/dev/full")
    assert done.returncode == expected
    assert "12% of the bytes moved" in done.stdout
    assert f"/dev/full: {option}: No space left on device" in done.stderr


@pytest.mark.parametrize(("code", "expected"), [(0, 3), (7, 7)])
@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
def test_without_a_stdout_that_takes_the_report_the_program_runs_and_its_code_is_kept(
    analyze, tmp_path, stdout, code, expected
):
    ran, page = tmp_path / "ran", tmp_path / "page.html"
    shell = ["/bin/sh", "-c", f'exec "$@" {stdout}', "sh"]
    program = f'launch(1, "k", 200, 32); open({str(ran)!r}, "w").close(); raise SystemExit({code})'
    done = analyze(program, "--html", str(page), before=shell)
    assert (done.returncode, ran.exists(), page.exists()) == (expected, True, True)
    assert "Traceback" not in done.stderr
    assert "stdout" in done.stderr


def test_an_impossible_analysis_leaves_no_old_report_behind(analyze, tmp_path):
    target, page = tmp_path / "report", tmp_path / "page.html"
    for file in (target, page):
        file.write_text("yesterday's")
    missing = {"PASTA_SANITIZER_LIBRARY": "/nonexistent.so"}
    files = ["--output", str(target), "--html", str(page)]
    assert analyze("pass", "--json", *files, **missing).returncode == 3
    report = json.loads(target.read_text())
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert report["launches"] == {"seen": 0, "analysed": 0, "skipped": {}}
    assert "does not exist" in report["problems"][0]
    assert "does not exist" in "".join(tree(page).itertext())
    assert "beyond a threshold" not in page.read_text()
    analyze("pass", *files, **missing)
    assert target.read_text().startswith("memory not analysed: ")
    assert "nothing to change" not in target.read_text()
    shown = json.loads(analyze("pass", "--json", **missing).stdout)
    assert shown["problems"] == report["problems"]
    none = json.loads(analyze('launch(1, "k", 1, 1)', "--json", "--kernel", "no").stdout)
    assert none["launches"] == {"seen": 1, "analysed": 0, "skipped": {"name": 1}}


def test_sigterm_without_a_handler_loses_no_result(analyze):
    done = analyze('launch(1, "k", 5, 1)\nos.kill(os.getpid(), 15)\nimport time; time.sleep(30)', "--json")
    assert done.returncode == 128 + signal.SIGTERM
    assert kernels(done)["k"]["global"]["load"]["requests"] == 5


def test_a_forked_child_writes_nothing_over_its_parents_result(analyze):
    done = analyze(
        """
launch(1, "k", 5, 1)
if os.fork() == 0: sys.exit(0)
os.wait()
""",
        "--json",
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["launches"]["analysed"] == 1


def test_with_json_the_programs_output_goes_to_stderr_unless_the_report_has_a_file(analyze, tmp_path):
    program = 'launch(1, "k", 1, 1)\nprint("from the program")'
    done = analyze(program, "--json")
    assert json.loads(done.stdout)["schema"] == 2
    assert "from the program" in done.stderr
    target = tmp_path / "report.json"
    done = analyze(program, "--json", "--output", str(target))
    assert done.stdout == "from the program\n"
    assert json.loads(target.read_text())["launches"]["analysed"] == 1


def test_device_memory_stays_within_the_bound_and_nothing_is_lost(analyze):
    launches = 101
    program = f"""
for number in range({launches}): launch(1 + number % 2, "k", 1, 1 + number % 3)
print(fake.fake_allocated(), file=sys.stderr)
"""
    done = analyze(program, "--json", "--device-memory", "1")
    report = json.loads(done.stdout)
    assert report["launches"] == {"seen": launches, "analysed": launches, "skipped": {}}
    assert report["waits"] > 0
    assert 0 < int(done.stderr.split()[0]) <= 1 << 20
    assert kernels(done)["k"]["global"]["load"]["requests"] == launches


@pytest.mark.parametrize(
    ("options", "analysed", "skipped"),
    [
        (["--kernel", "so*"], {"some": 9}, {"name": 9}),
        (["--every", "4"], {"some": 3, "other": 3}, {"sample": 12}),
        (["--count", "5"], {"some": 3, "other": 2}, {"count": 13}),
    ],
)
def test_gpu_kernels_are_chosen_by_name_sample_and_count(analyze, options, analysed, skipped):
    done = analyze('for _ in range(9): launch(1, "some", 1, 1); launch(1, "other", 1, 1)', "--json", *options)
    assert {name: kernel["launches"] for name, kernel in kernels(done).items()} == analysed
    assert json.loads(done.stdout)["launches"]["skipped"] == skipped


def test_a_module_without_a_chosen_gpu_kernel_keeps_its_machine_code(analyze):
    program = r"""
module(b"\x7fELF...\0.text.sgemm_nn\0.text.sgemm_nt\0")
module(b"\x7fELF...\0.text.softmax\0.nv.info.softmax\0")
module(b"something else")
launch(1, "softmax", 1, 1)
print(fake.fake_patched(), file=sys.stderr)
"""
    chosen = analyze(program, "--json", "--kernel", "soft*")
    assert chosen.stderr.split()[0] == "3"  # the first has no code to look at, nor has the last
    assert json.loads(chosen.stdout)["unpatched_modules"] == 1
    every = analyze(program, "--json")
    assert every.stderr.split()[0] == "4"
    assert json.loads(every.stdout)["unpatched_modules"] == 0


def test_the_programs_exit_code_is_the_commands(analyze):
    assert analyze('launch(1, "k", 1, 1); raise SystemExit(7)').returncode == 7
    assert analyze("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PASTA_SANITIZER_LIBRARY": "/nonexistent.so"}, "/nonexistent.so (PASTA_SANITIZER_LIBRARY) does not exist"),
        (
            {"PASTA_SANITIZER_PATCH": "/nonexistent.fatbin"},
            "/nonexistent.fatbin (PASTA_SANITIZER_PATCH) does not exist",
        ),
        ({"PASTA_SANITIZER_LIBRARY": sys.executable}, "cannot be used"),
        (
            {"CUDA_INJECTION64_PATH": "/profiler.so"},
            "not available, CUPTI is active: CUDA_INJECTION64_PATH=/profiler.so",
        ),
        ({"FAKE_SUBSCRIBE_RESULT": "13"}, "cannot reach the CUDA driver"),
        ({"FAKE_SUBSCRIBE_RESULT": "10"}, "there is another subscriber"),
        ({"FAKE_REFUSES_PATCHES": "1"}, "this GPU cannot be analysed: sanitizerAddPatchesFromFile: invalid parameter"),
    ],
)
@pytest.mark.parametrize(("code", "expected"), [(0, 3), (7, 7)])
def test_where_analysis_is_impossible_one_message_says_so_and_the_program_runs(
    analyze, environ, message, code, expected
):
    done = analyze(f'launch(1, "k", 1, 1)\nprint("ran"); raise SystemExit({code})', **environ)
    assert done.stdout == "ran\n"
    assert done.returncode == expected
    assert done.stderr.count("pasta-otel:") == 1
    assert message in done.stderr


def test_a_compiler_that_fails_is_named_and_the_program_runs(analyze, tmp_path):
    toolkit = tmp_path / "bin"
    toolkit.mkdir()
    (toolkit / "nvcc").write_text("#!/bin/sh\necho 'no licence today' >&2; exit 1\n")
    (toolkit / "nvcc").chmod(0o755)
    path = os.pathsep.join([str(toolkit), os.environ["PATH"]])
    done = analyze('print("ran")', PASTA_SANITIZER_PATCH="", PATH=path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "nvcc cannot compile the device patches: no licence today" in done.stderr


def test_a_program_that_launches_nothing_is_said_to(analyze):
    done = analyze("print('ran')")
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "the program launched no GPU kernel" in done.stderr


def test_a_wrong_number_is_refused_before_the_program_runs(analyze):
    done = analyze("print('ran')", "--every", "0")
    assert done.returncode == 2
    assert "every: expected at least 1" in done.stderr
    assert done.stdout == ""


def waiting(fake, tmp_path, number):
    """Return a command whose program waits for a signal and ends by it with code 9."""
    script = tmp_path / "program.py"
    script.write_text(
        f"import signal, sys\nsignal.signal({number:d}, lambda *a: sys.exit(9))\n"
        "print('up', flush=True)\nwhile True: signal.pause()"
    )
    words = [sys.executable, "-m", "pasta_otel", "analyze", "memory", "--", sys.executable, str(script)]
    environ = {**os.environ, "PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": fake, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    time.sleep(0.1)
    return process


@pytest.mark.parametrize("number", ["TERM", "HUP", "INT", "QUIT", "USR1", "USR2"])
def test_a_signal_to_the_command_alone_reaches_the_program(fake, tmp_path, number):
    sent = signal.Signals[f"SIG{number}"]
    process = waiting(fake, tmp_path, sent)
    process.send_signal(sent)
    process.communicate(timeout=30)
    assert process.returncode == 9
    assert folders(tmp_path) == []


def test_the_terminals_interrupt_reaches_the_program_once(fake, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import signal, sys, time\ngot = []\nsignal.signal(2, lambda *a: got.append(1))\n"
        "print('up', flush=True)\nwhile not got: signal.pause()\ntime.sleep(0.5)\nprint(len(got), flush=True)"
    )
    words = [sys.executable, "-m", "pasta_otel", "analyze", "memory", "--", sys.executable, str(script)]
    environ = {**os.environ, "PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": fake}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, environ)
    shown = b""
    while b"up" not in shown:
        shown += os.read(terminal, 1000)
    time.sleep(0.2)
    os.write(terminal, b"\x03")
    while not (count := re.search(rb"up\s+\^C(\d)", shown)):
        shown += os.read(terminal, 1000)
    os.waitpid(pid, 0)
    os.close(terminal)
    assert count[1] == b"1"


@pytest.mark.parametrize("outer", ["run", "analyze"])
def test_run_and_analyze_go_together_and_the_programs_own_sitecustomize_runs_once(fake, tmp_path, outer):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.stderr.write('own sitecustomize\\n')\n")
    script, patch, report = tmp_path / "program.py", tmp_path / "patch.fatbin", tmp_path / "report.json"
    script.write_text(PROGRAM + "launch(1, 'k', 5, 1); print('ran', 'pasta_otel.autoinstrument' in sys.modules)")
    patch.touch()
    cli = [sys.executable, "-m", "pasta_otel"]
    analyzing, running = [*cli, "analyze", "memory", "--json", "--output", str(report), "--"], [*cli, "run", "--"]
    words = [*running, *analyzing] if outer == "run" else [*analyzing, *running]
    settings = {"PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": str(patch), "FAKE_SANITIZER": fake}
    environment = {**os.environ, **settings, "PYTHONPATH": str(own)}
    done = subprocess.run(
        [*words, sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran True\n"
    assert "Error" not in done.stderr
    # one in the command, one in the program; the command that becomes another process is a third
    assert done.stderr.count("own sitecustomize") in {2, 3}
    assert json.loads(report.read_text())["launches"]["analysed"] == 1


def test_processes_that_died_are_named_and_the_others_are_reported(analyze):
    program = """
import subprocess
if len(sys.argv) == 1:
    launch(1, "k", 5, 1)
    for how in ("os.kill(os.getpid(), 9)", "os._exit(0)", "0"):
        subprocess.run([sys.executable, __file__, how])
else:
    launch(1, "k", 5, 1)
    print(os.getpid(), file=sys.stderr, flush=True)
    eval(sys.argv[1])
"""
    done = analyze(program, "--json")
    assert done.returncode == 0, done.stderr
    killed, ended, _ = done.stderr.split()[:3]
    report = json.loads(done.stdout)
    assert report["launches"]["analysed"] == 2
    first, second = sorted(map(int, (killed, ended)))
    said = f"no result of processes {first}, {second}: killed, ended by os._exit or exec, or still running"
    assert report["problems"] == [said]
    assert f"pasta-otel: {said}" in done.stderr
    alone = analyze("launch(1, 'k', 5, 1); os._exit(0)")
    assert alone.returncode == 3
    assert re.search(r"not analysed: no result of process \d+: killed, ended by os._exit", alone.stderr)


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_a_python_that_ignores_the_environment_is_said_to(fake, option):
    words = [
        sys.executable,
        "-m",
        "pasta_otel",
        "analyze",
        "memory",
        "--",
        sys.executable,
        option,
        "-c",
        "print('ran')",
    ]
    environ = {**os.environ, "PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": fake}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "no Python was reached" in done.stderr
    assert "PYTHONPATH: not with -I, -E or -S" in done.stderr


def test_a_python_without_our_package_is_named_once(fake, tmp_path):
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    python = bare / "bin" / "python"
    words = [sys.executable, "-m", "pasta_otel", "analyze", "memory", "--", str(python), "-c", "print('ran')"]
    environ = {**os.environ, "PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": fake}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert done.stderr.count("pasta-otel:") == 1
    assert f"{python} has no pasta-otel (No module named 'pasta_otel')" in done.stderr


MANGLED = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_7MeanOpsIffffEEjfLi4ELi4EEEEEvT1_"


@pytest.mark.parametrize(
    "pattern", ["reduce_kernel", "at::native::reduce_kernel", "void at::native::*", "*MeanOps*", MANGLED, "*reduce*"]
)
def test_gpu_kernels_are_chosen_by_the_names_that_the_report_prints(analyze, pattern):
    done = analyze(f'launch(1, "{MANGLED}", 1, 1); launch(1, "other", 1, 1)', "--json", "--kernel", pattern)
    assert list(kernels(done)) == [MANGLED]


def test_where_no_name_was_chosen_some_of_those_that_there_were_are_said(analyze):
    done = analyze(f'launch(1, "{MANGLED}", 1, 1); launch(1, "other", 1, 1)', "--kernel", "softmax")
    assert done.returncode == 3
    said = "none of 2 launches was chosen by --kernel; there were at::native::reduce_kernel<ReduceOp<MeanOps>>, other"
    assert said in done.stderr


def test_with_a_sample_a_gpu_kernels_line_says_of_how_many_it_is(analyze):
    done = analyze('for _ in range(100): launch(1, "some", 1, 1)', "--every", "10")
    assert "some  (10 of 100 launches," in done.stdout
    whole = analyze('launch(1, "some", 1, 1)')
    assert "some  (1 launch," in whole.stdout


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_name_that_stdout_has_no_code_for_costs_neither_report_nor_page_nor_the_programs_code(
    analyze, tmp_path, encoding
):
    page, target = tmp_path / "page.html", tmp_path / "report"
    program = 'launch(1, "größe核", 200, 32); raise SystemExit(5)'
    done = analyze(program, "--html", str(page), PYTHONIOENCODING=encoding)
    assert (done.returncode, "Traceback" in done.stderr) == (5, False)
    assert "12% of the bytes moved" in done.stdout
    assert "größe核" in page.read_text(encoding="utf-8")
    done = analyze(program, "--output", str(target), PYTHONIOENCODING=encoding)
    assert (done.returncode, "größe核" in target.read_text(encoding="utf-8")) == (5, True)


def test_a_program_that_forks_is_told_that_forked_processes_are_not_analysed(analyze):
    program = """
if os.fork() == 0:
    launch(1, "k", 5, 1)
    os._exit(0)
os.wait()
"""
    done = analyze(program)
    assert done.returncode == 3
    assert "launched no GPU kernel (processes that it forked are not analysed" in done.stderr


def test_one_file_for_report_and_page_is_refused_before_the_program_runs(analyze, tmp_path):
    target, link = tmp_path / "both", tmp_path / "link"
    link.symlink_to(target)
    for other in (target, tmp_path / "." / "both", link):
        done = analyze('print("ran")', "--output", str(target), "--html", str(other))
        assert (done.returncode, done.stdout, target.exists()) == (2, "", False)
        assert "--html: is --output too" in done.stderr
    target.touch()
    assert analyze('print("ran")', "--output", str(target), "--html", str(link)).returncode == 2
    done = analyze('launch(1, "k", 200, 32)', "--output", "/dev/null", "--html", "/dev/null")
    assert done.returncode == 0


def test_a_link_that_leads_nowhere_stays_and_leads_to_the_report(analyze, tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    assert analyze('launch(1, "k", 200, 32)', "--output", str(link)).returncode == 0
    assert link.is_symlink()
    assert "12% of the bytes moved" in target.read_text()
    target.unlink()
    analyze("raise SystemExit(4)", "--every", "0", "--output", str(link))
    assert (link.is_symlink(), target.exists()) == (True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html"], "--html: expected a value, got '--'"),
        (["--output"], "--output: expected a value, got '--'"),
        (["--kernel"], "--kernel: expected a value, got '--'"),
        (["--module", "--json"], "--module: expected a value, got '--json'"),
        (["--kernel", ""], "kernel: expected a shell pattern, got an empty one"),
        (["--module", ""], "module: expected a shell pattern, got an empty one"),
        (["--device-memory", "0"], "--device-memory: expected 1 to 1,048,576 MiB, got 0"),
        (["--device-memory", "99999999999999999999"], "--device-memory: expected 1 to 1,048,576 MiB, got 99,999"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_the_program_runs(analyze, options, message):
    # of `--html -- python x.py` the option takes the `--`; the fixture's own comes after it, before the program
    done = analyze('print("ran")', *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_without_a_driver_that_is_said_and_not_to_install_a_toolkit(analyze, tmp_path):
    if any(path.is_file() for path in library.candidates({"PATH": ""})):
        pytest.skip("the Sanitizer's library is installed here")
    with contextlib.suppress(MissingError):
        library.check_driver()
        pytest.skip("a driver is installed here")
    environ = {name: str(tmp_path) for name in ("CUDA_HOME", "CUDA_PATH")}
    done = analyze('print("ran")', PASTA_SANITIZER_LIBRARY="", **environ)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "install the NVIDIA driver" in done.stderr
    assert "install a CUDA toolkit" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "spans", "metrics", "said"),
    [
        ({"OTEL_SDK_DISABLED": "True"}, False, False, "--otlp sends nothing: OTEL_SDK_DISABLED=true"),
        ({"OTEL_TRACES_EXPORTER": "none"}, False, True, "--otlp sends no traces: OTEL_TRACES_EXPORTER=none"),
        ({"OTEL_METRICS_EXPORTER": "console"}, True, False, "--otlp sends no metrics: OTEL_METRICS_EXPORTER=console"),
    ],
)
def test_what_the_variables_of_the_sdk_turn_off_is_not_sent_and_said(analyze, variables, spans, metrics, said):
    with otlp_server() as (received, environ):
        done = analyze('launch(1, "k", 200, 32)', "--otlp", **environ, **variables)
    assert done.returncode == 0, done.stderr
    assert (bool(received["/v1/traces"]), bool(received["/v1/metrics"])) == (spans, metrics)
    assert f"pasta-otel: {said}\n" in done.stderr
    assert ("spans sent" in done.stderr) is spans


def test_what_an_otlp_server_says_is_one_line_with_our_name(analyze):
    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = Status(code=3, message="$POST is not\nfor you").SerializeToString()
            self.send_response(400)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        done = analyze('launch(1, "k", 200, 32)', "--otlp", OTEL_EXPORTER_OTLP_ENDPOINT=address)
        server.shutdown()
    assert done.returncode == 3
    assert all(line.startswith("pasta-otel: ") for line in done.stderr.splitlines()), done.stderr
    assert "dropped, http_400: $POST is not for you" in done.stderr


def folders(place):
    return list(place.glob("pasta-analyze-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT])
def test_a_signal_while_the_command_reads_results_ends_it_and_leaves_nothing_behind(fake, tmp_path, number):
    slow = f"""
import os, signal, sys, time
signal.signal({int(number)}, signal.SIG_DFL)  # a shell's background job ignores some
import pasta_otel.cli.analyze as analyze
def reading(folder):
    print("reading", flush=True)
    time.sleep(30)
analyze._results = reading
sys.argv = ["pasta-otel", "analyze", "memory", "--", {sys.executable!r}, "-c", "0"]
from pasta_otel.cli import main
main()
"""
    environ = {**os.environ, "PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": fake, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", slow], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "reading\n"
        assert len(folders(tmp_path)) == 1
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -number
    assert (folders(tmp_path), errors) == ([], "")
