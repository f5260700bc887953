"""Slots that an H200 left behind, decoded and held against ncu's numbers of the same run and against closed forms."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from pasta_otel.gpu.memory import slots
from pasta_otel.gpu.memory.model import Contention, GlobalAccess, SharedAccess
from pasta_otel.gpu.memory.page import as_html
from pasta_otel.gpu.memory.report import MemoryReport, by_kernel, read_results
from pasta_otel.gpu.memory.text import as_text
from pasta_otel.gpu.memory.words import markup
from tests.gpu.test_memory_gpu import BLOCKS, COUNTERS, SAMPLE, STREAMS, differences, firm, ours, tally
from tests.memory_slots import words

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "sanitizer"
PUBLISHED = json.loads((ROOT / "benchmarks" / "results" / "memory-ncu.json").read_text(encoding="utf-8"))
PHASES = {4: 1, 8: 2, 16: 4}
UNEQUAL = {"sm80_xmma_gemm", "nvjet_sm90", "cudnn_generated", "vectorized_layer_norm"}
"""GPU kernels of PyTorch with a shared-memory counter that is not ncu's to the last unit."""


def recorded(name, folder):
    shutil.copy(FIXTURES / f"h200-{name}.json", folder / "1.json")
    (result,) = read_results(folder)
    return result


@pytest.fixture
def torch(tmp_path):
    return recorded("torch", tmp_path)


@pytest.fixture(scope="module")
def patterns(tmp_path_factory):
    found = defaultdict(list)
    for launch in recorded("patterns", tmp_path_factory.mktemp("patterns")).launches:
        found[launch.name].append(launch)
    return found


@pytest.fixture(scope="module")
def facts():
    return json.loads((FIXTURES / "h200-ncu.json").read_text(encoding="utf-8"))


def test_slots_of_torch_decode_to_the_counters_of_the_run(torch, facts):
    assert {kernel.name: ours(kernel.accesses) for kernel in by_kernel(torch.launches)} == facts["torch_counters"]


def test_global_requests_and_sectors_of_torch_are_exactly_those_of_ncu(torch, facts):
    for kernel in by_kernel(torch.launches):
        counted, reference = ours(kernel.accesses), facts["torch_ncu"][kernel.name]
        chosen = [name for name in COUNTERS if name.startswith("global")]
        assert [counted[name] for name in chosen] == [reference[name] for name in chosen], kernel.name


def test_wavefronts_of_torch_are_exactly_those_that_ncu_counts_by_address(torch, facts):
    mine = {kernel.name: ours(kernel.accesses) for kernel in by_kernel(torch.launches)}
    for name, reference in facts["torch_ncu"].items():
        for counter in ("shared_load_wavefronts", "shared_store_wavefronts"):
            assert mine[name][counter] == reference[f"{counter}_by_address"], (name, counter)


def test_the_hardwares_shared_counters_differ_in_the_known_gpu_kernels_alone(torch, facts):
    found = differences(torch.launches, facts["torch_ncu"])
    assert len(found) == len(UNEQUAL)
    assert all(any(part in name for part in UNEQUAL) for name in found)
    assert firm(found) == {}


def test_tensors_of_torch_are_those_of_the_operations(torch):
    """``x + x`` reads one tensor twice and writes another: 2048 x 1024 floats, four a lane."""
    (add,) = (launch for launch in torch.launches if "CUDAFunctor_add" in launch.name)
    assert sorted(accesses for _, accesses in add.tensors) == [524_288, 1_048_576]
    assert add.working_set == 2 * 2048 * 1024 * 4
    assert {torch.tensors[number].bytes for number, _ in add.tensors} == {2048 * 1024 * 4}


def test_the_published_numbers_are_the_recorded_ones(torch, patterns, facts):
    assert PUBLISHED["torch"]["equal"] == facts["torch_equal"] == tally(torch.launches, facts["torch_ncu"])
    for kernel in PUBLISHED["torch"]["kernels"]:
        assert kernel["ours"] == facts["torch_counters"][kernel["kernel"]]
        assert kernel["ncu"] == facts["torch_ncu"][kernel["kernel"]]
        assert kernel["different"] == facts["torch_differences"].get(kernel["kernel"], {})
    both = {kernel["kernel"]: kernel["both"] for kernel in PUBLISHED["patterns"]["kernels"]}
    assert both == {name: ours(launches[0].accesses) for name, launches in patterns.items() if name != "bulk_copy"}
    assert set(PUBLISHED["patterns"]["equal"].values()) == {f"{len(both)} of {len(both)}"}


def test_the_recorded_patterns_are_those_that_ncu_was_asked_for_on_both_streams(patterns):
    assert all(re.match(SAMPLE.removeprefix("regex:"), name) for name in patterns if name != "bulk_copy")
    assert all(len({launch.stream for launch in launches}) == STREAMS for launches in patterns.values())
    assert all(len({launch.words[: slots.NOT_BEGIN] for launch in launches}) == 1 for launches in patterns.values())


def matching(patterns, prefix):
    """Return the numbers in the names of a family of GPU kernels, with the counters of each launch."""
    families = {name: launches for name, launches in patterns.items() if name.startswith(prefix)}
    assert families
    for name, launches in families.items():
        yield [int(number) for number in re.findall(r"\d+", name)], [launch.accesses for launch in launches]


def test_recorded_strides_equal_the_closed_form(patterns):
    for (stride,), launches in matching(patterns, "strided_"):
        for counted in launches:
            sectors = min(32, 4 * stride) * BLOCKS
            assert counted.global_["load"] == GlobalAccess(BLOCKS, 32 * BLOCKS, sectors, 128 * BLOCKS)


def test_recorded_bank_strides_equal_the_closed_form(patterns):
    for (width, stride), launches in matching(patterns, "bank_"):
        phases = PHASES[width]
        wavefronts = phases * math.gcd(stride, 32 // phases)
        expected = SharedAccess(BLOCKS, 32 * BLOCKS, wavefronts * BLOCKS, phases * BLOCKS)
        assert {counted.shared[f"load_{width}"] for counted in launches} == {expected}
        assert {counted.shared[f"store_{width}"] for counted in launches} == {expected}


@pytest.mark.parametrize(("prefix", "merges"), [("group_", 2), ("near", 2), ("next", 2), ("mod4", 1), ("mod8", 1)])
def test_recorded_loads_of_shared_addresses_merge_as_the_rule_says(patterns, prefix, merges):
    names = [name for name in patterns if name.startswith(prefix) or name.endswith(prefix)]
    assert names
    for name in names:
        width = int(name.split("_")[1])
        wavefronts = max(1, PHASES[width] // merges) * BLOCKS
        for launch in patterns[name]:
            assert launch.accesses.shared[f"load_{width}"].wavefronts == wavefronts, name


def test_recorded_divergence_and_contention_equal_the_closed_form(patterns):
    for (lanes,), launches in matching(patterns, "lanes_"):
        assert {counted.global_["load"].lanes for counted in launches} == {lanes * BLOCKS}
    for (lanes,), launches in matching(patterns, "atomic_"):
        assert {counted.contention["global"] for counted in launches} == {
            Contention(32 // lanes * BLOCKS, lanes * BLOCKS)
        }


def test_recorded_copies_equal_the_closed_form(patterns):
    for launch in patterns["async_copy"]:
        assert launch.accesses.global_["async_copy"] == GlobalAccess(BLOCKS, 32 * BLOCKS, 16 * BLOCKS, 512 * BLOCKS)
    for launch in patterns["bulk_copy"]:
        assert launch.accesses.global_["bulk_load"] == GlobalAccess(BLOCKS, BLOCKS, 128 * BLOCKS, 4096 * BLOCKS)


def test_recorded_times_follow_one_another_on_each_stream(patterns):
    launches = [launch for some in patterns.values() for launch in some]
    for stream in {launch.stream for launch in launches}:
        times = sorted((one.begin_unix_nano, one.end_unix_nano) for one in launches if one.stream == stream)
        assert all(before[1] <= after[0] for before, after in pairwise(times))


def test_a_choice_by_name_left_one_module_as_it_was(tmp_path):
    result = recorded("chosen", tmp_path)
    assert (result.seen, result.unpatched, result.skipped) == (168, 1, {"name": 164})
    assert [launch.name for launch in result.launches] == [f"strided_{stride}" for stride in (1, 2, 8, 32)]


def texts(name, folder):
    report = MemoryReport([recorded(name, folder)])
    return report, " ".join(as_text(report).split()), as_html(report)


def test_gpu_kernels_that_read_by_tma_are_not_said_to_be_idle(tmp_path):
    report, text, page = texts("torch", tmp_path)
    unseen = [report.labels[kernel.name] for kernel in report.kernels if kernel.reads_unseen]
    assert [label.split("_")[0] for label in unseen] == ["cudnn", "nvjet"]
    for label in unseen:
        assert f"{label} (1 launch, accesses by TMA not counted, " in text
    assert text.count("not in these numbers: accesses by TMA") == len(unseen)
    assert "working set 0 B" not in text
    assert "working set 4 KiB" not in text
    assert page.count("accesses by TMA are not counted") == len(unseen)
    assert "0% of all sectors" not in text
    unknown = [one["symbol"] for one in report.as_dict()["gpu_kernels"] if one["working_set"] is None]
    assert unknown == [kernel.name for kernel in report.kernels if kernel.reads_unseen]
    assert sum(launch.working_set is None for launch in report.results[0].launches) == len(unseen)


@pytest.mark.parametrize(
    ("counters", "unseen"),
    [
        ({"other_tensor_map_copies": 1, "global_load": (9, 288, 36, 1152)}, True),
        ({"other_wgmma_instructions": 1}, True),
        ({"other_wgmma_instructions": 1, "global_atomic": (9, 9, 9, 36)}, True),
        ({"other_wgmma_instructions": 1, "global_bulk_load": (1, 1, 32, 1024)}, False),
        ({"other_wgmma_instructions": 1, "global_async_copy": (1, 32, 4, 128)}, False),
        ({"shared_load_4": (1, 32, 1, 1)}, False),
    ],
)
def test_accesses_that_are_not_counted_are_told_from_a_gpu_kernel_without_any(counters, unseen):
    assert slots.accessed_unseen(words(**counters)) is unseen


def test_names_of_torch_are_told_apart_and_keep_their_beginning(tmp_path):
    report, text, page = texts("torch", tmp_path)
    labels = [report.labels[kernel.name] for kernel in report.kernels]
    assert len(set(labels)) == len(labels) == 11
    assert [label for label in labels if "vectorized_elementwise" in label] == [
        "at::native::vectorized_elementwise_kernel<CUDAFunctor_add>",
        "at::native::vectorized_elementwise_kernel<float16_copy_kernel_cuda>",
        "at::native::vectorized_elementwise_kernel<BUnaryFunctor<MulFunctor>>",
    ]
    assert any(label.startswith("sm80_xmma_gemm_f32f32") for label in labels)
    for label in labels:
        assert label in text
        assert markup(label) in page


def test_no_recorded_gpu_kernel_is_told_to_become_what_it_is(tmp_path):
    report, _, _ = texts("patterns", tmp_path)
    said = [finding for _, finding in report.findings]
    assert said
    assert all(finding.row is None or finding.row > finding.stride for finding in said)
    assert all(finding.stride is None or finding.stride > 1 for finding in said)
    alone = [finding for kernel, finding in report.findings if kernel.name.startswith("lone_")]
    assert {finding.kind for finding in alone if finding.predicted is not None} == {"divergence"}
    # two elements apart: half of the bytes are used, and the threshold is less than half
    assert not next(kernel for kernel in report.kernels if kernel.name == "strided_2").findings
