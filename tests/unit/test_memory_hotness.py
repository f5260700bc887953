"""Hotness, bulk copies, device times and the worst request: the device functions on the CPU, against plain Python."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.gpu.memory import slots
from pasta_otel.gpu.memory.counters import MemoryTool
from pasta_otel.gpu.memory.model import GlobalAccess, Worst
from pasta_otel.gpu.memory.tool import LaunchInfo, Record
from tests.sanitizer import ALL, ATOMIC, LOAD, STORE, Warp, build

BASE = 0x7F0000000000
MIB = 1 << 20
EMPTY = struct.pack("<Q", 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return ctypes.CDLL(str(build("emulation", tmp_path_factory.mktemp("emulation"))))


def table(*tensors):
    """Return the device table of (number, begin, size), given by address."""
    count = len(tensors)
    columns = (
        [begin for _, begin, _ in tensors],
        [begin + size for _, begin, size in tensors],
        [n for n, _, _ in tensors],
    )
    return struct.pack(f"<{1 + 3 * count}Q", count, *(value for column in columns for value in column))


def consecutive(size=4, base=BASE):
    return [base + lane * size for lane in range(32)]


addresses = st.lists(st.integers(0, 5 * MIB // 4).map(lambda word: BASE + 4 * word), min_size=32, max_size=32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(addresses, st.integers(1, ALL)), min_size=1, max_size=6))
def test_ranges_tensors_and_pages_are_those_of_every_lane(library, requests):
    tensors = [(7, BASE + 512, 3 * 512), (3, BASE + 2 * MIB - 4096, 8192), (9, BASE + 4 * MIB, 512)]
    warp = Warp(library, table(*tensors)).block()
    lanes = [lane for some, mask in requests for at, lane in enumerate(some) if mask >> at & 1]
    for some, mask in requests:
        warp.access("global", some, 4, mask=mask)
    result = warp.result
    assert dict(result.ranges) == Counter(lane // (2 * MIB) * (2 * MIB) for lane in lanes)
    assert result.working_set == 4096 * len({lane // 4096 for lane in lanes})
    holders = [next((n for n, begin, size in tensors if begin <= lane < begin + size), 0) for lane in lanes]
    assert dict(result.tensors) == Counter(number for number in holders if number)
    assert warp.counted.other["hot_outside"] == holders.count(0)
    assert warp.counted.other["hot_lost"] == 0


@pytest.mark.parametrize("flags", [LOAD, STORE, ATOMIC])
def test_every_kind_of_access_is_heat(library, flags):
    warp = Warp(library, table((1, BASE, 128))).block().access("global", consecutive(), 4, flags)
    assert warp.result.tensors == ((1, 32),)


def test_asynchronous_copies_heat_what_they_read(library):
    sources = [BASE + lane * 16 if lane < 20 else 0 for lane in range(32)]
    warp = Warp(library, table((1, BASE, 4096))).block().copy(sources, 16)
    assert warp.result.tensors == ((1, 20),)


def test_without_the_header_nothing_is_hot(library):
    warp = Warp(library).block().access("global", consecutive(), 4)
    assert (warp.result.tensors, warp.result.ranges, warp.result.working_set) == ((), (), 0)


def test_without_a_table_ranges_are_counted_and_all_is_outside(library):
    warp = Warp(library, EMPTY).block().access("global", consecutive(), 4)
    assert warp.result.ranges == ((BASE, 32),)
    assert warp.counted.other["hot_outside"] == 32


def test_more_ranges_than_the_table_holds_are_counted_as_lost_and_never_wrong(library):
    warp = Warp(library, EMPTY).block()
    for number in range(slots.RANGES + 300):
        warp.access("global", consecutive(base=BASE + number * 2 * MIB), 4)
    found = dict(warp.result.ranges)
    assert all(accesses == 32 for accesses in found.values())
    assert 32 * len(found) + warp.counted.other["hot_lost"] == 32 * (slots.RANGES + 300)
    assert len(found) > slots.RANGES * 0.9


def test_more_tensors_than_the_table_holds_are_counted_as_lost_and_never_wrong(library):
    many = [(number + 1, BASE + 512 * number, 512) for number in range(400)]
    warp = Warp(library, table(*many)).block()
    for _, begin, _ in many:
        warp.access("global", consecutive(base=begin), 4)
    found = dict(warp.result.tensors)
    assert all(accesses == 32 for accesses in found.values())
    assert 32 * len(found) + warp.counted.other["hot_lost"] == 32 * 400
    assert len(found) > slots.TENSORS * 0.7


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400_000), st.integers(0, 65_535), st.booleans())
def test_a_bulk_copy_counts_its_bytes_sectors_and_pages(library, start, blocks, store):
    begin, size = BASE + 16 * start, 16 * blocks
    warp = Warp(library, table((5, BASE, 1 << 30))).block().bulk(begin, size, store=store)
    sectors = -(-(begin + size) // 32) - begin // 32 if size else 0
    kind = "bulk_store" if store else "bulk_load"
    assert warp.counted.global_[kind] == GlobalAccess(bool(size), bool(size), sectors, size)
    assert warp.result.working_set == (4096 * ((begin + size - 1) // 4096 - begin // 4096 + 1) if size else 0)
    assert warp.result.tensors == (((5, blocks),) if blocks else ())


def test_a_bulk_copy_that_every_lane_names_is_one_copy(library):
    assert Warp(library).bulk(BASE, 256).counted.global_["bulk_load"] == GlobalAccess(1, 1, 8, 256)


def test_times_are_of_the_first_begin_and_the_last_end(library):
    warp = Warp(library)
    for number, (begin, end) in enumerate([(500, 900), (400, 700), (600, 1000)]):
        library.on_multiprocessor(number)
        warp.block(begin, end)
    library.on_multiprocessor(0)
    assert (warp.result.begin_ns, warp.result.end_ns) == (400, 1000)
    assert warp.counted.other["blocks"] == 3


def test_a_launch_without_a_block_did_not_take_place():
    tool = MemoryTool()
    assert tool.decode(Record(LaunchInfo("k", (1, 1, 1), (32, 1, 1), 0), bytes(tool.slot_bytes))) is None


def test_the_worst_request_keeps_its_distance_and_width(library):
    warp = Warp(library)
    for stride, size in ((1, 4), (2, 4), (8, 8), (4, 4)):
        warp.access("global", [BASE + lane * stride * size for lane in range(32)], size)
    for stride in (1, 33, 4):
        warp.access("shared", [lane * stride * 4 for lane in range(32)], 4)
    assert warp.counted.worst == {"global": Worst(32, 8, 8), "shared": Worst(4, 4, 4)}


def test_a_request_at_its_best_is_nobodys_worst(library):
    warp = Warp(library).access("global", consecutive(16), 16).access("shared", consecutive(16, 0), 16)
    assert warp.counted.worst == {}


def test_the_worst_of_all_is_irregular(library):
    scattered = [BASE + 4 * lane * lane * 16 for lane in range(32)]
    assert Warp(library).access("global", scattered, 4).counted.worst == {"global": Worst(32, 4, None)}


def test_distributed_shared_memory_and_warp_group_matrices(library):
    warp = Warp(library)
    library.emulate_remote(
        warp.slot, ctypes.c_uint(0xFF), (ctypes.c_ulonglong * 32)(), ctypes.c_uint(8), ctypes.c_uint(LOAD)
    )
    library.emulate_warpgroup(warp.slot, ctypes.c_uint(2048), ctypes.c_uint(8192))
    other = warp.counted.other
    assert [other[f"remote_shared_{what}"] for what in ("requests", "lanes", "bytes")] == [1, 8, 64]
    assert [other[f"wgmma_{what}"] for what in ("instructions", "a_bytes", "b_bytes")] == [1, 2048, 8192]


def test_launches_are_summed_but_for_what_is_raised(library):
    first, second = Warp(library).block(5, 9), Warp(library).block(7, 8)
    for warp, stride in ((first, 2), (second, 8)):
        warp.access("global", [BASE + 4 * stride * lane for lane in range(32)], 4)
    words = slots.total([first.result.words, second.result.words])
    assert words[slots.GLOBAL["load"]] == 2
    assert words[slots.END] == 9
    assert words[slots.WORST["global"]] == second.result.words[slots.WORST["global"]]
