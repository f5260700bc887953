"""PASTA_METRICS_ADDR and PASTA_DEBUG in an application of its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import free_port

PROGRAM = """
import sys, pasta_otel
from opentelemetry import metrics, trace
OWN
pasta_otel.instrument()
with trace.get_tracer("t").start_as_current_span("request"):
    pass
print("ready", flush=True)
sys.stdin.read()
"""
OWN = "from opentelemetry.sdk.metrics import MeterProvider; metrics.set_meter_provider(MeterProvider())"


@contextmanager
def running(tmp_path: Path, own: str = "", **environ: str) -> Iterator[subprocess.Popen[str]]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("OWN", own))
    nowhere = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, str(program)], text=True, env={**os.environ, **nowhere, **environ}, **pipes
    )
    try:
        assert process.stdout.readline() == "ready\n", process.communicate(timeout=60)[1]
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate("", timeout=60)
    assert process.returncode == 0, err
    return err


def test_an_application_serves_its_metrics_where_it_is_told_to(tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path, PASTA_METRICS_ADDR=f"127.0.0.1:{port}") as process:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            text = page.read().decode()
        finish(process)
    assert "pasta_traces_recorded_total" in text


def test_a_taken_port_is_one_log_line_and_no_failure(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with running(tmp_path, PASTA_METRICS_ADDR=address), running(tmp_path, PASTA_METRICS_ADDR=address) as second:
        assert finish(second).count("/metrics is not served") == 1


def test_a_program_with_its_own_meter_provider_keeps_it(tmp_path: Path) -> None:
    with running(tmp_path, own=OWN, PASTA_METRICS_ADDR=f"127.0.0.1:{free_port()}") as process:
        assert "its own MeterProvider" in finish(process)


@pytest.mark.parametrize(("debug", "lines"), [("true", True), ("false", False)])
def test_debug_says_what_happens_and_silence_is_the_default(tmp_path: Path, debug: str, lines: bool) -> None:
    with running(tmp_path, PASTA_DEBUG=debug, PASTA_METRICS_ADDR=f"127.0.0.1:{free_port()}") as process:
        assert ("INFO pasta_otel" in finish(process)) == lines
