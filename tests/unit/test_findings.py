"""Findings on real traces: each is found where it is and not where it is not; users add their own."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from pasta_otel.gpu import findings
from pasta_otel.gpu.analysis.timeline import OP, OpKind, Timeline
from pasta_otel.gpu.cupti.rows import ROW, Kind
from pasta_otel.gpu.findings import GROUP, OUR_FINDERS, Finding, find, thresholds
from pasta_otel.gpu.findings.fp64 import is_double
from pasta_otel.gpu.kineto import read_trace

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "fixtures" / "samples"
FINDINGS = ROOT / "pasta_otel" / "gpu" / "findings"
HTA, TRACELENS = "facebookresearch+HolisticTraceAnalysis", "AMD-AGI+TraceLens"
ALEXNET = f"{HTA}/benchmark_result_2869224_1695835535_trace.json.gz"
DDP = f"{HTA}/nccl_data.json.gz"  # ResNet-50, two ranks, batch norm without synchronisation
BERT = f"{TRACELENS}/h100-bert-small.json.gz"  # eager inference, batch 1
COMPILED = f"{TRACELENS}/mi300-torch-compile.json.gz"
SGLANG = f"{TRACELENS}/mi300-sglang-prefill-decode-part.json.gz"
SYNC = "../h200/sync_batchnorm_rank0.json.gz"  # our own: benchmarks/gpu/sync_batchnorm.py on two H200
DOUBLES = f"{HTA}/negative_queue_rank0_part.json.gz"
KINDS = {finder.__module__.rpartition(".")[2] for finder in OUR_FINDERS}


def timelines(*files) -> list[Timeline]:
    return [dataclasses.replace(read_trace(SAMPLES / file).timeline, rank=rank) for rank, file in enumerate(files)]


def kinds(*files) -> set[str]:
    return {finding.kind for finding in find(timelines(*files))}


def one(kind, *files) -> Finding:
    (finding,) = [finding for finding in find(timelines(*files)) if finding.kind == kind]
    return finding


@pytest.mark.parametrize(
    ("kind", "there", "not_there"),
    [
        ("sync_stall", SGLANG, BERT),
        ("launch_bound", BERT, COMPILED),
        ("tensor_cores_missed", ALEXNET, BERT),
        ("pageable_copy", ALEXNET, DDP),
        ("small_kernels", BERT, DDP),
        ("idle_gap", DDP, COMPILED),
        ("fp64", DOUBLES, DDP),
    ],
)
def test_a_finding_is_made_where_it_is_and_not_where_it_is_not(kind, there, not_there):
    finding = one(kind, there)
    assert finding.evidence
    assert finding.suggestion
    assert 0 < finding.share <= 1
    assert finding.thresholds == thresholds(kind)
    assert kind not in kinds(not_there)


def test_a_launch_bound_finding_names_its_phases_and_what_a_graph_could_replay():
    phases = [evidence.detail for evidence in one("launch_bound", DDP).evidence if evidence.name == "waiting_kernels"]
    assert any("DistributedDataParallel.forward" in phase for phase in phases)
    normalization = one("launch_bound", f"{TRACELENS}/mi300-normalization.json.gz")
    candidates = {(e.detail, e.value) for e in normalization.evidence if e.name == "graph_candidate"}
    assert ("Net: the same 23 GPU kernels", 3) in candidates


def test_a_clean_trace_has_no_findings():
    assert find(timelines(COMPILED)) == []


def test_a_graph_replays_kernels_are_not_small_kernels_to_launch():
    assert kinds(f"{TRACELENS}/mi300-vllm-decode-graph.json.gz") == set()


def test_a_sync_stall_names_the_call_the_op_and_the_line():
    finding = one("sync_stall", SGLANG)
    first = finding.evidence[0].detail
    assert re.match(r"hipMemcpyWithStream in aten::copy_ at \S+/sglang/\S+\.py\(\d+\): \w+ \(\d times\)", first), first
    assert finding.share == pytest.approx(0.5, abs=0.01)


def test_missed_tensor_cores_name_the_gpu_kernel():
    assert any("sgemm" in evidence.detail for evidence in one("tensor_cores_missed", ALEXNET).evidence)


def test_a_rank_that_computes_longer_is_found_beside_the_others():
    slow, fast = f"{HTA}/sampled_rank-1.json.gz", f"{HTA}/sampled_rank-0.json.gz"
    finding = one("load_imbalance", fast, slow)
    assert finding.rank is None
    assert finding.evidence[0].detail == "rank 1"
    assert "load_imbalance" not in kinds(fast, fast)
    assert "load_imbalance" not in kinds(slow)


# ---- batch-norm synchronisation: one recorded step, and one built so that the share is known


def built(sync: bool) -> Timeline:
    """Two collectives of one step, one launched within SyncBatchNorm's forward as torch.nn names it."""
    names = ["", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "cudaLaunchKernelExC",
             "SyncBatchNorm" if sync else "aten::batch_norm", "c10d::allgather_"]  # fmt: skip
    rows = np.zeros(4, ROW)
    rows["kind"] = [Kind.RUNTIME, Kind.CONCURRENT_KERNEL, Kind.RUNTIME, Kind.CONCURRENT_KERNEL]
    rows["name"], rows["correlation"] = [2, 1, 2, 1], [1, 1, 2, 2]
    rows["start"], rows["end"] = [10, 100, 400, 500], [20, 200, 410, 900]
    ops = np.zeros(2, OP)
    ops["kind"], ops["name"] = OpKind.OP, [3, 4]
    ops["start"], ops["end"] = [0, 300], [50, 450]
    return Timeline(0, rows, np.zeros(4, np.int64), names, ops, [(1, 1)])


def test_sync_batch_norm_of_a_recorded_step_is_found():
    finding = one("batchnorm_sync", SYNC)
    # two layers, each with one gathering forward and one reduction backward
    assert [evidence.value for evidence in finding.evidence if evidence.name == "collectives"] == [4]


def test_collectives_within_sync_batch_norm_are_found():
    (finding,) = [finding for finding in find([built(sync=True)]) if finding.kind == "batchnorm_sync"]
    assert "1 collectives, 20%" in finding.title
    assert not [finding for finding in find([built(sync=False)]) if finding.kind == "batchnorm_sync"]
    assert "batchnorm_sync" not in kinds(DDP)


@pytest.mark.parametrize(
    ("name", "double"),
    [
        ("void cutlass_80_tensorop_d884gemm_128x64_16x3_nn_align1", True),
        ("ampere_dgemm_64x64_nn", True),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<double>, at::detail::Array>",
            True,
        ),
        ("void at::native::elementwise_kernel<uniform_and_transform<float, float, 4ul, (double, double)>", False),
        ("void at::native::vectorized_elementwise_kernel<4, gelu<c10::BFloat16>::{lambda(double)#1}>", False),
        ("volta_sgemm_128x32_nt", False),
    ],
)
def test_a_double_is_an_element_type_not_a_scalar_parameter(name, double):
    assert is_double(name) is double


# ---- form


def test_each_finding_is_one_small_file_with_thresholds_that_name_their_source():
    assert {"sync_stall", "launch_bound", "tensor_cores_missed", "pageable_copy", "small_kernels", "idle_gap",
                     "batchnorm_sync", "fp64", "load_imbalance"} == KINDS  # fmt: skip
    for kind in KINDS:
        assert len((FINDINGS / f"{kind}.py").read_text().splitlines()) < 100
        for threshold in thresholds(kind).values():
            assert threshold.source.partition(": ")[0] in {"choice", "measured", "NVIDIA", "NVIDIA data sheets"}


WORDS = {0.01: "1 %", 0.05: "5 %", 0.1: "a tenth", 0.3: "30 %", 0.5: "half", 1.0: "more to launch than to run",
         3: "three", 7: "7.0", 50: "at least 50", 10_000: "10 us", 1_000_000: "1 ms"}  # fmt: skip
"""How the table of docs/findings.md writes a threshold's number."""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_documentation_says_every_number_that_decides(kind):
    (row,) = re.findall(rf"^\| `{kind}` \| .*$", (ROOT / "docs" / "findings.md").read_text(), re.MULTILINE)
    for name, threshold in thresholds(kind).items():
        assert WORDS[threshold.value] in row, name


def test_findings_are_plain_json_and_the_largest_share_comes_first():
    found = find(timelines(ALEXNET))
    assert [finding.share for finding in found] == sorted((finding.share for finding in found), reverse=True)
    assert json.loads(json.dumps([finding.as_dict() for finding in found]))


def test_traces_without_gpu_work_have_no_findings():
    assert find(timelines(f"{HTA}/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz")) == []
    assert find([]) == []


# ---- findings of users


def broken(ranks):
    raise RuntimeError("a user's mistake")


def test_a_finding_that_fails_costs_no_other(caplog):
    found = find(timelines(BERT), [broken, *OUR_FINDERS])
    assert {finding.kind for finding in found} == {"launch_bound", "small_kernels"}
    assert "a user's mistake" in caplog.text


def test_one_that_cannot_be_imported_is_logged(monkeypatch, caplog):
    missing = EntryPoint("gone", "no_such_module:find", GROUP)
    monkeypatch.setattr(findings, "entry_points", lambda group: [missing] if group == GROUP else [])
    assert findings.plugins() == []
    assert "gone cannot be loaded" in caplog.text


def test_the_example_in_the_documentation_works_as_a_distribution(tmp_path):
    text = (ROOT / "docs" / "findings.md").read_text()
    code = re.search(r"```python\n# long_copies\.py\n(.*?)```", text, re.DOTALL)[1]
    (tmp_path / "long_copies.py").write_text(code)
    declared = re.search(r'```toml\n\[project\.entry-points\."pasta_otel\.findings"\]\n(.*?)\n```', text, re.DOTALL)[1]
    name, _, target = declared.partition(" = ")
    info = tmp_path / "long_copies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: long-copies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {json.loads(target)}\n")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from pasta_otel.gpu.findings import find\n"
        "from pasta_otel.gpu.kineto import read_trace\n"
        "print(*[finding.kind for finding in find([read_trace(Path(sys.argv[2])).timeline])])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(SAMPLES / ALEXNET)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "long_copies" in done.stdout.split(), done.stderr
