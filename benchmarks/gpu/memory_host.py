"""The same analysis on the host, from a copy of every access: vectorised NumPy on all cores, and C in one thread."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path

import numpy as np

RECORD = np.dtype([("mask", "<u4"), ("size", "<u4"), ("flags", "<u4"), ("unused", "<u4"), ("address", "<u8", (32,))])
KINDS = ("load", "store", "atomic")
CHUNK = 1 << 14
LANES = np.arange(32, dtype=np.uint32)
ATOMIC = 3
FAR = 0xFFFFFFFF
WORDS = 3 * 4 + 8 + 2 + 1
"""An answer: totals by kind, stride classes, contention, the worst request."""
Answer = np.ndarray
Tensors = list[tuple[int, int]]
"""Begins and ends, ascending."""


def by_numpy(records: np.ndarray, workers: int | None = None) -> Answer:
    """Return what the device functions count of accesses to global memory."""
    return reduce(_join, _map(_chunk, records, workers), np.zeros(WORDS, dtype=np.uint64))


def heat_by_numpy(records: np.ndarray, tensors: Tensors, workers: int | None = None) -> dict[str, object]:
    """Return lane accesses by 2 MiB range, the working set and lane accesses to tensors."""
    bounds = _map(lambda part: _bounds(part["address"][_active(part)]), records, workers)
    base, size = _span(min(low for low, _ in bounds), max(high for _, high in bounds))
    begins, ends = (np.array(column, dtype=np.uint64) for column in zip(*tensors, strict=True))

    def chunk(part: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        address = part["address"][_active(part)]
        offset = address - np.uint64(base)
        pages = np.zeros(size << 9, dtype=bool)
        pages[offset >> np.uint64(12)] = True
        at = np.searchsorted(begins, address, side="right").astype(np.int64) - 1
        held = (at >= 0) & (address < ends[at])
        ranges = np.bincount((offset >> np.uint64(21)).astype(np.int64), minlength=size)
        return ranges, pages, np.bincount(at[held], minlength=len(tensors))

    parts = _map(chunk, records, workers)
    pages = reduce(np.logical_or, (part[1] for part in parts))
    return _heat(sum(part[0] for part in parts), pages, sum(part[2] for part in parts))


def _bounds(address: np.ndarray) -> tuple[int, int]:
    return int(address.min()), int(address.max())


def _span(low: int, high: int) -> tuple[int, int]:
    """Return where the first 2 MiB range begins, and how many there are."""
    return low >> 21 << 21, (high >> 21) - (low >> 21) + 1


def _heat(ranges: np.ndarray, pages: np.ndarray, tensors: np.ndarray) -> dict[str, object]:
    return {
        "ranges": sorted(ranges[ranges > 0].tolist()),
        "working_set": 4096 * int(np.count_nonzero(pages)),
        "tensors": tensors.tolist(),
    }


def _map(function: Callable, records: np.ndarray, workers: int | None) -> list:
    chunks = [records[at : at + CHUNK] for at in range(0, len(records), CHUNK)]
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:  # NumPy lets go of the interpreter while it works
        return list(pool.map(function, chunks))


def _join(a: Answer, b: Answer) -> Answer:
    joined = a + b
    joined[-1] = max(a[-1], b[-1])
    return joined


def _active(records: np.ndarray) -> np.ndarray:
    return (records["mask"][:, None] >> LANES & 1).astype(bool)


def _chunk(records: np.ndarray) -> Answer:
    active, size = _active(records), records["size"].astype(np.int64)
    lanes = active.sum(axis=1)
    first = active.argmax(axis=1)
    sectors = _distinct(records["address"] >> np.uint64(5), active, first)
    access = records["flags"] & 3
    kind = np.where(access == ATOMIC, 2, np.where(access == 2, 1, 0))
    columns = (np.ones_like(lanes), lanes, sectors, lanes * size)
    totals = np.stack([np.bincount(kind, column, len(KINDS)) for column in columns], axis=1)
    plain = access != ATOMIC
    units = _distances(records, active, first, size)[plain]
    strides = np.bincount(_classes(units), minlength=8)
    worse = sectors[plain] > (lanes * size + 31)[plain] // 32
    far = np.where((units < 0) | (units >= FAR), FAR, units).astype(np.uint64)
    words = (sectors[plain].astype(np.uint64) << 48) | (size[plain].astype(np.uint64) << 32) | far
    worst = words[worse].max() if worse.any() else 0
    contention = _contention(records["address"][~plain], active[~plain], first[~plain])
    return np.array([*totals.ravel(), *strides, *contention, worst], dtype=np.uint64)


def _ordered(values: np.ndarray, active: np.ndarray, first: np.ndarray) -> np.ndarray:
    filler = values[np.arange(len(values)), first]
    return np.sort(np.where(active, values, filler[:, None]), axis=1)


def _distinct(values: np.ndarray, active: np.ndarray, first: np.ndarray) -> np.ndarray:
    ordered = _ordered(values, active, first)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)


def _distances(records: np.ndarray, active: np.ndarray, first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the distance between neighbouring lanes in accesses; -1 where it is not the same for all."""
    rest = records["mask"] & (records["mask"] - 1)
    second = np.where(rest, np.log2(np.maximum(rest & -rest, 1)).astype(np.int64), first)
    rows, address = np.arange(len(records)), records["address"].astype(np.int64)
    begin = address[rows, first]
    span, gap = address[rows, second] - begin, np.maximum(second - first, 1)
    stride = np.sign(span) * (np.abs(span) // gap)
    expected = begin[:, None] + stride[:, None] * (np.arange(32) - first[:, None])
    same = ((address == expected) | ~active).all(axis=1) & (stride & (size - 1) == 0)
    return np.where(same, np.abs(stride) // size, -1)


def _classes(units: np.ndarray) -> np.ndarray:
    return np.where(units < 0, 7, np.searchsorted([0, 1, 2, 4, 8, 32], units, side="left"))


def _contention(address: np.ndarray, active: np.ndarray, first: np.ndarray) -> tuple[int, int]:
    """Return distinct addresses, and the most lanes on one address, summed over atomics."""
    if not len(address):
        return 0, 0
    addresses = int(_distinct(address, active, first).sum())
    equal = (address[:, :, None] == address[:, None, :]) & active[:, :, None] & active[:, None, :]
    return addresses, int(equal.sum(axis=2).max(axis=1).sum())


class Compiled:
    """The C analysis, compiled with the machine's compiler at -O3.

    Args:
        folder: Where the library goes.
    """

    def __init__(self, folder: Path) -> None:
        target, source = folder / "memory_host.so", Path(__file__).with_name("memory_host.c")
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([os.environ.get("CC", "cc"), *flags, str(source), "-o", str(target)], check=True)
        self._library = ctypes.CDLL(str(target))

    def __call__(self, records: np.ndarray) -> Answer:
        """Return the same as ``by_numpy``."""
        answer = np.zeros(WORDS, dtype=np.uint64)
        self._library.analyse(_at(records), ctypes.c_size_t(len(records)), _at(answer))
        return answer

    def heat(self, records: np.ndarray, tensors: Tensors) -> dict[str, object]:
        """Return the same as ``heat_by_numpy``."""
        bounds = np.zeros(2, dtype=np.uint64)
        self._library.bounds(_at(records), ctypes.c_size_t(len(records)), _at(bounds))
        base, size = _span(*bounds.tolist())
        ranges, pages = np.zeros(size, dtype=np.uint64), np.zeros(size << 9, dtype=np.uint8)
        begins, ends = (np.array(column, dtype=np.uint64) for column in zip(*tensors, strict=True))
        accesses, count = np.zeros(len(tensors), dtype=np.uint64), ctypes.c_size_t(len(tensors))
        numbers = (_at(records), ctypes.c_size_t(len(records)), ctypes.c_uint64(base))
        self._library.heat(*numbers, _at(ranges), _at(pages), count, _at(begins), _at(ends), _at(accesses))
        return _heat(ranges, pages, accesses)


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
