"""Which GPU kernel stored the first NaN or infinity.

pasta-otel analyze tool docs/examples/nonfinite.py:NonFinite -- python train.py
pasta-otel analyze tool docs/examples/nonfinite.py:NonFinite --option number=bfloat16 -- python train.py
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pasta_otel.gpu.classes import short_name
from pasta_otel.gpu.memory.tool import Instruction, Record, StreamMemory, Tool

FORMATS = {
    "float16": (2, 0x7C00, 0x03FF),
    "bfloat16": (2, 0x7F80, 0x007F),
    "float32": (4, 0x7F800000, 0x007FFFFF),
    "float64": (8, 0x7FF << 52, (1 << 52) - 1),
}
"""Bytes of a number, and the bits of its exponent and of its fraction (IEEE 754)."""
HEADER, WORDS = 3, 9
MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class Stored:
    """What one launch stored.

    Attributes:
        numbers: Numbers stored, if all were of the format that was asked for.
        nan: NaN among them.
        negative_nan: NaN with the sign bit set; small negative integers look the same (-1 has all bits set).
        infinite: Infinities among them.
        first_address: Where the first of those three went; 0 = there was none.
        first_ns: When, by the device's clock.
    """

    numbers: int
    nan: int
    negative_nan: int
    infinite: int
    first_address: int
    first_ns: int


class NonFinite(Tool[Stored]):
    """Looks at every number that is stored to global memory.

    Args:
        number: The numbers' format: the same bits are another number in another one.
    """

    name = "nonfinite"
    source = Path(__file__).with_name("nonfinite.cu")
    patches: ClassVar[Mapping[int, str]] = {Instruction.GLOBAL_MEMORY_ACCESS: "NonFiniteStore"}
    slot_bytes = 8 * WORDS

    def __init__(self, *, number: str = "float32") -> None:
        if number not in FORMATS:
            raise ValueError(f"number must be one of {', '.join(FORMATS)}, got {number!r}")
        self.number = number

    def header(self, memory: StreamMemory) -> bytes:
        """Tell the device function what to look for."""
        del memory
        return struct.pack(f"<{HEADER}Q", *FORMATS[self.number])

    def decode(self, record: Record) -> Stored:
        """Read a launch's slot."""
        return Stored(*struct.unpack(f"<{WORDS}Q", record.slot)[HEADER:])

    def report(self, results: Sequence[Mapping[str, Any]]) -> str:
        """Name the first launch that stored one, then all, in the order in which they did it."""
        found = sorted((one for one in results if one["result"]["first_address"]), key=_when)
        looked_at = f"{sum(one['result']['numbers'] for one in results):,} numbers stored as {self.number}"
        if not found:
            return f"no NaN and no infinity in {looked_at}"
        lines = [_line(one) for one in found[:MOST_LINES]]
        more = [f"  and {len(found) - MOST_LINES:,} more launches"] if len(found) > MOST_LINES else []
        return "\n".join([f"{looked_at}; launches that stored NaN or infinity, the first one first:", *lines, *more])


def _when(one: Mapping[str, Any]) -> int:
    return int(one["result"]["first_ns"])


def _line(one: Mapping[str, Any]) -> str:
    result = one["result"]
    kinds = ("nan", "NaN"), ("negative_nan", "NaN with the sign bit set or negative integers"), ("infinite", "infinite")
    counts = ", ".join(f"{result[key]:,} {words}" for key, words in kinds if result[key])
    place = ", ".join(one[key] for key in ("module", "source") if one[key])
    head = f"  launch {one['number']:,}: {short_name(one['name'])}: {counts} of {result['numbers']:,}"
    return f"{head}, first at {result['first_address']:#x}" + (f"\n    {place}" if place else "")
