"""Installed without a C compiler, all works but GPU kernel capture."""

from __future__ import annotations

import subprocess
import sys

import pytest

# stands for an installation that has no extension: a None in sys.modules makes every import of it fail
WITHOUT = """
import sys
sys.modules["pasta_otel._native._cupti"] = None
import {module}
"""


@pytest.mark.parametrize(
    "module",
    [
        "pasta_otel.gpu.analysis.report",
        "pasta_otel.gpu.findings",
        "pasta_otel.gpu.imports.jaeger",
        "pasta_otel.gpu.imports.otlp",
        "pasta_otel.gpu.kineto",
        "pasta_otel.gpu.mapping",
    ],
)
def test_imported_traces_need_no_extension(module: str):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(module=module)], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
