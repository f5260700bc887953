"""Adapter: PetShop's five-minute metrics and call graph as the attribution's store, and synthetic cases made of it."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pasta_otel.model import EdgeKey, ModuleKey, OperationKey, Samples, SpanSLI, TimeWindow
from pasta_otel.slo.attribution import Thresholds

TARGET = "PetSite"
STEP_S = 300
FAULT_POINTS = 2  # the five-minute points that the recorded faults cover
SECOND_NS = 1_000_000_000
# A point is an average over hundreds of requests, and there are two of them: significance comes from standing above
# nearly every point of the baseline. z of delta = 1 with two points is 2.4; gates of size are the engine's own.
METRIC_LIMITS = Thresholds(min_count=2, min_requests=2, min_z=2.3, min_delta=0.9, min_tail=2.0)
SLIS = {
    "latency": SpanSLI(TARGET, good_status=False),
    "availability": SpanSLI(TARGET, good_status=True),
}


@dataclass(frozen=True)
class Series:
    """One node's metrics by time: seconds, requests, percent."""

    latency: np.ndarray
    requests: np.ndarray
    availability: np.ndarray

    def cut(self, where: slice) -> Series:
        return Series(self.latency[where], self.requests[where], self.availability[where])


Nodes = Mapping[str, Series]


@dataclass(frozen=True)
class Scenario:
    """One traffic pattern: graph, normal operation (may be empty) and its recorded issues."""

    name: str
    children: Mapping[str, tuple[str, ...]]
    normal: Nodes
    folder: Path


@dataclass(frozen=True)
class PetCase:
    """Two stretches of metrics to compare."""

    name: str
    metric: str
    root_cause: str
    before: Nodes
    after: Nodes


def read_metrics(path: Path) -> tuple[np.ndarray, Nodes]:
    """Return times and nodes; the file has three header rows and an empty one with the index's name."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    data = rows[4:]
    times = np.array([float(row[0]) for row in data])
    columns: dict[str, dict[str, np.ndarray]] = {}
    for index, (node, metric, statistic) in enumerate(zip(*rows[:3], strict=True)):
        if index and (metric, statistic) in {("latency", "Average"), ("requests", "Sum"), ("availability", "Average")}:
            cells = (row[index] if index < len(row) else "" for row in data)
            columns.setdefault(node, {})[metric] = np.array([float(cell) if cell else np.nan for cell in cells])
    absent = np.full(len(times), np.nan)
    return times, {
        node: Series(*(metrics.get(name, absent) for name in ("latency", "requests", "availability")))
        for node, metrics in columns.items()
    }


def read_graph(path: Path) -> dict[str, tuple[str, ...]]:
    with path.open(newline="") as file:
        header, *rows = list(csv.reader(file))
    return {
        row[0]: tuple(name for name, cell in zip(header[1:], row[1:], strict=True) if cell not in {"", "0", "0.0"})
        for row in rows
    }


def scenarios(folder: Path) -> list[Scenario]:
    found = []
    for path in sorted(p for p in folder.iterdir() if (p / "graph.csv").exists()):
        normal = path / "noissue" / "metrics.csv"
        nodes = read_metrics(normal)[1] if normal.exists() else {}
        found.append(Scenario(path.name, read_graph(path / "graph.csv"), nodes, path))
    return found


def recorded(scenario: Scenario) -> list[PetCase]:
    """Return the labelled issues; without a recording of normal operation the points before the fault are normal."""
    cases = []
    for path in sorted(scenario.folder.glob("*/issue_*")):
        label = json.loads((path / "target.json").read_text())
        times, nodes = read_metrics(path / "metrics.csv")
        start = label["target"]["timestamp"]
        fault = slice(int(np.searchsorted(times, start)), int(np.searchsorted(times, start + FAULT_POINTS * STEP_S)))
        before = scenario.normal or {n: s.cut(slice(0, fault.start)) for n, s in nodes.items()}
        after = {n: s.cut(fault) for n, s in nodes.items()}
        cases.append(
            PetCase(
                f"{scenario.name}/{path.parent.name}/{path.name}",
                label["target"]["metric"],
                label["root_cause"]["node"],
                before,
                after,
            )
        )
    return cases


def flows(children: Mapping[str, tuple[str, ...]], requests: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return the requests on every edge that come from TARGET's own requests.

    A callee's requests are shared out to its callers in proportion to theirs; what reaches a caller from elsewhere is
    taken out on the way down. The graph has no cycles.
    """
    parents: dict[str, list[str]] = {}
    for caller, callees in children.items():
        for callee in callees:
            parents.setdefault(callee, []).append(caller)
    own = {TARGET: requests.get(TARGET, 0.0)}
    edges: dict[tuple[str, str], float] = {}
    for node in topological(children):
        share = own.get(node, 0.0) / requests[node] if requests.get(node, 0.0) > 0 else 0.0
        for callee in children.get(node, ()):
            whole = sum(requests.get(parent, 0.0) for parent in parents[callee])
            part = requests.get(callee, 0.0) * requests.get(node, 0.0) / whole if whole > 0 else 0.0
            if part * share > 0:
                edges[node, callee] = part * share
                own[callee] = own.get(callee, 0.0) + part * share
    return edges


def topological(children: Mapping[str, tuple[str, ...]]) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()

    def visit(node: str) -> None:
        if node not in seen:
            seen.add(node)
            for child in children.get(node, ()):
                visit(child)
            order.append(node)

    for node in sorted(children):
        visit(node)
    return order[::-1]


class MetricStore:
    """Implements the attribution's ``SpanStore`` over two stretches of metrics: window 0..1 and 1..2."""

    def __init__(self, children: Mapping[str, tuple[str, ...]], before: Nodes, after: Nodes) -> None:
        self._parts = [_Part(children, nodes) for nodes in (before, after)]

    def operation_self_times(self, window: TimeWindow, **_: object) -> dict[OperationKey, Samples]:
        return self._parts[window.start_unix_nano].operations()

    def edge_durations(self, window: TimeWindow, **_: object) -> dict[EdgeKey, Samples]:
        return self._parts[window.start_unix_nano].edges()

    def edge_gaps(self, _window: TimeWindow, **_: object) -> dict[EdgeKey, Samples]:
        return {}

    def module_self_times(self, _window: TimeWindow, **_: object) -> dict[ModuleKey, Samples]:
        return {}


class _Part:
    def __init__(self, children: Mapping[str, tuple[str, ...]], nodes: Nodes) -> None:
        self._children, self._nodes = children, nodes
        self._total = {n: float(np.nansum(s.requests)) for n, s in nodes.items()}
        self._flows = flows(children, self._total)
        self._own = {TARGET: self._total.get(TARGET, 0.0)}
        for (_, callee), count in self._flows.items():
            self._own[callee] = self._own.get(callee, 0.0) + count

    def operations(self) -> dict[OperationKey, Samples]:
        return {
            OperationKey(node, "*"): self._samples(node, self.self_seconds(node), count)
            for node, count in self._own.items()
        }

    def edges(self) -> dict[EdgeKey, Samples]:
        return {
            EdgeKey(*edge): self._samples(edge[1], self._nodes[edge[1]].latency, count)
            for edge, count in self._flows.items()
        }

    def self_seconds(self, node: str) -> np.ndarray:
        """Return a node's latency less what its callees took, each in proportion to its calls."""
        series = self._nodes[node]
        rest = series.latency.copy()
        for callee in self._children.get(node, ()):
            calls = self._flows.get((node, callee), 0.0) / max(self._own[node], 1.0)
            rest -= np.nan_to_num(self._nodes[callee].latency) * calls if callee in self._nodes else 0.0
        return rest

    def _samples(self, node: str, seconds: np.ndarray, count: float) -> Samples:
        series = self._nodes[node]
        bad = np.nansum((1.0 - series.availability / 100.0) * series.requests)
        total = max(self._total.get(node, 0.0), 1.0)
        values = seconds[~np.isnan(seconds)]
        rounded = round(count)
        return Samples(
            values_ns=tuple(int(value * SECOND_NS) for value in values),
            count=rounded,
            errors=min(rounded, round(float(bad) * count / total)),
            requests=rounded,
        )


BEFORE, AFTER = TimeWindow(0, 1), TimeWindow(1, 2)


def synthetic(scenario: Scenario, shapes: Mapping[str, list[np.ndarray]], seed: int, metric: str) -> PetCase:
    """Return normal data with a recorded rise of TARGET put into a random other node and passed up to its callers."""
    rng = random.Random(seed)
    before, after = normal_pair(scenario, rng)
    shape = rng.choice(shapes[metric])
    requests = {n: float(np.nansum(s.requests)) for n, s in after.items()}
    edges = flows(scenario.children, requests)
    own = {TARGET: requests[TARGET]}
    for (_, callee), count in edges.items():
        own[callee] = own.get(callee, 0.0) + count
    reached = sorted({callee for _, callee in edges if usable(before, after, callee)} - {TARGET})
    if metric == "availability":  # a node that is called less often than TARGET fails cannot be the reason
        lost = float(shape.max()) * requests[TARGET]
        reached = [node for node in reached if own[node] * float(after[node].availability.min()) / 100.0 >= lost]
    root = rng.choice(reached)
    # the same requests of TARGET are hit: what one call of the root loses is TARGET's loss over its calls
    loss = shape * requests[TARGET] / own[root]
    changed = dict(after)
    for node, part in _lifted(scenario.children, edges, own, root).items():
        if node in changed:
            changed[node] = _add(changed[node], metric, loss * part)
    return PetCase(f"{scenario.name}/{seed}", metric, root, before, changed)


def usable(before: Nodes, after: Nodes, node: str) -> bool:
    """Say whether a node has values in the fault points and mostly in the baseline, so that a fault there can show."""
    if node not in before or node not in after:
        return False
    return not np.isnan(after[node].latency).any() and bool(np.isnan(before[node].latency).mean() < 0.5)


def _lifted(
    children: Mapping[str, tuple[str, ...]], edges: Mapping[tuple[str, str], float], own: Mapping[str, float], root: str
) -> dict[str, float]:
    """Return, for the root (1) and its callers, the root's calls in one call of theirs."""
    part = {root: 1.0}
    for node in reversed(topological(children)):
        for callee in children.get(node, ()):
            if callee in part and (node, callee) in edges:
                part[node] = part.get(node, 0.0) + part[callee] * edges[node, callee] / own[node]
    return part


def _add(series: Series, metric: str, extra: np.ndarray) -> Series:
    if metric == "latency":
        return replace(series, latency=series.latency + extra)
    return replace(series, availability=np.clip(series.availability - 100.0 * extra, 0.0, 100.0))


def normal_pair(scenario: Scenario, rng: random.Random) -> tuple[Nodes, Nodes]:
    """Return a day of normal points and the two that follow it."""
    length = len(scenario.normal[TARGET].latency)
    day = 24 * 3600 // STEP_S
    start = rng.randrange(day, length - FAULT_POINTS)
    before = {n: s.cut(slice(start - day, start)) for n, s in scenario.normal.items()}
    return before, {n: s.cut(slice(start, start + FAULT_POINTS)) for n, s in scenario.normal.items()}


def recorded_shapes(all_scenarios: list[Scenario]) -> dict[str, list[np.ndarray]]:
    """Return the rises of TARGET in the recorded issues: seconds of latency, share of requests that failed."""
    shapes: dict[str, list[np.ndarray]] = {"latency": [], "availability": []}
    for scenario in (s for s in all_scenarios if s.normal):
        for case in recorded(scenario):
            old, new = case.before[TARGET], case.after[TARGET]
            if case.metric == "latency":
                shape = new.latency - np.nanmedian(old.latency)
            else:
                shape = (np.nanmedian(old.availability) - new.availability) / 100.0
            if len(shape) == FAULT_POINTS and np.nanmin(shape) > 0:
                shapes[case.metric].append(shape)
    return shapes
