"""Which rank each trace of a job is: said by the trace, else by its file name, else refused when it is not certain."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pasta_otel.errors import InputError
from pasta_otel.gpu.kineto.read import DEFAULTS, KinetoTrace, ReadOptions, read_trace

MOST_RANK = (1 << 31) - 1
"""MPI and torch.distributed count ranks in a C int; -1 is nobody's."""
_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Job:
    """The traces of one job, by rank.

    Attributes:
        traces: One a rank, lowest first, with ``timeline.rank`` set.
        warnings: How a rank was found where the trace does not say it.
    """

    traces: tuple[KinetoTrace, ...]
    warnings: tuple[str, ...] = ()


def read_job(
    paths: Sequence[Path],
    options: ReadOptions = DEFAULTS,
    progress: Callable[[int], None] | None = None,
) -> Job:
    """Read all traces of a job.

    Raises:
        InputError: As ``read_trace``; ``duplicate_rank`` and ``rank_unknown`` name the files.
    """
    return assign_ranks([read_trace(path, options, progress) for path in paths])


def assign_ranks(traces: Sequence[KinetoTrace]) -> Job:
    """Give every trace its rank.

    Raises:
        InputError: kind ``rank_unknown`` or ``duplicate_rank``, naming the files.
    """
    found: list[tuple[int, KinetoTrace]] = []
    warnings, unknown = [], []
    for trace in traces:
        file, rank = trace.timeline.source, _said(trace)
        if rank is None and (in_name := _IN_NAME.search(Path(file).name)):
            rank = int(in_name[1])
            warnings.append(f"{file}: {_why(trace)}; rank {rank} taken from the file name")
        elif rank is None and len(traces) == 1:
            rank = 0
            warnings.append(f"{file}: {_why(trace)}; taken as rank 0")
        if rank is None:
            unknown.append(file)
        else:
            found.append((rank, trace))
    if unknown:
        raise InputError(
            f"rank not known of {', '.join(unknown)}: add distributedInfo.rank, or name the files rank-N",
            kind="rank_unknown",
        )
    _refuse_duplicates(found)
    found.sort(key=lambda pair: pair[0])
    return Job(
        tuple(replace(trace, timeline=replace(trace.timeline, rank=rank)) for rank, trace in found), tuple(warnings)
    )


def _said(trace: KinetoTrace) -> int | None:
    rank = _written(trace)
    if isinstance(rank, str) and rank.isdecimal() and len(rank) <= len(str(MOST_RANK)):
        rank = int(rank)
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= MOST_RANK else None


def _written(trace: KinetoTrace) -> Any:
    info = trace.header.get("distributedInfo")
    return info.get("rank") if isinstance(info, dict) else None


def _why(trace: KinetoTrace) -> str:
    """Say why a trace has no rank."""
    rank = _written(trace)
    return "no distributedInfo.rank" if rank is None else f"distributedInfo.rank is {str(rank)[:40]!r}, no rank"


def _refuse_duplicates(found: Sequence[tuple[int, KinetoTrace]]) -> None:
    by_rank: dict[int, str] = {}
    for rank, trace in found:
        other = by_rank.setdefault(rank, trace.timeline.source)
        if other is not trace.timeline.source:
            raise InputError(f"rank {rank} twice: {other} and {trace.timeline.source}", kind="duplicate_rank")
