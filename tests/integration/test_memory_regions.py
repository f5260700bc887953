"""``with pasta_otel.analyze()``: in programs started for it, in others before CUDA, and where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pasta_otel
from pasta_otel.errors import InputError
from tests.sanitizer import build, build_driver

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROGRAM = """
import ctypes, json, os, sys
import pasta_otel
fake = ctypes.CDLL(os.environ["FAKE_SANITIZER"])
context = ctypes.c_void_p(16)
def launch(name, warps=1, stride=1, stream=1):
    fake.fake_launch(context, ctypes.c_void_p(stream), name.encode(), warps, stride)
def wait(stream=1): fake.fake_synchronize(context, ctypes.c_void_p(stream))
def module(): fake.fake_module(context, b"", ctypes.c_size_t(0))
def names(analysis):
    return {one["symbol"]: one["launches"] for one in analysis.as_dict()["gpu_kernels"]}
def show(*values): print(json.dumps(values))
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return str(build("fake", tmp_path_factory.mktemp("fake"), driver=True))


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A libcuda.so.1 that says that CUDA is initialised where the environment does."""
    return str(build_driver(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def run(fake, tmp_path):
    patch = tmp_path / "patch.fatbin"
    patch.touch()

    def run(program, *command, **environ):
        """Run a program; by itself, or under a command's words."""
        script = tmp_path / "program.py"
        script.write_text(PROGRAM + program)
        prefix = [sys.executable, "-m", "pasta_otel", *command, "--"] if command else []
        settings = {"PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": str(patch), "FAKE_SANITIZER": fake}
        environment = {**os.environ, **settings, **environ}
        environment = {name: value for name, value in environment.items() if value is not None}
        words = [*prefix, sys.executable, str(script)]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


def shown(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def reported(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BLOCK = """
with pasta_otel.analyze() as analysis:
    module()
    launch("inside", 4, 8)
    launch("inside", 4, 8)
launch("outside")
"""


def test_a_program_that_was_not_started_for_it_is_analysed_from_its_first_block_on(run):
    done = run(
        BLOCK + "before = analysis.pending\nwait()\nshow(before, analysis.pending, names(analysis), analysis.problem)"
    )
    assert shown(done) == [2, 0, {"inside": 2}, ""]
    assert done.stderr == ""


def test_what_has_not_passed_yet_is_said(run):
    done = run(BLOCK + "show(analysis.text(), analysis.as_dict(), analysis.html())")
    text, report, page = shown(done)
    assert text.startswith("2 launches are not in yet: synchronise their streams first\nmemory analysis: 0 of 2")
    assert (report["available"], report["pending"]) == (True, 2)
    assert "2 launches are not in yet" in page


def test_text_dictionary_and_page_are_those_of_the_command(run):
    done = run(BLOCK + "wait()\nshow(analysis.text(), analysis.as_dict(), analysis.html())")
    text, report, page = shown(done)
    assert text.startswith("memory analysis: 2 of 2 launches of GPU kernels analysed")
    assert report["gpu_kernels"][0]["global"]["load"]["sectors"] == 2 * 4 * 32
    assert report["launches"] == {"seen": 2, "analysed": 2, "skipped": {}}
    assert page.startswith("<!doctype html>")
    assert "inside" in page


def test_under_the_command_with_regions_only_blocks_are_analysed_and_reported(run):
    program = 'launch("before")\n' + BLOCK + 'wait()\nprint(names(analysis), file=sys.stderr)\nlaunch("after")'
    done = run(program, "analyze", "memory", "--regions", "--json")
    report = reported(done)
    assert {one["symbol"]: one["launches"] for one in report["gpu_kernels"]} == {"inside": 2}
    assert report["launches"] == {"seen": 5, "analysed": 2, "skipped": {"inactive": 3}}
    assert "{'inside': 2}" in done.stderr


def test_under_the_command_without_regions_all_is_reported_and_a_block_gets_its_own(run):
    done = run(BLOCK + "wait()\nprint(names(analysis), file=sys.stderr)", "analyze", "memory", "--json")
    assert {one["symbol"]: one["launches"] for one in reported(done)["gpu_kernels"]} == {"inside": 2, "outside": 1}
    assert "{'inside': 2}" in done.stderr


def test_with_regions_a_program_without_a_block_is_said_to_have_none(run):
    done = run('module()\nlaunch("outside")', "analyze", "memory", "--regions")
    assert done.returncode == 3
    assert "none of 1 launches was inside a block of pasta_otel.analyze()" in done.stderr


def test_blocks_within_blocks_and_side_by_side_get_each_its_own(run):
    done = run("""
import threading
with pasta_otel.analyze() as outer:
    module()
    launch("first")
    with pasta_otel.analyze(kernels="b*") as inner:
        launch("a"); launch("b")
        thread = threading.Thread(target=launch, args=("b",)); thread.start(); thread.join()
    launch("last")
with pasta_otel.analyze() as later:
    launch("later")
wait()
show(names(outer), names(inner), names(later))
""")
    outer, inner, later = shown(done)
    assert outer == {"first": 1, "a": 1, "b": 2, "last": 1}
    assert inner == {"b": 2}
    assert later == {"later": 1}


def test_blocks_of_tasks_that_take_turns_close_in_any_order(run):
    done = run("""
import asyncio
async def request(name, wait_before, wait_after):
    await asyncio.sleep(wait_before)
    with pasta_otel.analyze(kernels=name) as analysis:
        launch(name)
        await asyncio.sleep(wait_after)
        launch(name)
    return analysis
async def main(): return await asyncio.gather(request("a", 0, 0.02), request("b", 0.01, 0.05), request("c", 0, 0))
with pasta_otel.analyze(): module()
found = asyncio.run(main())
launch("a"); wait()
show(*map(names, found))
""")
    assert shown(done) == [{"a": 2}, {"b": 2}, {"c": 2}]


def test_threads_with_blocks_of_their_own_lose_nothing(run):
    done = run("""
import threading
found, turn = {}, threading.Lock()  # the stand-in for the driver is no library for threads
def work(number):
    for _ in range(20):
        with pasta_otel.analyze(kernels=f"k{number}") as analysis:
            with turn: launch(f"k{number}", stream=number)
            with turn: launch("noise", stream=number)
            with turn: wait(number)
        found[number] = found.get(number, 0) + names(analysis)[f"k{number}"]
with pasta_otel.analyze(): module()
threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
for thread in threads: thread.start()
for thread in threads: thread.join()
show(found)
""")
    assert shown(done) == [{str(number): 20 for number in range(1, 5)}]


def test_an_exception_passes_and_the_block_is_closed(run):
    done = run("""
try:
    with pasta_otel.analyze() as analysis:
        module(); launch("inside")
        raise LookupError("the program's own")
except LookupError as error: caught = str(error)
launch("outside"); wait()
show(caught, names(analysis))
""")
    assert shown(done) == ["the program's own", {"inside": 1}]


def test_one_analysis_may_be_entered_again_and_within_itself(run):
    done = run("""
analysis = pasta_otel.analyze()
for round in range(3):
    with analysis, analysis:
        if not round: module()
        launch("k")
    launch("k")
wait()
show(names(analysis), analysis.as_dict()["launches"]["seen"])
""")
    assert shown(done) == [{"k": 3}, 3]


def test_a_program_that_analyses_for_long_keeps_only_what_its_analyses_hold(run):
    done = run("""
from pasta_otel.gpu.memory.session import running
with pasta_otel.analyze(): module()
for _ in range(50):
    with pasta_otel.analyze() as analysis: launch("k")
    wait()
session, found = running(), names(analysis)
show(len(session.collector.launches), len(session._blocks._wanted), found)
""")
    assert shown(done) == [0, 0, {"k": 1}]


def test_sample_and_count_hold_for_each_block(run):
    done = run("""
found = []
for _ in range(2):
    with pasta_otel.analyze(every=2, count=3) as analysis:
        module()
        for _ in range(9): launch("k")
    wait(); found.append(analysis.as_dict()["launches"])
show(*found)
""")
    assert shown(done) == [{"seen": 9, "analysed": 3, "skipped": {"sample": 4, "count": 2}}] * 2


def test_a_later_block_may_want_other_gpu_kernels_of_a_module_that_is_there(run):
    done = run("""
with pasta_otel.analyze(kernels="a*") as one: module(); launch("a"); launch("b")
with pasta_otel.analyze(kernels="b*") as other: launch("a"); launch("b")
wait(); show(names(one), names(other), fake.fake_patched())
""")
    assert shown(done) == [{"a": 1}, {"b": 1}, 1]


NOTHING = """
with pasta_otel.analyze() as analysis:
    launch("k"); ran = True
report = analysis.as_dict()
show(ran, analysis.available, analysis.problem, analysis.text(), report["available"], report["gpu_kernels"], analysis.html())
"""


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (
            {"CUDA_INJECTION64_PATH": "/profiler.so"},
            "not available, CUPTI is active: CUDA_INJECTION64_PATH=/profiler.so",
        ),
        ({"PASTA_SANITIZER_LIBRARY": "/nonexistent.so"}, "/nonexistent.so (PASTA_SANITIZER_LIBRARY) does not exist"),
        ({"PASTA_SANITIZER_LIBRARY": sys.executable}, "cannot be used"),
        ({"PASTA_SANITIZER_PATCH": "/nonexistent.fatbin"}, "(PASTA_SANITIZER_PATCH) does not exist"),
        ({"FAKE_SUBSCRIBE_RESULT": "10"}, "not available, sanitizerSubscribe: there is another subscriber"),
        ({"FAKE_SUBSCRIBE_RESULT": "13"}, "not available, sanitizerSubscribe: cannot reach the CUDA driver"),
    ],
)
def test_where_it_cannot_be_one_line_says_why_and_the_block_runs(run, environ, problem):
    ran, available, said, text, in_report, kernels, page = shown(run(NOTHING, **environ))
    assert (ran, available, in_report, kernels) == (True, False, False, [])
    assert problem in said
    assert "\n" not in said
    assert text == f"not analysed: {said}"
    assert problem in page


def test_an_architecture_without_patches_is_known_once_the_module_is_loaded(run):
    done = run("""
with pasta_otel.analyze() as analysis:
    before = analysis.available
    module(); launch("k")
show(before, analysis.available, analysis.problem)
""", FAKE_REFUSES_PATCHES="1")  # fmt: skip
    before, after, problem = shown(done)
    assert (before, after) == (True, False)
    assert problem == "this GPU cannot be analysed: sanitizerAddPatchesFromFile: invalid parameter"


def test_without_a_compiler_that_works_it_is_said(run, tmp_path):
    environ = {"PASTA_SANITIZER_PATCH": "", "PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    ran, available, problem, *_ = shown(run(NOTHING, **environ))
    assert (ran, available) == (True, False)
    assert problem.startswith(("no nvcc to compile the device patches", "nvcc cannot compile the device patches: "))
    assert "\n" not in problem


def test_a_driver_that_is_not_initialised_yet_is_no_hindrance(run, driver):
    done = run(f'ctypes.CDLL("{driver}")\n' + BLOCK + "wait()\nshow(names(analysis))")
    assert shown(done) == [{"inside": 2}]


def test_a_process_that_has_used_cuda_is_told_how_to_be_started(run, driver):
    done = run(f'ctypes.CDLL("{driver}")\n' + NOTHING, FAKE_CUDA_IN_USE="1")
    assert shown(done)[2] == (
        "CUDA was initialised before: start the program by `pasta-otel analyze memory --regions -- CMD`"
    )


def test_under_the_command_cuda_may_be_in_use_before_the_block(run, driver):
    program = f'ctypes.CDLL("{driver}")\n' + BLOCK
    report = reported(run(program, "analyze", "memory", "--regions", "--json", FAKE_CUDA_IN_USE="1"))
    assert report["launches"]["analysed"] == 2


def test_our_own_capture_is_named_and_does_not_begin_afterwards(run):
    done = run("""
from opentelemetry.sdk.trace import TracerProvider
from pasta_otel.gpu.cupti import start
provider = TracerProvider()
pasta_otel.instrument(tracer_provider=provider)
with pasta_otel.analyze() as first: pass
waiting = len(start.running)
pasta_otel.uninstrument()
with pasta_otel.analyze() as second: module(); launch("k")
wait()
starter = start.GpuCaptureStarter(start.CaptureOptions(), uses_cuda=lambda: True)
starter._begin()
show(first.problem, waiting, second.problem, names(second), starter.missing)
""")
    first, waiting, second, found, missing = shown(done)
    assert first.startswith("not available, CUPTI is active: pasta_otel.instrument() captures GPU kernels")
    assert (waiting, second, found) == (1, "", {"k": 1})
    assert missing == "this process' memory accesses are analysed, and a process has one profiler"


def test_under_the_command_our_own_capture_stands_back(run):
    done = run("""
from opentelemetry.sdk.trace import TracerProvider
running = pasta_otel.instrument(tracer_provider=TracerProvider())
print("capture", running.gpu, "pasta_otel.gpu.cupti.start" in sys.modules, file=sys.stderr)
module(); launch("k")
""", "analyze", "memory", "--json")  # fmt: skip
    assert "capture None False" in done.stderr
    assert reported(done)["launches"]["analysed"] == 1


def test_a_running_profiler_of_torch_is_named(run, tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "autograd.py").write_text("def _profiler_enabled(): return True\n")
    done = run(f"sys.path.insert(0, {str(tmp_path)!r})\nimport torch.autograd\n" + NOTHING)
    assert shown(done)[2] == "not available, CUPTI is active: torch.profiler is running"


def test_a_forked_child_says_so_and_runs_its_block(run):
    done = run("""
module(); launch("k")
if os.fork() == 0:
    with pasta_otel.analyze() as analysis: pass
    print(analysis.available, analysis.problem, file=sys.stderr, flush=True)
    os._exit(0)
os.wait()
""", "analyze", "memory", "--json")  # fmt: skip
    assert "False not available in a process that was forked from an analysed one" in done.stderr
    assert reported(done)["launches"]["analysed"] == 1


def test_a_block_in_a_process_that_could_not_be_analysed_has_the_commands_reason(run):
    done = run(NOTHING, "analyze", "memory", "--regions", FAKE_SUBSCRIBE_RESULT="13")
    assert done.returncode == 3
    assert json.loads(done.stdout)[2] == "sanitizerSubscribe: cannot reach the CUDA driver"


def test_another_tool_in_one_process_is_refused(run):
    done = run(f"""
with pasta_otel.analyze() as first: module()
with pasta_otel.analyze(tool="{EXAMPLES}/nonfinite.py:NonFinite") as second: launch("k")
show(first.problem, second.problem)
""")
    assert shown(done) == ["", "this process is analysed with the tool memory, not nonfinite"]


def test_what_is_destroyed_after_the_interpreter_calls_nobody(run):
    assert run(BLOCK + "wait()\nfake.fake_stream_at_exit()\nshow(names(analysis))").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every: expected at least 1, got 0"),
        ({"every": "3"}, "every: expected a whole number, got '3'"),
        ({"count": -1}, "count: expected at least 1"),
        ({"device_bytes": 10}, r"device_bytes: expected at least 1 MiB \(1,048,576 bytes\), got 10"),
        ({"kernels": [3]}, "kernels: expected shell patterns"),
        ({"tool": "nothing"}, "tool: expected FILE.py:CLASS or MODULE:CLASS"),
        ({"tool": "/nonexistent.py:Tool"}, "tool Tool: FileNotFoundError"),
        ({"tool": object()}, "is no subclass of"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_at_once(arguments, message):
    with pytest.raises(InputError, match=message):
        pasta_otel.analyze(**arguments)


@pytest.fixture(scope="module")
def without_driver(tmp_path_factory):
    """A Sanitizer that loads and takes subscriptions, on a machine without a driver."""
    words = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
    if not subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("this machine has an NVIDIA driver")
    return str(build("fake", tmp_path_factory.mktemp("without")))


def test_a_block_without_a_driver_says_so_every_time(run, without_driver):
    done = run(NOTHING + NOTHING, PASTA_SANITIZER_LIBRARY=without_driver, FAKE_SANITIZER=without_driver)
    for line in done.stdout.splitlines():
        ran, available, problem, *_ = json.loads(line)
        assert (ran, available) == (True, False)
        assert problem.startswith("no NVIDIA driver: libcuda.so.1: cannot open shared object file")
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("analysis", [["memory"], ["tool", f"{EXAMPLES}/nonfinite.py:NonFinite"]])
def test_the_command_without_a_driver_says_so_once_and_runs_the_program(run, without_driver, analysis):
    done = run('print("ran")', "analyze", *analysis, PASTA_SANITIZER_LIBRARY=without_driver)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "no NVIDIA driver: libcuda.so.1: cannot open shared object file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("delay", [0.001, 0.02])
def test_sigterm_while_results_are_read_at_the_end_loses_none(run, delay):
    program = f"""
import signal, threading, time
module()
for number in range(800): launch(f"k{{number % 5}}", 20)
def terminate():
    time.sleep({delay})
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=terminate, daemon=True).start()
"""
    done = run(program, "analyze", "memory", "--json")
    assert json.loads(done.stdout)["launches"] == {"seen": 800, "analysed": 800, "skipped": {}}


def test_sigterm_in_the_middle_of_our_work_waits_for_its_end(run):
    program = """
import signal, threading, time
module()
from pasta_otel.gpu.memory.session import running
collector = running().collector
decode, sent = collector._tool.decode, []
def terminated(record):
    if not sent:
        sent.append(1)
        with collector._lock: os.kill(os.getpid(), signal.SIGTERM)
    return decode(record)
collector._tool.decode = terminated
for number in range(3): launch("k", 20)
wait()
launch("k", 20)
time.sleep(30)
"""
    done = run(program, "analyze", "memory", "--json")
    assert done.returncode == 128 + 15
    assert json.loads(done.stdout)["launches"] == {"seen": 4, "analysed": 4, "skipped": {}}


def test_a_block_that_could_not_begin_in_one_thread_leaves_another_threads_open(run):
    done = run("""
import threading
from pasta_otel.gpu.memory import region
analysis = pasta_otel.analyze()
module()
inside, failed = threading.Event(), threading.Event()
find = analysis._find
def other():
    def fails(): raise RuntimeError("cannot begin")
    inside.wait()
    analysis._find = fails
    with analysis:
        analysis._find = find
        failed.set()
        ended.wait()
ended = threading.Event()
thread = threading.Thread(target=other)
thread.start()
with analysis:
    launch("inside")
    inside.set()
    failed.wait()
launch("outside")
wait()
ended.set()
thread.join()
launch("outside")
wait()
show(names(analysis))
""")
    assert shown(done) == [{"inside": 1}]


def test_a_result_that_cannot_be_written_is_told_of_and_the_program_ends_as_it_would(run, tmp_path):
    done = run(
        'import resource\nmodule()\nfor _ in range(200): launch("k", 20)\nwait()\n'
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\nimport signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nimport atexit\n",
        *("analyze", "memory", "--output", str(tmp_path / "report.txt")),
    )
    assert "Traceback" not in done.stderr
    assert "pasta-otel: no result of process" in done.stderr
    assert "it could not be written below" in done.stderr


def test_the_report_says_how_many_of_a_blocks_launches_were_analysed(run):
    done = run(
        'module()\nwith pasta_otel.analyze(count=3):\n    for _ in range(9): launch("k", 20)\n    wait()\n',
        *("analyze", "memory", "--regions"),
    )
    assert "3 of 9 launches" in done.stdout
