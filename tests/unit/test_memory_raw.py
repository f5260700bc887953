"""Device memory is told of from any thread, while Python's interpreter lock is held by one that waits for it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from pasta_otel.gpu.memory import raw
from pasta_otel.gpu.memory.sanitizer import CALLBACK, Domain, Resource
from pasta_otel.gpu.memory.tensors import Tensors
from tests.unit.test_memory_tensors import BASE, UNIT, entries

SOURCE = Path(__file__).parents[1] / "fixtures" / "native" / "other_thread.c"
pytest.importorskip("pasta_otel._native._sanitizer", reason="built without a C compiler")
ALIVE: list[object] = []


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("native") / "other_thread.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(target), "-lpthread"], check=True)
    return str(target)


class Peer:
    """The driver's side: calls the subscribed receiver in threads of C, with or without the interpreter lock held."""

    def __init__(self, library: str) -> None:
        self.seen: list[tuple[int, int]] = []
        function = CALLBACK(lambda _user, domain, event, _data: self.seen.append((domain, event)))
        ALIVE.append(function)
        self.subscribed, self.take = raw.receiver(function, (Resource.MODULE_LOADED,))
        self.take()
        self.holding, self.letting_go = ctypes.PyDLL(library), ctypes.CDLL(library)

    def tell(self, domain: int, event: int, address: int = 0, size: int = 0, *, held=False, times=1, threads=1) -> None:
        call = (self.holding if held else self.letting_go).call_in_threads
        numbers = (ctypes.c_uint64(address), ctypes.c_uint64(size), ctypes.c_uint32(times))
        call(self.subscribed, domain, ctypes.c_uint32(event), *numbers, threads)


@pytest.fixture
def peer(library) -> Peer:
    return Peer(library)


def test_an_allocation_is_told_of_while_another_thread_has_the_interpreter_lock(peer):
    peer.tell(Domain.RESOURCE, Resource.DEVICE_MEMORY_ALLOC, BASE, UNIT, held=True)
    peer.tell(Domain.RESOURCE, Resource.DEVICE_MEMORY_FREE, BASE, UNIT, held=True)
    assert peer.take() == [(0, BASE, UNIT), (1, BASE, UNIT)]
    assert peer.take() == []
    assert peer.seen == []


def test_resource_events_that_nobody_reads_do_not_wait_for_python_either(peer):
    for event in range(1, 70):
        if event not in (Resource.MODULE_LOADED, Resource.DEVICE_MEMORY_ALLOC, Resource.DEVICE_MEMORY_FREE):
            peer.tell(Domain.RESOURCE, event, held=True)
    assert peer.seen == peer.take() == []


def test_all_else_is_handed_on(peer):
    peer.tell(Domain.RESOURCE, Resource.MODULE_LOADED)
    peer.tell(Domain.LAUNCH, 1)
    peer.tell(Domain.SYNCHRONIZE, 2)
    assert peer.seen == [(Domain.RESOURCE, Resource.MODULE_LOADED), (Domain.LAUNCH, 1), (Domain.SYNCHRONIZE, 2)]
    assert peer.take() == []


def test_threads_lose_no_allocation(peer):
    peer.tell(Domain.RESOURCE, Resource.DEVICE_MEMORY_ALLOC, BASE, UNIT, times=5000, threads=4, held=True)
    taken = peer.take()
    assert sorted(address for _, address, _ in taken) == [BASE + UNIT * at for at in range(20_000)]
    assert raw._native.lost() == 0


def test_tensors_know_raw_memory_before_what_lies_in_it(peer):
    tensors = Tensors()
    tensors.raw = peer.take
    peer.tell(Domain.RESOURCE, Resource.DEVICE_MEMORY_ALLOC, BASE, 8 * UNIT, held=True)
    tensors.allocated(BASE + UNIT, 0)
    assert entries(tensors.table()) == [(BASE + UNIT, BASE + 8 * UNIT, 2)]
    peer.tell(Domain.RESOURCE, Resource.DEVICE_MEMORY_FREE, BASE, 8 * UNIT, held=True)
    peer.tell(Domain.RESOURCE, Resource.DEVICE_MEMORY_ALLOC, BASE, 4 * UNIT, held=True)
    assert entries(tensors.table()) == [(BASE, BASE + 4 * UNIT, 3)]


def test_without_the_native_part_the_callback_is_subscribed_itself(monkeypatch):
    monkeypatch.setattr(raw, "_native", None)
    function = CALLBACK(lambda *_: None)
    subscribed, take = raw.receiver(function, (1,))
    assert subscribed is function
    assert take() == []
