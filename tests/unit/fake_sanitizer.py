"""The fake of Compute Sanitizer and CUDA driver (``fixtures/native/fake_sanitizer.c``) for tests: built, loaded, typed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "fixtures" / "native" / "fake_sanitizer.c"
ALL_INSTRUCTIONS = (1 << 64) - 1
DEFAULT_STREAM = 1
"""For ``synchronize``, where none means the context."""
RESULT, LAUNCHES = 16, 17
"""The words of a slot, 8 bytes each, that a launch adds its value and 1 to."""


class How(IntEnum):
    """The driver call that launches."""

    KERNEL = 0
    KERNEL_EX = 1
    COOPERATIVE = 2
    PER_THREAD = 3
    UNKNOWN = 4
    FAILS = 5
    CAPTURED = 6
    NO_CONFIG = 7


class Node(ctypes.Structure):
    """A GPU kernel in a CUDA graph."""

    _fields_ = (("handle", ctypes.c_void_p), ("value", ctypes.c_uint64), ("grid_x", ctypes.c_uint32))


_POINTER, _INT, _NAME = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_NODES = ctypes.POINTER(Node)
_BETWEEN = ctypes.CFUNCTYPE(None)
_SIGNATURES = {
    "fake_reset": (None, ()),
    "fake_context": (_POINTER, ()),
    "fake_stream": (_POINTER, (_INT,)),
    "fake_kernel": (_POINTER, (_NAME, ctypes.c_uint64)),
    "fake_function": (_POINTER, (_NAME,)),
    "fake_launch": (_INT, (_POINTER, _POINTER, ctypes.c_uint32, ctypes.c_uint64, _INT)),
    "fake_graph": (_INT, (_POINTER, _POINTER, _NODES, ctypes.c_uint32, _INT)),
    "fake_synchronize": (_INT, (_POINTER,)),
    "fake_stream_destroy": (_INT, (_POINTER,)),
    "fake_context_destroy": (None, ()),
    "fake_malloc": (ctypes.c_uint64, (ctypes.c_size_t,)),
    "fake_free": (_INT, (ctypes.c_uint64,)),
    "fake_empty_cache": (None, ()),
    "fake_drop": (None, ()),
    "fake_first_malloc_loads_modules": (None, (_INT, ctypes.POINTER(_POINTER))),
    "fake_linger": (None, (_INT,)),
    "fake_limit": (None, (_INT,)),
    "fake_others_capture": (None, (_INT,)),
    "fake_late": (None, (_INT,)),
    "fake_between": (None, (_BETWEEN,)),
    "fake_patched": (_INT, (_POINTER,)),
    "fake_errors": (_INT, ()),
    "fake_last_error": (_NAME, ()),
}


def build(target: Path) -> str:
    """Compile the fake and return its file; without a C compiler the test is skipped."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    options = ["-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *options, str(SOURCE), "-o", str(target)], check=True)
    return str(target)


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Program:
    """A program that uses CUDA; each call but ``drop_a_tensor`` lets go of the interpreter lock, as PyTorch does."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library, self.holding = _typed(ctypes.CDLL(path)), _typed(ctypes.PyDLL(path))
        self.reset()

    def reset(self) -> None:
        """Begin afresh: a new context, no subscriber, no errors."""
        self.library.fake_reset()

    @property
    def context(self) -> int:
        return self.library.fake_context()

    def stream(self, number: int) -> int | None:
        """Return a CUstream, new for a new number; 0 = the default stream, whose CUstream is None."""
        return self.library.fake_stream(number)

    def kernel(self, name: str, instructions: int = ALL_INSTRUCTIONS) -> int:
        """Return a CUkernel that is not loaded yet."""
        return self.library.fake_kernel(name.encode(), instructions)

    def function(self, name: str) -> int:
        """Return a CUfunction, loaded by cuModuleLoadData."""
        return self.library.fake_function(name.encode())

    def launch(
        self, handle: int, stream: int | None = None, *, value: int = 1, grid_x: int = 1, how: How = How.KERNEL
    ) -> int:
        return self.library.fake_launch(handle, stream, grid_x, value, how)

    def graph(
        self, exec_: int, stream: int | None, nodes: Sequence[tuple[int, int, int]], *, upload: bool = False
    ) -> int:
        """Launch a graph of (handle, value, grid_x), and a memset after them."""
        return self.library.fake_graph(exec_, stream, (Node * len(nodes))(*nodes), len(nodes), upload)

    def synchronize(self, stream: int | None = None) -> int:
        """Wait for a stream; None = for the context."""
        return self.library.fake_synchronize(stream)

    def destroy_stream(self, stream: int) -> int:
        return self.library.fake_stream_destroy(stream)

    def destroy_context(self) -> None:
        self.library.fake_context_destroy()

    def malloc(self, size: int) -> int:
        return self.library.fake_malloc(size)

    def free(self, address: int) -> int:
        return self.library.fake_free(address)

    def empty_cache(self) -> None:
        self.library.fake_empty_cache()

    def drop_a_tensor(self) -> None:
        """Wait for the allocator's lock with the interpreter lock held."""
        self.holding.fake_drop()

    def first_malloc(self, modules: int) -> list[int]:
        """Have the runtime load modules while the allocator's lock is held; return a CUfunction of each."""
        functions = (ctypes.c_void_p * modules)()
        self.library.fake_first_malloc_loads_modules(modules, functions)
        return [function or 0 for function in functions]

    def linger(self, microseconds: int) -> None:
        """Have driver calls sleep whenever they have taken the driver's lock, so that threads meet."""
        self.library.fake_linger(microseconds)

    def limit(self, blocks: int) -> None:
        """Let the Sanitizer be out of device memory once it has given so many blocks; 0 = never."""
        self.library.fake_limit(blocks)

    def others_capture(self, on: bool) -> None:
        """Let another thread begin or end to capture a stream in global mode."""
        self.library.fake_others_capture(on)

    def late(self) -> None:
        """Have the GPU kernels of graphs look for their slots last of all."""
        self.library.fake_late(1)

    def in_the_next_graph(self, meanwhile: Callable[[], None]) -> None:
        """Have something happen in another thread while a graph is launched, once its GPU kernels are begun."""

        def between() -> None:
            other = threading.Thread(target=meanwhile)
            other.start()
            other.join()

        self.between = _BETWEEN(between)
        self.library.fake_between(self.between)

    def patched(self, handle: int) -> bool:
        return bool(self.library.fake_patched(handle))

    @property
    def errors(self) -> int:
        """Return how many uses were refused or would have done harm on a GPU."""
        return self.library.fake_errors()

    @property
    def last_error(self) -> str:
        return self.library.fake_last_error().decode()
