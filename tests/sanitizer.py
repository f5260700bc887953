"""The device functions on the CPU, one warp instruction at a time, for the tests of memory analysis."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from pasta_otel.gpu.memory.counters import MemoryCounts, MemoryTool
from pasta_otel.gpu.memory.library import DRIVER, source
from pasta_otel.gpu.memory.model import Accesses, accesses
from pasta_otel.gpu.memory.slots import SLOT_BYTES, fold, header
from pasta_otel.gpu.memory.tool import LaunchInfo, Record

FIXTURES = Path(__file__).parent / "fixtures" / "sanitizer"
DRIVER_SOURCE = """
#include <stdlib.h>
int cuDeviceGetCount(int* count) { *count = 1; return getenv("FAKE_CUDA_IN_USE") ? 0 : 3; }
"""
ALL = 0xFFFFFFFF
LOAD, STORE, ATOMIC, PREFETCH = 1, 2, 3, 8


def build(name: str, folder: Path, *places: Path, driver: bool = False) -> Path:
    """Compile a fixture with the device functions in it, which lie beside ours or in one of the places.

    Args:
        name: The fixture.
        folder: Where to.
        places: Where else its includes may lie.
        driver: Whether a driver comes with it: the Sanitizer needs one, and there is none here.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to run the device functions on the CPU")
    target = folder / f"{name}.so"
    included = [f"-I{folder}" for folder in (source().parent, FIXTURES, *places)]
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", *included, str(FIXTURES / f"{name}.cpp"), "-o"]
    needed = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", str(build_driver(folder))] if driver else []
    subprocess.run([*command, str(target), *needed], check=True)
    return target


def build_driver(folder: Path) -> Path:
    """Compile a libcuda.so.1 that says that CUDA is initialised where the environment does."""
    target = folder / DRIVER
    command = [shutil.which("cc") or "c++", "-xc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", str(target), "-"]
    subprocess.run(command, input=DRIVER_SOURCE, text=True, check=True)
    return target


class Warp:
    """One launch's slot and a warp that counts into it.

    Args:
        library: The emulation.
        tensors: The table of tensors on the "device"; None = hotness is not counted.
    """

    def __init__(self, library: ctypes.CDLL, tensors: bytes | None = None) -> None:
        self.library = library
        self.slot = ctypes.create_string_buffer(SLOT_BYTES)
        if tensors is not None:
            self.table = ctypes.create_string_buffer(tensors, len(tensors))
            ctypes.memmove(self.slot, header(ctypes.addressof(self.table)), 16)

    def access(self, space: str, addresses: Sequence[int], size: int, flags: int = LOAD, mask: int = ALL) -> Warp:
        """Run one load, store or atomic; a lane's address counts if its bit is in the mask."""
        call = getattr(self.library, f"emulate_{space}")
        call(self.slot, ctypes.c_uint(mask), lanes(addresses), ctypes.c_uint(size), ctypes.c_uint(flags))
        return self

    def copy(self, sources: Sequence[int], size: int, mask: int = ALL) -> Warp:
        """Run one cp.async; the source of a lane that copies nothing is 0, as the Sanitizer gives it."""
        self.library.emulate_async(self.slot, ctypes.c_uint(mask), lanes(sources), ctypes.c_uint(size))
        return self

    def matrix(self, addresses: Sequence[int], count: int, flags: int = LOAD) -> Warp:
        """Run one ldmatrix or stmatrix."""
        numbers = (ctypes.c_uint(count), ctypes.c_uint(flags))
        self.library.emulate_matrix(self.slot, ctypes.c_uint(ALL), lanes(addresses), *numbers)
        return self

    def bulk(self, address: int, size: int, *, store: bool = False, mask: int = ALL) -> Warp:
        """Run one cp.async.bulk, bytes."""
        numbers = (ctypes.c_uint(mask), int(store), ctypes.c_ulonglong(address), ctypes.c_uint(size // 16))
        self.library.emulate_bulk(self.slot, *numbers)
        return self

    def block(self, begin: int = 1, end: int = 2) -> Warp:
        """Run a block's begin and end."""
        self.library.emulate_block(self.slot, ctypes.c_ulonglong(begin), ctypes.c_ulonglong(end))
        return self

    @property
    def counted(self) -> Accesses:
        """Return what the slot holds."""
        return accesses(fold(self.slot.raw, SLOT_BYTES)[0].tolist())

    @property
    def result(self) -> MemoryCounts:
        """Return what the tool makes of the slot; a block must have run."""
        result = MemoryTool().decode(Record(LaunchInfo("k", (1, 1, 1), (32, 1, 1), 0), self.slot.raw))
        assert result is not None
        return result


def lanes(values: Sequence[int]) -> ctypes.Array[ctypes.c_ulonglong]:
    """Return 32 addresses."""
    return (ctypes.c_ulonglong * 32)(*values)
