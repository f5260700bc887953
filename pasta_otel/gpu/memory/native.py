"""The native receiver of the Sanitizer's callbacks, and what it tells.

The driver holds a lock while it tells of a launch, a module or device memory. PyTorch's allocator waits for that lock,
in cudaMalloc, with a lock of its own held; and a thread that has Python's interpreter lock waits for the allocator's
when it drops a tensor. A callback in Python would close the circle. So Python is entered only at the beginning and the
end of calls into the driver, where nothing is held (``pasta_otel/_native/calls.h``), and modules are patched natively.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from types import ModuleType
from typing import NamedTuple

from pasta_otel.errors import MissingError

_native: ModuleType | None
try:
    from pasta_otel._native import _sanitizer as _native
except ImportError:  # built without a C compiler
    _native = None

Event = tuple[int, int, int]
"""What happened to device memory: whether it was freed, address, bytes."""
Shape = tuple[int, int, int]
NOT_BEGUN = -1
"""``CallData.code`` of a launch that did not take place."""
NO_MEMORY = -2
"""``CallData.code`` of a launch whose slab could not be allocated."""
SHARED = -3
"""``Node.code`` of a GPU kernel that another thread launched at the same time: counts could not be told apart."""
NO_NATIVE = (
    "memory analysis needs pasta-otel's native part, and this one was built without; install a C compiler and "
    "Python.h (gcc and python3-dev bring them), then pasta-otel again"
)


class Call(IntEnum):
    """What Python is called for, in the thread of the call."""

    LAUNCH_ENTER = 1
    LAUNCH_LEAVE = 2
    """Only where a slot was given."""
    GRAPH_ENTER = 3
    GRAPH_LEAVE = 4
    STREAM_GOES = 5
    """A stream is about to be destroyed: of the data context and stream are valid."""
    CONTEXT_GOES = 6
    """A context is, without data."""


class CallData(ctypes.Structure):
    """``pasta_call``: a launch that is being entered or left.

    Attributes:
        context: The CUDA context.
        stream: The Sanitizer's handle of the stream; None = the default stream.
        function: The GPU kernel's handle (``CUfunction`` or ``CUkernel``), or a graph's (``CUgraphExec``).
        name: The GPU kernel's (mangled); None where the driver does not tell.
        grid: Blocks in x, y, z.
        block: Threads of a block in x, y, z.
        code: At the end: what came of the slot (``SanitizerResult``), ``NOT_BEGUN`` or ``NO_MEMORY``.
    """

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("code", ctypes.c_int32),
    )

    @property
    def kernel(self) -> str:
        """Return the GPU kernel's name."""
        return (self.name or b"?").decode(errors="replace")


class NoteKind(IntEnum):
    """What was noted without Python; in parentheses what its value is."""

    STREAM_SYNCHRONIZED = 1
    """(the stream's handle)"""
    CONTEXT_SYNCHRONIZED = 2
    CONTEXT_GONE = 3
    CONTEXT_REFUSED = 4
    """(``SanitizerResult``)"""
    MODULE_REFUSED = 5
    """(``SanitizerResult``)"""
    MODULE_LEFT = 6
    """No GPU kernel in it can be a chosen one: it keeps its own machine code."""
    INSTRUCTION_UNKNOWN = 7
    """(``Sanitizer_InstructionId``)"""
    STREAM_GONE = 8
    """(the stream's handle)"""


class Note(NamedTuple):
    """One thing that happened.

    Attributes:
        kind: A ``NoteKind``.
        context: The CUDA context.
        value: As the kind has it.
        entered: Of a synchronisation: how many launches had begun, in all streams, when it was asked for.
        call: The function of the Sanitizer API that refused.
    """

    kind: int
    context: int
    value: int
    entered: int = 0
    call: str | None = None


class Node(NamedTuple):
    """All nodes of one GPU kernel in one launch of a graph.

    Attributes:
        function: The GPU kernel.
        name: Its name (mangled).
        grid: The first node's.
        block: The first node's.
        nodes: How many.
        code: What came of giving the slot (``SanitizerResult``, ``NO_MEMORY`` or ``SHARED``).
        slot: The slot's address; 0 = none.
        place: Which of the reserved slots, also where it could not be made ready; -1 = none.
    """

    function: int
    name: str
    grid: Shape
    block: Shape
    nodes: int
    code: int
    slot: int
    place: int


class Slot(NamedTuple):
    """A place for what one launch counts.

    Attributes:
        slab: Number of the slab that it lies in, which is allocated when its first launch begins.
        turn: Which use of the slab; it is cleared once for each.
        slab_bytes: The slab's size.
        offset: Where in it.
        header: What is written there before; it must live until the stream has passed.
    """

    slab: int
    turn: int
    slab_bytes: int
    offset: int
    header: bytes


def nothing() -> list[Event]:
    """Return no events."""
    return []


def native() -> ModuleType:
    """Return the native part.

    Raises:
        MissingError: There is none.
    """
    if _native is None:
        raise MissingError(NO_NATIVE)
    return _native
