"""Shared by the tests: where the real peers are, free ports, and waiting without fixed sleeps."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".cache" / "tools" / "root" / "usr" / "bin"
CASES = ROOT / "tests" / "fixtures" / "cases"


def tool(name: str) -> str:
    """Return the path of a real peer, or skip the test saying what is missing."""
    found = TOOLS / name
    if found.exists():
        return str(found)
    on_path = shutil.which(name)
    if on_path is None:
        pytest.skip(f"{name} is missing: run tests/tools.sh")
    return on_path


def rotel_binary() -> str:
    """Return rotel's own executable, which lies inside its Python package.

    It is linked with libpython, which a system Python may lack; tests/tools.sh then writes a starter that brings it along.
    """
    binary = Path(sysconfig.get_paths()["purelib"]) / "rotel" / "rotel-agent"
    if not binary.exists():
        pytest.skip("rotel is missing: pip install --group test")
    starter = TOOLS / "rotel-agent"
    for program in (binary, starter):
        if (
            program.exists()
            and subprocess.run([program, "--version"], check=False, capture_output=True).returncode == 0
        ):
            return str(program)
    pytest.skip("rotel does not start, mostly for lack of libpython: run tests/tools.sh")


def free_port() -> int:
    """Return a loopback port that was free a moment ago, for programs that cannot be given port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Return the condition's first true value; fails the test when the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"not within {timeout_s} s: {condition}")
    return None


def case(name: str, file: str) -> Any:
    """Return a handed case's JSON document."""
    return json.loads((CASES / name / file).read_text(encoding="utf-8"))
