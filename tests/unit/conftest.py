import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "fixtures" / "native" / "fake_cupti.c"


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory):
    """The stand-in for libcupti of CUDA 13, compiled."""
    return compiled(tmp_path_factory, "libcupti.so.13")


@pytest.fixture(scope="session")
def fake_cupti_12_4(tmp_path_factory):
    """The stand-in for libcupti of CUDA 12.4, which records all calls of an API or none and names no subscriber."""
    return compiled(tmp_path_factory, "libcupti.so.12", "-DBEFORE_12_6")


def compiled(tmp_path_factory, soname, *options):
    pytest.importorskip("pasta_otel._native._cupti", reason="the C extension is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in CUPTI")
    path = tmp_path_factory.mktemp("cupti") / soname
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", *options, "-o", path, SOURCE, "-lpthread"], check=True)
    return path
