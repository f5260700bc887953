"""Memory analysis on the GPU machine: against closed forms, on two streams at once, and against ncu."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from pasta_otel.gpu.memory import library
from pasta_otel.gpu.memory.child import command_environment
from pasta_otel.gpu.memory.model import Accesses, Contention, GlobalAccess, SharedAccess
from pasta_otel.gpu.memory.report import by_kernel, read_results
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.session import Job

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BLOCKS = 64
STREAMS = 2
TOLERANCE = 0.02
COUNTERS = {
    "global_load_requests": "smsp__sass_inst_executed_op_global_ld.sum",
    "global_store_requests": "smsp__sass_inst_executed_op_global_st.sum",
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
BY_ADDRESS = {
    "shared_load_wavefronts": (
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum",
    ),
    "shared_store_wavefronts": (
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_stsm.sum",
    ),
}
"""ncu's wavefronts by instrumentation: from addresses alone, as ours, without what else uses the data pipe. Summed."""
_PIPE = {"shared_load_conflicts", "shared_load_wavefronts", "shared_store_conflicts", "shared_store_wavefronts"}
EXPLAINED = {
    # docs/reference/memory.md, "Against ncu": the hardware's counters hold more than addresses
    "nvjet_*": _PIPE,
    "cudnn_*_wgmma_*": _PIPE,
    "sm80_xmma_gemm_*": {"shared_load_conflicts"},
    "*layer_norm*": {"shared_load_conflicts"},
}
"""Counters that need not agree, by pattern of the GPU kernel's name."""


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if shutil.which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], check=False).returncode:
        pytest.skip("no NVIDIA GPU")


def analysed(script: str, *arguments: str, out: Path, selection: Selection | None = None):
    """Run a script under the analysis and return its process' result."""
    job = Job(library.find_library(), library.find_patch(), selection or Selection())
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = command_environment({**os.environ, "PYTHONPATH": path}, {"out": str(out), **job.to_json()})
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "done" in done.stdout
    keep(out)
    results = read_results(out)
    assert not [problem for result in results for problem in result.problems]
    return max(results, key=lambda result: len(result.launches))


def keep(out: Path) -> None:
    """Copy the raw results to $OUT: recorded slots for the tests that run without a GPU."""
    if target := os.environ.get("OUT"):
        for file in out.glob("*.json"):
            shutil.copy(file, Path(target) / f"slots-{out.name}-{file.name}")


def say(**facts: object) -> None:
    """Print what was measured (shown with -rA) and keep it."""
    sys.stdout.write(f"FACTS {json.dumps(facts)}\n")
    if target := os.environ.get("OUT"):
        with (Path(target) / "memory-facts.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")


@pytest.fixture(scope="module")
def patterns(tmp_path_factory):
    result = analysed("memory_patterns.py", str(STREAMS), out=tmp_path_factory.mktemp("patterns"))
    found = defaultdict(list)
    for launch in result.launches:
        found[launch.name].append(launch)
    say(launches=len(result.launches), seen=result.seen, waits=result.waits, skipped=dict(result.skipped))
    return found


def each(patterns, name: str) -> list[Accesses]:
    """Return the counters of a GPU kernel's launches: one on each stream."""
    launches = patterns[name]
    assert len({launch.stream for launch in launches}) == len(launches) == STREAMS
    return [launch.accesses for launch in launches]


@pytest.mark.parametrize("stride", [1, 2, 8, 32])
def test_strided_loads_equal_the_closed_form(patterns, stride):
    for counted in each(patterns, f"strided_{stride}"):
        assert counted.global_["load"] == GlobalAccess(BLOCKS, 32 * BLOCKS, min(32, 4 * stride) * BLOCKS, 128 * BLOCKS)
        assert counted.global_["store"] == GlobalAccess(BLOCKS, 32 * BLOCKS, 4 * BLOCKS, 128 * BLOCKS)


@pytest.mark.parametrize(("width", "phases"), [(4, 1), (8, 2), (16, 4)])
def test_bank_strides_equal_the_closed_form(patterns, width, phases):
    for stride in range(1, 34):
        wavefronts = phases * math.gcd(stride, 32 // phases)
        expected = SharedAccess(BLOCKS, 32 * BLOCKS, wavefronts * BLOCKS, phases * BLOCKS)
        for counted in each(patterns, f"bank_{width}_{stride}"):
            assert counted.shared[f"load_{width}"] == expected, stride
            assert counted.shared[f"store_{width}"] == expected, stride


@pytest.mark.parametrize(("width", "phases"), [(8, 2), (16, 4)])
@pytest.mark.parametrize(("kernel", "merges"), [("near", 2), ("next", 2), ("mod4", 1), ("mod8", 1)])
def test_loads_of_shared_addresses_equal_the_closed_form(patterns, width, phases, kernel, merges):
    wavefronts = phases // merges * BLOCKS
    for counted in each(patterns, f"share_{width}_{kernel}"):
        assert counted.shared[f"load_{width}"] == SharedAccess(BLOCKS, 32 * BLOCKS, wavefronts, wavefronts)


def test_divergence_equals_the_closed_form(patterns):
    for lanes in range(1, 33):
        for counted in each(patterns, f"lanes_{lanes}"):
            assert (counted.global_["load"].requests, counted.global_["load"].lanes) == (BLOCKS, BLOCKS * lanes)
            assert (counted.global_["store"].requests, counted.global_["store"].lanes) == (BLOCKS, BLOCKS * lanes)


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_contended_atomics_equal_the_closed_form(patterns, lanes):
    for counted in each(patterns, f"atomic_{lanes}"):
        assert counted.global_["atomic"].requests == BLOCKS
        assert counted.global_["atomic"].lanes == 32 * BLOCKS
        assert counted.contention["global"] == Contention(32 // lanes * BLOCKS, lanes * BLOCKS)


def test_asynchronous_copies_equal_the_closed_form(patterns):
    for counted in each(patterns, "async_copy"):
        assert counted.global_["async_copy"] == GlobalAccess(BLOCKS, 32 * BLOCKS, 16 * BLOCKS, 512 * BLOCKS)


def test_bulk_copies_equal_the_closed_form(patterns):
    if "bulk_copy" not in patterns:
        pytest.skip("bulk copies need compute capability 9.0")
    for counted in each(patterns, "bulk_copy"):
        assert counted.global_["bulk_load"] == GlobalAccess(BLOCKS, BLOCKS, 128 * BLOCKS, 4096 * BLOCKS)


def test_device_times_of_a_stream_follow_one_another(patterns):
    launches = [launch for some in patterns.values() for launch in some]
    assert all(0 < launch.begin_unix_nano <= launch.end_unix_nano for launch in launches)
    assert all(launch.caller.time_unix_nano <= launch.begin_unix_nano for launch in launches)
    for stream in {launch.stream for launch in launches}:
        own = sorted((one.begin_unix_nano, one.end_unix_nano) for one in launches if one.stream == stream)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    waits = sorted(launch.begin_unix_nano - launch.caller.time_unix_nano for launch in launches)
    say(launch_to_begin_ns=[waits[0], waits[len(waits) // 2], waits[-1]])


def test_the_gpu_kernels_of_a_replayed_graph_are_counted_each_time(tmp_path):
    result = analysed("memory_graph.py", out=tmp_path)
    graphs = [launch for launch in result.launches if launch.nodes]
    say(graphs=[(launch.name[:70], launch.nodes, launch.accesses.other["blocks"]) for launch in graphs])
    say(graph_seen=result.seen, graph_skipped=dict(result.skipped))
    assert sorted(launch.nodes for launch in graphs) == [35] * 3 + [70] * 3  # additions and negations of three replays
    for launch in graphs:
        assert launch.accesses.other["blocks"] == launch.nodes * launch.grid[0]
        assert launch.accesses.global_["store"].bytes == launch.nodes * (4 << 20)


def test_a_gpu_kernel_that_a_graph_left_behind_counts_for_nobody(tmp_path):
    """The functions of a graph's nodes are given no slot after its launch: later launches that are not chosen count nowhere."""
    result = analysed("memory_graph.py", out=tmp_path, selection=Selection(count=8))
    say(left=[(launch.nodes, launch.accesses.other["blocks"]) for launch in result.launches])
    for launch in result.launches:
        assert launch.accesses.other["blocks"] == max(1, launch.nodes) * math.prod(launch.grid)


def test_a_small_device_memory_loses_nothing(tmp_path):
    result = analysed("memory_patterns.py", str(STREAMS), out=tmp_path, selection=Selection(device_bytes=1 << 20))
    say(waits_with_1_mib=result.waits, launches=len(result.launches))
    assert not result.skipped
    assert result.seen == len(result.launches)


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pasta_otel", "analyze", "memory", *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environ}
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


FAILING = "import cupy as cp; (cp.arange(4096)[::32] + 1).sum().item(); print('ran'); raise SystemExit(7)"


def test_the_command_reports_and_keeps_the_exit_code():
    done = command("--", "-c", FAILING)
    assert done.returncode == 7
    assert "ran" in done.stdout
    assert "global load" in done.stdout


def test_an_unsupported_architecture_is_said_and_the_program_runs(tmp_path):
    other = tmp_path / "other.fatbin"
    library.compile_patch(library.find_nvcc(os.environ), other, architectures=(75,))
    done = command("--", "-c", FAILING.replace("SystemExit(7)", "SystemExit(0)"), PASTA_SANITIZER_PATCH=str(other))
    say(unsupported=done.stderr[-500:])
    assert "ran" in done.stdout
    assert done.returncode == 3
    assert "cannot be analysed" in done.stderr


def test_a_busy_profiler_is_said_and_the_program_runs():
    program = "print('ran'); raise SystemExit(7)"  # without CUDA: the driver would load what is named
    done = command("--", "-c", program, CUDA_INJECTION64_PATH="/nonexistent/injection.so")
    say(busy=done.stderr[-500:])
    assert "CUPTI is active" in done.stderr
    assert done.returncode == 7


def test_modules_without_a_chosen_gpu_kernel_stay_as_they_are(tmp_path):
    result = analysed("memory_patterns.py", "1", out=tmp_path, selection=Selection(names=("strided_*",)))
    say(unpatched=result.unpatched, seen=result.seen)
    assert {launch.name for launch in result.launches} == {f"strided_{stride}" for stride in (1, 2, 8, 32)}
    assert result.unpatched > 0  # CuPy's own GPU kernels, which fill the arrays


SAMPLE = "regex:^(pipe_.*|strided_.*|group_.*|share_.*|lone_.*|async_copy|bank_[0-9]+_(1|2|3|4|8|16|32|33)|lanes_(1|7|32)|atomic_(1|8|32))$"
"""ncu takes a good part of a second for each GPU kernel."""


@cache
def known_metrics() -> frozenset[str]:
    """Return the names that this ncu knows."""
    listed = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, timeout=60, check=False).stdout
    return frozenset(line.split()[0] for line in listed.splitlines() if line.strip())


def wanted() -> dict[str, tuple[str, ...]]:
    """Return ncu's metrics for each of our counters; those by instrumentation only as far as this ncu has them."""
    found = {name: (metric,) for name, metric in COUNTERS.items()}
    for name, metrics in BY_ADDRESS.items():
        if all(metric.removesuffix(".sum") in known_metrics() for metric in metrics):
            found[f"{name}_by_address"] = metrics
    return found


def ncu(script: str, *chosen: str) -> dict[str, dict[str, int]]:
    """Return ncu's counters of a script's GPU kernels, summed by mangled name."""
    if shutil.which("ncu") is None:
        pytest.skip("no ncu")
    metrics = ",".join(metric for some in wanted().values() for metric in some)
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--print-kernel-base", "mangled", *chosen, "--metrics", metrics]
    done = subprocess.run(
        [*command, sys.executable, str(HERE / script)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith('"ID"')) :]
    counted: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(wanted(), 0))
    for row in csv.DictReader(table):
        if not row["ID"]:
            continue  # the row of units
        for name, some in wanted().items():
            counted[row["Kernel Name"]][name] += sum(round(float(row[m].replace(",", "") or 0)) for m in some)
    return dict(counted)


def ours(accesses: Accesses) -> dict[str, int]:
    """Return our counters under ncu's names."""
    loads = [access for kind, access in accesses.shared.items() if kind.startswith(("load", "matrix_load"))]
    stores = [access for kind, access in accesses.shared.items() if kind.startswith(("store", "matrix_store"))]
    return {
        "global_load_requests": accesses.global_["load"].requests,
        "global_store_requests": accesses.global_["store"].requests,
        # ncu counts the sectors of asynchronous copies among loads, but not their instructions
        "global_load_sectors": accesses.global_["load"].sectors + accesses.global_["async_copy"].sectors,
        "global_store_sectors": accesses.global_["store"].sectors,
        "shared_load_conflicts": sum(access.conflicts for access in loads),
        "shared_store_conflicts": sum(access.conflicts for access in stores),
        "shared_load_wavefronts": sum(access.wavefronts for access in loads),
        "shared_store_wavefronts": sum(access.wavefronts for access in stores),
    }


def differences(launches, reference) -> dict[str, dict[str, tuple[int, int]]]:
    """Return where we and ncu differ by more than the tolerance: GPU kernel -> counter -> (ours, ncu's)."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    mine = {kernel.name: ours(kernel.accesses) for kernel in by_kernel(launches)}
    for name, counted in reference.items():
        if name not in mine:
            found[name] = {"launches": (0, 1)}
            continue
        for counter, value in counted.items():
            own = mine[name][counter.removesuffix("_by_address")]
            if abs(own - value) > TOLERANCE * value:
                found.setdefault(name, {})[counter] = (own, value)
    return found


def firm(found):
    """Return the differences in the counters that must agree."""
    kept = {name: {c: v for c, v in counters.items() if c not in explained(name)} for name, counters in found.items()}
    return {name: counters for name, counters in kept.items() if counters}


def explained(name: str) -> set[str]:
    """Return the counters of a GPU kernel that need not agree."""
    return set().union(*(names for pattern, names in EXPLAINED.items() if fnmatchcase(name, pattern)))


def tally(launches, reference) -> dict[str, str]:
    """Return how many of ncu's numbers are equal to ours, by counter."""
    mine = {kernel.name: ours(kernel.accesses) for kernel in by_kernel(launches)}
    common = [name for name in reference if name in mine]
    counters = list(reference[common[0]]) if common else []
    equal = {c: sum(mine[n][c.removesuffix("_by_address")] == reference[n][c] for n in common) for c in counters}
    return {counter: f"{number} of {len(common)}" for counter, number in equal.items()}


def test_patterns_agree_with_ncu(patterns):
    one_stream = [launches[0] for launches in patterns.values()]
    reference = ncu("memory_patterns.py", "--kernel-name", SAMPLE)
    found = differences(one_stream, reference)
    say(pattern_differences=found, patterns_equal=tally(one_stream, reference))
    say(pipes={name: reference[name] for name in reference if name.startswith("pipe_")})
    # two lanes alone are there to be looked at: whether their phases merge is not written down by NVIDIA
    assert not firm({name: counters for name, counters in found.items() if "lone" not in name})


def test_operations_of_torch_agree_with_ncu(tmp_path):
    result = analysed("memory_torch.py", out=tmp_path)
    reference = ncu("memory_torch.py")
    found = differences(result.launches, reference)
    say(torch_differences=found, torch_equal=tally(result.launches, reference))
    say(torch_ncu=reference, torch_counters={k.name: ours(k.accesses) for k in by_kernel(result.launches)})
    assert {launch.name for launch in result.launches} == set(reference)
    assert not firm(found)
