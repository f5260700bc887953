"""What memory analysis costs: ``python -m benchmarks.gpu.memory`` (two minutes on a GPU machine).

Four processes run the same operations: natively, analysed on the GPU (counters alone, and with hotness), and with every
access written to memory and analysed on the host. Times are of the GPU's own events; copy and host analysis are apart.
The answers must be equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.memory_host import KINDS, RECORD, Compiled, by_numpy, heat_by_numpy
from pasta_otel.gpu.memory import library
from pasta_otel.gpu.memory.collector import Collector
from pasta_otel.gpu.memory.counters import MemoryTool
from pasta_otel.gpu.memory.native import Call, CallData
from pasta_otel.gpu.memory.sanitizer import Sanitizer
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.slots import CONTENTION, GLOBAL, STRIDES, WORST, total
from pasta_otel.gpu.memory.tensors import Tensors

RESULTS = Path(__file__).parents[1] / "results"
REPEATS = 7
CAPACITY = 6_000_000
HEADER_BYTES = 16
MODES = ("native", "slots", "hotness", "trace")


def operations(made: Callable[[Any], object] = lambda _: None) -> dict[str, Any]:
    """Return what is measured; imports torch, after the Sanitizer has subscribed.

    Args:
        made: Is told of the tensor that all read.
    """
    import torch  # noqa: PLC0415 - after the Sanitizer has subscribed

    x = torch.arange(8192 * 4096, device="cuda", dtype=torch.float32).reshape(8192, 4096) / 1e6
    torch.cuda.synchronize()
    made(x)
    return {
        "transpose": lambda: x.t().contiguous(),
        "add": lambda: x + x,
        "softmax": lambda: torch.softmax(x, dim=1),
        "layer_norm": lambda: torch.nn.functional.layer_norm(x, (4096,)),
    }


def timed(operation, repeats: int) -> list[float]:
    """Return milliseconds of each repeat, from the GPU's events."""
    import torch  # noqa: PLC0415 - after the Sanitizer has subscribed

    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        operation()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def native() -> dict[str, Any]:
    found = {}
    for name, operation in operations().items():
        operation()
        found[name] = {"ms": timed(operation, REPEATS)}
    return found


def slots(*, hotness: bool = False) -> dict[str, Any]:
    tensors = Tensors()
    tool = MemoryTool(hotness=hotness, tensors=tensors)
    sanitizer = Sanitizer(library.find_library(), tool.functions, tool.optional_functions)
    problems: list[str] = []
    collector = Collector(sanitizer, Selection(), tool, on_problem=problems.append)
    sanitizer.subscribe(collector.on_call, library.find_patch())
    found = {}
    for name, operation in operations(lambda x: tensors.allocated(x.data_ptr(), x.nbytes)).items():
        operation()
        collector.finish()
        before = len(collector.launches)
        times = timed(operation, REPEATS)
        began = time.perf_counter()
        collector.finish()
        read_ms = (time.perf_counter() - began) * 1e3
        results = [result for _, result in collector.launches[before:]]
        answer = words_of([result.words for result in results[: len(results) // REPEATS]]) if results else []
        found[name] = {"ms": times, "read_ms": read_ms, "answer": answer, "launches": len(results)}
        if hotness:
            found[name]["heat"] = heat_of(results[: len(results) // REPEATS])
    return {**found, "problems": problems}


def words_of(rows: list[tuple[int, ...]]) -> list[int]:
    """Return what the host's analysis gives too (``memory_host.WORDS``), of launches summed."""
    words = total(rows)
    totals = [words[GLOBAL[kind] + field] for kind in KINDS for field in range(4)]
    strides = words[STRIDES["global"] : STRIDES["global"] + 8]
    contention = words[CONTENTION["global"] : CONTENTION["global"] + 2]
    return [*totals, *strides, *contention, words[WORST["global"]]]


def heat_of(results: list[Any]) -> dict[str, Any]:
    """Return hotness as the host's analysis gives it, of an operation that is one launch."""
    (one,) = results
    ranges = sorted(accesses for _, accesses in one.ranges)
    return {"ranges": ranges, "working_set": one.working_set, "tensors": [accesses for _, accesses in one.tensors]}


class Trace:
    """Writes every access to device memory while ``armed``."""

    def __init__(self, patch: str) -> None:
        self.sanitizer = Sanitizer(library.find_library(), {3: b"TraceGlobal"})
        self.buffer, self.armed, self.problems = 0, False, []
        self.sanitizer.subscribe(self.on_call, patch)

    def on_call(self, call: int, data: int) -> None:
        if call != Call.LAUNCH_ENTER:
            return
        try:
            if not self.buffer:
                context = CallData.from_address(data).context
                self.buffer = self.sanitizer.allocate(context, HEADER_BYTES + CAPACITY * RECORD.itemsize)
            if self.armed:
                self.sanitizer.give_memory(self.buffer)
        except Exception as error:
            self.problems.append(str(error))

    def reset(self) -> None:
        """Empty the buffer: count 0, and the capacity, byte by byte."""
        self.sanitizer.clear(self.buffer, HEADER_BYTES, None)
        for at, byte in enumerate(CAPACITY.to_bytes(8, "little")):
            self.sanitizer._call("sanitizerMemset", self.buffer + 8 + at, byte, 1, None)

    def copy(self) -> tuple[np.ndarray, float]:
        """Return the records, and milliseconds of their copy into memory that has been touched before."""
        count = int.from_bytes(self.sanitizer.read(self.buffer, 8, None), "little")
        assert 0 < count <= CAPACITY, count
        records = np.zeros(count, dtype=RECORD)
        records.view(np.uint8)[:] = 1
        began = time.perf_counter()
        arguments = (records.ctypes.data, self.buffer + HEADER_BYTES, records.nbytes, None)
        self.sanitizer._call("sanitizerMemcpyDeviceToHost", *arguments)
        return records, (time.perf_counter() - began) * 1e3


def trace() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        patch = Path(folder) / "trace.fatbin"
        source = Path(__file__).with_name("memory_trace.cu")
        nvcc = library.find_nvcc(os.environ)
        subprocess.run([nvcc, *library.PATCH_FLAGS, "-arch=native", str(source), "-o", str(patch)], check=True)
        by_c, tracer, found, tensors = Compiled(Path(folder)), Trace(str(patch)), {}, []
        operated = operations(lambda x: tensors.append((x.data_ptr(), x.data_ptr() + x.nbytes)))
        for name, operation in operated.items():
            operation()
            found[name] = _trace(tracer, operation, by_c, tensors)
    return {**found, "problems": tracer.problems}


def _trace(tracer: Trace, operation, by_c: Compiled, tensors: list[tuple[int, int]]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - after the Sanitizer has subscribed

    tracer.reset()
    torch.cuda.synchronize()
    tracer.armed = True
    (ms,) = timed(operation, 1)
    tracer.armed = False
    records, copy_ms = tracer.copy()
    numpy_ms, answer = repeated(lambda: by_numpy(records).tolist())
    c_ms, c_answer = repeated(lambda: by_c(records).tolist())
    heat_numpy_ms, heat = repeated(lambda: heat_by_numpy(records, tensors))
    heat_c_ms, c_heat = repeated(lambda: by_c.heat(records, tensors))
    assert (answer, heat) == (c_answer, c_heat)
    times = {"numpy_ms": numpy_ms, "c_ms": c_ms, "heat_numpy_ms": heat_numpy_ms, "heat_c_ms": heat_c_ms}
    return {"ms": [ms], "copy_ms": copy_ms, "records": len(records), "answer": answer, "heat": heat, **times}


def repeated(analyse: Callable[[], Any]) -> tuple[list[float], Any]:
    """Return milliseconds of three runs, and the answer."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        answer = analyse()
        times.append((time.perf_counter() - began) * 1e3)
    return times, answer


def ratios(modes: dict[str, Any]) -> dict[str, Any]:
    """Return, for each operation, how much longer than natively, and how much faster than on the host.

    The host's time is that of its analysis alone: neither writing the trace nor copying it is in it.
    """
    found = {}
    for name, own in modes["native"].items():
        slot, hot, traced = modes["slots"][name], modes["hotness"][name], modes["trace"][name]
        plain, counters, hotness = (float(np.median(one["ms"])) for one in (own, slot, hot))
        host = {key: float(np.median(traced[key])) for key in ("numpy_ms", "c_ms", "heat_numpy_ms", "heat_c_ms")}
        found[name] = {
            "native_ms": plain,
            "counters": _ratios(plain, counters, host["numpy_ms"], host["c_ms"]),
            "with_hotness": _ratios(
                plain, hotness, host["numpy_ms"] + host["heat_numpy_ms"], host["c_ms"] + host["heat_c_ms"]
            ),
            "trace_ms": traced["ms"][0],
            "copy_ms": traced["copy_ms"],
            "equal": slot["answer"] == hot["answer"] == traced["answer"] and hot["heat"] == traced["heat"],
        }
    return found


def _ratios(native_ms: float, in_situ_ms: float, numpy_ms: float, c_ms: float) -> dict[str, float]:
    return {
        "in_situ_ms": in_situ_ms,
        "slow_down": in_situ_ms / native_ms,
        "numpy_ms": numpy_ms,
        "c_ms": c_ms,
        "numpy_over_in_situ": numpy_ms / in_situ_ms,
        "c_over_in_situ": c_ms / in_situ_ms,
    }


def run() -> dict[str, Any]:
    """Run the three processes and return all that they measured."""
    modes = {}
    for mode in MODES:
        command = [sys.executable, "-m", "benchmarks.gpu.memory", mode]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        if done.returncode:
            raise SystemExit(f"{mode}: {done.stderr[-3000:]}")
        modes[mode] = json.loads(done.stdout.splitlines()[-1])
    return {"ratios": ratios(modes), "modes": modes, "cores": os.cpu_count(), "repeats": REPEATS}


def main() -> None:
    if len(sys.argv) > 1:
        print(
            json.dumps(
                {"native": native, "slots": slots, "hotness": partial(slots, hotness=True), "trace": trace}[
                    sys.argv[1]
                ]()
            )
        )
        return
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = {"gpu": subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip(), **run()}
    answer["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    folder = Path(os.environ.get("OUT", RESULTS))
    (folder / "memory-cost.json").write_text(json.dumps(answer, indent=1))
    print(json.dumps(answer["ratios"], indent=1))


if __name__ == "__main__":
    main()
