import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "fixtures" / "native" / "fake_cupti.c"


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory):
    """The stand-in for libcupti, compiled."""
    pytest.importorskip("pasta_otel._native._cupti", reason="the C extension is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in CUPTI")
    path = tmp_path_factory.mktemp("cupti") / "libcupti.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, SOURCE, "-lpthread"], check=True)
    return path
