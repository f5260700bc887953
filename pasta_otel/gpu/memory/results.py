"""What the processes of an analysed program left behind, read: launches on the host's clock, and tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pasta_otel.gpu.memory.callers import Caller
from pasta_otel.gpu.memory.model import Launch, Tensor
from pasta_otel.gpu.memory.slots import accessed_unseen

TOOL = "memory"
_UNSET = 1 << 63
"""A begin from here on was never written: the device keeps its complement."""


@dataclass(frozen=True, slots=True)
class DeviceClock:
    """The device's clock beside the host's, as far as launches bind it.

    No GPU kernel begins before its launch. So the true offset is at least the greatest of (time of launch - begin);
    that one is taken, and every begin may be up to the shortest launch latency later than shown.

    Attributes:
        offset_ns: Unix time minus the device's.
        launches: How many bind it.
        slack_ns: How much farther from the bound the second closest launch is; None with one launch. Where it is small,
            more than an outlier meets the bound.
    """

    offset_ns: int
    launches: int
    slack_ns: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        return {"offset_ns": self.offset_ns, "launches": self.launches, "slack_ns": self.slack_ns}


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """What one process of the program left behind.

    Attributes:
        pid: Its id.
        launches: The analysed launches, in the order in which they were read.
        seen: Launches of GPU kernels in all.
        skipped: Launches and modules not analysed, by reason.
        waits: How often a launch had to wait for a slot.
        unpatched: Modules without a chosen GPU kernel: their machine code is as it was.
        problems: What went wrong.
        tensors: Pieces of device memory by number: those that a launch touched.
        command: The program, as it was called.
        clock: The device's clock; None where no launch has a time.
        not_counted: Numbers of instructions that this Sanitizer cannot report (``Sanitizer_InstructionId``).
        of_name: By GPU kernel: launches that patterns fit, whether analysed or not.
        refused: Some GPU kernels that no pattern fits.
    """

    pid: int
    launches: tuple[Launch, ...]
    seen: int
    skipped: Mapping[str, int]
    waits: int
    unpatched: int
    problems: tuple[str, ...]
    tensors: Mapping[int, Tensor] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    clock: DeviceClock | None = None
    not_counted: tuple[int, ...] = ()
    of_name: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    @property
    def analysed(self) -> int:
        """Return how many launches were analysed; each node of a CUDA graph is one."""
        return sum(executions(launch) for launch in self.launches)


def executions(launch: Launch) -> int:
    """Return how often a GPU kernel ran within one result: a CUDA graph's nodes of it have one together."""
    return max(1, launch.nodes)


def read_results(folder: Path) -> list[ProcessResult]:
    """Return what the processes wrote into the job's folder; what other tools wrote is left aside."""
    documents = (
        (int(path.stem), json.loads(path.read_text(encoding="utf-8"), object_hook=_Compact()))
        for path in sorted(folder.glob("*.json"))
        if path.stem.isdecimal()
    )
    # a process that could not be analysed names no tool
    return [read_document(pid, content) for pid, content in documents if content.get("tool") in {None, "", TOOL}]


class _Compact:
    """Makes each launch's tables small as soon as they are read: a pair takes 120 bytes as a list, 56 as a tuple."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        if "words" in item:
            once = self._places.setdefault  # one object for a place that many launches touch
            for name in ("tensors", "ranges"):
                item[name] = tuple([(once(place, place), accesses) for place, accesses in item.get(name) or ()])
        return item


def read_document(pid: int, content: Mapping[str, Any]) -> ProcessResult:
    """Return what one process left behind, as ``session.document`` gives it."""
    clock = device_clock([(one["time_unix_nano"], one["result"]["begin_ns"]) for one in content["launches"]])
    seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    tables = content.get("tables", content)  # recordings of the first version hold them beside the rest
    return ProcessResult(
        pid,
        tuple(_launch(one, clock, seen) for one in content["launches"]),
        content["seen"],
        content["skipped"],
        content["waits"],
        content["unpatched"],
        tuple(content["problems"]),
        {one["number"]: Tensor(**one) for one in tables.get("tensors", ())},
        tuple(content.get("command", ())),
        clock,
        tuple(content.get("not_counted", ())),
        content.get("of_name", {}),
        tuple(content.get("refused", ())),
    )


def _launch(one: Mapping[str, Any], clock: DeviceClock | None, seen: dict[tuple[Any, ...], tuple[Any, ...]]) -> Launch:
    result = one["result"]
    begin, end = result["begin_ns"], result["end_ns"]
    timed = clock is not None and _known(begin)
    offset = clock.offset_ns if clock is not None else 0
    # launches that repeat share their tables
    words, tensors, ranges = (
        seen.setdefault(table, table)
        for table in (tuple(result["words"]), _pairs(result.get("tensors")), _pairs(result.get("ranges")))
    )
    return Launch(
        one["name"],
        tuple(one["grid"]),
        tuple(one["block"]),
        one["stream"],
        words,
        Caller(one["time_unix_nano"], one["source"], one["span"], one["module"]),
        begin + offset if timed else 0,
        max(begin, end) + offset if timed else 0,
        None if accessed_unseen(words) else result.get("working_set"),
        tensors,
        ranges,
        one.get("nodes", 0),
    )


def _pairs(table: Any) -> tuple[tuple[int, int], ...]:
    return tuple(map(tuple, table or ()))  # those that _compact made stay as they are


def _known(begin_ns: int) -> bool:
    return 0 < begin_ns < _UNSET


def device_clock(times: Sequence[tuple[int, int]]) -> DeviceClock | None:
    """Put the device's clock beside the host's.

    Args:
        times: By launch: Unix time of the launch, and begin by the device's clock (0 = unknown), in nanoseconds.
    """
    offsets = sorted((launched - begin for launched, begin in times if _known(begin)), reverse=True)
    if not offsets:
        return None
    return DeviceClock(offsets[0], len(offsets), offsets[0] - offsets[1] if len(offsets) > 1 else None)
