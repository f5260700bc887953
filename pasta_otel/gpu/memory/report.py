"""From the results of processes to one report: by GPU kernel, with ratios and findings."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pasta_otel.gpu.classes import demangle, short_name
from pasta_otel.gpu.memory import formulas
from pasta_otel.gpu.memory.callers import Caller
from pasta_otel.gpu.memory.findings import MemoryFinding, find
from pasta_otel.gpu.memory.model import Accesses, Launch, Tensor, accesses
from pasta_otel.gpu.memory.slots import total

SCHEMA = 1
MOST_SOURCES = 3
"""Lines of the program that the text names for one GPU kernel; the JSON has all."""


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
    """

    pid: int
    launches: tuple[Launch, ...]
    seen: int
    skipped: Mapping[str, int]
    waits: int
    unpatched: int
    problems: tuple[str, ...]
    tensors: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """One GPU kernel: all its analysed launches, summed.

    Attributes:
        name: As the driver gives it.
        launches: How many were analysed.
        accesses: What they did.
        findings: What that says to change.
        sources: Lines of the program that launched it, and how often; the most frequent first.
        spans: OpenTelemetry spans that it was launched in (``trace id-span id``), and how often.
    """

    name: str
    launches: int
    accesses: Accesses
    findings: tuple[MemoryFinding, ...]
    sources: tuple[tuple[str, int], ...]
    spans: tuple[tuple[str, int], ...] = ()

    @property
    def sectors(self) -> int:
        """Return the 32-byte sectors touched, which orders the report."""
        return sum(access.sectors for access in self.accesses.global_.values())

    def ratios(self) -> dict[str, float | None]:
        """Return the ratios that the findings judge."""
        global_, shared = self.accesses.global_, self.accesses.shared
        return {
            "coalescing_efficiency": formulas.coalescing_efficiency(global_[kind] for kind in formulas.COALESCED),
            "bank_conflict_ratio": formulas.bank_conflict_ratio(
                access for kind, access in shared.items() if kind != "atomic"
            ),
            "active_lane_ratio": formulas.active_lane_ratio(self.accesses),
            "global_atomic_lanes_per_address": formulas.lanes_per_address(
                global_["atomic"], self.accesses.contention["global"]
            ),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        counted = asdict(self.accesses)
        counted["global"] = counted.pop("global_")
        head = {"name": demangle(self.name), "symbol": self.name, "launches": self.launches}
        spans = [
            {"trace_id": span.partition("-")[0], "span_id": span.partition("-")[2], "launches": count}
            for span, count in self.spans
        ]
        sources = [{"source": source, "launches": count} for source, count in self.sources]
        return {
            **head,
            "sources": sources,
            "spans": spans,
            **self.ratios(),
            **counted,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def read_results(folder: Path) -> list[ProcessResult]:
    """Return what the processes wrote into the job's folder."""
    return [_result(path) for path in sorted(folder.glob("*.json"))]


def _result(path: Path) -> ProcessResult:
    content = json.loads(path.read_text(encoding="utf-8"))
    launches = tuple(
        Launch(
            one["name"],
            tuple(one["grid"]),
            tuple(one["block"]),
            one["stream"],
            tuple(one["words"]),
            Caller(one["time_unix_nano"], one["source"], one["span"]),
        )
        for one in content["launches"]
    )
    counts = (content["seen"], content["skipped"], content["waits"], content["unpatched"], tuple(content["problems"]))
    return ProcessResult(int(path.stem), launches, *counts)


def by_kernel(launches: Iterable[Launch]) -> list[KernelMemory]:
    """Sum launches by GPU kernel, the one that touches most sectors first."""
    of_name: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        of_name[launch.name].append(launch)
    kernels = []
    for name, same in of_name.items():
        summed = accesses(total(launch.words for launch in same))
        sources = Counter(launch.caller.source for launch in same if launch.caller.source).most_common()
        spans = Counter(launch.caller.span for launch in same if launch.caller.span).most_common()
        kernels.append(KernelMemory(name, len(same), summed, tuple(find(summed)), tuple(sources), tuple(spans)))
    return sorted(kernels, key=lambda kernel: (-kernel.sectors, kernel.name))


def as_dict(results: Iterable[ProcessResult]) -> dict[str, Any]:
    """Return the report as one JSON document."""
    chosen = list(results)
    skipped: Counter[str] = Counter()
    for result in chosen:
        skipped.update(result.skipped)
    launches = [launch for result in chosen for launch in result.launches]
    return {
        "schema": SCHEMA,
        "launches": {"seen": sum(one.seen for one in chosen), "analysed": len(launches), "skipped": dict(skipped)},
        "waits": sum(one.waits for one in chosen),
        "unpatched_modules": sum(one.unpatched for one in chosen),
        "problems": sorted({problem for one in chosen for problem in one.problems}),
        "gpu_kernels": [kernel.as_dict() for kernel in by_kernel(launches)],
    }


def as_text(results: Iterable[ProcessResult]) -> str:
    """Return the report as text."""
    chosen = list(results)
    launches = [launch for result in chosen for launch in result.launches]
    seen = sum(result.seen for result in chosen)
    lines = [f"memory analysis: {len(launches)} of {seen} launches of GPU kernels analysed"]
    for kernel in by_kernel(launches):
        lines += _kernel_lines(kernel)
    return "\n".join(lines)


def _kernel_lines(kernel: KernelMemory) -> Iterator[str]:
    yield ""
    yield f"{short_name(kernel.name)}  ({kernel.launches} launches)"
    for source, count in kernel.sources[:MOST_SOURCES]:
        yield f"  from {source}  ({count})"
    for kind, access in kernel.accesses.global_.items():
        if access.requests:
            efficiency = formulas.coalescing_efficiency([access])
            used = "" if efficiency is None else f", {efficiency:.0%} of the bytes moved asked for"
            yield (
                f"  global {kind}: {access.requests} requests, {access.lanes / access.requests:.1f} lanes and"
                f" {access.sectors / access.requests:.1f} sectors each{used}"
            )
    for kind, shared in kernel.accesses.shared.items():
        if shared.requests:
            yield (
                f"  shared {kind}: {shared.requests} requests, {shared.wavefronts} wavefronts,"
                f" {shared.conflicts} of them bank conflicts"
            )
    for finding in kernel.findings:
        yield f"  ! {finding.title}"
        yield f"    {finding.suggestion}"
