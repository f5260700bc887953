"""What one analysis is: device functions that count beside GPU kernels, one record in and one record out.

A tool is a subclass of ``Tool``. The Sanitizer API calls its device functions at the instructions that it names; they
write into the launch's slot of device memory; when the launch's stream has passed, ``decode`` makes a record of it.
docs/reference/memory-tools.md shows how to write one.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
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
        graph: Whether a CUDA graph launched it.
        number: Its place among all launches of the process, from 1 on.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    stream: int
    caller: Caller = NOBODY
    graph: bool = False
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
    """

    name: ClassVar[str]
    source: ClassVar[Path]
    patches: ClassVar[Mapping[int, str]]
    optional: ClassVar[Mapping[int, str]] = {}
    slot_bytes: int
    tensors: TensorTable | None = None

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


def load_tool(reference: str, options: Mapping[str, Any] | None = None) -> Tool[Any]:
    """Return a new tool.

    Args:
        reference: ``package.module:Class`` or ``FILE.py:Class``.
        options: Keyword arguments of the class.

    Raises:
        InputError: There is no such class, or it is no complete tool; says why.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise InputError(f"expected FILE.py:CLASS or MODULE:CLASS, got {reference!r}", field="tool")
    try:
        found = getattr(_module(place), name)
        tool = found(**(options or {}))
    except Exception as error:  # a user's own code
        raise InputError(f"{type(error).__name__}: {error}", field=f"tool {reference}") from error
    if not isinstance(tool, Tool):
        raise InputError("is no subclass of pasta_otel.gpu.memory.tool.Tool", field=f"tool {reference}")
    _check(tool, reference)
    return tool


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None  # noqa: S101 - for the type checker: a .py file has a spec
    assert spec.loader is not None  # noqa: S101 - as above
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(tool: Tool[Any], reference: str) -> None:
    missing = [name for name in ("name", "source", "patches", "slot_bytes") if not hasattr(tool, name)]
    if missing:
        raise InputError(f"has no {', '.join(missing)}", field=f"tool {reference}")
    if not Path(tool.source).is_file():
        raise InputError(f"{tool.source} does not exist", field=f"tool {reference}")
    if tool.slot_bytes <= 0 or tool.slot_bytes % 8:
        raise InputError(f"slot_bytes must be a multiple of 8, got {tool.slot_bytes}", field=f"tool {reference}")
