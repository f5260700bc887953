"""What a program calls to analyse a part of itself: ``analyze()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pasta_otel.config import load_settings
from pasta_otel.errors import InputError
from pasta_otel.gpu.memory.library import SETTINGS
from pasta_otel.gpu.memory.region import Analysis
from pasta_otel.gpu.memory.selection import DEFAULT_BYTES, DEFAULT_COUNT, Selection
from pasta_otel.gpu.memory.tool import absolute, check, load_tool

if TYPE_CHECKING:
    from pasta_otel.gpu.memory.tool import Tool


def analyze(  # noqa: PLR0913 - keyword-only options, each with a default
    *,
    kernels: str | Sequence[str] = (),
    modules: str | Sequence[str] = (),
    every: int = 1,
    count: int = DEFAULT_COUNT,
    device_bytes: int = DEFAULT_BYTES,
    hotness: bool = True,
    tool: str | Tool[Any] | None = None,
) -> Analysis:
    """Analyse the launches of GPU kernels inside a ``with`` block, on the GPU (docs/reference/memory.md).

    The process must have been started by ``pasta-otel analyze memory [--regions] -- CMD``, or not have used CUDA before
    its first block. Otherwise ``available`` is False, ``problem`` says why, and the block runs as if nothing were
    there.

    Args:
        kernels: Shell patterns of GPU kernels' names (mangled); none = all.
        modules: Shell patterns of the torch modules that launch, by qualified name; none = all.
        every: Of the launches of one name, every how-many-th.
        count: Most launches in this block.
        device_bytes: Most device memory for results on a GPU; the first block of a process decides for all.
        hotness: Whether to count by 2 MiB range and by tensor too; the first block of a process decides for all.
        tool: ``FILE.py:Class``, ``package.module:Class`` or a tool; None = memory accesses, or what the command counts.

    Raises:
        InputError: An argument makes no sense.
    """
    names, layers = _patterns(kernels, "kernels"), _patterns(modules, "modules")
    selection = Selection(names, every, count, device_bytes, layers)
    if not isinstance(hotness, bool):
        raise InputError(f"expected True or False, got {hotness!r}", field="hotness")
    chosen = load_tool(absolute(tool), aside=False) if isinstance(tool, str) else tool
    if chosen is not None:
        check(chosen, str(tool))
    return Analysis(selection, chosen, hotness=hotness, settings=_settings)


def _patterns(given: str | Sequence[str], field: str) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    patterns = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"expected shell patterns, got {given!r}", field=field)
    return patterns


def _settings() -> Mapping[str, Any]:
    settings = load_settings()
    return {name: settings[name] for name in SETTINGS}
