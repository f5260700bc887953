"""Hotness by tensor on the GPU machine: exact lane accesses and pages, and the names that launches and tensors get."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pasta_otel.gpu.memory import library
from pasta_otel.gpu.memory.child import command_environment
from pasta_otel.gpu.memory.results import read_results
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.session import Job
from pasta_otel.gpu.memory.slots import OTHER, PAGE_BYTES, RANGE_BYTES

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "memory_tensors_program.py"
ROWS, COLUMNS, SMALL, FORGOTTEN = 512, 1024, 1024, 4096
COUNT, PAGES, STEP = 1 << 18, 256, 1024
THREADS, TURNS = 4, 40


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if shutil.which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], check=False).returncode:
        pytest.skip("no NVIDIA GPU")


def run(kind: str, out: Path, seconds: float = 100) -> SimpleNamespace:
    """Run the program under the analysis; return its result, and where its tensors lay."""
    job = Job(library.find_library(), library.find_patch(), Selection())
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = command_environment({**os.environ, "PYTHONPATH": path}, {"out": str(out), **job.to_json()})
    command = [sys.executable, str(PROGRAM), kind]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "done" in done.stdout
    if target := os.environ.get("OUT"):
        for file in out.glob("*.json"):
            shutil.copy(file, Path(target) / f"tensors-{kind}-{file.name}")
    result = max(read_results(out), key=lambda one: len(one.launches))
    assert result.problems == ()
    facts = json.loads(done.stdout.splitlines()[0])
    sys.stdout.write(f"FACTS {json.dumps({kind: facts})}\n")
    return SimpleNamespace(result=result, facts=facts)


@pytest.fixture(scope="module")
def torch(tmp_path_factory):
    return run("torch", tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def cupy(tmp_path_factory):
    return run("cupy", tmp_path_factory.mktemp("cupy"))


def launches(ran, function: str):
    """Return the launches from a function of the program, in its order."""
    return [launch for launch in ran.result.launches if launch.caller.source.endswith(f" {function}")]


def one_launch(ran, function: str):
    found = launches(ran, function)
    assert len(found) == 1, [launch.name for launch in found]
    return found[0]


def by_address(ran, launch) -> dict[int, int]:
    """Return lane accesses by where the tensor began; nothing was left out."""
    assert launch.words[OTHER["hot_lost"]] == launch.words[OTHER["hot_outside"]] == 0
    tensors = ran.result.tensors
    found = {tensors[number].address: accesses for number, accesses in launch.tensors}
    assert len(found) == len(launch.tensors)
    return found


def lanes(launch) -> int:
    kinds = launch.accesses.global_.values()
    return sum(access.lanes for access in kinds)


def pages(*places) -> int:
    """Return the bytes of the distinct pages that lie in whole tensors, each a beginning and a length."""
    touched = {page for begin, size in places for page in range(begin // PAGE_BYTES, -(-(begin + size) // PAGE_BYTES))}
    return PAGE_BYTES * len(touched)


def tensor(ran, launch, name: str):
    """Return the record of a tensor that the program told of, as this launch touched it."""
    begin, _ = ran.facts[name]
    (found,) = (ran.result.tensors[n] for n, _ in launch.tensors if ran.result.tensors[n].address == begin)
    return found


SHIFT = "torch_program.<locals>.Shift.forward"


def test_a_broadcast_sum_accesses_each_of_its_tensors_once_an_element(torch):
    launch = next(one for one in launches(torch, SHIFT) if lanes(one) == 3 * ROWS * COLUMNS)
    x, shifted, weight = (torch.facts[name] for name in ("x", "shifted", "net.first.weight"))
    assert by_address(torch, launch) == dict.fromkeys((x[0], shifted[0], weight[0]), ROWS * COLUMNS)
    assert launch.working_set == pages(x, shifted, weight)
    assert sum(accesses for _, accesses in launch.ranges) == 3 * ROWS * COLUMNS


def test_tensors_have_the_name_module_and_line_that_they_come_from(torch):
    launch = next(one for one in launches(torch, SHIFT) if lanes(one) == 3 * ROWS * COLUMNS)
    # it was called by itself before the whole ever ran: its place was not known yet
    assert launch.caller.module == "Shift"
    weight, shifted, x = (tensor(torch, launch, name) for name in ("net.first.weight", "shifted", "x"))
    assert weight.name == "net.first.weight"
    assert (weight.bytes, shifted.bytes, x.bytes) == (4 * COLUMNS, 4 * ROWS * COLUMNS, 4 * ROWS * COLUMNS)
    assert shifted.module == launch.caller.module
    assert shifted.source.endswith(f" {SHIFT}")
    assert (x.module, x.source.endswith(" torch_program")) == ("", True)


def test_tensors_in_one_segment_are_told_apart(torch):
    launch = one_launch(torch, "torch_program.<locals>.share")
    places = [torch.facts[name] for name in ("one", "other", "both")]
    assert len({begin // RANGE_BYTES for begin, _ in places}) == 1
    stores = launch.accesses.global_["store"]
    assert stores.bytes == 4 * SMALL
    assert by_address(torch, launch) == {begin: stores.lanes for begin, _ in places}
    assert launch.ranges == ((places[0][0] // RANGE_BYTES * RANGE_BYTES, 3 * stores.lanes),)
    assert launch.working_set == pages(*places)


def test_a_tensor_that_is_gone_before_the_result_is_read_is_still_known(torch):
    filled, doubled = launches(torch, "torch_program.<locals>.double_and_forget")
    later = one_launch(torch, "torch_program.<locals>.come_after")
    assert torch.facts["gone"][0] == torch.facts["after"][0]  # the same memory
    gone, after = tensor(torch, doubled, "gone"), tensor(torch, later, "after")
    assert gone == tensor(torch, filled, "gone")
    assert gone.number != after.number
    assert 0 < gone.allocated_unix_nano < gone.freed_unix_nano <= after.allocated_unix_nano
    assert gone.bytes == after.bytes == 4 * FORGOTTEN
    assert gone.source.endswith("double_and_forget")
    assert after.source.endswith("come_after")
    accesses = by_address(torch, doubled)
    assert accesses == dict.fromkeys((gone.address, torch.facts["doubled"][0]), doubled.accesses.global_["store"].lanes)


def test_launches_of_the_forward_pass_have_their_layer_and_touch_its_parameters(torch):
    labels = {}
    for launch in torch.result.launches:
        names = {torch.result.tensors[number].name for number, _ in launch.tensors}
        labels.setdefault(launch.caller.module, set()).update(names)
    assert "net.second.weight" in labels["net.second"]
    assert {"net.third.weight", "net.third.bias"} <= labels["net.third"]
    assert "table.weight" in labels["table"]


def test_launches_of_the_backward_pass_have_the_layer_of_their_forward_pass(torch):
    backward = [launch for launch in torch.result.launches if not launch.caller.source]
    modules = {launch.caller.module for launch in backward}
    assert {"net.first", "net.second", "net.third", "table"} <= modules
    touched = {
        torch.result.tensors[number].name
        for launch in backward
        if launch.caller.module == "net.second"
        for number, _ in launch.tensors
    }
    assert "net.second.weight" in touched


def test_threads_that_allocate_side_by_side_neither_hang_nor_lose_an_access(tmp_path):
    ran = run("threads", tmp_path, seconds=25)
    found = launches(ran, "threads_program.<locals>.shift")
    rows = [lanes(launch) // (3 * COLUMNS) for launch in found]
    assert sorted(rows) == list(range(ROWS - THREADS * TURNS + 1, ROWS + 1))
    for launch in found:
        assert sum(by_address(ran, launch).values()) == lanes(launch)


def test_each_element_of_a_cupy_array_is_accessed_once(cupy):
    launch = next(one for one in cupy.result.launches if one.name == "tensor_add")
    places = [cupy.facts[name] for name in ("one", "other", "total")]
    assert by_address(cupy, launch) == {begin: COUNT for begin, _ in places}
    assert launch.working_set == pages(*places)
    total = tensor(cupy, launch, "total")
    assert total.bytes == 4 * COUNT
    assert total.source.endswith("cupy_program.<locals>.add")


def test_the_working_set_is_the_pages_that_are_touched(cupy):
    launch = next(one for one in cupy.result.launches if one.name == "tensor_pages")
    assert by_address(cupy, launch) == {cupy.facts["spread"][0]: PAGES}
    assert launch.working_set == PAGES * PAGE_BYTES
    begin, size = cupy.facts["spread"]
    assert [place for place, _ in launch.ranges] == list(
        range(begin // RANGE_BYTES * RANGE_BYTES, begin + size - PAGE_BYTES + 1, RANGE_BYTES)
    )


def test_memory_from_the_driver_is_one_tensor(cupy):
    launch = next(one for one in cupy.result.launches if one.name == "tensor_raw")
    assert by_address(cupy, launch) == {cupy.facts["raw"][0]: COUNT}
    assert tensor(cupy, launch, "raw").bytes == 4 * COUNT


def test_arrays_of_other_threads_are_known_too(cupy):
    launch = next(one for one in cupy.result.launches if one.name == "tensor_thread")
    assert by_address(cupy, launch) == {cupy.facts["thread"][0]: COUNT}
    assert tensor(cupy, launch, "thread").source.endswith("cupy_program.<locals>.thread")
