"""The report as one HTML file without anything to load: hotness over time, coalescing, bank conflicts, working set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from pasta_otel.gpu.memory import formulas
from pasta_otel.gpu.memory.findings import MemoryFinding, thresholds
from pasta_otel.gpu.memory.hot import HotTensor, Row, label_of
from pasta_otel.gpu.memory.model import Launch
from pasta_otel.gpu.memory.plots import Axis, Bar, HeatRow, columns_over_time, heat_map, stacked_bars
from pasta_otel.gpu.memory.report import Counts, KernelMemory, MemoryReport
from pasta_otel.gpu.memory.results import ProcessResult
from pasta_otel.gpu.memory.words import clip, duration, markup, short_number, size

MOST_TENSORS, MOST_RANGES, MOST_BARS, MOST_KERNELS, MOST_FINDINGS = 30, 32, 20, 40, 10
"""What is shown of each; the JSON has all."""
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>Memory analysis of GPU kernels</title><style>
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;padding:0 1.5em;max-width:72em;color:#1c2733;background:#fff}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.15em;margin:2em 0 .3em}p{margin:.3em 0}
.quiet{color:#5d6b7a;fill:#5d6b7a}svg{width:100%;height:auto;display:block;margin:.6em 0}
svg text{font-size:11.5px;fill:#1c2733}svg text.quiet{fill:#5d6b7a}
.left,.end{text-anchor:end}.mid{text-anchor:middle}.start{text-anchor:start}
.axis{stroke:#8492a1}.grid{stroke:#e1e6eb}
.tiles{display:flex;flex-wrap:wrap;gap:1em;margin:1em 0}
.tiles div{background:#f1f4f8;border-radius:6px;padding:.6em 1em}
.tiles b{display:block;font-size:1.35em}ol li{margin:.5em 0}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35em .6em;border-bottom:1px solid #dde3ea;vertical-align:top}
th{color:#5d6b7a;font-weight:600}.n{text-align:right;white-space:nowrap}
.first td{border-bottom:0;padding-bottom:0}.first+tr td{padding-top:0}
code,b{overflow-wrap:anywhere}code{font-size:12px}td:first-child{min-width:16em}ul{margin:.3em 0;padding-left:1.2em}
</style></head><body>"""


def as_html(report: MemoryReport) -> str:
    """Return the report as a page."""
    return f"{_HEAD}{''.join(_parts(report))}</body></html>\n"


def _parts(report: MemoryReport) -> Iterator[str]:
    yield from _summary(report)
    yield from _findings(report)
    if not report.analysed:
        return  # plots would say that nothing was done, where nothing is known
    yield from _tensor_heat(report)
    yield from _range_heat(report)
    yield from _coalescing(report)
    yield from _conflicts(report)
    yield from _working_set(report)
    yield from _table(report)


def _section(title: str, about: str) -> str:
    return f'<h2>{markup(title)}</h2><p class="quiet">{markup(about)}</p>'


def _summary(report: MemoryReport) -> Iterator[str]:
    yield "<h1>Memory analysis of GPU kernels</h1>"
    yield f"<p>{report.analysed:,} of {report.seen:,} launches analysed."
    if report.skipped:
        reasons = ", ".join(f"{count:,} ({reason})" for reason, count in report.skipped.most_common())
        yield f" Not analysed: {markup(reasons)}."
    yield "</p>"
    yield from (f"<p><b>Problem:</b> {markup(problem)}</p>" for problem in report.problems)
    commands = dict.fromkeys(" ".join(result.command) for result in report.results if result.command)
    yield from (f"<p><code>{markup(command)}</code></p>" for command in commands)
    facts = [
        (f"{len(report.kernels):,}", "GPU kernels"),
        (f"{sum(len(kernel.findings) for kernel in report.kernels):,}", "findings"),
        (short_number(sum(kernel.sectors for kernel in report.kernels)), "32-byte sectors"),
        (f"{len(report.tensors):,}", "tensors touched"),
        (size(2 * 1024 * 1024 * len(report.ranges)), "address space touched"),
        (f"{len(report.results):,}", "processes"),
    ]
    yield f'<div class="tiles">{"".join(f"<div><b>{number}</b>{what}</div>" for number, what in facts)}</div>'


def _findings(report: MemoryReport) -> Iterator[str]:
    yield _section("What to change first", "Ordered by the transactions that the change saves, at best.")
    if not report.analysed:
        yield f"<p>No launch was analysed{f'; {markup(report.candidates)}' if report.candidates else ''}.</p>"
        return
    if not report.findings:
        found = report.nothing_found
        yield f"<p>{markup(found[0].upper() + found[1:])}.</p>"
        return
    items = "".join(
        f"<li>{_finding(report.labels[kernel.name], finding)}</li>"
        for kernel, finding in report.findings[:MOST_FINDINGS]
    )
    yield f"<ol>{items}</ol>"


def _finding(label: str, finding: MemoryFinding) -> str:
    gain = ""
    if finding.predicted is not None:
        gain = f"{finding.measured:,} → {finding.predicted:,} {finding.unit}s, {finding.gain:.0%} fewer. "
    named = (("layer", finding.module), ("line", finding.source), ("tensor", finding.tensor))
    place = ", ".join(f"{what} <code>{markup(word)}</code>" for what, word in named if word)
    return (
        f"<b>{markup(label)}</b>: {markup(finding.title)}.<br/>→ {markup(finding.suggestion)}."
        f'<br/><span class="quiet">{gain}{place}</span>'
    )


def _axis(report: MemoryReport) -> Axis:
    line = report.timeline
    clock = "of begin on the device" if line.on_device else "of launch"
    what = f"time {clock} since the first launch" if line.by_time else f"launches in order, and time {clock}"
    return Axis(line.columns, line.ticks, f"{what} (slowed by the analysis)")


def _tensor_heat(report: MemoryReport) -> Iterator[str]:
    yield _section(
        "Hotness over time by tensor", "Lane accesses to the tensors that are accessed most; hottest on top."
    )
    chosen = report.tensors[:MOST_TENSORS]
    if not chosen:
        yield "<p>No tensor is known: hotness was not counted, no allocator was watched, or no tensor was accessed.</p>"
        return
    line = report.timeline
    rows = line.rows(lambda result, launch: ((label_of(result, number), count) for number, count in launch.tensors))
    drawn = [HeatRow(f"{one.label}  {one.share:.0%}", _about(one), rows.get(one.label, {})) for one in chosen]
    yield heat_map(drawn, _axis(report), "lane accesses")
    if len(report.tensors) > len(chosen):
        left = len(report.tensors) - len(chosen)
        yield f'<p class="quiet">{left:,} tensors that are accessed less are in --json.</p>'


def _about(tensor: HotTensor) -> str:
    times = f", {tensor.allocations:,} allocations" if tensor.allocations > 1 else ""
    return f"{tensor.label} ({size(tensor.bytes)}{times})"


def _range_heat(report: MemoryReport) -> Iterator[str]:
    yield _section(
        "Hotness over time by 2 MiB range", "Lane accesses by address, lowest on top; untouched ranges are left out."
    )
    if not report.ranges:
        yield "<p>No range is known: hotness was not counted, or no access to global memory was.</p>"
        return
    line = report.timeline
    groups = _grouped(list(report.ranges))
    row_of: dict[int, dict[int, int]] = defaultdict(dict)
    for number, group in enumerate(groups):
        for pid, address in group:
            row_of[pid][address] = number

    def keys(result: ProcessResult, launch: Launch) -> Iterable[tuple[int, int]]:
        of_process = row_of[result.pid]
        return ((of_process[address], count) for address, count in launch.ranges)

    rows = line.rows(keys)
    several = len(report.results) > 1
    drawn = [_range_row(group, rows.get(number, {}), several=several) for number, group in enumerate(groups)]
    yield heat_map(drawn, _axis(report), "lane accesses")


def _grouped(keys: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return ranges in as many groups as there is room for, none with ranges of two processes."""
    each = -(-len(keys) // MOST_RANGES)
    groups: list[list[tuple[int, int]]] = []
    for key in keys:
        if not groups or len(groups[-1]) == each or groups[-1][0][0] != key[0]:
            groups.append([])
        groups[-1].append(key)
    return groups


def _range_row(group: Sequence[tuple[int, int]], row: Row, *, several: bool) -> HeatRow:
    pid, first = group[0]
    label = f"{first:#x}" + (f" and {len(group) - 1} more" if len(group) > 1 else "")
    label += f" (process {pid})" if several else ""
    return HeatRow(label, f"{len(group)} ranges of 2 MiB from {first:#x} to {group[-1][1]:#x}, process {pid}", row)


def _bars(report: MemoryReport, bar: Callable[[KernelMemory, str], Bar | None]) -> list[Bar]:
    made = (bar(kernel, report.labels[kernel.name]) for kernel in report.kernels)
    bars = [one for one in made if one is not None]
    return sorted(bars, key=lambda one: -(one.good + one.bad))[:MOST_BARS]


def _coalescing(report: MemoryReport) -> Iterator[str]:
    about = (
        "Sectors moved by loads, stores and asynchronous copies, and those that the same requests could do with. It is"
        f" a finding where less than {thresholds()['coalescing']['efficiency'].value:.0%} of the bytes are used."
    )
    yield _section("Coalescing by GPU kernel", about)
    bars = _bars(report, _coalescing_bar)
    if bars:
        yield stacked_bars(bars, "32-byte sectors", "sectors needed", "sectors that coalescing saves")
    else:
        yield "<p>No load, store or asynchronous copy of global memory was counted.</p>"


def _coalescing_bar(kernel: KernelMemory, label: str) -> Bar | None:
    chosen = [kernel.accesses.global_[kind] for kind in formulas.COALESCED]
    moved, needed = sum(one.sectors for one in chosen), sum(formulas.predicted_sectors(one) for one in chosen)
    efficiency = formulas.coalescing_efficiency(chosen)
    if efficiency is None:
        return None
    return Bar(label, kernel.name, needed, moved - needed, f"{efficiency:.0%} of the bytes are used")


def _conflicts(report: MemoryReport) -> Iterator[str]:
    yield _section("Bank conflicts by GPU kernel", "Passes through the banks of shared memory, without atomics.")
    bars = _bars(report, _conflict_bar)
    if bars:
        yield stacked_bars(bars, "wavefronts", "wavefronts needed", "bank conflicts")
    else:
        yield "<p>No access to shared memory was counted.</p>"


def _conflict_bar(kernel: KernelMemory, label: str) -> Bar | None:
    chosen = [access for kind, access in kernel.accesses.shared.items() if kind != "atomic"]
    ratio = formulas.bank_conflict_ratio(chosen)
    if ratio is None:
        return None
    needed, added = sum(one.phases for one in chosen), sum(one.conflicts for one in chosen)
    return Bar(label, kernel.name, needed, added, f"{ratio:.0%} conflicts")


def _working_set(report: MemoryReport) -> Iterator[str]:
    yield _section("Working set over time", "4 KiB pages touched by the launch that touched most, by piece of time.")
    line = report.timeline
    most: dict[int, int] = {}
    for _, launch, column in line.launches:
        if launch.working_set is not None:
            most[column] = max(most.get(column, 0), launch.working_set)
    if not any(most.values()):
        yield "<p>No working set was counted.</p>"
        return
    yield columns_over_time(most, _axis(report), "working set")


def _table(report: MemoryReport) -> Iterator[str]:
    kernels = report.kernels
    about = f"The {MOST_KERNELS} of {len(kernels)} that touch most memory." if len(kernels) > MOST_KERNELS else ""
    yield _section("GPU kernels", about)
    titles = ("launches", "sectors", "coalescing", "bank conflicts", "active lanes", "working set", "device time")
    head = "".join(f'<th class="n">{title}</th>' for title in titles)
    rows = "".join(_row(kernel, report.labels[kernel.name]) for kernel in kernels[:MOST_KERNELS])
    yield f"<table><tr><th>GPU kernel</th>{head}</tr>{rows}</table>"
    yield '<p class="quiet">Device time is that under analysis, which slows each GPU kernel differently.</p>'


def _row(kernel: KernelMemory, label: str) -> str:
    found = kernel.ratios()
    shares = [found[name] for name in ("coalescing_efficiency", "bank_conflict_ratio", "active_lane_ratio")]
    of_all = f" of {kernel.wanted:,}" if kernel.wanted > kernel.launches else ""
    cells = [
        f"{kernel.launches:,}{of_all}",
        f"{kernel.sectors:,}",
        *("-" if one is None else f"{one:.0%}" for one in shares),
    ]
    cells.append("-" if kernel.working_set is None else size(kernel.working_set))
    cells.append(duration(kernel.device_ns) if kernel.timed else "-")
    numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    name = f'<b title="{markup(kernel.name)}">{markup(label)}</b>'
    described = f'<tr><td colspan="{1 + len(cells)}">{"".join(_described(kernel))}</td></tr>'
    return f'<tr class="first"><td>{name}</td>{numbers}</tr>{described}'


def _described(kernel: KernelMemory) -> Iterator[str]:
    yield from _names("layers", kernel.modules)
    yield from _names("lines", kernel.sources)
    yield from _names("tensors", kernel.tensors)
    if kernel.reads_unseen:
        yield '<div class="quiet">accesses by TMA are not counted: it touches more memory than this says</div>'
    if kernel.findings:
        yield f"<ul>{''.join(f'<li>{markup(one.title)}</li>' for one in kernel.findings)}</ul>"
    if kernel.unjudged:
        kinds = markup(", ".join(kernel.unjudged))
        yield f'<div class="quiet">{kinds}: beyond the threshold, but with too few requests to be judged</div>'


def _names(what: str, counts: Counts) -> Iterator[str]:
    if counts:
        names = (f"<code>{markup(clip(word, 80))}</code> ({short_number(count)})" for word, count in counts[:3])
        rest = f", and {len(counts) - 3} more" if len(counts) > 3 else ""
        yield f'<div><span class="quiet">{what}</span> {", ".join(names)}{rest}</div>'
