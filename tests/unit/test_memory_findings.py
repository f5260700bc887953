"""What a finding says to change, and that its numbers follow from the device functions' own arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.gpu.memory import findings, formulas
from pasta_otel.gpu.memory.model import GlobalAccess, accesses
from tests.memory_slots import IRREGULAR, words
from tests.sanitizer import Warp, build

WIDTHS = st.sampled_from([1, 2, 4, 8, 16])


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    import ctypes

    return ctypes.CDLL(str(build("emulation", tmp_path_factory.mktemp("emulation"))))


def finding(kind, **counters):
    found = [one for one in findings.find(accesses(words(**counters))) if one.kind == kind]
    assert len(found) == 1
    return found[0]


@given(stride=st.integers(1, 5000), width=st.sampled_from([4, 8, 16]))
def test_wavefronts_of_a_stride_are_those_of_the_closed_form(stride, width):
    phases = formulas.phases_of_width(width)
    assert formulas.wavefronts_of_stride(stride, width) == phases * math.gcd(stride, 32 // phases)


@given(stride=st.integers(1, 5000), width=WIDTHS)
def test_a_padded_row_needs_one_wavefront_a_phase_and_no_shorter_row_does(stride, width):
    row = formulas.conflict_free_stride(stride, width)
    phases = formulas.phases_of_width(width)
    begins = range(0, 4, min(width, 4))
    assert all(formulas.wavefronts_of_stride(row, width, begin) == phases for begin in begins)
    for shorter in range(stride, row):
        assert any(formulas.wavefronts_of_stride(shorter, width, begin) > phases for begin in begins)
    if width >= 4:
        assert row == stride | 1


@settings(deadline=None, max_examples=60)
@given(stride=st.integers(1, 200), width=WIDTHS)
def test_the_device_functions_count_no_conflict_with_the_padding_that_is_suggested(emulation, stride, width):
    def counted(row):
        return Warp(emulation).access("shared", [lane * row * width for lane in range(32)], width).counted

    kind = f"load_{max(4, width)}"
    before, after = counted(stride), counted(formulas.conflict_free_stride(stride, width))
    assert before.shared[kind].wavefronts == formulas.wavefronts_of_stride(stride, width)
    assert after.shared[kind].conflicts == 0


@settings(deadline=None, max_examples=60)
@given(stride=st.integers(1, 300), width=WIDTHS)
def test_the_device_functions_count_the_sectors_that_are_predicted_for_neighbours(emulation, stride, width):
    def counted(distance):
        return Warp(emulation).access("global", [lane * distance * width for lane in range(32)], width).counted

    strided, contiguous = (counted(distance).global_["load"] for distance in (stride, 1))
    assert strided.sectors == formulas.sectors_of_stride(stride, width)
    assert formulas.predicted_sectors(strided) == contiguous.sectors


@pytest.mark.parametrize(("stride", "width", "row"), [(32, 4, 33), (16, 8, 17), (8, 16, 9), (64, 2, 66)])
def test_bank_conflicts_name_the_padding_and_what_it_saves(stride, width, row):
    wavefronts = formulas.wavefronts_of_stride(stride, width)
    phases = formulas.phases_of_width(width)
    found = finding(
        "bank_conflicts",
        **{f"shared_load_{max(4, width)}": (1000, 32000, 1000 * wavefronts, 1000 * phases)},
        strides_shared=(0, 0, 0, 0, 0, 0, 1000, 0),
        worst_shared=(wavefronts, width, stride),
    )
    assert f"pad rows from {stride} to {row} elements of {width} bytes" in found.suggestion
    assert (found.measured, found.predicted) == (1000 * wavefronts, 1000 * phases)
    assert found.gain == pytest.approx(1 - phases / wavefronts)
    assert (found.stride, found.width, found.row) == (stride, width, row)


def test_what_irregular_requests_may_have_of_the_conflicts_is_not_promised():
    found = finding(
        "bank_conflicts",
        shared_load_4=(100, 3200, 900, 100),
        strides_shared=(0, 0, 0, 0, 80, 0, 0, 20),
        worst_shared=(8, 4, 8),
    )
    assert found.predicted == 900 - (800 - 20 * 7)


def test_an_irregular_distance_in_shared_memory_gets_a_swizzle_and_no_number():
    found = finding("bank_conflicts", shared_load_4=(100, 3200, 900, 100), worst_shared=(32, 4, IRREGULAR))
    assert "swizzle" in found.suggestion
    assert (found.gain, found.predicted, found.row) == (None, None, None)


def test_conflicts_of_matrix_instructions_ask_for_16_bytes_of_padding():
    found = finding("bank_conflicts", shared_matrix_load=(100, 3200, 3200, 400))
    assert "by 16 bytes" in found.suggestion
    assert found.gain is None


@pytest.mark.parametrize(
    ("stride", "width", "words_of_it"),
    [
        (3, 4, "fields of a structure of 12 bytes"),
        (4, 4, "take the 16 bytes in one access"),
        (1024, 4, "rows of 1,024 elements"),
        (1024, 8, "with rows of 33 elements of 8 bytes"),
    ],
)
def test_coalescing_names_the_layout(stride, width, words_of_it):
    sectors = formulas.sectors_of_stride(stride, width)
    # half of the lanes' bytes, so that all of these are beyond the threshold
    found = finding(
        "coalescing",
        global_load=(100, 3200, 100 * max(sectors, 2 * width + 1), 3200 * width),
        strides_global=(0, 0, 0, 0, 0, 0, 100, 0),
        worst_global=(sectors, width, stride),
    )
    assert words_of_it in found.suggestion
    assert found.predicted == 100 * width


def test_a_gather_is_told_so_and_gets_no_number():
    found = finding(
        "coalescing",
        global_load=(100, 3200, 3200, 12800),
        strides_global=(0, 0, 0, 0, 0, 0, 0, 100),
        worst_global=(32, 4, IRREGULAR),
    )
    assert "gather or scatter" in found.suggestion
    assert found.gain is None


def test_requests_of_one_lane_are_not_promised_a_layout():
    found = finding("coalescing", global_store=(100, 100, 100, 400))
    assert "no layout helps" in found.suggestion
    assert "1.0 sectors a request for 1.0 active lanes" in found.title
    assert found.gain is None


def test_the_worst_request_is_not_told_of_stores_when_it_was_a_load_of_another_width():
    found = findings.find(
        accesses(
            words(
                global_load=(100, 3200, 3200, 25600),
                global_store=(100, 3200, 3200, 12800),
                strides_global=(0, 0, 0, 0, 0, 100, 100, 0),
                worst_global=(32, 8, 40),
            )
        )
    )
    assert [(one.access, one.stride) for one in found] == [("load", 40), ("store", None)]


def test_a_few_stores_of_a_gpu_kernel_that_loads_much_do_not_matter():
    assert (
        findings.find(accesses(words(global_load=(1000, 32000, 4000, 128000), global_store=(200, 200, 200, 800)))) == []
    )


def test_lanes_that_act_for_their_warp_are_no_divergence():
    elected = {"global_atomic": (200, 200, 200, 800), "contention_global": (200, 200)}
    assert finding("divergence", **elected).measured == 200
    assert findings.find(accesses(words(**elected, other_tensor_map_copies=100, other_wgmma_instructions=101))) == []
    assert findings.find(accesses(words(**elected, shared_matrix_store=(201, 6432, 804, 804)))) == []


def test_without_a_worst_request_the_usual_distance_that_costs_sectors_is_named():
    found = finding(
        "coalescing",
        global_load=(100, 3200, 3200, 12800),
        global_store=(100, 3200, 400, 12800),
        strides_global=(0, 100, 0, 0, 0, 0, 100, 0),
    )
    assert "over 32 elements" in found.title


def test_idle_lanes_and_meeting_atomics_get_the_requests_and_lanes_that_are_left():
    idle = finding("divergence", global_load=(1000, 8000, 1000, 32000))
    assert (idle.measured, idle.predicted, idle.unit) == (1000, 250, "request")
    meeting = finding("global_atomics", global_atomic=(100, 3200, 100, 12800), contention_global=(100, 3200))
    assert (meeting.measured, meeting.predicted, meeting.unit) == (3200, 100, "lane")


counts = st.integers(0, 10**6)


@given(requests=st.integers(1, 10**6), sectors=st.integers(1, 32), asked=st.integers(0, 512))
def test_a_prediction_lies_between_one_sector_a_request_and_what_was_measured(requests, sectors, asked):
    access = GlobalAccess(requests, 32 * requests, sectors * requests, asked * requests)
    predicted = formulas.predicted_sectors(access)
    assert requests <= predicted <= access.sectors
    assert predicted * 32 >= min(access.bytes, 32 * access.sectors)


@given(st.data())
def test_no_counters_lead_to_a_gain_outside_zero_to_one(data):
    filled = {}
    for kind in ("load", "store", "atomic", "async_copy"):
        requests = data.draw(counts)
        lanes = data.draw(st.integers(requests, 32 * requests))
        sectors = data.draw(st.integers(requests, 32 * requests))
        filled[f"global_{kind}"] = (requests, lanes, sectors, lanes * data.draw(WIDTHS))
    for kind in ("load_4", "store_16", "matrix_load"):
        requests = data.draw(counts)
        phases = data.draw(st.integers(requests, 4 * requests))
        filled[f"shared_{kind}"] = (requests, requests, data.draw(st.integers(phases, 8 * phases)), phases)
    atomics = filled["global_atomic"]
    filled["contention_global"] = (data.draw(st.integers(atomics[0], atomics[1])), atomics[1])
    stride = st.integers(1, 5000) | st.just(IRREGULAR)
    for space in ("global", "shared"):
        filled[f"strides_{space}"] = data.draw(st.tuples(*[counts] * 8))
        filled[f"worst_{space}"] = (data.draw(st.integers(1, 32)), data.draw(WIDTHS), data.draw(stride))
    for found in findings.find(accesses(words(**filled))):
        assert found.gain is None or 0 <= found.gain <= 1
        assert found.predicted is None or 0 <= found.predicted <= found.measured


@pytest.mark.parametrize(("width", "gap"), [(16, 8), (8, 16), (4, 32), (16, 16)])
@pytest.mark.parametrize("stride", [1, 3, 5])
def test_a_row_that_is_no_longer_than_it_was_is_not_suggested(width, gap, stride):
    found = finding(
        "bank_conflicts",
        **{f"shared_load_{width}": (128, 256, 256, 128)},
        strides_shared=(0, 256, 0, 0, 0, 0, 0, 0),
        worst_shared=(2, width, stride),
    )
    assert "pad rows" not in found.suggestion
    assert "all lanes of a warp" in found.suggestion
    assert "idle" in found.title
    assert (found.predicted, found.row, found.stride) == (None, None, None)
    assert "1 elements" not in found.title


@given(width=WIDTHS, stride=st.integers(1, 300), wavefronts=st.integers(2, 32))
def test_a_suggested_row_is_always_longer(width, stride, wavefronts):
    found = finding(
        "bank_conflicts",
        **{f"shared_load_{max(4, width)}": (1000, 32000, 1000 * wavefronts, 1000)},
        worst_shared=(wavefronts, width, stride),
    )
    assert found.row is None or found.row > stride


@pytest.mark.parametrize("stride", [0, 1])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_neighbours_with_idle_lanes_between_them_are_not_told_to_become_neighbours(width, stride):
    found = finding(
        "coalescing",
        global_store=(128, 256, 256, 256 * width),
        worst_global=(2, width, stride),
        strides_global=(0, 128),
    )
    assert "2.0 sectors a request for 2.0 active lanes" in found.title
    assert "so few lanes" in found.suggestion
    assert (found.predicted, found.stride) == (None, None)
