"""The report as one HTML file without anything to load: bars by GPU kernel, findings, and the lines that launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from pasta_otel.gpu.classes import short_name
from pasta_otel.gpu.memory.report import KernelMemory, ProcessResult, by_kernel

MOST_KERNELS = 40
"""GPU kernels shown: those that touch most sectors."""
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>Memory analysis of GPU kernels</title><style>
body{font:14px system-ui,sans-serif;margin:2em;max-width:75em;color:#222;background:#fff}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3em .6em;border-bottom:1px solid #ddd;vertical-align:top}
td.n{text-align:right;white-space:nowrap}code{font-size:12px;overflow-wrap:anywhere}li{margin:.2em 0}
</style></head><body>"""
_COLUMNS = (
    ("coalescing_efficiency", "coalescing", "#2b6cb0"),
    ("bank_conflict_ratio", "bank conflicts", "#c05621"),
    ("active_lane_ratio", "active lanes", "#2f855a"),
)


def as_html(results: Iterable[ProcessResult]) -> str:
    """Return the report as a page."""
    chosen = list(results)
    launches = [launch for result in chosen for launch in result.launches]
    kernels = by_kernel(launches)
    seen = sum(result.seen for result in chosen)
    head = f"<h1>Memory analysis of GPU kernels</h1><p>{len(launches)} of {seen} launches analysed."
    if len(kernels) > MOST_KERNELS:
        head += f" The {MOST_KERNELS} GPU kernels of {len(kernels)} that touch most memory are shown."
    columns = "".join(f"<th>{title}</th>" for _, title, _ in _COLUMNS)
    table = f"<table><tr><th>GPU kernel</th><th>launches</th><th>sectors</th>{columns}</tr>"
    rows = "".join(map(_row, kernels[:MOST_KERNELS]))
    return f"{_HEAD}{head}</p>{table}{rows}</table></body></html>\n"


def _row(kernel: KernelMemory) -> str:
    ratios = kernel.ratios()
    bars = "".join(f"<td>{_bar(ratios[key], title, colour)}</td>" for key, title, colour in _COLUMNS)
    numbers = f'<td class="n">{kernel.launches}</td><td class="n">{kernel.sectors:,}</td>'
    return f"<tr><td>{''.join(_about(kernel))}</td>{numbers}{bars}</tr>"


def _about(kernel: KernelMemory) -> Iterator[str]:
    yield f'<b title="{escape(kernel.name)}">{escape(short_name(kernel.name))}</b>'
    yield from (f"<div><code>{escape(source)}</code> ({count})</div>" for source, count in kernel.sources[:3])
    if kernel.findings:
        items = (f"<li>{escape(one.title)}: {escape(one.suggestion)}</li>" for one in kernel.findings)
        yield f"<ul>{''.join(items)}</ul>"


def _bar(value: float | None, title: str, colour: str) -> str:
    """Return a bar of a share; above 1 (lanes share an address) it is full."""
    if value is None:
        return "-"
    label = f"{value:.0%}"
    return (
        f'<svg width="104" height="16" role="img" aria-label="{title} {label}"><rect width="100" height="12" y="2"'
        f' fill="#eee"/><rect width="{100 * min(value, 1):.1f}" height="12" y="2" fill="{colour}"/></svg> {label}'
    )
