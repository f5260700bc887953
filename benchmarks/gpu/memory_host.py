"""The same analysis on the host, from a copy of every access: vectorised NumPy on all cores, and C in one thread."""

from __future__ import annotations

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

RECORD = np.dtype([("mask", "<u4"), ("size", "<u4"), ("flags", "<u4"), ("unused", "<u4"), ("address", "<u8", (32,))])
KINDS = ("load", "store", "atomic")
CHUNK = 1 << 14
LANES = np.arange(32, dtype=np.uint32)


def by_numpy(records: np.ndarray, workers: int | None = None) -> np.ndarray:
    """Return requests, lanes, sectors and bytes by kind."""
    chunks = [records[at : at + CHUNK] for at in range(0, len(records), CHUNK)]
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:  # NumPy lets go of the interpreter while it works
        return sum(pool.map(_chunk, chunks), np.zeros((len(KINDS), 4), dtype=np.int64))


def _chunk(records: np.ndarray) -> np.ndarray:
    active = (records["mask"][:, None] >> LANES & 1).astype(bool)
    sectors = records["address"] >> np.uint64(5)
    first = sectors[np.arange(len(records)), active.argmax(axis=1)]
    ordered = np.sort(np.where(active, sectors, first[:, None]), axis=1)
    distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    lanes = active.sum(axis=1)
    access = records["flags"] & 3
    kind = np.where(access == 3, 2, np.where(access == 2, 1, 0))
    columns = (np.ones_like(lanes), lanes, distinct, lanes * records["size"].astype(np.int64))
    return np.stack([np.bincount(kind, column, len(KINDS)) for column in columns], axis=1).astype(np.int64)


def compiled(folder: Path):
    """Return the C analysis as a function of records, compiled with the machine's compiler at -O3."""
    target = folder / "memory_host.so"
    source = Path(__file__).with_name("memory_host.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))

    def by_c(records: np.ndarray) -> np.ndarray:
        totals = np.zeros((len(KINDS), 4), dtype=np.uint64)
        at = ctypes.c_void_p(records.ctypes.data)
        library.analyse(at, ctypes.c_size_t(len(records)), ctypes.c_void_p(totals.ctypes.data))
        return totals.astype(np.int64)

    return by_c
