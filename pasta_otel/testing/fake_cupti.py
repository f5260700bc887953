"""Run code against a stand-in for libcupti, in a process of its own: a process has one CUPTI for its life."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

LOADED = "_cupti.load(sys.argv[1]); capture = Capture(buffer_bytes=65536, max_buffers=8, detach=False)\n"
DETACHING = "_cupti.load(sys.argv[1]); capture = Capture(buffer_bytes=65536, max_buffers=8)\n"

_PREAMBLE = """
import ctypes, sys
import numpy as np
from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti.capture import T3_WINDOW, Capture, WindowKinds
from pasta_otel.gpu.cupti.rows import Kind
fake = ctypes.CDLL(sys.argv[1])
fake.fake_launch.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64]
GEMM = ctypes.create_string_buffer(b"gemm")
launch = lambda n=1: [fake.fake_launch(GEMM, 100, 10) for _ in range(n)]
"""


def run_with(library: Path, body: str, timeout_s: float = 100) -> str:
    """Run Python code with ``fake`` (the stand-in), ``launch`` and the capture's names defined; returns its output.

    Args:
        library: The stand-in, built from ``tests/fixtures/native/fake_cupti.c``.
        body: The code; begin it with ``LOADED`` or ``DETACHING`` for a ready ``capture``.
        timeout_s: Longest time it may take.

    Raises:
        AssertionError: It failed; says its errors.
    """
    command = [sys.executable, "-c", _PREAMBLE + textwrap.dedent(body), str(library)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-4000:])
    return done.stdout
