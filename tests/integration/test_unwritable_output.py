"""Where stdout or stderr cannot be written, a command says so in one line and fails; no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
JAEGER = next(
    (Path(__file__).parents[1] / "fixtures" / "samples" / "jaegertracing+jaeger").rglob("otlp2jaeger-out.json")
)
COMMANDS = (
    ["doctor"],
    ["doctor", "--json"],
    ["--help"],
    ["--version"],
    ["import", str(JAEGER)],
    ["slo", "rules", "SLO"],
    ["slo", "validate", "SLO"],
)
SLO = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: a}
spec:
  service: a
  budgetingMethod: Occurrences
  timeWindow: [{duration: 30d, isRolling: true}]
  indicator:
    metadata: {name: b}
    spec:
      ratioMetric:
        counter: true
        good: {metricSource: {type: prometheus, spec: {query: 'good_total'}}}
        total: {metricSource: {type: prometheus, spec: {query: 'all_total'}}}
  objectives: [{target: 0.9}]
"""


def words(command: list[str], folder: Path) -> list[str]:
    (file := folder / "slo.yaml").write_text(SLO)
    return [sys.executable, "-m", "pasta_otel", *[str(file) if word == "SLO" else word for word in command]]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line_and_exit_code_3(command: list[str], tmp_path: Path):
    with FULL.open("w") as full:
        done = subprocess.run(
            words(command, tmp_path), stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert done.returncode == 3
    assert [line for line in done.stderr.splitlines() if line.startswith("pasta-otel: ")] == [
        "pasta-otel: [Errno 28] No space left on device"
    ]
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
def test_an_error_that_cannot_be_said_keeps_its_exit_code(tmp_path: Path):
    with FULL.open("w") as full:
        done = subprocess.run(
            words(["import", "/nowhere"], tmp_path), stdout=full, stderr=full, check=False, timeout=60
        )
    assert done.returncode == 2


@pytest.mark.parametrize("command", [["doctor"], ["import", str(JAEGER)]], ids=" ".join)
def test_a_program_without_stdout_ends_in_order(command: list[str], tmp_path: Path):
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *words(command, tmp_path)]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


GREEK = SLO.replace("name: a}", "name: a, displayName: Größe, annotations: {owner: Größe核}}").replace(
    "good_total", 'good_total{job="größe核"}'
)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("command", [["slo", "rules"], ["slo", "status", "--slo"], ["slo", "validate"]], ids=" ".join)
def test_what_the_terminal_has_no_code_for_is_written_otherwise_and_the_exit_code_kept(
    command: list[str], encoding: str, tmp_path: Path
):
    (file := tmp_path / "größe核.yaml").write_text(GREEK, encoding="utf-8")
    prometheus = ["--prometheus", "http://127.0.0.1:9"] if "status" in command else []
    environ = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "200"}
    words = [sys.executable, "-m", "pasta_otel", *command, str(file), *prometheus]
    done = subprocess.run(words, env=environ, capture_output=True, check=False, timeout=120)
    assert (done.returncode, b"Traceback" in done.stderr) == (3 if prometheus else 0, False), done.stderr
    if "rules" in command:
        assert 'job="größe核"' in done.stdout.decode()
    if "status" in command:
        shown = "Größe核".encode(encoding, "backslashreplace").decode(encoding)
        assert shown in done.stdout.decode(encoding)


def test_a_way_of_encoding_that_the_user_chose_is_kept(tmp_path: Path):
    (file := tmp_path / "slo.yaml").write_text(GREEK, encoding="utf-8")
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:replace", "COLUMNS": "200"}
    words = [sys.executable, "-m", "pasta_otel", "slo", "status", "--slo", str(file)]
    done = subprocess.run(
        [*words, "--prometheus", "http://127.0.0.1:9"], env=environ, capture_output=True, check=False, timeout=120
    )
    assert (done.returncode, b"Gr??e" in done.stdout) == (3, True), done.stderr
