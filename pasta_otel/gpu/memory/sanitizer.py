"""The Compute Sanitizer API by ctypes: what we call of ``sanitizer_{callbacks,patching,memory}.h`` of CUDA 12 and 13.

Its callbacks are received natively (``native``). Every call here releases Python's interpreter lock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any

from pasta_otel.errors import MissingError, StateError
from pasta_otel.gpu.memory.library import DRIVER
from pasta_otel.gpu.memory.native import Event, Node, Note, NoteKind, Slot, native, nothing

Pointer = ctypes.c_void_p


class Domain(IntEnum):
    """``Sanitizer_CallbackDomain``, those that we listen to."""

    DRIVER_API = 1
    RESOURCE = 3
    SYNCHRONIZE = 4
    LAUNCH = 5
    GRAPHS = 10


RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``."""
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
    "sanitizerGetStreamHandle": (Pointer, Pointer, ctypes.POINTER(Pointer)),
    "sanitizerMemcpyHostToDeviceAsync": (Pointer, ctypes.c_char_p, ctypes.c_size_t, Pointer),
}
_FOR_THE_RECEIVER = (
    "sanitizerAlloc",
    "sanitizerMemset",
    "sanitizerMemcpyHostToDeviceAsync",
    "sanitizerSetLaunchCallbackData",
    "sanitizerSetCallbackData",
    "sanitizerGetStreamHandle",
)
_FOR_PATCHING = ("sanitizerAddPatchesFromFile", "sanitizerPatchInstructions", "sanitizerPatchModule")

_IMMORTAL: list[Any] = []
"""Callbacks that C code knows: one that were freed, be it at the interpreter's end, would be jumped to all the same."""


def _immortal(callback: Any) -> Any:
    _IMMORTAL.append(callback)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))  # the list itself goes when the interpreter ends
    return callback


def meaning(code: int) -> str:
    """Return what a ``SanitizerResult`` says."""
    return RESULTS.get(code, f"error {code}")


def _address(function: Any) -> int:
    return ctypes.cast(function, Pointer).value or 0


class Sanitizer:
    """The loaded library.

    Args:
        path: Its file.
        patches: Device functions by ``Sanitizer_InstructionId``.
        optional: The same, where the library or the GPU may not know the instruction.
        driver: File of the CUDA driver.

    Raises:
        MissingError: It cannot be loaded, or lacks a function.

    Attributes:
        unknown: The optional instructions that it did not know.
        raw: Returns what happened to device memory since its last call.
    """

    def __init__(
        self,
        path: str,
        patches: Mapping[int, bytes],
        optional: Mapping[int, bytes] | None = None,
        driver: str = DRIVER,
    ) -> None:
        self._patches, self._optional, self._driver = patches, optional or {}, driver
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
        self._receiver: Any = None
        self._listening = False

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise StateError(f"{name}: {meaning(code)}")

    def subscribe(self, callback: Callable[[int, int], None], patch: str, texts: tuple[str, ...] = ()) -> None:
        """Patch modules as they are loaded, and call back at the beginning and the end of launches.

        Args:
            callback: Is called with a ``Call`` and the address of its ``CallData``.
            patch: File of the compiled device functions.
            texts: Only modules with a GPU kernel whose name has one of these are patched; none = all.

        Raises:
            MissingError: The native part is missing.
            StateError: Somebody else has subscribed, or there is no CUDA driver.
        """

        def received(call: int, data: int) -> None:
            if self._listening:
                callback(call, data)

        self._receiver = native()
        main = threading.main_thread().ident
        self._receiver.patch_with(*self._addresses(_FOR_PATCHING), patch, self._device_functions(), texts)
        function = CALLBACK(self._receiver.receiver(received, main, *self._addresses(_FOR_THE_RECEIVER), self._driver))
        _immortal(function)
        self._listening = True  # from its first callback on
        try:
            self._call("sanitizerSubscribe", ctypes.byref(self._subscriber), function, None)
            for domain in Domain:
                self._call("sanitizerEnableDomain", 1, self._subscriber, domain)
        except StateError:
            self.stop()
            raise
        self.raw = self._receiver.memory

    def _addresses(self, names: Iterable[str]) -> list[int]:
        return [_address(self._functions[name]) for name in names]

    def _device_functions(self) -> list[tuple[int, bool, str]]:
        required = [(instruction, False, name.decode()) for instruction, name in self._patches.items()]
        return required + [(instruction, True, name.decode()) for instruction, name in self._optional.items()]

    def stop(self) -> None:
        """Have no more callbacks; may be called again.

        It must be called before the interpreter ends: modules and streams that Python objects own are destroyed while
        it does, and a callback from there would enter Python without a thread state. The subscription itself stays:
        patched modules live on.
        """
        if not self._listening:
            return
        self._listening = False
        self._receiver.stop()
        codes = [self._functions["sanitizerEnableDomain"](0, self._subscriber, domain) for domain in Domain]
        if any(codes):  # the only way left
            self._functions["sanitizerUnsubscribe"](self._subscriber)

    def cancel(self) -> None:
        """Have no more callbacks, and give the subscription back: nothing was patched."""
        self.stop()
        self._functions["sanitizerUnsubscribe"](self._subscriber)

    def noted(self) -> bool:
        """Return whether something happened since the last call of ``notes``."""
        return bool(self._receiver.noted())

    def notes(self) -> list[Note]:
        """Return what happened since the last call."""
        notes = [Note(*note) for note in self._receiver.notes()]
        self.unknown.update(note.value for note in notes if note.kind == NoteKind.INSTRUCTION_UNKNOWN)
        return notes

    def lost_notes(self) -> int:
        """Return how many events there was no room for."""
        return int(self._receiver.lost())

    def unknown_launches(self) -> int:
        """Return how many launches began in calls that nobody knows, so that none of them has a slot."""
        return int(self._receiver.unknown())

    def give_slot(self, slot: Slot) -> None:
        """Have the launch that is being entered count into a slot."""
        self._receiver.give(*slot)

    def give_memory(self, address: int) -> None:
        """Have the launch that is being entered count into device memory as it is."""
        self._receiver.give(0, 0, 0, address, b"")

    def reserve(self, slots: list[Slot]) -> None:
        """Have the graph that is being entered count into slots, each for all nodes of one GPU kernel."""
        self._receiver.reserve(slots)

    def slab(self, number: int, turn: int) -> int:
        """Return where a slab lies; 0 = no launch of this turn has begun."""
        return int(self._receiver.slab(number, turn))

    def idle(self, stream: int | None, entered: int) -> bool:
        """Return whether no launch has begun in a stream since so many had begun in all (``Note.entered``)."""
        return bool(self._receiver.idle(stream or 0, entered))

    def nodes(self) -> list[Node]:
        """Return the GPU kernels of the graph that is being left, with what slots they got."""
        return [Node(*node) for node in self._receiver.nodes()]

    def raise_later(self, error: BaseException) -> None:
        """Raise an exception in this thread, once its call into the driver is over.

        Raised in the callback itself it would be printed and lost: a driver cannot pass it on.
        """
        self._receiver.raise_later(error)

    def inside(self, work: Callable[[], None]) -> None:
        """Do something as a part of the analysis: ``depth`` counts it, whatever a handler of a signal raises there."""
        self._receiver.inside(work)

    def depth(self) -> int:
        """Return how many calls into the analysis this thread is in, one inside the other."""
        return int(self._receiver.depth())

    def deafen(self) -> None:
        """Have no more callbacks in this process, which was forked: the subscription is its parent's."""
        if self._listening:
            self._listening = False
            self._receiver.stop()

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
        former = self._receiver.exchange_mode(RELAXED)  # another thread's capture must bear it
        try:
            self._call("sanitizerMemcpyDeviceToHost", copy, address, size, stream)
        finally:
            self._receiver.exchange_mode(former)
        return bytes(copy)
