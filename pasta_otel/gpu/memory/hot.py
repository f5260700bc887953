"""Where accesses go: tensors and 2 MiB ranges by lane accesses, and both over the program's time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pasta_otel.gpu.memory.model import Launch, Tensor
from pasta_otel.gpu.memory.results import ProcessResult
from pasta_otel.gpu.memory.slots import OTHER
from pasta_otel.gpu.memory.words import duration, steps

COLUMNS = 60
_LEAST_FILLED = 0.5

Key = TypeVar("Key")
Row = Mapping[int, int]
"""Lane accesses by column."""


@dataclass(frozen=True, slots=True)
class HotTensor:
    """All tensors of one label: one parameter, or what one line of one module allocates again and again.

    Attributes:
        label: What a person would call it.
        name: Qualified name of a parameter or buffer; else empty.
        module: The torch module that allocated it; may be empty.
        source: ``file:line function`` that allocated it; may be empty.
        bytes: Of the longest.
        allocations: How many pieces of memory carried the label.
        processes: In how many processes.
        accesses: Lane accesses.
        share: Of all lane accesses that were counted by place, 0..1.
        kernels: Symbols of GPU kernels and their lane accesses, most first.
    """

    label: str
    name: str
    module: str
    source: str
    bytes: int
    allocations: int
    processes: int
    accesses: int
    share: float
    kernels: tuple[tuple[str, int], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        kernels = [{"symbol": name, "accesses": accesses} for name, accesses in self.kernels]
        return {**asdict(self), "kernels": kernels}


def label_of(result: ProcessResult, number: int) -> str:
    """Return what a tensor is called; one that is not described is called by its number and process."""
    tensor = result.tensors.get(number)
    return f"tensor {number} of process {result.pid}" if tensor is None else tensor.label


def placed_accesses(launch: Launch) -> int:
    """Return the lane accesses of a launch that were counted by place: to tensors, and to memory of no known one."""
    return sum(accesses for _, accesses in launch.tensors) + launch.words[OTHER["hot_outside"]]


def hottest_tensor(result: ProcessResult, launch: Launch) -> tuple[str, float] | None:
    """Return the label of the tensor that a launch accesses most, and its share; None where none is known."""
    if not launch.tensors:
        return None
    number, accesses = max(launch.tensors, key=lambda entry: entry[1])
    return label_of(result, number), accesses / max(1, placed_accesses(launch))


def hot_tensors(results: Sequence[ProcessResult]) -> list[HotTensor]:
    """Sum lane accesses by label, the most accessed first."""
    pieces: dict[str, dict[tuple[int, int], Tensor | None]] = defaultdict(dict)
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    every = 0
    for result in results:
        labels = {number: label_of(result, number) for one in result.launches for number, _ in one.tensors}
        for number, label in labels.items():
            pieces[label][result.pid, number] = result.tensors.get(number)
        for launch in result.launches:
            every += placed_accesses(launch)
            for number, accesses in launch.tensors:
                kernels[labels[number]][launch.name] += accesses
    found = [_hot(label, pieces[label], of_kernel, every) for label, of_kernel in kernels.items()]
    return sorted(found, key=lambda tensor: (-tensor.accesses, tensor.label))


def _hot(label: str, pieces: Mapping[tuple[int, int], Tensor | None], of_kernel: Counter[str], every: int) -> HotTensor:
    described = [piece for piece in pieces.values() if piece is not None]
    first = described[0] if described else Tensor(0, 0, 0)
    accesses = of_kernel.total()
    return HotTensor(
        label,
        first.name,
        first.module,
        first.source,
        max((piece.bytes for piece in described), default=0),
        len(pieces),
        len({pid for pid, _ in pieces}),
        accesses,
        accesses / every if every else 0.0,
        tuple(of_kernel.most_common()),
    )


def hot_ranges(results: Sequence[ProcessResult]) -> dict[tuple[int, int], int]:
    """Return lane accesses by process and beginning of a 2 MiB range, in ascending order."""
    ranges: Counter[tuple[int, int]] = Counter()
    for result in results:
        of_process: Counter[int] = Counter()
        for launch in result.launches:
            for address, accesses in launch.ranges:
                of_process[address] += accesses
        ranges.update({(result.pid, address): accesses for address, accesses in of_process.items()})
    return dict(sorted(ranges.items()))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Launches of all processes in columns: pieces of time, or, where they leave most of it empty, of their order.

    Attributes:
        columns: How many.
        by_time: Whether columns are equally long; else each has equally many launches.
        on_device: Whether times are those of the device; else some are of the launching call.
        ticks: Columns and what stands below them: time since the first launch.
        launches: Process, launch and column, by time.
    """

    columns: int
    by_time: bool
    on_device: bool
    ticks: tuple[tuple[float, str], ...]
    launches: tuple[tuple[ProcessResult, Launch, int], ...]

    def rows(self, keys: Callable[[ProcessResult, Launch], Iterable[tuple[Key, int]]]) -> dict[Key, Row]:
        """Sum numbers by key and column."""
        found: dict[Key, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for result, launch, column in self.launches:
            for key, number in keys(result, launch):
                found[key][column] += number
        return dict(found)


def timeline(results: Sequence[ProcessResult], columns: int = COLUMNS) -> Timeline:
    """Put launches into columns."""
    entries = [
        (one.begin_unix_nano or one.caller.time_unix_nano, result, one) for result in results for one in result.launches
    ]
    entries.sort(key=lambda entry: entry[0])
    times = [at for at, _, _ in entries]
    places = _by_time(times, columns)
    by_time = places is not None
    if places is None:
        columns = max(1, min(columns, len(entries)))
        places = [number * columns // len(entries) for number in range(len(entries))]
    ticks = _time_ticks(times, columns) if by_time else _order_ticks(times, columns)
    launches = tuple((result, one, place) for (_, result, one), place in zip(entries, places, strict=True))
    return Timeline(columns, by_time, all(one.begin_unix_nano for _, _, one in entries), ticks, launches)


def _by_time(times: Sequence[int], columns: int) -> list[int] | None:
    """Return each launch's column; None where most columns would be empty."""
    if len(times) < columns or times[-1] == times[0]:
        return None
    span = times[-1] - times[0] + 1
    places = [(at - times[0]) * columns // span for at in times]
    return places if len(set(places)) >= _LEAST_FILLED * columns else None


def _time_ticks(times: Sequence[int], columns: int) -> tuple[tuple[float, str], ...]:
    span = times[-1] - times[0] + 1
    return tuple((columns * at / span, duration(at)) for at in steps(span))


def _order_ticks(times: Sequence[int], columns: int, most: int = 6) -> tuple[tuple[float, str], ...]:
    numbers = sorted({n * (len(times) - 1) // most for n in range(most + 1)}) if times else []
    return tuple((n * columns / len(times), f"{n + 1:,} ({duration(times[n] - times[0])})") for n in numbers)
