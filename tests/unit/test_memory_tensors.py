"""Tensors: the device's table equals a plain model of who owns which byte, whatever allocators and threads do."""

from __future__ import annotations

import ctypes
import gc
import random
import struct
import threading
from bisect import bisect_right
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.gpu.memory.slots import OTHER, PAGE_BYTES
from pasta_otel.gpu.memory.tensors import LEAST_BYTES, Tensors, _common
from tests.sanitizer import Warp, build

UNIT = LEAST_BYTES
PLACES = 40
BASE = 0x7F0000000000


def at(place: int) -> int:
    return BASE + UNIT * place


def entries(table: bytes) -> list[tuple[int, int, int]]:
    """Decode a table as the device functions read it."""
    (count,) = struct.unpack_from("<Q", table)
    words = struct.unpack(f"<{3 * count}Q", table[8:])
    assert len(table) == 8 * (1 + 3 * count)
    return list(zip(words[:count], words[count : 2 * count], words[2 * count :], strict=True))


def look_up(table: bytes, address: int) -> int:
    """Return the number of the tensor that holds an address: the device function's search."""
    found = entries(table)
    index = bisect_right([begin for begin, _, _ in found], address) - 1
    return found[index][2] if index >= 0 and address < found[index][1] else 0


def numbers(tensors: Tensors) -> list[int]:
    return [number for _, _, number in entries(tensors.table())]


class Model:
    """Who owns each unit of memory, in dictionaries: begin -> (end, number, raw, guessed)."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, int, bool, bool]] = {}
        self.segments: dict[int, int] = {}
        self.last = 0

    def owner(self, place: int) -> int:
        return next((n for begin, (end, n, _, _) in self.live.items() if begin <= place < end), 0)

    def clear(self, begin: int, end: int) -> None:
        for first, (last, number, raw, guessed) in list(self.live.items()):
            if first < end and last > begin:
                del self.live[first]
                if guessed and first < begin:
                    self.live[first] = (begin, number, raw, guessed)

    def put(self, begin: int, end: int, *, raw: bool = False, guessed: bool = False) -> None:
        self.clear(begin, end)
        self.last += 1
        self.live[begin] = (end, self.last, raw, guessed)

    def allocate(self, begin: int, length: int) -> None:
        if length:
            self.put(begin, begin + length)
            return
        segment = next((last for first, last in self.segments.items() if first <= begin < last), begin + 1)
        following = [first for first in self.live if first > begin]
        self.put(begin, min([segment, *following]), guessed=True)

    def free(self, begin: int) -> None:
        if begin in self.live and not self.live[begin][2]:
            del self.live[begin]

    def allocate_segment(self, begin: int, length: int) -> None:
        end = begin + length
        self.segments = {f: last for f, last in self.segments.items() if last <= begin or f >= end}
        self.segments[begin] = end
        if not any(begin <= first < end for first in self.live):
            self.put(begin, end, raw=True)

    def free_segment(self, begin: int) -> None:
        if begin in self.segments:
            self.clear(begin, self.segments.pop(begin))


PLACE = st.integers(0, PLACES - 1)
CHANGES = st.one_of(
    st.tuples(st.just("allocate"), PLACE, st.integers(0, 6)),
    st.tuples(st.just("free"), PLACE),
    st.tuples(st.just("allocate_segment"), PLACE, st.integers(1, 16)),
    st.tuples(st.just("free_segment"), PLACE),
)


def apply(tensors: Tensors, change: tuple) -> None:
    match change:
        case ("allocate", place, length):
            tensors.allocated(at(place), UNIT * length)
        case ("free", place):
            tensors.freed(at(place))
        case ("allocate_segment", place, length):
            tensors.segment_allocated(at(place), UNIT * length)
        case ("free_segment", place):
            tensors.segment_freed(at(place))


@given(st.lists(CHANGES, max_size=60))
def test_the_table_equals_the_model(changes):
    tensors, model = Tensors(), Model()
    for change in changes:
        version, table = tensors.version, tensors.table()
        apply(tensors, change)
        getattr(model, change[0])(*change[1:])
        if tensors.table() != table:
            assert tensors.version != version
        found = entries(tensors.table())
        assert all(begin < end for begin, end, _ in found)
        assert all(one[1] <= two[0] for one, two in pairwise(found))
        assert len({number for _, _, number in found}) == len(found)
        for place in range(PLACES + 16):
            assert look_up(tensors.table(), at(place)) == model.owner(place), place
            assert look_up(tensors.table(), at(place) + UNIT - 1) == model.owner(place), place


@given(st.lists(CHANGES, max_size=60))
def test_what_is_described_is_what_the_table_holds(changes):
    tensors = Tensors()
    for change in changes:
        apply(tensors, change)
    found = entries(tensors.table())
    described = tensors.describe(number for _, _, number in found)
    assert [(one.address, one.address + one.bytes, one.number) for one in described] == found
    assert not any(one.freed_unix_nano for one in described)


def test_an_empty_table_is_one_word():
    assert Tensors().table() == bytes(8)


def test_a_tensor_keeps_where_it_comes_from_until_long_after_its_end():
    times = iter((5, 7))
    tensors = Tensors(now_unix_nano=lambda: next(times))
    tensors.allocated(at(0), 100, source="a.py:1 f", module="net.first")
    (number,) = numbers(tensors)
    tensors.name(at(0), "net.first.weight")
    tensors.freed(at(0))
    assert numbers(tensors) == []
    (one,) = tensors.describe([number])
    assert (one.name, one.module, one.source, one.bytes) == ("net.first.weight", "net.first", "a.py:1 f", 100)
    assert (one.allocated_unix_nano, one.freed_unix_nano) == (5, 7)


def test_memory_that_is_handed_out_again_is_another_tensor():
    tensors = Tensors()
    tensors.allocated(at(0), UNIT, source="first")
    (first,) = numbers(tensors)
    tensors.freed(at(0))
    tensors.allocated(at(0), UNIT, source="second")
    (second,) = numbers(tensors)
    assert first != second
    assert [one.source for one in tensors.describe([first, second])] == ["first", "second"]


def test_raw_memory_is_a_tensor_until_an_allocator_hands_out_a_part_of_it():
    tensors = Tensors()
    tensors.segment_allocated(at(0), 8 * UNIT, "raw.py:1 f")
    assert [one.source for one in tensors.describe(numbers(tensors))] == ["raw.py:1 f"]
    tensors.allocated(at(2), UNIT)
    assert entries(tensors.table()) == [(at(2), at(3), 2)]
    tensors.freed(at(2))
    assert entries(tensors.table()) == []


def test_a_free_that_an_allocator_tells_does_not_end_raw_memory():
    tensors = Tensors()
    tensors.segment_allocated(at(0), 8 * UNIT)
    tensors.freed(at(0))
    assert len(numbers(tensors)) == 1
    tensors.segment_freed(at(0))
    assert numbers(tensors) == []


def test_a_tensor_of_unknown_length_ends_where_its_segment_or_the_next_one_does():
    tensors = Tensors()
    tensors.segment_allocated(at(0), 8 * UNIT)
    tensors.allocated(at(1), 0)
    assert entries(tensors.table()) == [(at(1), at(8), 2)]
    tensors.allocated(at(4), 0)
    assert entries(tensors.table()) == [(at(1), at(4), 2), (at(4), at(8), 3)]
    assert [one.bytes for one in tensors.describe([2, 3])] == [3 * UNIT, 4 * UNIT]


@pytest.mark.parametrize("change", [("allocate", 1, 3), ("free", 9), ("free_segment", 9), ("free", 0)])
def test_what_changes_nothing_costs_no_new_table(change):
    tensors = Tensors()
    tensors.segment_allocated(at(0), UNIT)
    version, table = tensors.version, tensors.table()
    if change[0] == "allocate":
        tensors.allocated(0, 64)
    else:
        apply(tensors, change)
    assert tensors.version == version
    assert tensors.table() is table


def test_beyond_the_most_entries_the_largest_stay_and_the_rest_is_counted():
    tensors = Tensors(most_entries=3)
    for place, length in ((0, 1), (2, 5), (10, 2), (20, 4), (30, 3)):
        tensors.allocated(at(place), UNIT * length)
    assert [(begin - BASE) // UNIT for begin, _, _ in entries(tensors.table())] == [2, 20, 30]
    assert tensors.left_out == 2
    tensors.freed(at(2))
    assert [(begin - BASE) // UNIT for begin, _, _ in entries(tensors.table())] == [10, 20, 30]


def test_freed_tensors_that_no_launch_touched_are_forgotten():
    tensors = Tensors(most_freed=4)
    for _ in range(20):
        tensors.allocated(at(0), UNIT)
        tensors.freed(at(0))
    assert [one.number for one in tensors.describe(range(30))] == [17, 18, 19, 20]
    assert tensors.lost == 0
    tensors.touched([3, 18])
    assert tensors.lost == 1
    for _ in range(20):
        tensors.allocated(at(0), UNIT)
        tensors.freed(at(0))
    assert [one.number for one in tensors.describe(range(30))] == [18]


def test_a_tensor_that_was_touched_while_it_lived_is_remembered_after_its_end():
    tensors = Tensors(most_freed=2)
    tensors.allocated(at(5), UNIT)
    tensors.touched([1])
    tensors.freed(at(5))
    for _ in range(10):
        tensors.allocated(at(0), UNIT)
        tensors.freed(at(0))
    assert tensors.describe([1])[0].address == at(5)
    assert tensors.lost == 0


def test_touched_tensors_are_bounded_too(monkeypatch):
    monkeypatch.setattr("pasta_otel.gpu.memory.tensors.MOST_TOUCHED", 3)
    tensors = Tensors(most_freed=2)
    for number in range(1, 11):
        tensors.allocated(at(0), UNIT)
        tensors.touched([number])
        tensors.freed(at(0))
    assert [one.number for one in tensors.describe(range(20))] == [8, 9, 10]
    assert tensors.lost == 7


def test_tied_weights_keep_the_first_name():
    tensors = Tensors()
    tensors.allocated(at(0), 4 * UNIT)
    tensors.name(at(0), "embedding.weight")
    tensors.name(at(0), "head.weight")
    assert tensors.describe([1])[0].name == "embedding.weight"


def test_a_name_that_says_more_takes_the_place_of_a_shorter_one():
    tensors = Tensors()
    tensors.allocated(at(0), 4 * UNIT)
    for name in ("weight", "net.first.weight", "first.weight"):
        tensors.name(at(0), name)
    assert tensors.describe([1])[0].name == "net.first.weight"


def test_flattened_weights_have_the_name_that_they_share():
    tensors = Tensors()
    tensors.allocated(at(0), 4 * UNIT)
    for offset, name in enumerate(("net.lstm.weight_ih_l0", "net.lstm.weight_hh_l0", "net.lstm.bias_ih_l0")):
        tensors.name(at(offset), name)
    assert tensors.describe([1])[0].name == "net.lstm.*"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a.b", "a.c", "a.*"),
        ("a.b.c", "a.b.d", "a.b.*"),
        ("a.*", "a.c", "a.*"),
        ("a.b.*", "a.c", "a.*"),
        ("x", "y", "x"),
    ],
)
def test_names_share_their_beginning(one, other, expected):
    assert _common(one, other) == expected


def test_names_go_to_nobody_where_there_is_no_tensor():
    tensors = Tensors()
    tensors.name(at(3), "x")
    tensors.allocated(at(3), UNIT)
    tensors.name(at(4), "y")
    assert tensors.describe([1])[0].name == ""


def test_threads_lose_nothing():
    tensors = Tensors()
    rounds, threads = 300, 6
    everyone_is_here = threading.Barrier(threads)

    def work(own: int) -> None:
        everyone_is_here.wait()
        for turn in range(rounds):
            place = at(own * 100 + turn % 10)
            tensors.allocated(place, UNIT)
            assert look_up(tensors.table(), place)
            if turn % 10 != 9 or turn < rounds - 1:
                tensors.freed(place)

    errors: list[BaseException] = []

    def guarded(own: int) -> None:
        try:
            work(own)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=guarded, args=(own,)) for own in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    assert [begin for begin, _, _ in entries(tensors.table())] == [at(own * 100 + 9) for own in range(threads)]
    assert max(numbers(tensors)) == rounds * threads


def test_a_free_below_our_own_frames_neither_hangs_nor_harms():
    """A garbage collection that our objects set off frees tensors: their allocator calls us inside of a change."""
    tensors = Tensors()
    for place in range(PLACES):
        tensors.allocated(at(place), UNIT)
    frees = iter(range(PLACES))

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            place = next(frees, None)
            if place is not None:
                tensors.freed(at(place))
                tensors.table()

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for place in range(PLACES):
            Cycle()
            tensors.allocated(at(100 + place), UNIT, source=str(place))
    finally:
        gc.set_threshold(*threshold)
        gc.collect()
    begins = [begin for begin, _, _ in entries(tensors.table())]
    assert begins == [at(100 + place) for place in range(PLACES)]


def test_a_change_inside_of_a_change_is_made_after_it(monkeypatch):
    tensors = Tensors()
    tensors.allocated(at(0), UNIT)
    remove = tensors._remove

    def remove_and_be_called(index: int, now: int) -> None:
        monkeypatch.undo()
        tensors.freed(at(1))  # as a finalizer would
        tensors.allocated(at(2), UNIT)
        remove(index, now)
        assert len(tensors.table()) > 8  # the last whole one

    tensors.allocated(at(1), UNIT)
    tensors.table()
    monkeypatch.setattr(tensors, "_remove", remove_and_be_called)
    tensors.freed(at(0))
    assert [begin for begin, _, _ in entries(tensors.table())] == [at(2)]


def test_the_device_functions_find_the_same_tensors(tmp_path):
    chance, library = random.Random(0), ctypes.CDLL(str(build("emulation", tmp_path)))
    tensors = Tensors()
    for _ in range(60):
        place, length = chance.randrange(PLACES), chance.randrange(7)
        kind = chance.choice(["allocate", "allocate", "free", "allocate_segment"])
        apply(tensors, (kind, place) if kind == "free" else (kind, place, length + (kind == "allocate_segment")))
        table = tensors.table()
        warp, touched, outside = Warp(library, table).block(), Counter[int](), 0
        for _ in range(4):
            addresses = [at(chance.randrange(PLACES + 8)) + 4 * chance.randrange(UNIT // 4) for _ in range(32)]
            warp.access("global", addresses, 4)
            touched.update(number for address in addresses if (number := look_up(table, address)))
            outside += sum(not look_up(table, address) for address in addresses)
        assert dict(warp.result.tensors) == touched
        assert warp.result.words[OTHER["hot_outside"]] == outside
        assert warp.result.words[OTHER["hot_lost"]] == 0
        assert warp.result.working_set % PAGE_BYTES == 0
