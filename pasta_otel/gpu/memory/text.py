"""The report as text: what to change first, then GPU kernel by GPU kernel, then the hottest tensors."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pasta_otel.gpu.memory import formulas
from pasta_otel.gpu.memory.findings import MemoryFinding
from pasta_otel.gpu.memory.report import Counts, KernelMemory, MemoryReport
from pasta_otel.gpu.memory.words import clip, duration, size

MOST_KERNELS, MOST_FIRST, MOST_TENSORS, MOST_WORDS = 20, 5, 10, 3
"""What the text shows of each; the JSON has all."""
COLUMNS = 110
WIDTH = 60
"""Longest name."""


def as_text(report: MemoryReport) -> str:
    """Return the report as text."""
    return "\n".join(folded for line in _lines(report) for folded in _folded(line))


def _lines(report: MemoryReport) -> Iterator[str]:
    yield from _head(report)
    yield from _first(report)
    yield from _kernels(report)
    yield from _tensors(report)


def _folded(line: str) -> list[str]:
    """Return a line as several, the further ones behind the indentation of the first and two more."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    if len(line) <= COLUMNS:
        return [line]
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _name(text: str) -> str:
    return clip(text, WIDTH)


def _head(report: MemoryReport) -> Iterator[str]:
    yield f"memory analysis: {report.analysed:,} of {report.seen:,} launches of GPU kernels analysed"
    if report.skipped:
        yield "  not analysed: " + ", ".join(f"{count:,} ({reason})" for reason, count in report.skipped.most_common())
    if report.candidates:
        yield f"  {report.candidates}"
    if len(report.results) > 1:
        yield f"  {len(report.results)} processes"
    missing = sorted({number for result in report.results for number in result.not_counted})
    if missing:
        numbers = ", ".join(map(str, missing))
        yield f"  not counted: instructions {numbers}, which this version of the Sanitizer cannot report"


def _first(report: MemoryReport) -> Iterator[str]:
    found = report.findings
    if not report.analysed:
        return
    if not found:
        yield ""
        yield f"nothing to change: {report.nothing_found}"
        return
    yield ""
    yield "change first (by transactions saved, at best):"
    for number, (kernel, finding) in enumerate(found[:MOST_FIRST], 1):
        yield f"  {number}. {report.labels[kernel.name]}: {finding.kind}{_gain(finding)}"
        yield f"     {finding.suggestion}"
        if place := _place(finding):
            yield f"     {place}"
    shown = {kernel.name for kernel in report.kernels[:MOST_KERNELS]}
    below = sum(kernel.name in shown for kernel, _ in found[MOST_FIRST:])
    if below:
        yield f"  and {below} more below"
    if hidden := len(found[MOST_FIRST:]) - below:
        yield f"  and {hidden} more in --json"


def _gain(finding: MemoryFinding) -> str:
    if finding.predicted is None:
        return ""
    return f", {finding.measured:,} -> {finding.predicted:,} {finding.unit}s ({finding.gain:.0%} fewer)"


def _place(finding: MemoryFinding) -> str:
    """Return the layer, line and tensor that a finding is about."""
    named = (("layer", finding.module), ("line", finding.source), ("tensor", finding.tensor))
    return ", ".join(f"{what} {_name(word)}" for what, word in named if word)


def _kernels(report: MemoryReport) -> Iterator[str]:
    every = sum(kernel.sectors for kernel in report.kernels) or 1
    told = [(kernel.name, finding) for kernel, finding in report.findings[:MOST_FIRST]]
    for kernel in report.kernels[:MOST_KERNELS]:
        yield ""
        yield f"{report.labels[kernel.name]}  ({', '.join(_facts(kernel, every))})"
        yield from _words("layers", kernel.modules)
        yield from _words("lines", kernel.sources)
        yield from _shares("tensors", kernel.tensors)
        yield from _accesses(kernel)
        for finding in kernel.findings:
            yield f"  ! {finding.title}"
            if (kernel.name, finding) in told:
                yield "    -> see above"
                continue
            yield f"    -> {finding.suggestion}"
            if finding.predicted is not None:
                yield f"    {_gain(finding).removeprefix(', ')}"
        if kernel.unjudged:
            yield f"  ? {', '.join(kernel.unjudged)}: beyond the threshold, but with too few requests to be judged"
    if len(report.kernels) > MOST_KERNELS:
        yield ""
        yield f"{len(report.kernels) - MOST_KERNELS} GPU kernels that touch less are in --json"


def _facts(kernel: KernelMemory, every: int) -> Iterator[str]:
    count = f"{kernel.launches:,}" + (f" of {kernel.wanted:,}" if kernel.wanted > kernel.launches else "")
    yield f"{count} launch{'' if count == '1' else 'es'}"
    if kernel.reads_unseen:
        yield "accesses by TMA not counted"
    else:
        yield f"{kernel.sectors / every:.0%} of all sectors"
    if kernel.working_set is not None:
        yield f"working set {size(kernel.working_set)}"
    if kernel.timed:
        yield f"{duration(kernel.device_ns)} under analysis"


def _words(what: str, counts: Counts) -> Iterator[str]:
    if counts:
        words = ", ".join(f"{_name(word)} ({count:,})" for word, count in counts[:MOST_WORDS])
        yield f"  {what}: {words}{_rest(counts)}"


def _shares(what: str, counts: Counts) -> Iterator[str]:
    if counts:
        every = sum(count for _, count in counts) or 1
        words = ", ".join(f"{_name(word)} {count / every:.0%}" for word, count in counts[:MOST_WORDS])
        yield f"  {what}: {words}{_rest(counts)}"


def _rest(counts: Counts) -> str:
    return f", and {len(counts) - MOST_WORDS} more" if len(counts) > MOST_WORDS else ""


def _accesses(kernel: KernelMemory) -> Iterator[str]:
    for kind, access in kernel.accesses.global_.items():
        if access.requests:
            efficiency = formulas.coalescing_efficiency([access])
            used = "" if efficiency is None else f", {efficiency:.0%} of the bytes moved asked for"
            yield (
                f"  global {kind}: {access.requests:,} requests, {access.lanes / access.requests:.1f} lanes and"
                f" {access.sectors / access.requests:.1f} sectors each{used}"
            )
    for kind, shared in kernel.accesses.shared.items():
        if shared.requests:
            yield (
                f"  shared {kind}: {shared.requests:,} requests, {shared.lanes / shared.requests:.1f} lanes each,"
                f" {shared.wavefronts:,} wavefronts,"
                f" {shared.conflicts:,} of them bank conflicts"
            )
    yield from _others(kernel)


def _others(kernel: KernelMemory) -> Iterator[str]:
    other = kernel.accesses.other
    if count := other["remote_shared_requests"]:
        yield f"  other blocks' shared memory: {count:,} requests, {size(other['remote_shared_bytes'])}"
    if count := other["wgmma_instructions"]:
        read = f"{size(other['wgmma_a_bytes'])} of A and {size(other['wgmma_b_bytes'])} of B"
        yield f"  wgmma: {count:,} instructions of a warp read {read} from shared memory"
    if kernel.reads_unseen:
        yield "  not in these numbers: accesses by TMA; this GPU kernel touches more memory than they say"
    if count := other["tensor_map_copies"]:
        yield f"  not in these numbers: {count:,} copies by a tensor map (TMA), of unknown size"


def _tensors(report: MemoryReport) -> Iterator[str]:
    if not report.tensors:
        return
    yield ""
    yield "hottest tensors:"
    yield f"  {'lane accesses':>16}  share  {'size':>9}  tensor"
    for tensor in report.tensors[:MOST_TENSORS]:
        times = f"  ({tensor.allocations:,} allocations)" if tensor.allocations > 1 else ""
        yield f"  {tensor.accesses:16,}  {tensor.share:5.0%}  {size(tensor.bytes):>9}  {_name(tensor.label)}{times}"
    if len(report.tensors) > MOST_TENSORS:
        yield f"  and {len(report.tensors) - MOST_TENSORS:,} more in --json"
    outside, lost = (sum(one.accesses.other[word] for one in report.kernels) for word in ("hot_outside", "hot_lost"))
    if outside:
        yield f"  {outside:16,}  lane accesses to memory of no known tensor"
    if lost:
        yield f"  {lost:16,}  lane accesses for which a launch's tables had no room"
