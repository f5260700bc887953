"""How well the attribution finds recorded causes: PetShop and Nezha OnlineBoutique, beside simple floors.

``BENCH_DATA=FOLDER python -m benchmarks.attribution`` (or the folder as argument). Nothing is pooled over systems or
kinds of fault. Two rows are ours: ``pasta-otel`` is what a user gets, where a cause that no gate lets through
counts as a miss; ``pasta-otel ungated`` ranks everything that grew, as the floors do.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import attribution_floors as floors
from benchmarks import attribution_nezha as nezha
from benchmarks import attribution_petshop as petshop
from benchmarks.otlp_spans import requests
from pasta_otel.errors import InputError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Intake
from pasta_otel.exporters.store import DuckDBSpanStore, StoreConfig
from pasta_otel.model import Attribution, SpanSLI, TimeWindow
from pasta_otel.slo.attribution import AttributionEngine, Thresholds
from pasta_otel.slo.attribution.thresholds import UNGATED
from pasta_otel.testing.world import BASELINE, BURNING, MS, Trouble, world

RESULT = Path(__file__).parent / "results" / "attribution-accuracy.json"
SEEDS, NORMAL_PAIRS, MISS, DEPTH = 200, 200, 10**6, 5
OURS, OURS_UNGATED = "pasta-otel", "pasta-otel ungated"
Rankings = Mapping[str, Sequence[str]]


class Score:
    """Ranks of the true cause, by method, system and kind of fault."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.chances: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, system: str, kind: str, truth: str, rankings: Rankings, candidates: int) -> None:
        for group in ((system, "all"), (system, kind)):
            self.chances[group].append(1.0 / candidates)
            for method, ranking in rankings.items():
                place = ranking.index(truth) + 1 if truth in ranking else MISS
                self.ranks[group][method].append(place)

    def table(self) -> list[dict[str, Any]]:
        rows = []
        for (system, kind), methods in sorted(self.ranks.items()):
            for method, ranks in methods.items():
                rows.append({"system": system, "fault": kind, "method": method, "cases": len(ranks), **accuracy(ranks)})
            single = float(np.mean(self.chances[system, kind]))
            at = [min(1.0, k * single) for k in range(1, DEPTH + 1)]
            chance = {"AC@1": at[0], "AC@3": at[2], "Avg@5": float(np.mean(at))}
            rows.append({"system": system, "fault": kind, "method": "chance", "cases": len(ranks), **chance})
        return rows


def accuracy(ranks: Sequence[int]) -> dict[str, float]:
    at = [sum(rank <= k for rank in ranks) / len(ranks) for k in range(1, DEPTH + 1)]
    return {"AC@1": at[0], "AC@3": at[2], "Avg@5": float(np.mean(at))}


def services(answer: Attribution) -> list[str]:
    return list(dict.fromkeys(cause.service for cause in answer.causes))


def score_nezha(folder: Path, score: Score) -> dict[str, Any]:
    normal = nezha.load_spans(folder, ("fault_free.parquet",))
    usage, sli, before = nezha.load_host(folder), nezha.entry(normal), nezha.window_of(normal)
    known = sorted({span.service for span in normal})
    for case in nezha.cases(folder):
        burning = nezha.load_spans(folder, case.files)
        minute = case.injected_unix // 60
        calm = [m for m in usage if minute - 5 <= m < minute]
        after = nezha.window_of(burning)
        host = nezha.host_samples(usage, calm, before.start_unix_nano)
        host += nezha.host_samples(usage, [minute + 1, minute + 2], after.start_unix_nano)
        store = nezha.store_of(normal, burning, host)
        windows = _at_least_a_minute(before), _at_least_a_minute(after)
        rankings = {
            OURS: services(AttributionEngine(store, store).attribute(sli, *windows)),
            OURS_UNGATED: services(AttributionEngine(store, store, limits=UNGATED).attribute(sli, *windows)),
            "pasta-otel ungated, no host": services(AttributionEngine(store, limits=UNGATED).attribute(sli, *windows)),
            "span duration KS": floors.ranking(floors.duration_ks(normal, burning)),
            "self time robust z": floors.ranking(floors.self_time_robust_z(store, before, after)),
            "edge gap robust z": floors.ranking(floors.edge_gap_robust_z(store, before, after)),
        }
        score.add(folder.name, case.kind, case.service, rankings, len(known))
    return {"system": folder.name, "normal against normal": _nezha_specificity(normal, sli)}


def _at_least_a_minute(window: TimeWindow) -> TimeWindow:
    return TimeWindow(window.start_unix_nano, max(window.end_unix_nano, window.start_unix_nano + 61 * nezha.SECOND_NS))


def _nezha_specificity(normal: list[Any], sli: SpanSLI, seeds: int = 20) -> dict[str, float]:
    """Compare random halves of the normal minute's traces."""
    traces = sorted({span.trace_id for span in normal})
    shift, silent = 3600 * nezha.SECOND_NS, 0
    window = nezha.window_of(normal)
    moved = TimeWindow(window.start_unix_nano + shift, window.end_unix_nano + shift)
    for seed in range(seeds):
        half = set(random.Random(seed).sample(traces, len(traces) // 2))
        spans = [span if span.trace_id in half else _later(span, shift) for span in normal]
        store = nezha.store_of(spans, [], [])
        silent += not AttributionEngine(store).attribute(sli, window, moved).causes
    return {"pairs": seeds, "no cause": silent / seeds}


def _later(span: Any, by_ns: int) -> Any:
    fields = {name: getattr(span, name) for name in span.__slots__}
    return type(span)(
        **fields
        | {
            "start_time_unix_nano": span.start_time_unix_nano + by_ns,
            "end_time_unix_nano": span.end_time_unix_nano + by_ns,
        }
    )


def score_petshop(folder: Path, score: Score) -> dict[str, Any]:
    found = petshop.scenarios(folder)
    for scenario in found:
        for case in petshop.recorded(scenario):
            _add_petshop(score, f"petshop recorded {scenario.name}", case, scenario)
    with_normal = [scenario for scenario in found if scenario.normal]
    shapes = petshop.recorded_shapes(found)
    for seed in range(SEEDS):
        metric = ("latency", "availability")[seed // 2 % 2]
        scenario = with_normal[seed % len(with_normal)]
        case = petshop.synthetic(scenario, shapes, seed, metric)
        _add_petshop(score, "petshop synthetic", case, scenario)
    return {"system": "petshop", "normal against normal": _petshop_specificity(with_normal)}


def _add_petshop(score: Score, system: str, case: petshop.PetCase, scenario: petshop.Scenario) -> None:
    store = petshop.MetricStore(scenario.children, case.before, case.after)
    reachable = sorted({key.service for key in store.operation_self_times(petshop.AFTER)})
    rankings = {
        OURS: services(_ask_petshop(store, case.metric, petshop.METRIC_LIMITS)),
        OURS_UNGATED: services(_ask_petshop(store, case.metric, UNGATED)),
        "ranked correlation": floors.ranking(_correlation(case, scenario)),
        "latency or availability robust z": floors.ranking(_metric_z(case)),
        "self time robust z": floors.ranking(floors.self_time_robust_z(store, petshop.BEFORE, petshop.AFTER)),
        "constant answer": ["PetSearch_AWS::ECS::Fargate"],
        "highest in-degree": _by_in_degree(scenario.children),
    }
    score.add(system, case.metric, case.root_cause, rankings, len(reachable))


def _ask_petshop(store: petshop.MetricStore, metric: str, limits: Thresholds) -> Attribution:
    return AttributionEngine(store, limits=limits).attribute(petshop.SLIS[metric], petshop.BEFORE, petshop.AFTER)


def _correlation(case: petshop.PetCase, scenario: petshop.Scenario, tail: int = 6) -> floors.Scores:
    """Rank correlation of each node with the target over the last half hour and the fault: its best tail of 2..48."""
    del scenario

    def series(node: str) -> np.ndarray:
        parts = (getattr(case.before[node], case.metric)[-tail:], getattr(case.after[node], case.metric))
        return np.concatenate(parts)

    target = series(petshop.TARGET)
    nodes = [node for node in case.before if node in case.after and node != petshop.TARGET]
    return {node: abs(floors.spearman(series(node), target)) for node in nodes}


def _metric_z(case: petshop.PetCase) -> floors.Scores:
    found = {}
    for node, old in case.before.items():
        values = [getattr(old, case.metric), getattr(case.after[node], case.metric)] if node in case.after else []
        kept = [np.sort(value[~np.isnan(value)]) for value in values]
        if len(kept) == 2 and all(len(value) for value in kept) and node != petshop.TARGET:
            sign = -1.0 if case.metric == "availability" else 1.0
            found[node] = floors.robust_z(np.sort(sign * kept[0]), np.sort(sign * kept[1]))
    return found


def _by_in_degree(children: Mapping[str, Sequence[str]]) -> list[str]:
    degree: dict[str, float] = defaultdict(float)
    for callees in children.values():
        for callee in callees:
            degree[callee] += 1.0
    return floors.ranking(degree)


def _petshop_specificity(scenarios: Sequence[petshop.Scenario]) -> dict[str, dict[str, float]]:
    found = {}
    for metric in ("latency", "availability"):
        silent = 0
        for seed in range(NORMAL_PAIRS):
            scenario = scenarios[seed % len(scenarios)]
            before, after = petshop.normal_pair(scenario, random.Random(seed))
            store = petshop.MetricStore(scenario.children, before, after)
            silent += not _ask_petshop(store, metric, petshop.METRIC_LIMITS).causes
        found[metric] = {"pairs": NORMAL_PAIRS, "no cause": silent / NORMAL_PAIRS}
    return found


def speed(spans: int = 200_000, windows: int = 15) -> dict[str, Any]:
    """Time whole attributions over a DuckDB store that holds this many spans in the two windows."""
    memory = world(1, Trouble(slow_layer=3), requests=spans // 2 // 43)
    ledger = Ledger(["store"])
    store = DuckDBSpanStore.open(":memory:", ledger, StoreConfig(max_age_s=4e9))
    try:
        intake = Intake([store], ledger)
        for body in requests(memory.spans):
            intake.traces(body)
            store.flush()
        store.write_host_samples(memory.host)
        store.flush(60.0, settle=True)
        engine = AttributionEngine(store, store)
        sli = SpanSLI("order-api", "POST /orders", threshold_ns=60 * MS)
        took, target = [], ""
        for _ in range(windows):
            started = time.perf_counter()
            answer = engine.attribute(sli, BASELINE, BURNING)
            took.append(time.perf_counter() - started)
            target = answer.causes[0].target if answer.causes else ""
    finally:
        store.close()
    return {
        "spans": len(memory.spans),
        "first_cause": target,
        "seconds": took,
        "median_seconds": float(np.median(took)),
    }


def run(data: Path | None = None) -> dict[str, Any]:
    """Return every table; without data only the speed."""
    data = data or (Path(os.environ["BENCH_DATA"]) if os.environ.get("BENCH_DATA") else None)
    score, specificity = Score(), []
    if data is not None:
        systems = sorted(path for path in data.iterdir() if path.is_dir())
        if not systems:
            raise InputError("no data sets in it", file=str(data))
        for folder in systems:
            if (folder / "faults.json").exists():
                specificity.append(score_nezha(folder, score))
            elif any(folder.glob("*/graph.csv")):
                specificity.append(score_petshop(folder, score))
    return {
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("numpy", "duckdb")}},
        "accuracy": score.table(),
        "specificity": specificity,
        "speed": speed(),
    }


def show(result: Mapping[str, Any]) -> None:
    group = None
    for row in result["accuracy"]:
        if group != (row["system"], row["fault"]):
            group = (row["system"], row["fault"])
            print(f"\n{row['system']}, {row['fault']} ({row['cases']} cases)            AC@1  AC@3  Avg@5")
        print(f"  {row['method']:<38} {row['AC@1']:.2f}  {row['AC@3']:.2f}  {row['Avg@5']:.2f}")
    print("\nspecificity", json.dumps(result["specificity"]))
    taken = result["speed"]
    print(f"speed: {taken['spans']} spans, median {taken['median_seconds']:.3f} s, first cause {taken['first_cause']}")


if __name__ == "__main__":
    outcome = run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    show(outcome)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(outcome, indent=1) + "\n")
