"""The tool behind ``analyze memory``: coalescing, bank conflicts, divergence, atomics, working set and hotness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from pasta_otel.gpu.memory import slots
from pasta_otel.gpu.memory.tool import Instruction, Record, StreamMemory, TensorTable, Tool

_ALL_BITS = (1 << 64) - 1
LEAST_TOUCHED = 131_072
"""Numbers of touched tensors that are kept before those are looked for that nothing is remembered of."""


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """What one launch did to memory.

    Attributes:
        words: Counters, as ``model.accesses`` names them.
        begin_ns: When the first block began, by the device's clock.
        end_ns: When the last block ended.
        working_set: Bytes of the distinct 4 KiB pages touched; None where hotness is not counted.
        tensors: Numbers of tensors and lane accesses to each, most first.
        ranges: Beginnings of 2 MiB ranges and lane accesses to each, by address.
    """

    words: tuple[int, ...]
    begin_ns: int
    end_ns: int
    working_set: int | None = None
    tensors: tuple[tuple[int, int], ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()


class MemoryTool(Tool[MemoryCounts]):
    """Counts accesses, and where they go.

    Args:
        hotness: Whether to count by 2 MiB range and by tensor too; it needs 97 KiB a launch instead of 6.
        tensors: Where tensors lie; without it only ranges are counted.
    """

    name = "memory"
    source = Path(str(files("pasta_otel.gpu").joinpath("kernels", "memory.cu")))
    patches: ClassVar[Mapping[int, str]] = {
        Instruction.BLOCK_ENTER: "PastaBegin",
        Instruction.BLOCK_EXIT: "PastaEnd",
        Instruction.GLOBAL_MEMORY_ACCESS: "PastaGlobal",
        Instruction.SHARED_MEMORY_ACCESS: "PastaShared",
        Instruction.MEMCPY_ASYNC: "PastaAsyncCopy",
        Instruction.MATRIX_MEMORY_ACCESS: "PastaMatrix",
    }
    optional: ClassVar[Mapping[int, str]] = {
        Instruction.REMOTE_SHARED_MEMORY_ACCESS: "PastaRemoteShared",
        Instruction.WARPGROUP_MMA_ASYNC: "PastaWarpgroup",
        Instruction.BULK_COPY_GLOBAL_TO_SHARED: "PastaBulkLoad",
        Instruction.BULK_COPY_SHARED_TO_GLOBAL: "PastaBulkStore",
        Instruction.BULK_REDUCTION_SHARED_TO_GLOBAL: "PastaBulkStore",
        Instruction.TMA_LOAD: "PastaTensorMap",
        Instruction.TMA_STORE: "PastaTensorMap",
    }

    def __init__(self, *, hotness: bool = True, tensors: TensorTable | None = None) -> None:
        self.hotness, self.tensors = hotness, tensors
        self.slot_bytes = slots.SLOT_BYTES if hotness else slots.COUNTER_BYTES
        self._touched: set[int] = set()
        self._most_touched = 2 * LEAST_TOUCHED

    def header(self, memory: StreamMemory) -> bytes:
        """Ask for hotness, by the tensors that there are now."""
        if not self.hotness:
            return b""
        if self.tensors is None:
            return slots.header(0)
        return slots.header(memory.put("tensors", self.tensors.version, self.tensors.table))

    def decode(self, record: Record) -> MemoryCounts | None:
        """Name what the slot holds; None where no block ran (a graph that was only uploaded)."""
        words = tuple(slots.fold(record.slot, self.slot_bytes)[0].tolist())
        if not words[slots.OTHER["blocks"]]:
            return None
        times = (_ALL_BITS - words[slots.NOT_BEGIN], words[slots.END])
        if not self.hotness:
            return MemoryCounts(words, *times)
        ranges, tensors = slots.hot_tables(record.slot)
        by_tensor = sorted(zip(tensors[:, 0].tolist(), tensors[:, 1:].sum(axis=1).tolist(), strict=True), key=_heat)
        places = sorted(zip(ranges[:, 0].tolist(), ranges[:, 1].tolist(), strict=True))
        self._touch([number for number, _ in by_tensor])
        return MemoryCounts(
            words,
            *times,
            int.from_bytes(ranges[:, 2:].tobytes(), "little").bit_count() * slots.PAGE_BYTES,
            tuple(by_tensor),
            tuple(((key - 1) * slots.RANGE_BYTES, accesses) for key, accesses in places),
        )

    def _touch(self, numbers: list[int]) -> None:
        self._touched.update(numbers)
        if self.tensors is None:
            return
        self.tensors.touched(numbers)
        if len(self._touched) > self._most_touched:  # a program that is analysed for long: forget what tensors have
            self._touched = {tensor.number for tensor in self.tensors.describe(self._touched)}
            self._most_touched = 2 * max(len(self._touched), LEAST_TOUCHED)

    def tables(self) -> dict[str, Any]:
        """Return the tensors that some launch touched."""
        if self.tensors is None:
            return {}
        return {"tensors": [asdict(tensor) for tensor in self.tensors.describe(sorted(self._touched))]}


def _heat(entry: tuple[int, int]) -> tuple[int, int]:
    return -entry[1], entry[0]
