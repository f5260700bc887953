"""The analysis on the host, which the benchmark compares with, gives the device functions' answers."""

from __future__ import annotations

import ctypes
import shutil
import struct

import numpy as np
import pytest

from benchmarks.gpu.memory import words_of
from benchmarks.gpu.memory_host import RECORD, Compiled, by_numpy, heat_by_numpy
from tests.sanitizer import Warp, build

BASE = 1 << 40


@pytest.fixture
def records():
    """Scattered and strided accesses of every width, with every lane mask."""
    rng = np.random.default_rng(0)
    made = np.zeros(4000, dtype=RECORD)
    made["mask"] = rng.integers(1, 1 << 32, len(made))
    made["mask"][::3] = 0xFFFFFFFF
    made["size"] = rng.choice([1, 2, 4, 8, 16], len(made))
    made["flags"] = rng.choice([1, 2, 3], len(made))
    size = made["size"][:, None].astype(np.uint64)
    scattered = rng.integers(0, 200, (len(made), 32)).astype(np.uint64)
    strided = rng.integers(0, 300_000, (len(made), 1)) + np.arange(32) * rng.choice([0, 1, 2, 3, 8, 33], (len(made), 1))
    chosen = rng.random((len(made), 1)) < 0.5
    made["address"] = np.uint64(BASE) + np.where(chosen, scattered, strided.astype(np.uint64)) * size
    return made


def counted(library, records, table=None):
    warp = Warp(library, table).block()
    for one in records:
        warp.access("global", one["address"].tolist(), int(one["size"]), int(one["flags"]), int(one["mask"]))
    return warp.result


@pytest.fixture
def library(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return ctypes.CDLL(str(build("emulation", tmp_path)))


def test_numpy_c_and_the_device_functions_agree(tmp_path, library, records):
    expected = words_of([counted(library, records).words])
    assert by_numpy(records, workers=2).tolist() == expected
    assert Compiled(tmp_path)(records).tolist() == expected


def test_they_agree_on_hotness_too(tmp_path, library, records):
    tensors = [(BASE, BASE + 4096), (BASE + 100_000, BASE + 1_000_000)]
    begins, ends = zip(*tensors, strict=True)
    result = counted(library, records, struct.pack("<7Q", 2, *begins, *ends, 1, 2))
    expected = {
        "ranges": sorted(accesses for _, accesses in result.ranges),
        "working_set": result.working_set,
        "tensors": [dict(result.tensors)[number] for number in (1, 2)],
    }
    assert heat_by_numpy(records, tensors, workers=2) == expected
    assert Compiled(tmp_path).heat(records, tensors) == expected
