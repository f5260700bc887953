"""Reading Kineto traces: a million events, and a file of 1 GB, in time and peak memory, beside HTA's own parser.

Every measurement is a process of its own, so that peak memory (``VmHWM``) is that of the import alone; readers take
turns on the same file. CPU times stand beside wall times, because the machine may be shared. The traces are generated,
in Kineto's own layout of lines and with its mix of events: host ops, API calls, GPU kernels with their arguments, flow
events.

HTA is not a dependency: ``PASTA_HTA_PYTHON`` names a Python that has it (``python -m venv .cache/hta &&
.cache/hta/bin/pip install traceinsight ijson``); without it only our own reader is measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

EVENTS = 1_000_000
LARGE_BYTES = 1 << 30
WINDOWS = 3
BAR_S, BAR_BYTES = 10.0, 1 << 30
HTA_PYTHON = Path(os.environ.get("PASTA_HTA_PYTHON", ".cache/hta/bin/python"))
RESULT = Path(__file__).parent / "results" / "kineto-import.json"

OURS = """
import json, sys, time
from pathlib import Path
began = time.perf_counter()
from pasta_otel.gpu.kineto import read_trace
loaded, cpu = time.perf_counter(), time.process_time()
trace = read_trace(Path(sys.argv[1]))
parsed = time.perf_counter()
work = trace.timeline.work
result = {"seconds": parsed - loaded, "cpu_s": time.process_time() - cpu, "import_s": loaded - began,
          "events": trace.total,
          "gpu_ns": int((work["end"] - work["start"]).sum())}
if sys.argv[2] == "analyze":
    from pasta_otel.gpu.analysis.report import analyze
    analyze([trace.timeline])
    result["analyze_s"] = time.perf_counter() - parsed
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
result["peak_bytes"] = int(peak.split()[1]) * 1024
print(json.dumps(result))
"""
HTA = """
import json, logging, sys, time, warnings
warnings.filterwarnings("ignore"); logging.disable(logging.CRITICAL)
from hta.common import trace_parser
from hta.configs.parser_config import ParserBackend, ParserConfig
config = ParserConfig.get_default_cfg()
config.parser_backend = getattr(ParserBackend, sys.argv[2])
began, cpu = time.perf_counter(), time.process_time()
meta, frame, symbols = trace_parser.parse_trace_dataframe(sys.argv[1], config)
result = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "rows": len(frame)}
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
result["peak_bytes"] = int(peak.split()[1]) * 1024
print(json.dumps(result))
"""

COMMAND = """
import json, sys, time
from pasta_otel.cli import main
began = time.perf_counter()
try:
    main(["import", sys.argv[1], "--to", sys.argv[2], "--store", sys.argv[3], "--quiet"])
except SystemExit as stop:
    code = stop.code
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
result = {"seconds": time.perf_counter() - began, "exit": code, "peak_bytes": int(peak.split()[1]) * 1024}
print(); print(json.dumps(result))
"""

_OP = """  {{
    "ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 4242, "tid": {tid},
    "ts": {ts}.{frac:03d}, "dur": {dur}.{frac:03d},
    "args": {{
      "External id": {ext}, "Record function id": 0, "Sequence number": {ext}, "Fwd thread id": 0, "Ev Idx": {n}
    }}
  }}"""
_CALL = """  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4242, "tid": {tid},
    "ts": {ts}.{frac:03d}, "dur": 4.{frac:03d},
    "args": {{
      "External id": {ext}, "cbid": 211, "correlation": {corr}
    }}
  }}"""
_KERNEL = """  {{
    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": 7,
    "ts": {ts}.{frac:03d}, "dur": {dur}.{frac:03d},
    "args": {{
      "External id": {ext}, "queued": 0, "device": 0, "context": 1,
      "stream": 7, "correlation": {corr},
      "registers per thread": 64, "shared memory": 0,
      "blocks per SM": 1.481481, "warps per SM": 11.851851,
      "grid": [160, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 18
    }}
  }}"""
_FLOW = """  {{
    "ph": "{ph}", "id": {corr}, "pid": {pid}, "tid": {tid}, "ts": {ts}.{frac:03d},
    "cat": "ac2g", "name": "ac2g"{tail}
  }}"""
_KERNELS = [
    f"void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    f"at::detail::Array<char*, {n}> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, {n}>)"
    for n in range(40)
] + [f"ampere_fp16_s16816gemm_fp16_{n}x64_ldg8_f2f_stages_64x5_tn" for n in range(40)]
_OPS = ["aten::linear", "aten::addmm", "aten::add", "aten::layer_norm", "aten::gelu", "aten::softmax"]


def events() -> Iterator[str]:
    """Yield events without end: an op within an op, its launch, the GPU kernel, and the two ends of its flow arrow."""
    n = 0
    while True:
        ts, frac, ext = 10_000 + n * 12, n * 7 % 1000, n + 1
        yield _OP.format(name=_OPS[n % 6], tid=4242, ts=ts, frac=frac, dur=11, ext=2 * ext, n=n)
        yield _OP.format(name=_OPS[(n + 1) % 6], tid=4242, ts=ts + 1, frac=frac, dur=9, ext=2 * ext + 1, n=n)
        yield _CALL.format(tid=4242, ts=ts + 3, frac=frac, ext=2 * ext + 1, corr=ext)
        name = _KERNELS[n % 80]
        yield _KERNEL.format(name=name, ts=ts + 20, frac=frac, dur=3 + n % 6, ext=2 * ext + 1, corr=ext)
        yield _FLOW.format(ph="s", corr=ext, pid=4242, tid=4242, ts=ts + 3, frac=frac, tail="")
        yield _FLOW.format(ph="f", corr=ext, pid=0, tid=7, ts=ts + 20, frac=frac, tail=', "bp": "e"')
        n += 1


def write(path: Path, count: int = 0, size: int = 0) -> int:
    """Write a trace of so many events, or of at least so many bytes; return the number of events."""
    written = 0
    with path.open("w") as file:
        file.write(
            '{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "NVIDIA A100", "computeMajor": 8}],'
        )
        file.write(
            '\n  "distributedInfo": {"rank": 0},\n  "baseTimeNanoseconds": 1700000000000000000,\n  "traceEvents": [\n'
        )
        for event in events():
            file.write(",\n" if written else "")
            file.write(event)
            written += 1
            if (count and written >= count) or (size and file.tell() >= size):
                break
        file.write('\n  ],\n  "traceName": "generated.json"\n}\n')
    return written


def measure(python: Path | str, program: str, *arguments: str) -> dict[str, float]:
    """Run one reader in a process of its own."""
    done = subprocess.run([str(python), "-c", program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.returncode, "error": done.stderr.strip().splitlines()[-1:] or ""}  # type: ignore[dict-item]
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def run(windows: int = WINDOWS, large_bytes: int = LARGE_BYTES, hta: Path = HTA_PYTHON) -> dict[str, object]:
    """Measure every reader in turn, ``windows`` times."""
    readers = {"pasta-otel": (sys.executable, OURS, "read")}
    if hta.exists():
        readers |= {"hta-json": (str(hta), HTA, "JSON"), "hta-ijson": (str(hta), HTA, "IJSON_BATCH_AND_COMPRESS")}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.json"
        count = write(path, count=EVENTS)
        million_bytes = path.stat().st_size
        for _ in range(windows):
            for name, (python, program, mode) in readers.items():
                taken[name].append(measure(python, program, str(path), mode))
        analysis = measure(sys.executable, OURS, str(path), "analyze")
        path.unlink()
        path = Path(folder) / "large.json"
        large_events = write(path, size=large_bytes)
        large_size = path.stat().st_size
        large = [measure(sys.executable, OURS, str(path), "read") for _ in range(windows)]
        store = str(Path(folder) / "store.duckdb")
        command = {to: measure(sys.executable, COMMAND, str(path), to, store) for to in ("json", "store")}
    medians = {
        name: statistics.median(window["seconds"] for window in windows_)
        for name, windows_ in taken.items()
        if all("seconds" in window for window in windows_)
    }
    return {
        "events": count,
        "bytes": million_bytes,
        "seconds": medians,
        "cpu_seconds": {
            name: statistics.median(window.get("cpu_s", float("nan")) for window in windows_)
            for name, windows_ in taken.items()
        },
        "peak_bytes": {name: max(w.get("peak_bytes", 0) for w in windows_) for name, windows_ in taken.items()},
        "with_analysis": analysis,
        "bar_seconds": BAR_S,
        "large": {
            "bytes": large_size,
            "events": large_events,
            "seconds": statistics.median(window["seconds"] for window in large),
            "cpu_seconds": statistics.median(window["cpu_s"] for window in large),
            "peak_bytes": max(window["peak_bytes"] for window in large),
            "bar_peak_bytes": BAR_BYTES,
            "windows": large,
            "command": command,
        },
        "windows": taken,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {"msgspec": version("msgspec"), "numpy": version("numpy"), "hta": hta_version(hta)},
    }


def hta_version(python: Path) -> str | None:
    """Return the version of ``traceinsight`` that the other Python has, or None."""
    if not python.exists():
        return None
    program = "from importlib.metadata import version; print(version('traceinsight'))"
    return subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Print the comparison and keep it."""
    result = run()
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    shown = {key: value for key, value in result.items() if key not in {"windows", "machine"}}
    print(json.dumps(shown, indent=2))


if __name__ == "__main__":
    main()
