"""A test that needs the machine alone gets it, although others come and go all the time."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from tests.support import wait_for
from tests.turns import turn


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    machine, queue = tmp_path / "machine", tmp_path / "queue"
    machine.touch()
    queue.touch()
    return machine, queue


def locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False


def starts(places: tuple[Path, Path], alone: bool, order: list[str], word: str) -> threading.Thread:
    def take() -> None:
        with turn(*places, alone=alone):
            order.append(word)

    thread = threading.Thread(target=take)
    thread.start()
    return thread


def test_tests_share_the_machine(places):
    with turn(*places, alone=False):
        starts(places, False, order := [], "another").join(20)
        assert order == ["another"]


@pytest.mark.parametrize("alone", [True, False])
def test_who_wants_the_machine_alone_waits_for_who_has_it_and_the_next_wait_behind(places, alone):
    order: list[str] = []
    with turn(*places, alone=alone):
        first = starts(places, True, order, "alone")
        wait_for(lambda: locked(places[1]))  # by the first, who waits for the machine
        others = [starts(places, False, order, "other") for _ in range(3)]
        assert order == []
    for thread in (first, *others):
        thread.join(20)
    assert order == ["alone", "other", "other", "other"]


def test_a_fork_that_lives_on_keeps_nothing_locked(places):
    read, write = os.pipe()
    with turn(*places, alone=True):
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0)
    try:
        assert not any(map(locked, places))
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
