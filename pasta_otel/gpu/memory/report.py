"""From the results of processes to one report: by GPU kernel, with ratios and findings, by tensor and by range."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from pasta_otel.gpu.classes import demangle, full_name, report_name
from pasta_otel.gpu.memory import formulas
from pasta_otel.gpu.memory.findings import MemoryFinding, find, least_requests, unjudged
from pasta_otel.gpu.memory.hot import HotTensor, Timeline, hot_ranges, hot_tensors, hottest_tensor, label_of, timeline
from pasta_otel.gpu.memory.model import Accesses, Launch, accesses
from pasta_otel.gpu.memory.results import ProcessResult, executions, read_document, read_results
from pasta_otel.gpu.memory.selection import candidates
from pasta_otel.gpu.memory.slots import accessed_unseen, total
from pasta_otel.gpu.memory.words import clip

__all__ = ["KernelMemory", "MemoryReport", "ProcessResult", "by_kernel", "ratios", "read_document", "read_results"]

SCHEMA = 2
MOST_NAME = 90
"""Characters of a GPU kernel's name in text and page."""

Counts = tuple[tuple[str, int], ...]
"""Words and how often each, the most frequent first."""


def ratios(counted: Accesses) -> dict[str, float | None]:
    """Return the ratios that findings judge; None where there was nothing to measure."""
    global_, shared = counted.global_, counted.shared
    return {
        "coalescing_efficiency": formulas.coalescing_efficiency(global_[kind] for kind in formulas.COALESCED),
        "bank_conflict_ratio": formulas.bank_conflict_ratio(
            access for kind, access in shared.items() if kind != "atomic"
        ),
        "active_lane_ratio": formulas.active_lane_ratio(counted),
        "global_atomic_lanes_per_address": formulas.lanes_per_address(global_["atomic"], counted.contention["global"]),
    }


def sectors(counted: Accesses) -> int:
    """Return the 32-byte sectors of global memory touched by all kinds of access."""
    return sum(access.sectors for access in counted.global_.values())


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """One GPU kernel: all its analysed launches, summed.

    Attributes:
        name: As the driver gives it.
        launches: How many were analysed; each node of a CUDA graph is one.
        accesses: What they did.
        findings: What that says to change.
        sources: Lines of the program that launched it, and how often.
        spans: OpenTelemetry spans that it was launched in (``trace id-span id``), and how often.
        modules: Torch modules that launched it, and how often.
        tensors: Labels of tensors, and lane accesses to each.
        working_set: Bytes touched by the launch that touched most; None where that was not counted.
        device_ns: From begin to end on the device, summed over the launches whose own times are known. Analysis slows
            them.
        timed: How many launches' times are known.
        wanted: Launches in all that patterns fit, whether analysed or not; 0 where unknown.
        reads_unseen: Whether a launch accessed memory in a way that is not counted (``slots.accessed_unseen``).
        unjudged: Kinds of findings that there would be, were there requests enough to judge by.
    """

    name: str
    launches: int
    accesses: Accesses
    findings: tuple[MemoryFinding, ...]
    sources: Counts
    spans: Counts = ()
    modules: Counts = ()
    tensors: Counts = ()
    working_set: int | None = None
    device_ns: int = 0
    timed: int = 0
    wanted: int = 0
    reads_unseen: bool = False
    unjudged: tuple[str, ...] = ()

    @property
    def sectors(self) -> int:
        """Return the 32-byte sectors touched, which orders the report."""
        return sectors(self.accesses)

    def ratios(self) -> dict[str, float | None]:
        """Return the ratios that the findings judge."""
        return ratios(self.accesses)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        counted = asdict(self.accesses)
        counted["global"] = counted.pop("global_")
        head = {"name": demangle(self.name), "symbol": self.name, "launches": self.launches}
        spans = [
            {"trace_id": span.partition("-")[0], "span_id": span.partition("-")[2], "launches": count}
            for span, count in self.spans
        ]
        return {
            **head,
            "sources": _counted(self.sources, "source", "launches"),
            "modules": _counted(self.modules, "module", "launches"),
            "spans": spans,
            "tensors": _counted(self.tensors, "tensor", "accesses"),
            "working_set": self.working_set,
            "device_seconds": self.device_ns / 1e9 if self.timed else None,
            **self.ratios(),
            **counted,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def _counted(counts: Counts, what: str, number: str) -> list[dict[str, Any]]:
    return [{what: word, number: count} for word, count in counts]


def by_kernel(launches: Iterable[Launch]) -> list[KernelMemory]:
    """Sum launches by GPU kernel, the one that touches most sectors first; tensors have no names here."""
    return _by_kernel([ProcessResult(0, tuple(launches), 0, {}, 0, 0, ())], named=False)


def _by_kernel(results: Sequence[ProcessResult], *, named: bool = True) -> list[KernelMemory]:
    of_name: dict[str, list[Launch]] = defaultdict(list)
    tensors: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        numbers: dict[str, Counter[int]] = defaultdict(Counter)
        for launch in result.launches:
            of_name[launch.name].append(launch)
            for number, count in launch.tensors if named else ():
                numbers[launch.name][number] += count
        for name, counts in numbers.items():
            for number, count in counts.items():
                tensors[name][label_of(result, number)] += count
    wanted = sum((Counter(result.of_name) for result in results), Counter[str]())
    made = (_kernel(name, same, _ordered(tensors[name])) for name, same in of_name.items())
    kernels = [replace(kernel, wanted=wanted[kernel.name]) for kernel in made]
    return sorted(kernels, key=lambda kernel: (-kernel.sectors, kernel.name))


def _kernel(name: str, same: Sequence[Launch], tensors: Counts) -> KernelMemory:
    summed = accesses(total(launch.words for launch in same))
    sources, spans, modules = (_callers(same, what) for what in ("source", "span", "module"))
    place = {"module": _first(modules), "source": _first(sources), "tensor": _first(tensors)}
    # between nodes of a graph lie other GPU kernels
    timed = [launch for launch in same if launch.begin_unix_nano and executions(launch) == 1]
    return KernelMemory(
        name,
        sum(map(executions, same)),
        summed,
        tuple(replace(finding, **place) for finding in find(summed)),  # type: ignore[arg-type]  # str fields alone
        sources,
        spans,
        modules,
        tensors,
        max((launch.working_set for launch in same if launch.working_set is not None), default=None),
        sum(launch.end_unix_nano - launch.begin_unix_nano for launch in timed),
        len(timed),
        reads_unseen=any(accessed_unseen(launch.words) for launch in same),
        unjudged=unjudged(summed),
    )


def _callers(launches: Sequence[Launch], what: str) -> Counts:
    counts: Counter[str] = Counter()
    for launch in launches:
        counts[getattr(launch.caller, what)] += executions(launch)
    return _ordered(counts)


def _ordered(counts: Counter[str]) -> Counts:
    """Return counts, most first; what has no name is left out."""
    return tuple((word, count) for word, count in counts.most_common() if word)


def _first(counts: Counts) -> str:
    return counts[0][0] if counts else ""


class MemoryReport:
    """All that the outputs say, each part worked out once.

    Args:
        results: Of the program's processes.
        problems: More than they report themselves.
    """

    def __init__(self, results: Iterable[ProcessResult], problems: Iterable[str] = ()) -> None:
        self.results = tuple(results)
        self.analysed = sum(result.analysed for result in self.results)
        self.seen = sum(result.seen for result in self.results)
        self.problems = sorted({*problems, *(problem for result in self.results for problem in result.problems)})
        self.skipped: Counter[str] = Counter()
        for result in self.results:
            self.skipped.update(result.skipped)

    @cached_property
    def kernels(self) -> list[KernelMemory]:
        """Return the GPU kernels, the one that touches most sectors first."""
        return _by_kernel(self.results)

    @cached_property
    def tensors(self) -> list[HotTensor]:
        """Return the tensors, the most accessed first."""
        return hot_tensors(self.results)

    @cached_property
    def ranges(self) -> dict[tuple[int, int], int]:
        """Return lane accesses by process and beginning of a 2 MiB range."""
        return hot_ranges(self.results)

    @cached_property
    def timeline(self) -> Timeline:
        """Return the launches over time."""
        return timeline(self.results)

    @cached_property
    def labels(self) -> dict[str, str]:
        """Return what each GPU kernel is called in text and page, by its name; no two are called the same."""
        return labels([kernel.name for kernel in self.kernels])

    @cached_property
    def findings(self) -> list[tuple[KernelMemory, MemoryFinding]]:
        """Return all findings, the ones that save most transactions first, those without a number last."""
        found = [(kernel, finding) for kernel in self.kernels for finding in kernel.findings]
        return sorted(found, key=lambda one: -_saved(one[1]))

    @property
    def nothing_found(self) -> str:
        """Return what it means that there is no finding."""
        few = sum(bool(kernel.unjudged) for kernel in self.kernels)
        if not few:
            return "no GPU kernel is beyond a threshold"
        least = f"no GPU kernel with at least {least_requests():.0f} requests of a kind is beyond a threshold"
        return f"{least} ({few:,} with fewer {'is' if few == 1 else 'are'}: too few to be judged)"

    @property
    def candidates(self) -> str:
        """Return what there was to choose from, where nothing was chosen; empty = nothing is known."""
        return "" if self.analysed else candidates({name for result in self.results for name in result.refused})

    def as_dict(self) -> dict[str, Any]:
        """Return the report as one JSON document (docs/reference/memory.schema.json)."""
        return {
            "schema": SCHEMA,
            "launches": {"seen": self.seen, "analysed": self.analysed, "skipped": dict(self.skipped)},
            "waits": sum(one.waits for one in self.results),
            "unpatched_modules": sum(one.unpatched for one in self.results),
            "problems": self.problems,
            "processes": [_process(result) for result in self.results],
            "gpu_kernels": [kernel.as_dict() for kernel in self.kernels],
            "tensors": [tensor.as_dict() for tensor in self.tensors],
            "ranges": [
                {"pid": pid, "address": address, "accesses": count} for (pid, address), count in self.ranges.items()
            ],
            "timeline": [_event(result, launch) for result, launch, _ in self.timeline.launches],
        }


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return names as people read them, each unlike the others: with all arguments, or a number, if need be."""
    waiting, found = list(names), dict[str, str]()
    for form in (report_name, full_name):
        of_label: dict[str, list[str]] = defaultdict(list)
        for name in waiting:
            of_label[clip(form(name), MOST_NAME)].append(name)
        found |= {same[0]: label for label, same in of_label.items() if len(same) == 1 and label not in found.values()}
        waiting = [name for name in waiting if name not in found]
    for number, name in enumerate(waiting, 1):
        found[name] = f"{clip(full_name(name), MOST_NAME - 6)} #{number}"
    return found


def _saved(finding: MemoryFinding) -> int:
    return -1 if finding.predicted is None else finding.measured - finding.predicted


def _process(result: ProcessResult) -> dict[str, Any]:
    return {
        "pid": result.pid,
        "command": list(result.command),
        "launches": {"seen": result.seen, "analysed": result.analysed, "skipped": dict(result.skipped)},
        "not_counted": list(result.not_counted),
        "clock": None if result.clock is None else result.clock.as_dict(),
    }


def _event(result: ProcessResult, launch: Launch) -> dict[str, Any]:
    hottest = hottest_tensor(result, launch)
    return {
        "pid": result.pid,
        "symbol": launch.name,
        "stream": launch.stream,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "nodes": launch.nodes,
        "module": launch.caller.module,
        "span": launch.caller.span,
        "launched_unix_nano": launch.caller.time_unix_nano,
        "begin_unix_nano": launch.begin_unix_nano or None,
        "end_unix_nano": launch.end_unix_nano or None,
        "sectors": sectors(launch.accesses),
        "working_set": launch.working_set,
        "hottest_tensor": None if hottest is None else {"tensor": hottest[0], "share": hottest[1]},
    }
