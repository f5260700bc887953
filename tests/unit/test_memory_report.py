"""Formulas, findings, the report, and where library and patches are found."""

from __future__ import annotations

import json
import stat

import pytest

from pasta_otel.errors import MissingError
from pasta_otel.gpu.memory import findings, formulas, library, report
from pasta_otel.gpu.memory.child import FOLDER, JOB, command_environment
from pasta_otel.gpu.memory.model import Contention, GlobalAccess, Launch, SharedAccess, accesses
from pasta_otel.gpu.memory.results import ProcessResult
from pasta_otel.gpu.memory.text import as_text
from tests.memory_slots import words


def kinds(**counters):
    return [finding.kind for finding in findings.find(accesses(words(**counters)))]


def test_ratios_of_nothing_are_none():
    nothing = accesses(words())
    assert formulas.coalescing_efficiency(nothing.global_.values()) is None
    assert formulas.bank_conflict_ratio(nothing.shared.values()) is None
    assert formulas.active_lane_ratio(nothing) is None
    assert formulas.lanes_per_address(nothing.global_["atomic"], nothing.contention["global"]) is None
    assert findings.find(nothing) == []


def test_ratios():
    assert formulas.coalescing_efficiency([GlobalAccess(1, 32, 32, 128), GlobalAccess(1, 32, 4, 128)]) == 256 / (
        36 * 32
    )
    assert formulas.bank_conflict_ratio([SharedAccess(10, 320, 40, 20)]) == 0.5
    assert formulas.sectors_per_request(GlobalAccess(10, 320, 80, 1280)) == 8
    assert formulas.lanes_per_address(GlobalAccess(1, 32, 1, 128), Contention(4, 8)) == 8
    assert formulas.predicted_sectors(GlobalAccess(1, 32, 32, 128)) == 4
    assert formulas.predicted_sectors(GlobalAccess(1, 32, 1, 128)) == 1


def test_matrix_instructions_do_not_count_as_divergence():
    assert (
        formulas.active_lane_ratio(accesses(words(global_load=(1, 32, 4, 128), shared_matrix_load=(9, 72, 9, 9)))) == 1
    )


@pytest.mark.parametrize(("sectors", "found"), [(800, []), (801, ["coalescing"])])
def test_coalescing_is_found_below_half(sectors, found):
    assert kinds(global_load=(100, 3200, sectors, 12800)) == found


def test_a_finding_has_its_threshold_with_a_source_and_the_gain():
    slot = words(
        global_load=(100, 3200, 3200, 12800), strides_global=(0, 0, 0, 0, 0, 100, 0, 0), worst_global=(32, 4, 12)
    )
    (finding,) = findings.find(accesses(slot))
    assert (finding.value, finding.gain) == (0.125, 0.875)
    assert (finding.access, finding.measured, finding.predicted, finding.unit) == ("load", 3200, 400, "sector")
    assert finding.threshold.source.startswith("choice:")
    assert "lanes are 12 elements of 4 bytes apart" in finding.title
    assert json.dumps(finding.as_dict())


@pytest.mark.parametrize(("wavefronts", "found"), [(1052, []), (1053, ["bank_conflicts"])])
def test_bank_conflicts_are_found_above_five_percent(wavefronts, found):
    assert kinds(shared_load_4=(1000, 32000, wavefronts, 1000)) == found


@pytest.mark.parametrize(("lanes", "found"), [(24, []), (23, ["divergence"])])
def test_divergence_is_found_below_three_quarters(lanes, found):
    assert kinds(global_load=(1000, 1000 * lanes, 4000, 4000 * lanes)) == found


@pytest.mark.parametrize(("addresses", "found"), [(801, []), (800, ["global_atomics"])])
def test_global_atomics_are_found_from_four_lanes_an_address(addresses, found):
    assert kinds(global_atomic=(100, 3200, 400, 12800), contention_global=(addresses, 400)) == found


def test_few_requests_are_no_finding():
    assert kinds(global_load=(99, 99, 99, 396)) == []


def test_launches_are_summed_by_gpu_kernel_and_ordered_by_sectors():
    one, many = words(global_load=(1, 32, 4, 128)), words(global_load=(1, 32, 32, 128))
    launches = [Launch("a", (1, 1, 1), (32, 1, 1), 0, one)] * 7 + [Launch("b", (1, 1, 1), (32, 1, 1), 1, many)]
    first, second = report.by_kernel(launches)
    assert (first.name, first.launches) == ("b", 1)
    assert second.accesses.global_["load"] == GlobalAccess(7, 224, 28, 896)
    assert second.ratios()["coalescing_efficiency"] == 1


def test_names_are_readable_and_the_symbol_is_kept():
    result = ProcessResult(1, (Launch("_Z3fooPf", (1, 1, 1), (1, 1, 1), 0, words()),), 1, {}, 0, 0, ())
    whole = report.MemoryReport([result])
    (kernel,) = whole.as_dict()["gpu_kernels"]
    assert (kernel["name"], kernel["symbol"]) == ("foo(float*)", "_Z3fooPf")
    assert "foo  (1 launch," in as_text(whole)


@pytest.mark.parametrize(
    "folder", ["nvidia/cu13/compute-sanitizer", "nvidia/cu13/lib", "nvidia/cuda_sanitizer_api", "nvidia/cu14/lib"]
)
def test_the_library_is_found_where_a_toolkit_or_the_package_puts_it(tmp_path, folder):
    packaged = tmp_path / "site" / folder / library.LIBRARY
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    environ = {"PATH": "", "CUDA_HOME": str(tmp_path / "cuda")}
    found = list(library.candidates(environ, [str(tmp_path / "site")]))
    assert packaged in found
    toolkit = tmp_path / "cuda" / "compute-sanitizer" / library.LIBRARY
    toolkit.parent.mkdir(parents=True)
    toolkit.touch()
    assert library.find_library(environ, [str(tmp_path / "site")]) == str(toolkit)
    assert list(library.candidates({"PASTA_SANITIZER_LIBRARY": "/mine.so"}, [])) == [library.Path("/mine.so")]


def test_patches_are_compiled_once_for_the_source_that_they_come_from(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    known = "".join(f"echo sm_{number}; " for number in library.ARCHITECTURES)
    asked = f'if [ "$1" = --list-gpu-code ]; then {known}exit; fi\n'
    nvcc.write_text(f'#!/bin/sh\n{asked}echo "$@" >> {calls}\nfor last; do :; done\necho patch > "$last"\n')
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    environ = {"PATH": f"{nvcc.parent}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    first, second = library.find_patch(environ), library.find_patch(environ)
    assert first == second
    assert len(calls.read_text().splitlines()) == 1
    assert all(f"code=sm_{number}" in calls.read_text() for number in library.ARCHITECTURES)
    assert [path.name for path in (tmp_path / "cache" / "pasta-otel").iterdir()] == [library.Path(first).name]


def test_patches_that_were_built_with_the_package_are_used_as_they_are(tmp_path, monkeypatch):
    source = tmp_path / "memory.cu"
    source.touch()
    built = source.with_suffix(".fatbin")
    built.touch()
    monkeypatch.setattr(library, "source", lambda: source)
    monkeypatch.setattr(library, "kernels", lambda: tmp_path)
    assert library.find_patch({"PATH": ""}) == str(built)
    assert library.find_patch({"PASTA_SANITIZER_PATCH": str(source)}) == str(source)


def test_without_nvcc_the_message_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(library, "toolkits", lambda _: [])
    with pytest.raises(MissingError, match=r"no nvcc .* install a CUDA toolkit, or set PASTA_SANITIZER_PATCH"):
        library.find_nvcc({"PATH": "/nonexistent"})


def test_the_programs_environment_has_the_job_and_leaves_cupti_alone():
    environ = command_environment({"PYTHONPATH": f"/mine:{FOLDER}"}, {"out": "/tmp/x"})
    assert environ["PYTHONPATH"] == f"{FOLDER}:/mine"
    assert json.loads(environ[JOB]) == {"out": "/tmp/x"}
    assert environ["PASTA_GPU_CAPTURE"] == "false"
