"""Followers of PyTorch's and CuPy's allocators: what tensors are told, by allocators that behave as those do."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _gpu_trace

from pasta_otel.gpu.memory.callers import calling_line, is_library
from pasta_otel.gpu.memory.follow_cupy import HOOKS, FollowCupy
from pasta_otel.gpu.memory.follow_torch import FollowTorch
from pasta_otel.gpu.memory.tensors import Tensors
from pasta_otel.gpu.torch import switch

BASE, ROUND = 0x7F0000000000, 512


class Caching:
    """What ``torch._C`` shows of PyTorch's caching allocator: statistics of its devices, and the trace."""

    def __init__(self, kinds: tuple[str, ...] = ("requested_bytes", "allocated_bytes")) -> None:
        self.kinds, self.traced, self.device = kinds, False, 0
        self.counts: dict[int, int] = {}
        self.totals: dict[tuple[int, str], int] = {}
        self.next = BASE
        self.streams: list[int] = []

    def _cuda_getDevice(self) -> int:  # noqa: N802 - torch's names
        return self.device

    def _activate_gpu_trace(self) -> None:
        self.traced = True

    def _cuda_memoryStats(self, device: int) -> dict:  # noqa: N802 - as above
        sizes = {kind: {"all": {"allocated": self.totals.get((device, kind), 0)}} for kind in self.kinds}
        return {"allocation": {"all": {"allocated": self.counts.get(device, 0)}}, **sizes}

    def take(self, size: int, device: int = 0) -> int:
        """Do what an allocation does before the trace is told."""
        rounded = -(-size // ROUND) * ROUND
        self.counts[device] = self.counts.get(device, 0) + 1
        for kind, more in (("requested_bytes", size), ("allocated_bytes", rounded)):
            self.totals[device, kind] = self.totals.get((device, kind), 0) + more
        self.next, address = self.next + rounded, self.next
        return address

    def tell(self, address: int, device: int = 0) -> None:
        self.device = device
        if self.traced:
            _gpu_trace.MemoryAllocationCallbacks.fire_callbacks(address)

    def allocate(self, size: int, device: int = 0) -> int:
        address = self.take(size, device)
        self.tell(address, device)
        return address

    def free(self, address: int) -> None:
        if self.traced:
            _gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(address)


class Told:
    """Takes the place of tensors, and keeps what it is told."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, str, str]] = {}

    def allocated(self, address: int, size: int, *, source: str = "", module: str = "") -> None:
        self.live[address] = (size, source, module)

    def freed(self, address: int) -> None:
        del self.live[address]


@contextmanager
def tracing():
    """Yield a list of problems that must be empty at the end; leave torch's trace as it was."""
    registries = (_gpu_trace.MemoryAllocationCallbacks, _gpu_trace.MemoryDeallocationCallbacks)
    before = [list(registry.callback_list) for registry in registries]
    problems: list[object] = []
    try:
        yield problems
    finally:
        for registry, callbacks in zip(registries, before, strict=True):
            registry.callback_list[:] = callbacks
    assert problems == []


@pytest.fixture
def trace():
    with tracing() as problems:
        yield problems


def followed(core: object, told: object, problems: list[object]) -> FollowTorch:
    streams = getattr(core, "streams", [])
    modules = {"torch": SimpleNamespace(_C=core, cuda=SimpleNamespace(Stream=streams.append))}
    follower = FollowTorch(told, lambda: ("a.py:1 f", "net"), problems.append, modules)
    follower.start()
    return follower


def test_every_allocation_of_torch_is_told_with_its_size_and_place(trace):
    core, told = Caching(), Told()
    followed(core, told, trace)
    one, two = core.allocate(100), core.allocate(5000, device=1)
    assert told.live == {one: (100, "a.py:1 f", "net"), two: (5000, "a.py:1 f", "net")}
    core.free(one)
    assert set(told.live) == {two}


def test_a_devices_streams_are_made_at_its_first_allocation(trace):
    core = Caching()
    followed(core, Told(), trace)
    for device in (0, 1, 0, 1):
        core.allocate(8, device)
    assert core.streams == [0, 1]


def test_a_thread_that_is_told_late_does_not_take_another_ones_size(trace):
    core, told = Caching(), Told()
    followed(core, told, trace)
    core.allocate(8)
    one, late = core.take(1000), core.take(2000)
    core.tell(one)
    other = core.take(3000)
    core.tell(late)  # since the last look exactly one allocation was counted: it is not this one
    core.tell(other)
    assert [told.live[address][0] for address in (one, late, other)] == [0, 0, 0]
    assert told.live[core.allocate(500)][0] == 500


@given(st.lists(st.sampled_from(["take", 0, 1, 2]), max_size=60))
def test_no_order_of_takes_and_tellings_gives_a_wrong_size(events):
    core, told, waiting, sizes = Caching(), Told(), [], {}
    with tracing() as problems:
        followed(core, told, problems)
        for size, event in enumerate(events, 1):
            if event == "take":
                waiting.append(core.take(size))
                sizes[waiting[-1]] = size
            elif event < len(waiting):
                core.tell(waiting.pop(event))
        for address in waiting:
            core.tell(address)
        assert all(told.live[address][0] in (0, size) for address, size in sizes.items())
        last = core.allocate(77)
        assert told.live[last][0] == 77


@given(st.lists(st.tuples(st.integers(1, 1 << 33), st.integers(0, 3)), max_size=30))
def test_sizes_of_several_devices_are_not_mixed(sizes):
    core, told = Caching(), Told()
    with tracing() as problems:
        followed(core, told, problems)
        addresses = [core.allocate(size, device) for size, device in sizes]
    assert [told.live[address][0] for address in addresses] == [size for size, _ in sizes]


def test_a_torch_that_does_not_count_what_was_requested_gives_whole_blocks(trace):
    core, told = Caching(kinds=("allocated_bytes",)), Told()
    followed(core, told, trace)
    assert told.live[core.allocate(100)][0] == ROUND


def test_where_two_threads_allocate_at_once_sizes_stay_unknown_and_the_next_is_known(trace):
    core, told = Caching(), Told()
    followed(core, told, trace)
    one, two = core.take(100), core.take(5000)  # both before either is told
    core.tell(one)
    core.tell(two)
    three = core.allocate(700)
    assert [told.live[address][0] for address in (one, two, three)] == [0, 0, 700]


def test_statistics_that_the_program_resets_cost_one_size(trace):
    core, told = Caching(), Told()
    followed(core, told, trace)
    core.allocate(100)
    core.allocate(100)
    core.counts.clear()
    core.totals.clear()
    assert [told.live[core.allocate(size)][0] for size in (300, 400)] == [0, 400]


def test_an_allocator_without_such_statistics_leaves_sizes_unknown(trace):
    class Pooled(Caching):
        def _cuda_memoryStats(self, device: int) -> dict:  # noqa: N802 - as above
            nothing = {"all": {"allocated": 0}}
            return {"allocation": nothing, "requested_bytes": nothing, "allocated_bytes": nothing}

    core, told = Pooled(), Told()
    followed(core, told, trace)
    assert told.live[core.allocate(100)][0] == 0


def test_a_torch_without_cuda_is_left_alone(trace):
    before = len(_gpu_trace.MemoryAllocationCallbacks.callback_list)
    followed(SimpleNamespace(), Told(), trace)
    assert len(_gpu_trace.MemoryAllocationCallbacks.callback_list) == before


def test_what_goes_wrong_in_a_hook_is_reported_and_does_not_reach_torch(trace, caplog):
    class Broken(Caching):
        def _cuda_memoryStats(self, device: int) -> dict:  # noqa: N802 - as above
            raise RuntimeError("no statistics")

    core = Broken()
    followed(core, Told(), trace)
    core.allocate(100)
    core.free(BASE + 1)  # of which nothing is known
    assert [str(problem) for problem in trace] == ["no statistics", str(BASE + 1)]
    trace.clear()
    assert not caplog.records


def cupy_module() -> ModuleType:
    """Return hooks of memory pools as CuPy documents them: each thread has its own."""
    module, local = ModuleType(HOOKS), threading.local()

    def get_memory_hooks() -> OrderedDict:
        if not hasattr(local, "hooks"):
            local.hooks = OrderedDict()
        return local.hooks

    class MemoryHook:
        name = "MemoryHook"

        def __enter__(self):
            if self.name in get_memory_hooks():
                raise KeyError(self.name)
            get_memory_hooks()[self.name] = self
            return self

    module.get_memory_hooks, module.MemoryHook = get_memory_hooks, MemoryHook
    return module


class Pool:
    """A memory pool of CuPy's, as far as its hooks see it."""

    def __init__(self, module: ModuleType) -> None:
        self._hooks, self.next = module.get_memory_hooks, BASE

    def malloc(self, size: int) -> int:
        rounded = -(-size // ROUND) * ROUND
        self.next, address = self.next + rounded, self.next
        for hook in self._hooks().values():
            hook.malloc_postprocess(device_id=0, size=size, mem_size=rounded, mem_ptr=address, pmem_id=7)
        return address

    def free(self, address: int) -> None:
        for hook in self._hooks().values():
            hook.free_preprocess(device_id=0, mem_size=ROUND, mem_ptr=address, pmem_id=7)


@pytest.fixture
def cupy():
    module, told = cupy_module(), Told()
    problems: list[object] = []
    before = threading.getprofile()
    follower = FollowCupy(told, lambda: ("a.py:1 f", ""), problems.append, {HOOKS: module})
    follower.start()
    yield SimpleNamespace(pool=Pool(module), told=told, problems=problems, follower=follower)
    threading.setprofile(before)


def test_every_allocation_of_cupy_is_told_with_its_size_and_place(cupy):
    one, two = cupy.pool.malloc(100), cupy.pool.malloc(5000)
    assert cupy.told.live == {one: (100, "a.py:1 f", ""), two: (5000, "a.py:1 f", "")}
    cupy.pool.free(one)
    assert set(cupy.told.live) == {two}
    assert cupy.problems == []


def test_threads_that_start_later_are_followed_and_not_profiled(cupy):
    found = []

    def work() -> None:
        found.append((cupy.pool.malloc(100), sys.getprofile()))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    ((address, profile),) = found
    assert cupy.told.live[address][0] == 100
    assert profile is None


def test_following_a_thread_twice_changes_nothing(cupy):
    cupy.follower.follow_thread()
    cupy.pool.malloc(100)
    assert len(cupy.told.live) == 1


def test_somebody_elses_profile_function_stays():
    def other(*_: object) -> None:
        """Profile threads."""

    problems: list[object] = []
    before = threading.getprofile()
    threading.setprofile(other)
    try:
        FollowCupy(Told(), lambda: ("", ""), problems.append, {HOOKS: cupy_module()}).start()
        assert threading.getprofile() is other
    finally:
        threading.setprofile(before)
    assert len(problems) == 1


def test_what_goes_wrong_in_a_hook_of_cupy_is_reported(cupy):
    cupy.pool.free(5)
    assert [type(problem) for problem in cupy.problems] == [KeyError]


def test_allocations_end_up_in_the_table(trace):
    core, tensors = Caching(), Tensors()
    followed(core, tensors, trace)
    one = core.allocate(1000)
    core.free(core.allocate(3000))
    (found,) = tensors.describe([1])
    assert (found.address, found.bytes, found.module, found.label) == (one, 1000, "net", "net (a.py:1 f)")
    assert len(tensors.table()) == 8 * 4


def test_the_programs_line_is_found_behind_our_hooks_and_torchs(trace):
    core, told, lines = Caching(), Told(), []
    modules = {"torch": SimpleNamespace(_C=core, cuda=SimpleNamespace(Stream=core.streams.append))}
    FollowTorch(told, lambda: (lines.append(calling_line()) or "", ""), trace.append, modules).start()
    core.allocate(8)
    assert lines[0].startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (sys.modules[FollowTorch.__module__].__file__, True),
        (switch.__file__, True),
        ("/tmp/torchinductor_root/ab/cabc.py", True),
        ("<eval_with_key>.3", True),
        ("/usr/lib/python3/site-packages/torch/nn/modules/module.py", True),
        ("<string>", False),
        ("/home/me/torch/train.py", False),
        ("/home/me/pasta_otel_demo/gpu/train.py", False),
    ],
)
def test_lines_that_the_program_did_not_write_are_passed_over(file, library):

    assert is_library(file) is library
