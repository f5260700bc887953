"""The built wheel: what it holds, and that it works in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest

from pasta_otel.ebpf.build import find_tool
from pasta_otel.errors import MissingError
from pasta_otel.gpu.memory import library

ROOT = Path(__file__).parents[2]


def build(out: Path, environ: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, ROOT],
        check=True,
        capture_output=True,
        env={**os.environ, **environ},
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build(out, {})
    (built,) = out.glob("*.whl")
    return built


def test_the_wheels_only_top_level_package_is_pasta_otel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pasta_otel"}
    assert {"pasta_otel/slo/controller.py", "pasta_otel/py.typed"} <= set(names)


def test_the_wheel_holds_the_native_extension_where_there_is_a_compiler(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for extension in ("_native/_cupti", "_native/_sanitizer", "termination/_deadline"):
        built = any(name.startswith(f"pasta_otel/{extension}") and name.endswith(".so") for name in names)
        assert built == ("abi3" in wheel.name), "the wheel's tag and its content disagree"
    if not built:
        assert os.environ.get("CI") != "true", "CI builds the wheel with the extension"
        pytest.skip("no C compiler or Python.h on this machine")


def test_the_wheel_ships_the_host_probes_for_both_loaders_where_there_is_clang(wheel: Path) -> None:
    if find_tool("clang") is None:
        pytest.skip("no clang: this wheel has no host probes")
    names = {
        Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("pasta_otel/ebpf/objects/")
    }
    sources = {path.name for path in (ROOT / "ebpf" / "bpf").glob("*.bpf.c")}
    assert {name.replace(".bpf.c", ".bcc.c") for name in sources} < names
    assert {f"pasta.{os.uname().machine}.bpf.o", "probes.json", "pasta.bcc.c"} < names


def test_a_wheel_built_without_a_compiler_is_tagged_as_pure_python(tmp_path: Path) -> None:
    build(tmp_path, {"CC": "there-is-no-such-compiler"})
    assert next(made.name for made in tmp_path.glob("*.whl")).endswith("py3-none-any.whl")


def test_the_wheel_carries_the_data_it_reads_at_run_time(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("slo", "exporters", "ebpf", "pasta_otel/demo"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".yaml", ".json", ".html", ".css", ".js", ".sql"}:
                inside = path.relative_to(ROOT).as_posix()
                assert (inside if inside.startswith("pasta_otel/") else f"pasta_otel/{inside}") in names


def test_the_wheel_carries_the_device_functions_and_compiled_ones_where_there_was_nvcc(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folder = "pasta_otel/gpu/kernels"
    assert {f"{folder}/memory.cu", f"{folder}/patch.cuh", "pasta_otel/gpu/memory/inject/sitecustomize.py"} <= names
    assert (f"{folder}/memory.fatbin" in names) == _nvcc_works()


def _nvcc_works() -> bool:
    try:
        nvcc = library.find_nvcc(os.environ)
    except MissingError:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "x.cu")
        source.write_text("__global__ void x() {}\n")
        command = [nvcc, "-cubin", str(source), "-o", str(Path(folder, "x"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_wheel_installs_into_an_empty_environment_and_its_command_starts(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True, capture_output=True)
    shown = subprocess.run(
        [tmp_path / "env" / "bin" / "pasta-otel", "--help"], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "sidecar" in shown.stdout
    imported = subprocess.run(
        [
            python,
            "-c",
            "import pasta_otel, pasta_otel.slo, sys; print('torch' in sys.modules, 'duckdb' in sys.modules)",
        ],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert imported.stdout.split() == ["False", "False"]
