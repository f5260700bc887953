"""The device functions of memory analysis, run on the CPU, against closed forms and definitions written out."""

from __future__ import annotations

import ctypes
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.gpu.memory import formulas, slots
from pasta_otel.gpu.memory.library import source
from pasta_otel.gpu.memory.model import Contention, GlobalAccess, SharedAccess
from tests.sanitizer import ALL, ATOMIC, LOAD, PREFETCH, STORE, Warp, build

BASE = 0x7F0000000000
masks = st.integers(1, ALL)
paired = st.lists(st.integers(0, 700), min_size=16, max_size=16).map(lambda some: [one for one in some for _ in (0, 1)])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return ctypes.CDLL(str(build("emulation", tmp_path_factory.mktemp("emulation"))))


def active(mask):
    return [lane for lane in range(32) if mask >> lane & 1]


def strided(stride, size, base=0):
    return [base + lane * stride * size for lane in range(32)]


def test_the_layout_in_python_is_the_layout_in_cuda():
    enum = re.search(r"enum Layout \{(.*?)\};", source().read_text(), re.DOTALL)
    assert enum is not None
    cuda = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", enum.group(1))}
    whole = {"async_copy", "bulk_load", "bulk_store"}
    named = {kind.upper() if kind in whole else f"GLOBAL_{kind.upper()}": at for kind, at in slots.GLOBAL.items()}
    named |= {f"SHARED_{kind.upper()}": at for kind, at in slots.SHARED.items()}
    named |= {f"{space.upper()}_CONTENTION": at for space, at in slots.CONTENTION.items()}
    named |= {f"{space.upper()}_STRIDE": at for space, at in slots.STRIDES.items()}
    named |= {f"WORST_{space.upper()}": at for space, at in slots.WORST.items()}
    named |= {"REMOTE_SHARED": slots.OTHER["remote_shared_requests"], "WGMMA": slots.OTHER["wgmma_instructions"]}
    named |= {"TMA": slots.OTHER["tensor_map_copies"], "NOT_BEGIN": slots.NOT_BEGIN, "END": slots.END}
    named |= {name.upper(): slots.OTHER[name] for name in ("blocks", "hot_lost", "hot_outside")}
    sizes = ("WORDS", "WAYS", "HEADER", "RANGES", "RANGE_WORDS", "TENSORS", "TENSOR_WAYS", "TENSOR_WORDS")
    named |= {name: getattr(slots, name) for name in sizes}
    assert cuda == named


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32), (32, 32)])
@pytest.mark.parametrize(("flags", "kind"), [(LOAD, "load"), (STORE, "store")])
def test_a_strided_access_of_four_bytes_touches_the_sectors_of_the_closed_form(library, stride, sectors, flags, kind):
    counted = Warp(library).access("global", strided(stride, 4, BASE), 4, flags).counted
    assert counted.global_[kind] == GlobalAccess(1, 32, sectors, 128)
    assert formulas.coalescing_efficiency([counted.global_[kind]]) == 4 / sectors


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("stride", [0, 1, 2, 4, 8, 32, 64])
def test_sectors_at_every_width(library, size, stride):
    counted = Warp(library).access("global", strided(stride, size, BASE), size).counted
    assert counted.global_["load"] == GlobalAccess(1, 32, max(1, min(32, stride * size)), 32 * size)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 600), min_size=32, max_size=32), masks, st.sampled_from([1, 2, 4, 8, 16]))
def test_sectors_are_the_distinct_sectors_of_the_active_lanes(library, elements, mask, size):
    addresses = [BASE + element * size for element in elements]
    touched = {addresses[lane] // 32 for lane in active(mask)}
    counted = Warp(library).access("global", addresses, size, mask=mask).counted
    lanes = mask.bit_count()
    assert counted.global_["load"] == GlobalAccess(1, lanes, len(touched), lanes * size)


@pytest.mark.parametrize("stride", range(1, 34))
@pytest.mark.parametrize(("width", "phases"), [(4, 1), (8, 2), (16, 4)])
def test_bank_conflicts_of_strides_1_to_33_follow_the_greatest_common_divisor(library, stride, width, phases):
    wavefronts = phases * math.gcd(stride, 32 // phases)
    for flags, kind in ((LOAD, "load"), (STORE, "store")):
        counted = Warp(library).access("shared", strided(stride, width), width, flags).counted
        assert counted.shared[f"{kind}_{width}"] == SharedAccess(1, 32, wavefronts, phases)


@pytest.mark.parametrize(("size", "phases"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)])
def test_stores_to_one_shared_address_are_served_at_once_in_each_phase(library, size, phases):
    counted = Warp(library).access("shared", strided(0, size), size, STORE).counted
    assert counted.shared[f"store_{max(size, 4)}"] == SharedAccess(1, 32, phases, phases)


@pytest.mark.parametrize(("width", "merged"), [(8, 1), (16, 2)])
def test_two_phases_of_a_load_become_one_where_neighbouring_lanes_share_addresses(library, width, merged):
    def wavefronts(units):
        counted = Warp(library).access("shared", [unit * width for unit in units], width).counted
        return counted.shared[f"load_{width}"]

    once, twice = SharedAccess(1, 32, merged, merged), SharedAccess(1, 32, 2 * merged, 2 * merged)
    assert wavefronts([0] * 32) == once
    assert wavefronts(lane // 2 for lane in range(32)) == once
    assert wavefronts(lane // 4 * 2 + (lane & 1) for lane in range(32)) == once
    assert wavefronts(lane % 4 for lane in range(32)) == twice


def phase_lanes(addresses, mask, size):
    """Lanes of a phase of a load: twice as many where each has the address of lane ^ 1, or each that of lane ^ 2."""
    share = any(
        all(addresses[lane] == addresses[lane ^ bit] for lane in active(mask) if mask >> (lane ^ bit) & 1)
        for bit in (1, 2)
    )
    return 128 // max(size, 4) * (2 if share and size > 4 else 1)


def wavefronts_by_definition(addresses, mask, size):
    """Per phase: the most distinct 4-byte words that any bank has to give."""
    lanes_of_phase = phase_lanes(addresses, mask, size)
    total = 0
    for first in range(0, 32, lanes_of_phase):
        words = set()
        for lane in active(mask):
            if first <= lane < first + lanes_of_phase:
                words |= {addresses[lane] // 4 + word for word in range(max(size // 4, 1))}
        total += max((sum(word % 32 == bank for word in words) for bank in range(32)), default=0) if words else 0
    return total


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=32, max_size=32) | paired, masks, st.sampled_from([1, 2, 4, 8, 16]))
def test_wavefronts_are_what_the_definition_says(library, elements, mask, size):
    addresses = [element * size for element in elements]
    counted = Warp(library).access("shared", addresses, size, mask=mask).counted
    access = counted.shared[f"load_{max(size, 4)}"]
    assert (access.requests, access.lanes) == (1, mask.bit_count())
    assert access.wavefronts == wavefronts_by_definition(addresses, mask, size)
    lanes = phase_lanes(addresses, mask, size)
    assert access.phases == sum(
        any(first <= lane < first + lanes for lane in active(mask)) for first in range(0, 32, lanes)
    )


@pytest.mark.parametrize("lanes", range(1, 33))
def test_divergence_is_counted_by_lane(library, lanes):
    mask = (1 << lanes) - 1
    warp = Warp(library).access("global", strided(1, 4, BASE), 4, mask=mask)
    counted = warp.access("shared", strided(1, 4), 4, STORE, mask=mask).counted
    assert counted.global_["load"].lanes == counted.shared["store_4"].lanes == lanes
    assert formulas.active_lane_ratio(counted) == lanes / 32


@pytest.mark.parametrize("lanes_an_address", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_contended_atomics(library, space, lanes_an_address):
    addresses = [BASE * (space == "global") + lane // lanes_an_address * 4 for lane in range(32)]
    counted = Warp(library).access(space, addresses, 4, ATOMIC).counted
    assert counted.contention[space] == Contention(32 // lanes_an_address, lanes_an_address)
    atomics = counted.global_["atomic"] if space == "global" else counted.shared["atomic"]
    assert formulas.lanes_per_address(atomics, counted.contention[space]) == lanes_an_address
    assert counted.global_["load"].requests == counted.shared["load_4"].requests == 0


def test_the_depth_of_contention_is_that_of_the_hottest_address(library):
    addresses = [BASE] * 9 + [BASE + 64 * lane for lane in range(1, 24)]
    counted = Warp(library).access("global", addresses, 4, ATOMIC).counted
    assert counted.contention["global"] == Contention(24, 9)


@pytest.mark.parametrize("flags", [ATOMIC, STORE | 4, STORE | 256])
def test_what_counts_as_an_atomic(library, flags):
    counted = Warp(library).access("global", strided(1, 4, BASE), 4, flags).counted
    assert counted.global_["atomic"].requests == 1


@pytest.mark.parametrize("size", [4, 8, 16])
def test_an_asynchronous_copy_reads_what_the_lanes_that_have_a_source_ask_for(library, size):
    full = Warp(library).copy(strided(1, size, BASE), size).counted.global_["async_copy"]
    assert full == GlobalAccess(1, 32, size, 32 * size)
    half = [BASE + lane * size if lane < 16 else 0 for lane in range(32)]
    assert Warp(library).copy(half, size).counted.global_["async_copy"] == GlobalAccess(1, 32, size // 2, 16 * size)
    none = Warp(library).copy([0] * 32, size).counted.global_["async_copy"]
    assert none == GlobalAccess(1, 32, 0, 0)
    lone = Warp(library).copy(strided(1, size, BASE), size, mask=1 << 31).counted.global_["async_copy"]
    assert lone == GlobalAccess(1, 1, 1, size)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("flags", "kind"), [(LOAD, "matrix_load"), (STORE, "matrix_store")])
def test_matrix_accesses_count_the_rows_they_name(library, count, flags, kind):
    clean = Warp(library).matrix([16 * lane for lane in range(32)], count, flags).counted.shared[kind]
    assert clean == SharedAccess(1, 8 * count, count, count)
    column = Warp(library).matrix([128 * lane for lane in range(32)], count, flags).counted.shared[kind]
    assert column == SharedAccess(1, 8 * count, 8 * count, count)


@pytest.mark.parametrize(
    ("stride", "name"),
    [(0, "one address"), (1, "1"), (-1, "1"), (2, "2"), (3, "3..4"), (8, "5..8"), (32, "9..32"), (33, "over 32")],
)
def test_the_distance_between_lanes_is_classified(library, stride, name):
    counted = Warp(library).access("global", strided(stride, 4, BASE), 4, mask=0xFFFF0FF0).counted
    assert counted.strides["global"] == tuple(int(name == one) for one in slots.GLOBAL_STRIDES)


@pytest.mark.parametrize(
    ("stride", "name"), [(0, "one address"), (1, "odd"), (33, "odd"), (6, "2"), (32, "32"), (64, "32")]
)
def test_the_distance_in_shared_memory_is_classified_by_what_divides_it(library, stride, name):
    counted = Warp(library).access("shared", strided(stride, 8), 8).counted
    assert counted.strides["shared"] == tuple(int(name == one) for one in slots.SHARED_STRIDES)


def test_an_irregular_access_is_called_so(library):
    addresses = [BASE + 4 * (lane * lane) for lane in range(32)]
    counted = Warp(library).access("global", addresses, 4).counted
    assert counted.strides["global"] == (0,) * 7 + (1,)


def test_prefetches_and_launches_without_a_slot_count_nothing(library):
    warp = Warp(library).access("global", strided(1, 4, BASE), 4, LOAD | PREFETCH)
    warp.library.emulate_global(
        None, ctypes.c_uint(ALL), (ctypes.c_ulonglong * 32)(), ctypes.c_uint(4), ctypes.c_uint(1)
    )
    assert not any(warp.slot.raw)


def test_multiprocessors_count_apart_and_are_summed(library):
    warp = Warp(library)
    for number in range(20):
        library.on_multiprocessor(number)
        warp.access("global", strided(1, 4, BASE), 4)
    library.on_multiprocessor(0)
    assert warp.counted.global_["load"] == GlobalAccess(20, 640, 80, 2560)
