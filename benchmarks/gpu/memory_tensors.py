"""What it costs to follow tensors: microseconds for one allocation or free and the table that the next launch needs."""

from __future__ import annotations

import platform
import random
import statistics
import time
from typing import Any

from pasta_otel.gpu.memory.tensors import Tensors

LIVE = (200, 2_000, 16_000)
CHANGES, ROUNDS = 4_000, 7
SPACING, SIZE = 4096, 1024


def _round(tensors: Tensors, live: list[int], free: list[int]) -> float:
    begin = time.perf_counter()
    for at in range(CHANGES // 2):
        tensors.freed(live[at % len(live)])
        tensors.table()
        tensors.allocated(free[at % len(free)], SIZE, source="train.py:1 main", module="net.first")
        tensors.table()
        live[at % len(live)], free[at % len(free)] = free[at % len(free)], live[at % len(live)]
    return (time.perf_counter() - begin) / CHANGES * 1e6


def measured(count: int) -> dict[str, Any]:
    """Return the microseconds of each round at so many live tensors, whose addresses are in random order."""
    places = [0x7F0000000000 + SPACING * at for at in range(2 * count)]
    random.Random(0).shuffle(places)
    live, free = places[:count], places[count:]
    tensors = Tensors()
    for address in live:
        tensors.allocated(address, SIZE)
    rounds = [_round(tensors, live, free) for _ in range(ROUNDS)]
    return {"live": count, "rounds_us": rounds, "median_us": statistics.median(rounds)}


def run() -> dict[str, Any]:
    """Measure at several numbers of live tensors."""
    machine = {"machine": platform.machine(), "python": platform.python_version(), "processor": platform.processor()}
    return {**machine, "changes": CHANGES, "by_live_tensors": [measured(count) for count in LIVE]}


if __name__ == "__main__":
    for one in run()["by_live_tensors"]:
        print(f"{one['live']:>6} live tensors: {one['median_us']:.1f} us a change and table")
