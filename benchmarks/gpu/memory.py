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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.memory_host import KINDS, RECORD, by_numpy, compiled
from pasta_otel.gpu.memory import library
from pasta_otel.gpu.memory.collector import Collector
from pasta_otel.gpu.memory.counters import MemoryTool
from pasta_otel.gpu.memory.model import accesses
from pasta_otel.gpu.memory.sanitizer import Domain, LaunchCallback, LaunchData, ModuleData, Resource, Sanitizer
from pasta_otel.gpu.memory.selection import Selection

RESULTS = Path(__file__).parents[1] / "results"
REPEATS = 7
CAPACITY = 6_000_000
HEADER_BYTES = 16
MODES = ("native", "slots", "hotness", "trace")


def operations() -> dict[str, Any]:
    """Return what is measured; imports torch, after the Sanitizer has subscribed."""
    import torch  # noqa: PLC0415 - after the Sanitizer has subscribed

    x = torch.arange(8192 * 4096, device="cuda", dtype=torch.float32).reshape(8192, 4096) / 1e6
    torch.cuda.synchronize()
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
    tool = MemoryTool(hotness=hotness)
    sanitizer = Sanitizer(library.find_library(), tool.functions, tool.optional_functions)
    problems: list[str] = []
    collector = Collector(sanitizer, library.find_patch(), Selection(), tool, on_problem=problems.append)
    sanitizer.subscribe(collector.on_event)
    found = {}
    for name, operation in operations().items():
        operation()
        collector.finish()
        before = len(collector.launches)
        times = timed(operation, REPEATS)
        began = time.perf_counter()
        collector.finish()
        read_ms = (time.perf_counter() - began) * 1e3
        counted = [accesses(result.words) for _, result in collector.launches[before:]]
        totals = [
            [sum(getattr(one.global_[kind], field) for one in counted) // REPEATS for field in FIELDS] for kind in KINDS
        ]
        found[name] = {"ms": times, "read_ms": read_ms, "totals": totals, "launches": len(counted)}
    return {**found, "problems": problems}


FIELDS = ("requests", "lanes", "sectors", "bytes")


class Trace:
    """Writes every access to device memory while ``armed``."""

    def __init__(self, patch: str) -> None:
        self.sanitizer = Sanitizer(library.find_library(), {3: b"TraceGlobal"})
        self.patch, self.buffer, self.armed, self.problems = patch, 0, False, []
        self.sanitizer.subscribe(self.on_event)

    def on_event(self, domain: int, event: int, data: int) -> None:
        try:
            if (domain, event) == (Domain.RESOURCE, Resource.MODULE_LOADED):
                module = ModuleData.from_address(data)
                if not self.buffer:
                    self.sanitizer.add_patches(self.patch, module.context)
                    self.buffer = self.sanitizer.allocate(module.context, HEADER_BYTES + CAPACITY * RECORD.itemsize)
                self.sanitizer.patch(module.module)
            elif (domain, event) == (Domain.LAUNCH, LaunchCallback.BEGIN) and self.armed:
                self.sanitizer.give_slot(LaunchData.from_address(data), self.buffer)
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
        by_c, tracer, found = compiled(Path(folder)), Trace(str(patch)), {}
        for name, operation in operations().items():
            operation()
            found[name] = _trace(tracer, operation, by_c)
    return {**found, "problems": tracer.problems}


def _trace(tracer: Trace, operation, by_c) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - after the Sanitizer has subscribed

    tracer.reset()
    torch.cuda.synchronize()
    tracer.armed = True
    (ms,) = timed(operation, 1)
    tracer.armed = False
    records, copy_ms = tracer.copy()
    times: dict[str, list[float]] = {"numpy_ms": [], "c_ms": []}
    for _ in range(3):
        for key, analyse in (("numpy_ms", by_numpy), ("c_ms", by_c)):
            began = time.perf_counter()
            totals = analyse(records)
            times[key].append((time.perf_counter() - began) * 1e3)
            if key == "numpy_ms":
                expected = totals
    assert (totals == expected).all()
    return {"ms": [ms], "copy_ms": copy_ms, "records": len(records), "totals": totals.tolist(), **times}


def ratios(modes: dict[str, Any]) -> dict[str, Any]:
    """Return, for each operation, how much longer than natively, and how much faster than on the host."""
    found = {}
    for name, own in modes["native"].items():
        slot, hot, traced = modes["slots"][name], modes["hotness"][name], modes["trace"][name]
        with_hotness = float(np.median(hot["ms"]))
        plain, analysed = float(np.median(own["ms"])), float(np.median(slot["ms"]))
        found[name] = {
            "native_ms": plain,
            "analysed_ms": analysed,
            "slow_down": analysed / plain,
            "with_hotness_ms": with_hotness,
            "slow_down_with_hotness": with_hotness / plain,
            "numpy_over_in_situ_with_hotness": float(np.median(traced["numpy_ms"])) / with_hotness,
            "numpy_over_in_situ": float(np.median(traced["numpy_ms"])) / analysed,
            "c_over_in_situ": float(np.median(traced["c_ms"])) / analysed,
            "copy_ms": traced["copy_ms"],
            "equal": slot["totals"] == hot["totals"] == traced["totals"],
        }
    return found


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
