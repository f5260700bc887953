import shutil
import subprocess
from pathlib import Path

import pytest

from pasta_otel.gpu.cupti.recording import read_recording

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "pasta_otel" / "_native"
FIXTURES = ROOT / "tests" / "fixtures"


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("fuzz") / "fuzz_decode"
    sources = [NATIVE / "rows.c", NATIVE / "decode.c", FIXTURES / "native" / "fuzz_decode.c"]
    flags = ["-D_GNU_SOURCE", "-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    built = subprocess.run(
        [compiler, *flags, "-I", NATIVE, "-o", program, *sources, "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode and "sanitize" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("seed", [1, 2])
def test_the_decoder_touches_nothing_outside_its_buffer_whatever_is_in_it(fuzzer, tmp_path, seed):
    files = []
    for number, recording in enumerate(sorted((FIXTURES / "cupti").glob("*.gz"))):
        path = tmp_path / f"{number}.raw"
        path.write_bytes(read_recording(recording).buffers[0][:200_000])
        files.append(str(path))
    done = subprocess.run(
        [str(fuzzer), "3000", str(seed), *files], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "ok\n"
