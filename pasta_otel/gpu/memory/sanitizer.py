"""The Compute Sanitizer API by ctypes: what we call of ``sanitizer_{callbacks,patching,memory}.h`` of CUDA 12 and 13.

Callbacks run in the thread that made the CUDA call and take Python's interpreter lock. Every call here releases it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from pasta_otel.errors import MissingError, StateError
from pasta_otel.gpu.memory.raw import Event, nothing, receiver

Pointer = ctypes.c_void_p


class Domain(IntEnum):
    """``Sanitizer_CallbackDomain``."""

    RESOURCE = 3
    SYNCHRONIZE = 4
    LAUNCH = 5
    GRAPHS = 10


class Resource(IntEnum):
    """``Sanitizer_CallbackIdResource``."""

    CONTEXT_DESTROY_STARTING = 4
    STREAM_DESTROY_STARTING = 7
    MODULE_LOADED = 9
    DEVICE_MEMORY_ALLOC = 11
    DEVICE_MEMORY_FREE = 12


class Graphs(IntEnum):
    """``Sanitizer_CallbackIdGraphs``."""

    NODE_LAUNCH_BEGIN = 4
    LAUNCH_BEGIN = 6
    LAUNCH_END = 7


class Synchronize(IntEnum):
    """``Sanitizer_CallackIdSync``."""

    STREAM = 1
    CONTEXT = 2


class LaunchCallback(IntEnum):
    """``Sanitizer_CallbackIdLaunch``."""

    BEGIN = 1
    END = 3


RESULTS = {
    1: "invalid parameter",
    2: "invalid device",
    3: "invalid context",
    6: "invalid operation",
    7: "out of memory",
    9: "not implemented",
    10: "there is another subscriber",
    12: "not compatible",
    13: "cannot reach the CUDA driver",
    14: "not supported on this system or device",
    999: "internal error",
}
"""``SanitizerResult``."""


MOST_CUBIN_BYTES = 1 << 30
"""A larger size is not one: the record of another version."""
ELF = b"\x7fELF"
_CODE_SECTION = re.compile(rb"\0\.text\.([^\0]+)(?=\0)")


class ModuleData(ctypes.Structure):
    """``Sanitizer_ResourceModuleData``, as far as we read it."""

    _fields_ = (("context", Pointer), ("module", Pointer), ("cubin_size", ctypes.c_size_t), ("cubin", Pointer))

    def functions(self) -> list[str] | None:
        """Return the names of the GPU kernels in the module's machine code; None where it is not at hand."""
        if not self.cubin or not 0 < self.cubin_size < MOST_CUBIN_BYTES:
            return None
        code = ctypes.string_at(self.cubin, self.cubin_size)
        if not code.startswith(ELF):
            return None
        return [name.decode(errors="replace") for name in _CODE_SECTION.findall(code)]


class StreamData(ctypes.Structure):
    """``Sanitizer_SynchronizeData``: context, stream, handle. ``Sanitizer_ResourceStreamData`` begins differently."""

    _fields_ = (("context", Pointer), ("stream", Pointer), ("handle", Pointer))


class LaunchData(ctypes.Structure):
    """``Sanitizer_LaunchData``, as far as we read it."""

    _fields_ = (
        ("context", Pointer),
        ("stream", Pointer),
        ("stream_handle", Pointer),
        ("module", Pointer),
        ("function", Pointer),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("grid_id", ctypes.c_uint64),
        ("launch", Pointer),
    )


class MemoryData(ctypes.Structure):
    """``Sanitizer_ResourceMemoryData``, as far as we read it."""

    _fields_ = (("address", ctypes.c_uint64), ("size", ctypes.c_uint64), ("context", Pointer))


class NodeData(ctypes.Structure):
    """``Sanitizer_GraphNodeLaunchData``, as far as we read it; it has a launch where its type is ``KERNEL_NODE``."""

    _fields_ = (
        ("graph", Pointer),
        ("launch_id", ctypes.c_uint32),
        ("node", Pointer),
        ("type", ctypes.c_int),
        ("launch", LaunchData),
    )


KERNEL_NODE = 0
"""``CU_GRAPH_NODE_TYPE_KERNEL``."""
CALLBACK = ctypes.CFUNCTYPE(None, Pointer, ctypes.c_int, ctypes.c_uint32, Pointer)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "sanitizerSubscribe": (ctypes.POINTER(Pointer), CALLBACK, Pointer),
    "sanitizerUnsubscribe": (Pointer,),
    "sanitizerEnableDomain": (ctypes.c_uint32, Pointer, ctypes.c_int),
    "sanitizerAddPatchesFromFile": (ctypes.c_char_p, Pointer),
    "sanitizerPatchInstructions": (ctypes.c_int, Pointer, ctypes.c_char_p),
    "sanitizerPatchModule": (Pointer,),
    "sanitizerSetLaunchCallbackData": (Pointer, Pointer, Pointer, Pointer),
    "sanitizerSetCallbackData": (Pointer, Pointer),
    "sanitizerAlloc": (Pointer, ctypes.POINTER(Pointer), ctypes.c_size_t),
    "sanitizerMemset": (Pointer, ctypes.c_int, ctypes.c_size_t, Pointer),
    "sanitizerMemcpyDeviceToHost": (Pointer, Pointer, ctypes.c_size_t, Pointer),
    "sanitizerMemcpyHostToDeviceAsync": (Pointer, ctypes.c_char_p, ctypes.c_size_t, Pointer),
}


_IMMORTAL: list[Any] = []
"""Callbacks that C code knows: one that were freed, be it at the interpreter's end, would be jumped to all the same."""


def _immortal(callback: Any) -> Any:
    _IMMORTAL.append(callback)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))  # the list itself goes when the interpreter ends
    return callback


class Sanitizer:
    """The loaded library.

    Args:
        path: Its file.
        patches: Device functions by ``Sanitizer_InstructionId``.
        optional: The same, where the library or the GPU may not know the instruction.

    Raises:
        MissingError: It cannot be loaded, or lacks a function.

    Attributes:
        unknown: The optional instructions that it did not know.
        raw: Returns what happened to device memory since its last call; no callback tells of it then.
    """

    def __init__(self, path: str, patches: Mapping[int, bytes], optional: Mapping[int, bytes] | None = None) -> None:
        self._patches, self._optional = patches, optional or {}
        self.unknown: set[int] = set()
        self.raw: Callable[[], list[Event]] = nothing
        try:
            library = ctypes.CDLL(path)
            self._functions = {name: library[name] for name in _ARGUMENTS}
        except (OSError, AttributeError) as error:
            raise MissingError(f"{path} cannot be used: {error}") from error
        for name, function in self._functions.items():
            function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_int
        self._subscriber = Pointer()
        self._listening = False

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise StateError(f"{name}: {RESULTS.get(code, f'error {code}')}")

    def subscribe(self, callback: Callable[[int, int, int], None]) -> None:
        """Call back with domain, callback id and the data's address, for launches, synchronisation and resources.

        Raises:
            StateError: Somebody else has subscribed, or there is no CUDA driver.
        """

        def received(_user: int, domain: int, event: int, data: int) -> None:
            if self._listening:
                callback(domain, event, data)

        wanted = set(Resource) - {Resource.DEVICE_MEMORY_ALLOC, Resource.DEVICE_MEMORY_FREE}
        function, self.raw = receiver(_immortal(CALLBACK(received)), wanted)
        _immortal(function)
        self._call("sanitizerSubscribe", ctypes.byref(self._subscriber), function, None)
        self._listening = True
        try:
            for domain in Domain:
                self._call("sanitizerEnableDomain", 1, self._subscriber, domain)
        except StateError:
            self.stop()
            raise

    def stop(self) -> None:
        """Have no more callbacks; may be called again.

        It must be called before the interpreter ends: modules and streams that Python objects own are destroyed while
        it does, and a callback from there would enter Python without a thread state. The subscription itself stays:
        patched modules live on.
        """
        if not self._listening:
            return
        self._listening = False
        codes = [self._functions["sanitizerEnableDomain"](0, self._subscriber, domain) for domain in Domain]
        if any(codes):  # the only way left
            self._functions["sanitizerUnsubscribe"](self._subscriber)

    def cancel(self) -> None:
        """Have no more callbacks, and give the subscription back: nothing was patched."""
        self.stop()
        self._functions["sanitizerUnsubscribe"](self._subscriber)

    def add_patches(self, file: str, context: int) -> None:
        """Load the device functions into a context."""
        self._call("sanitizerAddPatchesFromFile", file.encode(), context)

    def patch(self, module: int) -> None:
        """Insert the calls of our device functions into a module's machine code."""
        for instruction, function in self._patches.items():
            self._call("sanitizerPatchInstructions", instruction, module, function)
        for instruction, function in self._optional.items():
            if self._functions["sanitizerPatchInstructions"](instruction, module, function):
                self.unknown.add(instruction)
        self._call("sanitizerPatchModule", module)

    def give_slot(self, launch: LaunchData, slot: int) -> None:
        """Have this launch's device functions count into a slot."""
        arguments = (launch.launch, launch.function, launch.stream_handle, slot)
        self._call("sanitizerSetLaunchCallbackData", *arguments)

    def give_function_slot(self, function: int, slot: int) -> None:
        """Have launches of a function, in so far as they are given none, count into a slot; 0 = into none."""
        self._call("sanitizerSetCallbackData", function, slot or None)

    def allocate(self, context: int, size: int) -> int:
        """Return the address of new device memory."""
        pointer = Pointer()
        self._call("sanitizerAlloc", context, ctypes.byref(pointer), size)
        return pointer.value or 0

    def clear(self, address: int, size: int, stream: int | None) -> None:
        """Zero device memory, in a stream's order."""
        self._call("sanitizerMemset", address, 0, size, stream)

    def write(self, address: int, content: bytes, stream: int | None) -> None:
        """Copy to device memory in a stream's order; the content must live until the stream has passed."""
        self._call("sanitizerMemcpyHostToDeviceAsync", address, content, len(content), stream)

    def read(self, address: int, size: int, stream: int | None) -> bytes:
        """Return a copy of device memory, once all that the stream was given before is done."""
        copy = (ctypes.c_char * size)()
        self._call("sanitizerMemcpyDeviceToHost", copy, address, size, stream)
        return bytes(copy)
