"""The report of ``analyze memory`` at the bound of ``--count``: 10,000 launches, 30 tensors and 200 ranges each.

Launches are made up at random, so that nothing repeats: the worst case for memory. Each output is made once in a fresh
process; the peak is that process' own.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pasta_otel import semconv
from pasta_otel.exporters.otlp.encoder import Scope, encode_spans
from pasta_otel.gpu.memory.page import as_html
from pasta_otel.gpu.memory.report import MemoryReport
from pasta_otel.gpu.memory.results import read_results
from pasta_otel.gpu.memory.slots import GLOBAL, RANGE_BYTES, SHARED, WORDS
from pasta_otel.gpu.memory.spans import MemorySpans
from pasta_otel.gpu.memory.text import as_text

RESULT = Path(__file__).parent / "results" / "memory-report.json"
LAUNCHES, TENSORS, RANGES = 10_000, 30, 200
KNOWN_TENSORS, KNOWN_RANGES, KERNELS, MODULES = 2000, 40_000, 60, 120
START = 1_700_000_000_000_000_000
REPEATS = 3


def _slot(rng: random.Random) -> list[int]:
    words = [0] * WORDS
    requests = rng.randrange(100, 1_000_000)
    words[GLOBAL["load"] : GLOBAL["load"] + 4] = [
        requests,
        32 * requests,
        requests * rng.randrange(4, 33),
        128 * requests,
    ]
    words[SHARED["load_4"] : SHARED["load_4"] + 4] = [requests, 32 * requests, requests * rng.randrange(1, 9), requests]
    return words


def _pairs(rng: random.Random, known: int, count: int, step: int) -> list[list[int]]:
    return [[step * place, rng.randrange(1, 1 << 24)] for place in sorted(rng.sample(range(1, known + 1), count))]


def _launch(rng: random.Random, number: int) -> dict[str, Any]:
    begin = number * 200_000
    result = {
        "words": _slot(rng),
        "begin_ns": begin + rng.randrange(5000, 50_000),
        "end_ns": begin + 150_000,
        "working_set": 4096 * rng.randrange(1, 1 << 16),
        "tensors": _pairs(rng, KNOWN_TENSORS, TENSORS, 1),
        "ranges": _pairs(rng, KNOWN_RANGES, RANGES, RANGE_BYTES),
    }
    module = rng.randrange(MODULES)
    where = {"source": f"/srv/app/model.py:{module} forward", "span": "", "module": f"model.layers.{module}"}
    head = {"name": f"kernel_{rng.randrange(KERNELS)}", "grid": [1, 1, 1], "block": [32, 1, 1], "stream": 0}
    return {**head, "time_unix_nano": START + begin, **where, "result": result}


def _document(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    plain = {"address": 0, "bytes": 1 << 20, "module": "", "source": "", "allocated_unix_nano": 0, "freed_unix_nano": 0}
    tensors = [{"number": n, "name": f"model.w{n}", **plain} for n in range(1, KNOWN_TENSORS + 1)]
    counts = {"tool": "memory", "seen": LAUNCHES, "skipped": {}, "waits": 0, "unpatched": 0, "problems": []}
    return {
        **counts,
        "command": ["train.py"],
        "launches": [_launch(rng, n) for n in range(LAUNCHES)],
        "tables": {"tensors": tensors},
    }


def _spans(report: MemoryReport) -> bytes:
    made = MemorySpans()
    resource_of = {semconv.SERVICE_NAME: "benchmark"}
    groups = (columns for result in report.results for columns in made.columns(result))
    return b"".join(encode_spans(columns, resource_of, Scope(semconv.SCOPE)) for columns in groups)


def _json(report: MemoryReport) -> int:
    return sum(map(len, json.JSONEncoder(indent=2).iterencode(report.as_dict())))


OUTPUTS: dict[str, Callable[[MemoryReport], int]] = {
    "text": lambda report: len(as_text(report)),
    "json": _json,
    "html": lambda report: len(as_html(report)),
    "spans": lambda report: len(_spans(report)),
}


def _measure(folder: Path, output: str) -> dict[str, Any]:
    start = time.perf_counter()
    report = MemoryReport(read_results(folder))
    read = time.perf_counter()
    size = OUTPUTS[output](report)
    facts = {"read_s": read - start, "output_s": time.perf_counter() - read, "bytes": size}
    return {**facts, "peak_mib": _peak_kib() / 1024}


def _peak_kib() -> int:
    # not getrusage: its maximum comes along from the process that started this one
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def _fresh(folder: str, output: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", __spec__.name, folder, output], capture_output=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def run() -> dict[str, Any]:
    """Measure every output in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "1.json"
        document.write_text(json.dumps(_document(1)), encoding="utf-8")
        size = document.stat().st_size
        windows = {output: [_fresh(folder, output) for _ in range(REPEATS)] for output in OUTPUTS}
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
    }
    counts = {"launches": LAUNCHES, "tensors_a_launch": TENSORS, "ranges_a_launch": RANGES, "document_bytes": size}
    return {"machine": {**machine, "numpy": np.__version__}, **counts, "outputs": windows}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(_measure(Path(sys.argv[1]), sys.argv[2])))
    else:
        found = run()
        RESULT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(found, indent=2))
