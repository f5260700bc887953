"""The analysis on the host, which the benchmark compares with, gives the device functions' answers."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest

from benchmarks.gpu.memory_host import KINDS, RECORD, by_numpy, compiled
from tests.sanitizer import Warp, build


def test_numpy_c_and_the_device_functions_agree(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    rng = np.random.default_rng(0)
    records = np.zeros(3000, dtype=RECORD)
    records["mask"] = rng.integers(1, 1 << 32, len(records))
    records["size"] = rng.choice([1, 2, 4, 8, 16], len(records))
    records["flags"] = rng.choice([1, 2, 3], len(records))
    records["address"] = (1 << 40) + rng.integers(0, 200, (len(records), 32)) * records["size"][:, None]
    warp = Warp(ctypes.CDLL(str(build("emulation", tmp_path))))
    for one in records:
        warp.access("global", one["address"].tolist(), int(one["size"]), int(one["flags"]), int(one["mask"]))
    counted = [warp.counted.global_[kind] for kind in KINDS]
    expected = [[one.requests, one.lanes, one.sectors, one.bytes] for one in counted]
    assert by_numpy(records, workers=2).tolist() == expected
    assert compiled(tmp_path)(records).tolist() == expected
