"""What the driver tells of under its lock is noted from any thread, while another one has Python's interpreter lock."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from pasta_otel.errors import MissingError
from pasta_otel.gpu.memory import native
from pasta_otel.gpu.memory.native import NoteKind
from pasta_otel.gpu.memory.sanitizer import CALLBACK, Domain
from pasta_otel.gpu.memory.tensors import Tensors
from tests.unit.test_memory_tensors import BASE, UNIT, entries

SOURCE = Path(__file__).parents[1] / "fixtures" / "native" / "other_thread.c"
receiver = pytest.importorskip("pasta_otel._native._sanitizer", reason="built without a C compiler")
ALLOC, FREE, CONTEXT_GOES = 11, 12, 4
STREAM, CONTEXT = 1, 2


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
        self.seen: list[int] = []
        main = threading.main_thread().ident
        heard = lambda call, _data: self.seen.append(call)  # noqa: E731
        self.subscribed = CALLBACK(receiver.receiver(heard, main, 0, 0, 0, 0, 0, 0, "libnone.so"))
        receiver.memory(), receiver.notes()
        self.holding, self.letting_go = ctypes.PyDLL(library), ctypes.CDLL(library)

    def tell(self, domain: int, event: int, address: int = 0, size: int = 0, *, times=1, threads=1) -> None:
        numbers = (ctypes.c_uint64(address), ctypes.c_uint64(size), ctypes.c_uint32(times))
        self.holding.call_in_threads(self.subscribed, domain, ctypes.c_uint32(event), *numbers, threads)


@pytest.fixture
def peer(library) -> Peer:
    return Peer(library)


def test_an_allocation_is_told_of_while_another_thread_has_the_interpreter_lock(peer):
    peer.tell(Domain.RESOURCE, ALLOC, BASE, UNIT)
    peer.tell(Domain.RESOURCE, FREE, BASE, UNIT)
    assert receiver.memory() == [(0, BASE, UNIT), (1, BASE, UNIT)]
    assert receiver.memory() == []


def test_nothing_that_comes_under_the_drivers_lock_waits_for_python(peer):
    for domain in (Domain.RESOURCE, Domain.SYNCHRONIZE):
        for event in range(1, 70):
            peer.tell(domain, event, 0x100)
    assert peer.seen == []


def test_synchronisation_and_contexts_that_go_are_noted_in_their_order(peer):
    peer.tell(Domain.SYNCHRONIZE, CONTEXT, 0x100)
    for _ in range(3):
        peer.tell(Domain.SYNCHRONIZE, STREAM, 0x100)
    peer.tell(Domain.RESOURCE, CONTEXT_GOES, 0x100)
    assert [(kind, context, value, call) for kind, context, value, _entered, call in receiver.notes()] == [
        (NoteKind.CONTEXT_SYNCHRONIZED, 0x100, 0, None),
        (NoteKind.STREAM_SYNCHRONIZED, 0x100, 0, None),
        (NoteKind.CONTEXT_GONE, 0x100, 0, None),
    ]
    assert receiver.notes() == []


def test_threads_lose_no_allocation(peer):
    peer.tell(Domain.RESOURCE, ALLOC, BASE, UNIT, times=5000, threads=4)
    taken = receiver.memory()
    assert sorted(address for _, address, _ in taken) == [BASE + UNIT * at for at in range(20_000)]
    assert receiver.lost() == 0


def test_tensors_know_raw_memory_before_what_lies_in_it(peer):
    tensors = Tensors()
    tensors.raw = receiver.memory
    peer.tell(Domain.RESOURCE, ALLOC, BASE, 8 * UNIT)
    tensors.allocated(BASE + UNIT, 0)
    assert entries(tensors.table()) == [(BASE + UNIT, BASE + 8 * UNIT, 2)]
    peer.tell(Domain.RESOURCE, FREE, BASE, 8 * UNIT)
    peer.tell(Domain.RESOURCE, ALLOC, BASE, 4 * UNIT)
    assert entries(tensors.table()) == [(BASE, BASE + 4 * UNIT, 3)]


def test_outside_a_call_no_slot_can_be_given(peer):
    with pytest.raises(RuntimeError, match="not in a call"):
        receiver.give(0, 1, 64, 8, b"")
    with pytest.raises(RuntimeError, match="not in a call"):
        receiver.reserve([(0, 1, 64, 8, b"")])
    with pytest.raises(TypeError):
        receiver.reserve(["x"])
    assert receiver.nodes() == []


def test_without_the_native_part_there_is_no_analysis_and_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr(native, "_native", None)
    with pytest.raises(MissingError, match="install a C compiler"):
        native.native()
