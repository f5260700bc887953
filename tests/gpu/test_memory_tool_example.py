"""The documented example of a tool on the GPU: NaN and infinities that GPU kernels are known to store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TOOL = ROOT / "docs" / "examples" / "nonfinite.py"
NUMBERS = 8 * 32


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if shutil.which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], check=False).returncode:
        pytest.skip("no NVIDIA GPU")


def analysed(what: str, *options: str) -> tuple[dict, str]:
    """Return the report of the command about a program, and what the program wrote."""
    pytest.importorskip(what)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pasta_otel", "analyze", "tool", f"{TOOL}:NonFinite", *options, "--json", "--"]
    program = [sys.executable, str(HERE / "memory_nonfinite.py"), what]
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [*command, *program], env=environ, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    keep(f"nonfinite-{what}{''.join(options)}.json", done.stdout)
    return json.loads(done.stdout), done.stderr


def keep(name: str, text: str) -> None:
    """Keep what was measured."""
    if target := os.environ.get("OUT"):
        Path(target, name.replace("=", "-")).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def cupy():
    report, said = analysed("cupy")
    assert report["problems"] == []
    return {one["name"]: one["result"] for one in report["results"]}, said


@pytest.mark.parametrize(
    ("name", "numbers", "nan", "negative", "infinite"),
    [
        ("clean", NUMBERS, 0, 0, 0),
        ("one", NUMBERS, 1, 0, 0),
        ("every", NUMBERS, NUMBERS // 8, 0, NUMBERS // 16),
        ("wide", 4 * NUMBERS, NUMBERS, 0, NUMBERS),
        ("half_warp", NUMBERS // 2, NUMBERS // 2, 0, 0),
        ("integers", NUMBERS, 0, NUMBERS, 0),
        ("loads", NUMBERS, 0, 0, 0),
    ],
)
def test_counts_equal_the_closed_form(cupy, name, numbers, nan, negative, infinite):
    result = cupy[0][name]
    counted = (result["numbers"], result["nan"], result["negative_nan"], result["infinite"])
    assert counted == (numbers, nan, negative, infinite)
    assert bool(result["first_address"]) == bool(nan or negative or infinite)


def test_the_first_address_is_the_one_that_was_stored_to(cupy):
    found, said = cupy
    address = int(next(line for line in said.splitlines() if line.startswith("address ")).split()[1])
    assert found["one"]["first_address"] == address


def test_doubles_are_looked_at_as_doubles():
    report, _ = analysed("cupy", "--option", "number=float64", "--kernel", "doubles")
    (one,) = report["results"]
    assert (one["result"]["numbers"], one["result"]["nan"]) == (NUMBERS, NUMBERS // 4)


def test_the_layer_of_a_network_that_divides_by_zero_is_named():
    report, _ = analysed("torch")
    found = [one for one in report["results"] if one["result"]["nan"]]
    first = min(found, key=lambda one: one["result"]["first_ns"])
    assert first["module"] == "2"
    assert "Norm.forward" in first["source"]
    assert first["result"]["nan"] == first["result"]["numbers"] == 1024
