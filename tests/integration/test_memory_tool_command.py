"""``analyze tool FILE.py:CLASS -- CMD``, with the documented example, over a Sanitizer library that runs on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sanitizer import build

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
EXAMPLE = f"{EXAMPLES}/nonfinite.py:NonFinite"
PROGRAM = """
import ctypes, os, sys
import pasta_otel
fake = ctypes.CDLL(os.environ["FAKE_SANITIZER"])
context = ctypes.c_void_p(16)
fake.fake_module(context, b"", ctypes.c_size_t(0))
values = (ctypes.c_float * 64)(*([1.0] * 64))
def launch(name, stream=1):
    address = ctypes.c_ulonglong(ctypes.addressof(values))
    fake.fake_launch_at(context, ctypes.c_void_p(stream), name.encode(), 2, 4, address)
    fake.fake_synchronize(context, ctypes.c_void_p(stream))
"""
DIVIDES = """
launch("_Z4normPf")
values[40] = values[41] = float("nan"); values[3] = float("-inf")
launch("_Z6dividePf", 2)
launch("_Z3addPf")
print("from the program")
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return str(build("fake_nonfinite", tmp_path_factory.mktemp("fake"), EXAMPLES, driver=True))


@pytest.fixture
def analyze(fake, tmp_path):
    patch = tmp_path / "patch.fatbin"
    patch.touch()

    def run(program, *options, tool=EXAMPLE, cwd=None, **environ):
        script = tmp_path / "program.py"
        script.write_text(PROGRAM + program)
        words = [sys.executable, "-m", "pasta_otel", "analyze", "tool", tool, *options, "--", sys.executable, script]
        settings = {"PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": str(patch), "FAKE_SANITIZER": fake}
        environment = {**os.environ, **settings, **environ}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)

    return run


def test_the_first_gpu_kernel_that_stored_nan_is_named_with_its_line(analyze, tmp_path):
    done = analyze(DIVIDES)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["from the program", "nonfinite: 3 of 3 launches of GPU kernels analysed"]
    assert lines[3] == "192 numbers stored as float32; launches that stored NaN or infinity, the first one first:"
    assert "launch 2: divide: 2 NaN, 1 infinite of 64, first at 0x" in lines[4]
    calling = next(at for at, line in enumerate(PROGRAM.splitlines(), 1) if "fake_launch_at" in line)
    assert lines[5].strip() == f"{tmp_path}/program.py:{calling} launch"
    assert "launch 3: add" in lines[6]


def test_the_json_report_holds_every_launch_with_its_record(analyze):
    done = analyze(DIVIDES, "--json")
    report = json.loads(done.stdout)
    assert (report["schema"], report["tool"]) == (1, "nonfinite")
    assert report["launches"] == {"seen": 3, "analysed": 3, "skipped": {}}
    assert [one["name"] for one in report["results"]] == ["_Z4normPf", "_Z6dividePf", "_Z3addPf"]
    assert [one["number"] for one in report["results"]] == [1, 2, 3]
    assert [one["result"]["nan"] for one in report["results"]] == [0, 2, 2]
    assert report["results"][0]["stream"] != report["results"][1]["stream"]
    assert "from the program" in done.stderr


def test_launches_are_chosen_and_the_report_has_a_file(analyze, tmp_path):
    target = tmp_path / "report.json"
    done = analyze(DIVIDES, "--kernel", "*add*", "--json", "--output", str(target))
    assert done.stdout == "from the program\n"
    report = json.loads(target.read_text())
    assert report["launches"] == {"seen": 3, "analysed": 1, "skipped": {"name": 2}}


def test_arguments_of_the_class_reach_the_device(analyze):
    report = json.loads(analyze(DIVIDES, "--option", "number=float16", "--json").stdout)
    assert [one["result"]["numbers"] for one in report["results"]] == [128, 128, 128]


def test_blocks_of_the_program_are_analysed_alone_and_get_their_own(analyze):
    done = analyze(
        """
launch("before")
with pasta_otel.analyze() as analysis: launch("inside")
print(analysis.text(), file=sys.stderr)
print(analysis.html().count("<pre>"), file=sys.stderr)
""",
        "--regions",
        "--json",
    )
    assert [one["name"] for one in json.loads(done.stdout)["results"]] == ["inside"]
    assert "nonfinite: 1 of 1 launches of GPU kernels analysed" in done.stderr
    assert "no NaN and no infinity in 64 numbers" in done.stderr
    assert done.stderr.splitlines()[-1] == "1"


def test_a_block_of_a_program_by_itself_may_have_a_tool(fake, tmp_path):
    program = """
with pasta_otel.analyze(tool="nonfinite.py:NonFinite") as analysis:
    fake.fake_module(context, b"", ctypes.c_size_t(0))
    launch("_Z4normPf")
print(analysis.text())
"""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace('fake.fake_module(context, b"", ctypes.c_size_t(0))\n', "") + program)
    environ = {**os.environ, "PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": fake, "FAKE_SANITIZER": fake}
    words = [sys.executable, script]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False, cwd=EXAMPLES)
    assert done.stdout.endswith("no NaN and no infinity in 64 numbers stored as float32\n"), done.stderr


def test_a_relative_file_is_found_by_a_program_that_starts_others_elsewhere(analyze, tmp_path):
    done = analyze(
        """
import subprocess
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], cwd="/", check=True)
launch("k")
""",
        "--json",
        tool="nonfinite.py:NonFinite",
        cwd=EXAMPLES,
    )
    assert done.returncode == 0, done.stderr
    assert len({one["pid"] for one in json.loads(done.stdout)["results"]}) == 2


def test_the_programs_exit_code_is_the_commands(analyze):
    assert analyze('launch("k"); raise SystemExit(7)').returncode == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "import nothing_of_this_name\n",
            r"mine.py:1: tool Mine: ModuleNotFoundError: No module named 'nothing_of_this",
        ),
        ("\n\ndef broken(:\n", r"mine.py:3: tool Mine: SyntaxError: invalid syntax"),
        ("class Mine: pass\n", r"mine.py:Mine: is no subclass of pasta_otel.gpu.memory.tool.Tool"),
        ("x = 1\n", r"mine.py: tool: has no class Mine"),
        ("\nclass Mine:\n    def __init__(self):\n        self.x = 1 / 0\n", "mine.py:4: tool Mine: ZeroDivisionError"),
        ("raise SystemExit(0)\n", "mine.py:1: tool Mine: SystemExit"),
    ],
)
def test_a_file_that_holds_no_tool_is_refused_with_its_line_before_the_program_runs(
    analyze, tmp_path, content, message
):
    (tmp_path / "mine.py").write_text(content)
    done = analyze('print("ran")', tool=f"{tmp_path}/mine.py:Mine")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


MINE = """
import struct
from pathlib import Path
from pasta_otel.gpu.memory.tool import Tool
class Mine(Tool):
    name, source, patches, slot_bytes = "mine", Path(__file__).with_name("mine.cu"), {3: "Mine"}, 64
    def header(self, memory):
        return struct.pack("<3Q", 4, 0x7F800000, 0x7FFFFF)
    def decode(self, record):
        return {"bytes": len(record.slot)}
    def as_json(self, result):
        return result
"""


def mine(folder, code="", tool=MINE):
    (folder / "mine.cu").write_text(code)
    (folder / "mine.py").write_text(tool)
    return f"{folder}/mine.py:Mine"


def test_device_functions_that_do_not_compile_are_said_with_the_compilers_message_and_the_program_runs(
    analyze, tmp_path
):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    reference = mine(tmp_path, '#include "patch.cuh"\nextern "C" __device__ int Mine(void* slot) { return nowhere; }\n')
    environ = {"PASTA_SANITIZER_PATCH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = analyze('print("ran")', tool=reference, **environ)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "not analysed by mine: nvcc cannot compile the device patches: " in done.stderr
    assert 'mine.cu(2): error: identifier "nowhere" is undefined' in done.stderr
    assert analyze("raise SystemExit(7)", tool=reference, **environ).returncode == 7


def test_a_header_beside_the_source_that_changes_is_compiled_again(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    from pasta_otel.gpu.memory import library

    code, header = tmp_path / "mine.cu", tmp_path / "mine.cuh"
    code.write_text('#include "mine.cuh"\nextern "C" __device__ __noinline__ int Mine(void*) { return VALUE; }\n')
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PASTA_SANITIZER_PATCH": ""}
    header.write_text("#define VALUE 0\n")
    first = library.find_patch(environ, code)
    assert library.find_patch(environ, code) == first
    header.write_text("#define VALUE 1\n")
    assert library.find_patch(environ, code) != first


def test_a_record_that_cannot_be_read_is_a_problem_and_no_crash(analyze, tmp_path):
    reference = mine(tmp_path, tool=MINE.replace('return {"bytes"', 'raise KeyError("x")\n        return {"bytes"'))
    done = analyze('launch("k"); print("ran")', tool=reference)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "not analysed by mine: mine: KeyError: 'x'" in done.stderr


def test_a_report_that_fails_names_its_line(analyze, tmp_path):
    reference = mine(tmp_path, tool=MINE + "    def report(self, results):\n        return results['x']\n")
    done = analyze('launch("k"); print("ran")', tool=reference)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert f"{tmp_path}/mine.py:{len(MINE.splitlines()) + 2}: report: TypeError" in done.stderr


def test_a_report_that_is_no_text_is_said_and_no_old_one_stays_behind(analyze, tmp_path):
    reference = mine(tmp_path, tool=MINE + "    def report(self, results):\n        pass\n")
    target = tmp_path / "report"
    target.write_text("yesterday's")
    done = analyze('launch("k"); print("ran")', "--output", str(target), tool=reference)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert done.stderr == "pasta-otel: report: mine: report() must return a string, got NoneType\n"
    assert target.read_text() == "no report by mine: report: mine: report() must return a string, got NoneType\n"
    done = analyze('launch("k")', "--json", tool=reference)
    assert (done.returncode, len(json.loads(done.stdout)["results"])) == (0, 1)


def test_a_report_with_half_a_surrogate_pair_is_written(analyze, tmp_path):
    reference = mine(tmp_path, tool=MINE + "    def report(self, results):\n        return chr(0xD880) + 'é'\n")
    target = tmp_path / "report"
    assert analyze('launch("k")', "--output", str(target), tool=reference).returncode == 0
    assert target.read_text(encoding="utf-8").endswith("\n\\ud880é\n")
    done = analyze('launch("k")', tool=reference, PYTHONIOENCODING="ascii")
    assert done.stdout.endswith("\n\\ud880\\xe9\n")


def test_a_reason_is_named_where_launches_left_nothing_and_none_was_skipped():
    from pasta_otel.cli.analyze_run import why_nothing

    for skipped in ({}, {"name": 0}):
        assert why_nothing(1, 4, skipped, []) == "none of 4 launches left a result"
    assert why_nothing(1, 4, {"name": 4, "module": 0}, []) == "none of 4 launches was chosen by --kernel"


def test_a_block_in_which_no_pattern_fits_says_what_there_was(analyze):
    program = """
with pasta_otel.analyze(kernels="nix") as analysis: launch("_Z4normPf")
print(analysis.text())
"""
    assert "there were norm" in analyze(program, "--json").stderr


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PASTA_SANITIZER_LIBRARY": "/nonexistent.so"}, "(PASTA_SANITIZER_LIBRARY) does not exist"),
        ({"CUDA_INJECTION64_PATH": "/profiler.so"}, "not available, CUPTI is active"),
        ({"FAKE_REFUSES_PATCHES": "1"}, "this GPU cannot be analysed"),
    ],
)
@pytest.mark.parametrize(("code", "expected"), [(0, 3), (7, 7)])
def test_where_analysis_is_impossible_one_message_says_so_and_the_program_runs(
    analyze, environ, message, code, expected
):
    done = analyze(f'launch("k"); print("ran"); raise SystemExit({code})', **environ)
    assert (done.returncode, done.stdout) == (expected, "ran\n")
    assert done.stderr.count("pasta-otel:") == 1
    assert message in done.stderr


def test_a_program_that_is_not_python_runs_and_is_said_not_to_be_analysed(fake):
    words = [sys.executable, "-m", "pasta_otel", "analyze", "tool", EXAMPLE, "--", "sh", "-c", "echo ran; exit 4"]
    environ = {**os.environ, "PASTA_SANITIZER_LIBRARY": fake, "PASTA_SANITIZER_PATCH": fake}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (4, "ran\n")
    assert "no Python was reached (only Python programs are analysed" in done.stderr


SOMETIMES = """
class Once(Mine): pass
class Mine(Once):
    calls = 0
    def {method}(self, given):
        Mine.calls += 1
        return {code} if Mine.calls in {when} else super().{method}(given)
"""


@pytest.mark.parametrize(
    ("method", "code", "skipped", "problem"),
    [
        ("header", "1 / 0", "header", "mine: ZeroDivisionError: division by zero in header() ("),
        ("header", "'abc'", "header", "mine: header() must return bytes, got str"),
        ("header", "bytes(72)", "header", "mine: header() returned 72 bytes, more than a slot's 64"),
        ("decode", "exit(9)", "undecodable", "mine: SystemExit: 9 in decode() ("),
        ("as_json", "{1, 2}", "not_json", "mine: TypeError: Object of type set is not JSON serializable in as_json()"),
        ("as_json", "1 / 0", "not_json", "mine: ZeroDivisionError: division by zero in as_json() ("),
    ],
)
def test_a_launch_that_the_tool_cannot_handle_is_lost_and_named_and_the_rest_reported(
    analyze, tmp_path, method, code, skipped, problem
):
    program = 'for _ in range(3): launch("k")\nprint("ran")'
    never = mine(tmp_path, tool=MINE + SOMETIMES.format(method=method, code=code, when="range(9)"))
    done = analyze(program, tool=never)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1
    once = mine(tmp_path, tool=MINE + SOMETIMES.format(method=method, code=code, when="{2}"))
    done = analyze(program, "--json", tool=once)
    report = json.loads(done.stdout)
    assert (done.returncode, report["launches"]["skipped"]) == (0, {skipped: 1})
    assert [one["result"] for one in report["results"]] == [{"bytes": 64}] * 2
    assert problem in done.stderr
    assert problem in report["problems"][0]


@pytest.mark.parametrize("tables", ["1 / 0", "{'a': {1}}", "[1]", "exit(4)"])
def test_tables_that_fail_are_named_and_the_launches_are_reported(analyze, tmp_path, tables):
    reference = mine(tmp_path, tool=f"{MINE}\n    def tables(self): return {tables}\n")
    done = analyze('launch("k")', "--json", tool=reference)
    report = json.loads(done.stdout)
    assert (done.returncode, len(report["results"]), report["tables"]) == (0, 1, {})
    assert "tables()" in report["problems"][0]


def test_tables_never_reach_into_the_rest_and_are_in_the_report(analyze, tmp_path):
    code = """
    def tables(self): return {"launches": [], "seen": 0, "problems": 7}
    def report(self, results): return f"{len(results)} and {list(self.process_tables.values())}"
"""
    reference = mine(tmp_path, tool=MINE + code)
    (tables,) = json.loads(analyze('launch("k")', "--json", tool=reference).stdout)["tables"].values()
    assert tables == {"launches": [], "seen": 0, "problems": 7}
    assert f"1 and [{tables}]" in analyze('launch("k")', tool=reference).stdout


def test_a_tool_that_fails_never_raises_into_a_block_of_the_program(analyze, tmp_path):
    code = """
    def tables(self): return 1 / 0
    def as_json(self, result): return {1}
"""
    program = """
with pasta_otel.analyze() as analysis: launch("k")
report = analysis.as_dict()
print(report["launches"], len(report["problems"]))
"""
    done = analyze(program, tool=mine(tmp_path, tool=MINE + code))
    assert done.stdout == "{'seen': 1, 'analysed': 0, 'skipped': {'not_json': 1}} 2\n"


def test_optional_instructions_that_the_library_does_not_know_are_in_the_results(analyze, tmp_path):
    reference = mine(tmp_path, tool=f"{MINE}\n    optional = {{43: 'Mine', 44: 'Mine'}}\n")
    report = json.loads(analyze('launch("k")', "--json", tool=reference, FAKE_UNKNOWN_INSTRUCTION="43").stdout)
    assert report["not_counted"] == [43]
    assert "not counted: TMA_LOAD, " in analyze('launch("k")', tool=reference, FAKE_UNKNOWN_INSTRUCTION="43").stdout


def test_a_slot_larger_than_the_device_memory_allowed_is_refused_and_the_program_runs(analyze, tmp_path):
    reference = mine(tmp_path, tool=f"{MINE}\n    slot_bytes = 16 << 20\n")
    done = analyze('launch("k"); print("ran")', "--device-memory", "1", tool=reference)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "slot_bytes is 16,777,216, more than the 1,048,576 bytes of device memory allowed" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    reference = mine(tmp_path, tool=f"{MINE}\n    slot_bytes = 1 << 40\n")
    assert analyze('launch("k"); raise SystemExit(7)', tool=reference).returncode == 7


def test_numbers_that_json_does_not_know_are_words_in_the_json_report(analyze, tmp_path):
    reference = mine(tmp_path, tool=f"{MINE}\n    def as_json(self, result): return [float('nan'), float('inf')]\n")
    done = analyze('launch("k")', "--json", tool=reference)
    assert json.loads(done.stdout, parse_constant=pytest.fail)["results"][0]["result"] == ["NaN", "Infinity"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("    patches = {'x': 'Mine'}", "patches: 'x' is no Instruction"),
        ("    patches = {999: 'Mine'}", "patches: 999 is no Instruction"),
        ("    patches = {}", "patches and optional are empty: there is nothing to count"),
        ("    slot_bytes = '80'", "slot_bytes must be a positive multiple of 8, got '80'"),
    ],
)
def test_a_tool_whose_attributes_make_no_sense_is_refused_before_the_program_runs(analyze, tmp_path, change, message):
    done = analyze('print("ran")', tool=mine(tmp_path, tool=f"{MINE}\n{change}\n"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"{message}\n")
    assert len(done.stderr.splitlines()) == 1


def test_what_a_tool_prints_while_it_loads_mixes_with_no_report_and_with_no_output_of_the_program(analyze, tmp_path):
    reference = mine(tmp_path, tool=f'print("imported")\n{MINE}')
    done = analyze('launch("k")', "--json", tool=reference)
    assert json.loads(done.stdout)["tool"] == "mine"
    assert done.stderr.count("imported") == 2  # the command, and the program's Python
    done = analyze('launch("k"); print("ran")', "--output", str(tmp_path / "report.txt"), tool=reference)
    assert done.stdout == "ran\n"
    assert "imported" not in (tmp_path / "report.txt").read_text()


def test_a_tools_report_that_fails_leaves_the_programs_code(analyze, tmp_path):
    reference = mine(tmp_path, tool=MINE + "    def report(self, results):\n        return results['x']\n")
    done = analyze('launch("k"); raise SystemExit(7)', tool=reference)
    assert done.returncode == 7
    assert "report: TypeError" in done.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_tools_report_whose_file_fails_is_on_stdout_and_a_wrong_file_is_refused_before(analyze, tmp_path, form):
    done = analyze('launch("k"); raise SystemExit(7)', *form, "--output", "/dev/full")
    assert done.returncode == 7
    assert "nonfinite" in done.stdout
    assert "/dev/full: --output: No space left on device" in done.stderr
    refused = analyze('print("ran")', *form, "--output", str(tmp_path / "missing" / "report"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--output: No such file or directory" in refused.stderr


def test_an_impossible_analysis_by_a_tool_leaves_no_old_report_behind(analyze, tmp_path):
    target = tmp_path / "report"
    target.write_text("yesterday's")
    missing = {"PASTA_SANITIZER_LIBRARY": "/nonexistent.so"}
    assert analyze("pass", "--json", "--output", str(target), **missing).returncode == 3
    report = json.loads(target.read_text())
    assert report["launches"] == {"seen": 0, "analysed": 0, "skipped": {}}
    assert "does not exist" in report["problems"][0]
    analyze("pass", "--output", str(target), **missing)
    assert target.read_text().startswith("not analysed by nonfinite: /nonexistent.so")


def test_a_process_that_died_under_a_tool_is_named_and_so_are_names_to_choose_from(analyze):
    died = analyze('launch("k"); os._exit(0)')
    assert died.returncode == 3
    assert "not analysed by nonfinite: no result of process" in died.stderr
    none = analyze('launch("_Z4normPf")', "--kernel", "softmax")
    assert "none of 1 launches was chosen by --kernel; there were norm" in none.stderr
