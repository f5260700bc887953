"""First look at a GPU machine: what this CUPTI does, in one call of a few minutes.

``python -m benchmarks.gpu.bringup OUT_DIR`` runs each part in its own process and writes OUT_DIR/bringup.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

COMBINATIONS = {
    "kernels": ((10,), "none", False),
    "kernels+ext": ((10, 39), "none", False),
    "kernels+ext+launches": ((10, 39), "launches", False),
    "kernels+ext+launches+driver": ((10, 39), "launches", True),
    "kernels+ext+runtime": ((10, 39), "all", False),
    "kernels+ext+runtime+driver": ((10, 39), "all", True),
    "T2": ((10, 1, 2, 39), "launches", False),
    "T3": ((10, 1, 2, 22, 38, 39, 17), "all", False),
    "graph_trace": ((51, 39), "launches", False),
}


def setup():
    import torch

    from pasta_otel._native import _cupti
    from pasta_otel.gpu.cupti import library
    from pasta_otel.gpu.cupti.capture import Capture, WindowKinds
    from pasta_otel.gpu.cupti.rows import Kind

    torch.ones(1, device="cuda")
    path = library.load()
    capture = Capture(_cupti.Ring(8192, 512))
    windows = {
        name: WindowKinds(tuple(map(Kind, kinds)), calls, driver)
        for name, (kinds, calls, driver) in COMBINATIONS.items()
    }
    return torch, _cupti, capture, windows, path


def rows_of(capture, torch):
    torch.cuda.synchronize()
    capture.flush(force=False)
    blocks = capture.drain()
    return np.concatenate(blocks) if blocks else np.empty(0)


def kinds_of(rows):
    return dict(Counter(int(kind) for kind in rows["kind"])) if len(rows) else {}


def part_costs(out: Path) -> dict:
    torch, cupti, capture, windows, path = setup()
    answer = {"library": path, "version": cupti.counts() and None}
    layout_sizes = {kind: cupti.struct_size(kind) for kind in (10, 1, 2, 5, 39, 38, 17, 51)}
    answer["struct_sizes"] = layout_sizes
    x, y = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")

    def loop(count):
        began = time.perf_counter_ns()
        for _ in range(count):
            x.add_(y)
        ended = time.perf_counter_ns()
        torch.cuda.synchronize()
        return (ended - began) / count / 1000

    for _ in range(5):
        loop(2000)
    answer["switch_us"], answer["launch_us"], answer["counts"] = {}, {}, {}
    for name, what in windows.items():
        try:
            opens, closes = [], []
            for _ in range(60):
                t0 = time.perf_counter_ns()
                assert capture.open(what), capture.holder
                t1 = time.perf_counter_ns()
                capture.close()
                t2 = time.perf_counter_ns()
                opens.append((t1 - t0) / 1000)
                closes.append((t2 - t1) / 1000)
            answer["switch_us"][name] = (float(np.median(opens)), float(np.median(closes)))
            off, on = [], []
            for _ in range(8):
                off.append(loop(1000))
                capture.open(what)
                on.append(loop(1000))
                capture.close()
            answer["launch_us"][name] = (float(np.median(off)), float(np.median(on)))
            rows = rows_of(capture, torch)
            answer["counts"][name] = kinds_of(rows)
        except Exception as error:
            answer["switch_us"][name] = repr(error)
    probe = []
    for _ in range(200):
        t0 = time.perf_counter_ns()
        cupti.probe()
        probe.append((time.perf_counter_ns() - t0) / 1000)
    register = []
    for _ in range(200):
        t0 = time.perf_counter_ns()
        cupti.register()
        register.append((time.perf_counter_ns() - t0) / 1000)
    pushes = []
    for _ in range(20):
        t0 = time.perf_counter_ns()
        for number in range(1000):
            cupti.push(number)
            cupti.pop()
        pushes.append((time.perf_counter_ns() - t0) / 1e6)
    answer["probe_us"], answer["register_us"], answer["push_pop_us"] = (
        float(np.median(probe)),
        float(np.median(register)),
        float(np.median(pushes)),
    )
    stats = capture.stats()
    answer["stats"] = stats
    answer["decode_ns_per_record"] = stats["decode_ns"] / max(stats["records"], 1)
    return answer


def joined(rows, names):
    ext = {int(r["correlation"]): int(r["value"]) for r in rows if r["kind"] == 39}
    out = Counter()
    missing = Counter()
    for r in rows:
        if r["kind"] in (1, 2, 3, 10, 22):
            hit = int(r["correlation"]) in ext
            out[f"{int(r['kind'])}:{'hit' if hit else 'miss'}"] += 1
            if not hit:
                missing[names[r["name"]][:60] or f"kind {int(r['kind'])}"] += 1
    return dict(out), dict(missing.most_common(8))


def work(torch, model, x):
    y = model(x)
    torch.nn.functional.scaled_dot_product_attention(*(torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.half),) * 3)
    z = x.to("cpu", non_blocking=True)
    torch.empty(1 << 20, device="cuda").zero_()
    h = torch.ones(1000).pin_memory().to("cuda", non_blocking=True)
    del z, h
    return y


def part_joins(out: Path) -> dict:
    torch, cupti, capture, windows, _ = setup()
    import triton
    import triton.language as tl

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.LayerNorm(256)).cuda().half()
    x = torch.randn(64, 256, device="cuda", dtype=torch.half)
    source = "import triton\nimport triton.language as tl\n@triton.jit\ndef double(p, n: tl.constexpr):\n    o = tl.arange(0, n)\n    tl.store(p + o, tl.load(p + o) * 2)\n"
    Path("/tmp/triton_double.py").write_text(source)
    sys.path.insert(0, "/tmp")
    from triton_double import double

    del triton, tl
    import cupy

    raw = cupy.RawKernel(r'extern "C" __global__ void cupy_twice(float* p) { p[threadIdx.x] *= 2; }', "cupy_twice")
    array = cupy.ones(128, dtype=cupy.float32)
    t = torch.ones(128, device="cuda")
    double[(1,)](t, 128)
    raw((1,), (128,), (array,))
    work(torch, model, x)
    torch.cuda.synchronize()
    answer = {}
    for name, what in windows.items():
        rows_of(capture, torch)
        assert capture.open(what)
        cupti.push(42)
        for _ in range(3):
            work(torch, model, x)
            double[(1,)](t, 128)
            raw((1,), (128,), (array,))
        print("pop", cupti.pop())
        torch.cuda.synchronize()
        capture.close()
        rows = rows_of(capture, torch)
        answer[name] = {"kinds": kinds_of(rows), "joined": joined(rows, capture.names())}
        calls = Counter((int(r["kind"]), int(r["detail"])) for r in rows if r["kind"] in (4, 5))
        answer[name]["calls"] = {
            f"{cupti.call_name(kind == 4, number)}({kind},{number})": n for (kind, number), n in calls.most_common(20)
        }
        start = {int(r["correlation"]): int(r["start"]) for r in rows if r["kind"] in (4, 5)}
        gaps = [
            int(r["start"]) - start[int(r["correlation"])]
            for r in rows
            if r["kind"] == 10 and int(r["correlation"]) in start
        ]
        answer[name]["kernel_start_minus_call_ns"] = (min(gaps), float(np.median(gaps)), len(gaps)) if gaps else None
    # backward on the autograd thread, with and without a prehook on the root
    loss_model = torch.nn.Linear(64, 64).cuda()
    xb = torch.randn(8, 64, device="cuda")
    loss_model(xb).sum().backward()
    for variant in ("plain", "prehook"):
        torch.cuda.synchronize()
        capture.open(windows["kernels+ext+runtime"])
        cupti.push(7)
        loss = loss_model(xb).sum()
        if variant == "prehook":
            handle = loss.grad_fn.register_prehook(lambda grads: print("prehook", cupti.push(8)))
        loss.backward()
        if variant == "prehook":
            handle.remove()
        cupti.pop()
        torch.cuda.synchronize()
        capture.close()
        rows = rows_of(capture, torch)
        answer["backward " + variant] = {
            "joined": joined(rows, capture.names()),
            "ids": dict(Counter(int(r["value"]) for r in rows if r["kind"] == 39)),
            "threads": dict(Counter(int(r["thread"]) for r in rows if r["kind"] == 5)),
        }
    return answer


def part_graph(out: Path) -> dict:
    import ctypes

    torch, cupti, capture, windows, _ = setup()
    cuda = ctypes.CDLL("libcuda.so.1")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.LayerNorm(256)).cuda().half()
    x = torch.randn(64, 256, device="cuda", dtype=torch.half)

    def nodes():
        status, graph = ctypes.c_int(), ctypes.c_void_p()
        ident, dependencies, count = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = cuda.cuStreamGetCaptureInfo_v2(
            stream, *(ctypes.byref(v) for v in (status, ident, graph, dependencies, count))
        )
        n = ctypes.c_size_t()
        code2 = cuda.cuGraphGetNodes(graph, None, ctypes.byref(n))
        array = (ctypes.c_void_p * n.value)()
        cuda.cuGraphGetNodes(graph, array, ctypes.byref(n))
        return [code, code2, status.value, [cupti.graph_node_id(int(p)) for p in array]]

    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(x)
        torch.cuda.synchronize()
        seen = []
        handles = [m.register_forward_hook(lambda m, a, o: seen.append((type(m).__name__, nodes()))) for m in model]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        for handle in handles:
            handle.remove()
        answer = {"capture": seen}
        for name in ("kernels+ext+launches", "T2", "graph_trace", "T3"):
            capture.open(windows[name])
            cupti.push(99)
            for _ in range(2):
                graph.replay()
            cupti.pop()
            torch.cuda.synchronize()
            capture.close()
            rows = rows_of(capture, torch)
            answer[name] = {
                "kinds": kinds_of(rows),
                "joined": joined(rows, capture.names()),
                "nodes": [(int(r["kind"]), int(r["node"]), int(r["graph"]), int(r["correlation"])) for r in rows][:24],
            }
    try:
        answer["raw_exec"] = hex(graph.raw_cuda_graph_exec())
    except Exception as error:
        answer["raw_exec"] = repr(error)
    return answer


def profile(torch, run):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        run()
        torch.cuda.synchronize()
    events = [e for e in p.events() if str(e.device_type).endswith("CUDA")]
    return len(events)


def part_profiler(out: Path) -> dict:
    torch, cupti, capture, windows, _ = setup()
    x, y = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
    answer = {}

    def run():
        for _ in range(50):
            x.add_(y)

    def window():
        opened = capture.open(windows["kernels+ext+runtime"])
        holder = capture.holder
        if opened:
            run()
            torch.cuda.synchronize()
            capture.close()
        rows = rows_of(capture, torch)
        return opened, holder, kinds_of(rows)

    answer["before"] = window()
    capture.hold("torch.profiler")
    answer["profiled 1"] = profile(torch, run)
    capture.release("torch.profiler")
    answer["probe after"] = cupti.probe()
    answer["after 1"] = window()
    run()
    torch.cuda.synchronize()
    time.sleep(0.5)
    run()
    answer["probe later"] = cupti.probe()
    answer["after later"] = window()
    capture.release("torch.profiler", idle_subscriber=True)
    answer["after, tolerated"] = window()
    capture.hold("torch.profiler")
    answer["profiled 2"] = profile(torch, run)
    capture.release("torch.profiler", idle_subscriber=True)
    answer["after 2"] = window()
    answer["stats"] = capture.stats()
    return answer


def part_unannounced(out: Path) -> dict:
    torch, cupti, capture, windows, _ = setup()
    x, y = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")

    def run():
        for _ in range(50):
            x.add_(y)

    capture.open(windows["kernels+ext+runtime"])
    run()
    answer = {"profiled inside our window": profile(torch, run)}
    run()
    torch.cuda.synchronize()
    capture.close()
    answer["rows"] = kinds_of(rows_of(capture, torch))
    answer["stats"] = capture.stats()
    answer["probe"] = cupti.probe()
    return answer


def part_record(out: Path) -> dict:
    from pasta_otel.gpu.cupti.recording import Recording, split_buffers, write_recording

    torch, cupti, capture, windows, _ = setup()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.LayerNorm(256)).cuda().half()
    x = torch.randn(64, 256, device="cuda", dtype=torch.half)
    work(torch, model, x)
    with torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
    torch.cuda.synchronize()
    cupti.record(8 << 20)
    capture.open(windows["T3"])
    for number in range(20):
        cupti.push(1000 + number)
        work(torch, model, x)
        cupti.pop()
    cupti.push(5000)
    for _ in range(3):
        graph.replay()
    cupti.pop()
    torch.cuda.synchronize()
    capture.close()
    torch.cuda.synchronize()
    capture.flush(force=True)
    rows = rows_of(capture, torch)
    names = cupti and capture.ring.name_pointers()
    buffers = tuple(split_buffers(cupti.recorded()))
    version = cupti.load(__import__("pasta_otel.gpu.cupti.library", fromlist=["x"]).load())
    write_recording(out / "h200.cupti.gz", Recording(version, names, buffers))
    return {"version": version, "kinds": kinds_of(rows), "buffers": [len(b) for b in buffers], "names": len(names)}


PARTS = ("costs", "joins", "graph", "profiler", "unannounced", "record")


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 2:
        answer = globals()[f"part_{sys.argv[2]}"](out)
        (out / f"bringup-{sys.argv[2]}.json").write_text(json.dumps(answer, indent=1, default=str))
        return
    answers = {}
    for part in PARTS:
        began = time.time()
        command = [sys.executable, "-m", "benchmarks.gpu.bringup", str(out), part]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            path = out / f"bringup-{part}.json"
            answers[part] = json.loads(path.read_text()) if path.exists() else {"failed": done.stderr[-1500:]}
            path.unlink(missing_ok=True)
            answers[part]["stderr"] = done.stderr[-300:]
        except subprocess.TimeoutExpired as error:
            answers[part] = {"timeout": str(error.stderr)[-1500:]}
        answers[part]["seconds"] = time.time() - began
    (out / "bringup.json").write_text(json.dumps(answers, indent=1))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
