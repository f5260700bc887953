"""What one analysis is: device functions that count beside GPU kernels, one record in and one record out.

A tool is a subclass of ``Tool``. The Sanitizer API calls its device functions at the instructions that it names; they
write into the launch's slot of device memory; when the launch's stream has passed, ``decode`` makes a record of it.
docs/reference/memory-tools.md shows how to write one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from pasta_otel.errors import InputError
from pasta_otel.gpu.memory.callers import NOBODY, Caller

if TYPE_CHECKING:
    from pasta_otel.gpu.memory.model import Tensor  # imports numpy


class Instruction(IntEnum):
    """``Sanitizer_InstructionId`` of CUDA 12 and 13: where a device function can be called."""

    BLOCK_ENTER = 1
    BLOCK_EXIT = 2
    GLOBAL_MEMORY_ACCESS = 3
    SHARED_MEMORY_ACCESS = 4
    LOCAL_MEMORY_ACCESS = 5
    BARRIER = 6
    SYNCWARP = 7
    SHFL = 8
    CALL = 9
    RET = 10
    DEVICE_SIDE_MALLOC = 11
    DEVICE_SIDE_FREE = 12
    CUDA_BARRIER = 13
    MEMCPY_ASYNC = 14
    PIPELINE_COMMIT = 15
    PIPELINE_WAIT = 16
    REMOTE_SHARED_MEMORY_ACCESS = 17
    MATRIX_MEMORY_ACCESS = 19
    CACHE_CONTROL = 20
    WARPGROUP_MMA_ASYNC = 23
    BULK_COPY_GLOBAL_TO_SHARED = 30
    BULK_COPY_SHARED_TO_GLOBAL = 35
    BULK_REDUCTION_SHARED_TO_GLOBAL = 37
    TMA_LOAD = 43
    TMA_STORE = 44


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """One analysed launch of a GPU kernel.

    Attributes:
        name: The GPU kernel's name as the driver gives it (mangled).
        grid: Blocks in x, y, z.
        block: Threads of a block in x, y, z.
        stream: Number of the stream, in order of first use within the CUDA context.
        caller: Who launched it, and when.
        nodes: How many nodes of a CUDA graph, all of this GPU kernel, the record is of: they share a slot. 0 = it was
            launched by itself.
        number: Its place among all launches of the process, from 1 on; the first node's.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    stream: int
    caller: Caller = NOBODY
    nodes: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """What goes into a tool: one launch that is done.

    Attributes:
        launch: Which.
        slot: What the device functions wrote, ``slot_bytes`` long.
    """

    launch: LaunchInfo
    slot: bytes


_NOT_THE_USERS = ("<frozen", str(Path(__file__).parent), str(Path(importlib.__file__).parents[1]))
"""Beginnings of the names of files that are not a tool's: the interpreter's own, ours, the standard library's."""

_MOST_INSTRUCTION = (1 << 31) - 1
"""``Sanitizer_InstructionId`` is a C enum."""
Out = TypeVar("Out", covariant=True)  # noqa: PLC0105 - the record out; its type checkers' name is of no use to readers


class StreamMemory(Protocol):
    """Device memory that a tool shares between the launches of one stream."""

    def put(self, key: str, version: int, content: Callable[[], bytes], /) -> int:
        """Return the device address of some content, copied there in the stream's order where the version is new."""


class TensorTable(Protocol):
    """Where tensors lie, at any moment."""

    @property
    def version(self) -> int:
        """Return a number that changes whenever the table would."""

    def table(self) -> bytes:
        """Return how many, begins in ascending order, ends, numbers: as ``kernels/memory.cu`` reads them."""

    def touched(self, numbers: Iterable[int], /) -> None:
        """Keep what is known of these tensors."""

    def describe(self, numbers: Iterable[int], /) -> list[Tensor]:
        """Return what is known of tensors, also of those that are gone."""


class Tool(ABC, Generic[Out]):
    """One analysis.

    Attributes:
        name: A word for messages and results.
        source: The CUDA file of the device functions. ``kernels/patch.cuh`` may be included by its name.
        patches: Device function by instruction. Each is ``extern "C" __device__ __noinline__ int F(void* slot, u64 pc,
            ...)``, with the further arguments that ``sanitizer_patching.h`` gives its instruction; ``slot`` is null in
            launches that were not chosen.
        optional: The same, where an older Sanitizer or an older GPU may not know the instruction.
        slot_bytes: Device memory of one launch; a multiple of 8, zero before the launch.
        tensors: Where tensors lie, for ``header``; set before the first launch of an analysed program.
        process_tables: What ``tables`` returned, by process id; set before ``report``.
    """

    name: ClassVar[str]
    source: ClassVar[Path]
    patches: ClassVar[Mapping[int, str]]
    optional: ClassVar[Mapping[int, str]] = {}
    slot_bytes: int
    tensors: TensorTable | None = None
    process_tables: Mapping[int, Mapping[str, Any]] = MappingProxyType({})

    @abstractmethod
    def decode(self, record: Record) -> Out | None:
        """Return the record out (a dataclass of JSON-compatible values); called once a launch, in the program.

        None says that the launch did not take place.
        """

    def header(self, memory: StreamMemory) -> bytes:
        """Return what is written to the beginning of the slot before the launch; empty = nothing."""
        del memory
        return b""

    def as_json(self, result: Any) -> dict[str, Any]:
        """Return a record out as JSON-compatible data."""
        return asdict(result)

    def tables(self) -> dict[str, Any]:
        """Return JSON-compatible data about the process as a whole, asked for at its end."""
        return {}

    def report(self, results: Sequence[Mapping[str, Any]]) -> str:
        """Return the text for people, from all launches' JSON (``name``, ``grid``, ..., ``result``)."""
        return "\n".join(f"{one['name']}: {one['result']}" for one in results)

    @cached_property
    def functions(self) -> dict[int, bytes]:
        """Return the required device functions' names as C wants them."""
        return {int(instruction): name.encode() for instruction, name in self.patches.items()}

    @cached_property
    def optional_functions(self) -> dict[int, bytes]:
        """Return the optional device functions' names as C wants them."""
        return {int(instruction): name.encode() for instruction, name in self.optional.items()}


def load_tool(reference: str, options: Mapping[str, Any] | None = None, *, aside: bool = True) -> Tool[Any]:
    """Return a new tool.

    Args:
        reference: ``package.module:Class`` or ``FILE.py:Class``.
        options: Keyword arguments of the class.
        aside: Whether what it prints meanwhile goes to stderr: on stdout stands a report, or what a program writes.

    Raises:
        InputError: There is no such class, or it is no complete tool; says why, with file and line.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"expected FILE.py:CLASS or MODULE:CLASS, got {reference!r}", field="tool")
    try:
        with redirect_stdout(sys.stderr if aside else sys.stdout):
            tool: Tool[Any] = _class(place, name)(**(options or {}))
            check(tool, reference)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a user's own code
        file, line = where(error)
        raise InputError(_words(error), file=file, line=line, field=f"tool {name}") from error
    return tool


def _class(place: str, name: str) -> type[Any]:
    found: type[Any] | None = getattr(_module(place), name, None)
    if not isinstance(found, type):
        raise InputError(f"has no class {name}", file=place, field="tool")
    return found


def absolute(reference: str) -> str:
    """Return a tool's reference that means the same in every working directory."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else reference


def where(error: BaseException) -> tuple[str | None, int | None]:
    """Return the file and line of a user's code where an error comes from; None where it comes from none."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno
    frames = [(entry.tb_frame.f_code.co_filename, entry.tb_lineno) for entry in _entries(error.__traceback__)]
    inside = [
        (file, line) for file, line in frames if not file.startswith(_NOT_THE_USERS) and "site-packages" not in file
    ]
    return inside[-1] if inside else (None, None)


def blame(name: str, error: BaseException, method: str) -> str:
    """Return in one line what went wrong in a method of a tool, with file and line where they are the tool's."""
    file, line = where(error)
    return f"{name}: {_words(error)} in {method}()" + (f" ({file}:{line})" if file else "")


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _words(error: BaseException) -> str:
    """Return an error in one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    name = f"pasta_otel_tool_{Path(place).stem}"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None  # noqa: S101 - for the type checker: a .py file has a spec
    assert spec.loader is not None  # noqa: S101 - as above
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def check(tool: Any, reference: str) -> None:
    """Check that a tool is complete.

    Raises:
        InputError: It is not; says what is missing.
    """
    field = f"tool {reference}"
    if not isinstance(tool, Tool):
        raise InputError("is no subclass of pasta_otel.gpu.memory.tool.Tool", field=field)
    missing = [name for name in ("name", "source", "patches", "slot_bytes") if not hasattr(tool, name)]
    if missing:
        raise InputError(f"has no {', '.join(missing)}", field=field)
    if not isinstance(tool.name, str) or not tool.name:
        raise InputError(f"name must be a word, got {tool.name!r}", field=field)
    if not isinstance(tool.source, str | Path):
        raise InputError(f"source must be a path, got {tool.source!r}", field=field)
    if not Path(tool.source).is_file():
        raise InputError(f"{tool.source} does not exist", field=field)
    size = tool.slot_bytes
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0 or size % 8:
        raise InputError(f"slot_bytes must be a positive multiple of 8, got {size!r}", field=field)
    _check_functions(tool, field)


def _check_functions(tool: Tool[Any], field: str) -> None:
    known = set(Instruction)
    for name in ("patches", "optional"):
        functions = getattr(tool, name)
        if not isinstance(functions, Mapping):
            raise InputError(f"{name} must be functions by instruction, got {functions!r}", field=field)
        for instruction, function in functions.items():
            number = isinstance(instruction, int) and 0 < instruction <= _MOST_INSTRUCTION
            if not number or (name == "patches" and instruction not in known):  # a newer library may know others
                raise InputError(f"{name}: {instruction!r} is no Instruction", field=field)
            if not isinstance(function, str) or not (function.isidentifier() and function.isascii()):
                raise InputError(f"{name}: {function!r} is no name of a device function", field=field)
    if not tool.patches and not tool.optional:
        raise InputError("patches and optional are empty: there is nothing to count", field=field)
