import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pasta_otel.ebpf.build import BuildError, build
from pasta_otel.ebpf.loaders.bcc import BccLoader, import_bcc
from pasta_otel.ebpf.loaders.core import CoreLoader, load_libbpf
from pasta_otel.ebpf.observer import HostObserver, Thresholds
from pasta_otel.ebpf.ports import RefusedError
from tests.ebpf.scenario import HERE, some_functions

LOADERS = ("core", "core_perf", "bcc")
STANDIN = f"libcuda.so.{os.getpid()}"
"""The agent looks for libcuda.so*, our observers for just this: other programs of the machine may have theirs."""


@pytest.fixture(scope="session")
def objects(tmp_path_factory) -> Path:
    """Build what the loaders load."""
    folder = tmp_path_factory.mktemp("objects")
    try:
        build(folder)
    except BuildError as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def standin(tmp_path_factory) -> Path:
    """Compile the stand-in for the CUDA driver."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc for the stand-in library")
    target = tmp_path_factory.mktemp("standin") / STANDIN
    subprocess.run(
        [
            "gcc",
            "-O1",
            "-fno-omit-frame-pointer",
            "-fcf-protection=none",
            "-shared",
            "-fPIC",
            "-o",
            target,
            HERE / "standin.c",
        ],
        check=True,
    )
    target.parent.chmod(0o755)
    return target


@pytest.fixture
def make_loader(objects: Path):
    """Return a function that makes a loader by name, or skips with the reason."""

    def make(name: str) -> CoreLoader | BccLoader:
        if os.geteuid() != 0:
            pytest.skip("eBPF needs root here")
        if name == "bcc":
            try:
                import_bcc()
            except RefusedError as error:
                pytest.skip(str(error))
            if not Path(f"/lib/modules/{os.uname().release}/build").exists():
                pytest.skip("no headers for bcc: PASTA_TEST_PREPARE_HOST=1 tests/prepare_host.sh")
            return BccLoader(objects)
        try:
            load_libbpf()
        except OSError as error:
            pytest.skip(str(error))
        return CoreLoader(objects, multi=name == "core")

    return make


@pytest.fixture
def observe(make_loader) -> Iterator:
    """Return a function that makes an observer which is closed at the end."""
    made: list[HostObserver] = []

    def make(loader: str = "core", **options: object) -> HostObserver:
        options.setdefault("thresholds", Thresholds(sample=1))
        probes = [
            probe._replace(library=STANDIN) if probe.library else probe
            for probe in options.pop("probes", some_functions())
        ]
        observer = HostObserver(make_loader(loader), probes, **options)
        made.append(observer)
        return observer

    yield make
    for observer in made:
        observer.close()
