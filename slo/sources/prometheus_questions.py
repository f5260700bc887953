"""Which questions go to the server together: at one time, or as a run of windows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pasta_otel.model import CountRequest
from pasta_otel.slo.sources.prometheus_answers import Value
from pasta_otel.slo.sources.promql import Expression

NS_PER_MS = 1_000_000
RUN_FROM = 3
RUN_EXPRESSIONS, RUN_POINTS = 120, 200_000  # of one request
CHUNK_TIMES = 1000
MAX_STEPS = 10_000  # Prometheus answers at most 11,000 points a series


@dataclass(slots=True)
class Asked:
    """One expression of one request at one time."""

    request: int
    expression: Expression
    time_ns: int
    value: Value = field(default_factory=lambda: Value(wrong="absent", detail="no time left in this tick"))


@dataclass(frozen=True, slots=True)
class Run:
    """Windows of one indicator and one length that end at even distances: one range query.

    Attributes:
        items: What is asked.
        start_ns: End of the first window.
        step_ns: Distance between two ends.
        steps: How many steps from the first to the last.
    """

    items: tuple[Asked, ...]
    start_ns: int
    step_ns: int
    steps: int


def length_ns(request: CountRequest) -> int:
    """Return the length of a request's window."""
    return request.window.end_unix_nano - request.window.start_unix_nano


def groups(asked: Sequence[Asked]) -> list[tuple[int, list[Asked]]]:
    """Return the expressions of each request with their time."""
    groups: list[tuple[int, list[Asked]]] = []
    last = -1
    for item in asked:
        if item.request != last:
            groups.append((item.time_ns, []))
            last = item.request
        groups[-1][1].append(item)
    return groups


def split_runs(asked: Sequence[Asked], requests: Sequence[CountRequest]) -> tuple[list[Run], list[Asked]]:
    """Return the runs, and what is left to ask one time at a time."""
    by_kind: dict[tuple[object, int], list[Asked]] = {}
    single: list[Asked] = []
    for item in asked:
        if item.request >= len(requests):
            single.append(item)
            continue
        request = requests[item.request]
        by_kind.setdefault((request.sli, length_ns(request)), []).append(item)
    runs: list[Run] = []
    for items in by_kind.values():
        for chunk in _chunks(items):
            run = _run(chunk)
            if run is None:
                single += chunk
            else:
                runs.append(run)
    return _merged(runs), sorted(single, key=lambda item: item.request)


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Return runs over the same times as one while its answer stays small: many SLOs have slices of one length."""
    by_times: dict[tuple[int, int, int], list[list[Run]]] = {}
    for run in runs:
        most = max(1, min(RUN_EXPRESSIONS, RUN_POINTS // (run.steps + 1)) // 2)  # an indicator has two expressions
        batches = by_times.setdefault((run.start_ns, run.step_ns, run.steps), [[]])
        if len(batches[-1]) >= most:
            batches.append([])
        batches[-1].append(run)
    return [
        Run(tuple(item for run in batch for item in run.items), *times)
        for times, batches in by_times.items()
        for batch in batches
    ]


def _chunks(items: Sequence[Asked]) -> list[list[Asked]]:
    """Return items by time, the newest first, in pieces that a server answers soon: a late piece costs only itself."""
    newest_first = sorted(items, key=lambda item: -item.time_ns)
    chunks: list[list[Asked]] = []
    times: set[int] = set()
    for item in newest_first:
        if not chunks or (item.time_ns not in times and len(times) >= CHUNK_TIMES):
            chunks.append([])
            times = set()
        times.add(item.time_ns)
        chunks[-1].append(item)
    return chunks


def _run(items: Sequence[Asked]) -> Run | None:
    ends = sorted({item.time_ns for item in items})
    if len(ends) < RUN_FROM:
        return None
    step = min(after - before for before, after in pairwise(ends))
    steps, rest = divmod(ends[-1] - ends[0], step)
    if rest or steps > MAX_STEPS or step < NS_PER_MS or any((end - ends[0]) % step for end in ends):
        return None
    return Run(tuple(items), ends[0], step, steps)
