"""The tool of docs/reference/memory-tools.md: its device function on the CPU, and what it makes of a slot."""

from __future__ import annotations

import ctypes
import math
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.errors import InputError
from pasta_otel.gpu.memory import library
from pasta_otel.gpu.memory.tool import LaunchInfo, Record, absolute, load_tool
from tests.sanitizer import ALL, ATOMIC, LOAD, STORE, build

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
REFERENCE = f"{EXAMPLES}/nonfinite.py:NonFinite"
CODES = {"float16": "e", "float32": "f", "float64": "d"}
KINDS = (("nan", math.nan), ("infinite", math.inf), ("infinite", -math.inf))


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    return ctypes.CDLL(str(build("fake_nonfinite", tmp_path_factory.mktemp("nonfinite"), EXAMPLES)))


def stored(device, values, *, number="float32", size=4, flags=STORE, mask=ALL, code=""):
    """Return what one access of a warp leaves in the slot; the values are those of 32 lanes, in order."""
    tool = load_tool(REFERENCE, {"number": number})
    slot = ctypes.create_string_buffer(tool.slot_bytes)
    header = tool.header(None)
    ctypes.memmove(slot, header, len(header))
    content = values if isinstance(values, bytes) else struct.pack(f"<{len(values)}{code or CODES[number]}", *values)
    data = ctypes.create_string_buffer(content, len(content))
    numbers = (ctypes.c_uint(size), ctypes.c_uint(flags))
    device.emulate_access(slot, ctypes.c_uint(mask), ctypes.c_void_p(ctypes.addressof(data)), *numbers, data)
    return tool.decode(Record(LaunchInfo("k", (1, 1, 1), (32, 1, 1), 0), slot.raw)), ctypes.addressof(data)


def test_finite_numbers_are_counted_and_nothing_is_found(device):
    found, _ = stored(device, [1.0, 3.4e38] * 16)
    assert (found.numbers, found.nan, found.negative_nan, found.infinite, found.first_address) == (32, 0, 0, 0, 0)


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize(("kind", "value"), KINDS)
def test_each_kind_is_counted_in_each_format_with_its_address(device, number, kind, value):
    bytes_ = struct.calcsize(CODES[number])
    found, base = stored(device, [1.0] * 9 + [value] + [-2.0] * 22, number=number, size=bytes_)
    assert getattr(found, kind) == 1
    assert found.nan + found.infinite + found.negative_nan == 1
    assert found.first_address == base + 9 * bytes_


@pytest.mark.parametrize("lanes", [1, 2, 31])
def test_only_active_lanes_count(device, lanes):
    found, _ = stored(device, [math.nan] * 32, mask=(1 << lanes) - 1)
    assert (found.numbers, found.nan) == (lanes, lanes)


@pytest.mark.parametrize(("number", "size"), [("float16", 16), ("float32", 8), ("float32", 16), ("float64", 16)])
def test_a_wide_store_holds_several_numbers(device, number, size):
    each = size // struct.calcsize(CODES[number])
    values = [1.0] * (32 * each)
    values[-1] = math.inf
    found, base = stored(device, values, number=number, size=size)
    assert (found.numbers, found.infinite) == (32 * each, 1)
    assert found.first_address == base + 32 * size - size // each


@pytest.mark.parametrize("flags", [LOAD, ATOMIC])
def test_loads_and_atomics_are_left_alone(device, flags):
    found, _ = stored(device, [math.nan] * 32, flags=flags)
    assert (found.numbers, found.nan) == (0, 0)


def test_a_number_that_is_wider_than_the_store_is_none(device):
    found, _ = stored(device, [math.nan] * 32, number="float16", size=2)
    assert found.numbers == 32
    found, _ = stored(device, b"\xff" * 64, number="float32", size=2)
    assert (found.numbers, found.negative_nan) == (0, 0)


def test_small_negative_integers_stand_apart_from_nan(device):
    found, _ = stored(device, [-1] * 32, code="i")
    assert (found.nan, found.negative_nan) == (0, 32)


def test_bfloat16_is_the_upper_half_of_float32(device):
    values = [struct.pack("<f", value)[2:] for value in [1.0] * 30 + [math.nan, math.inf]]
    found, _ = stored(device, b"".join(values), number="bfloat16", size=2)
    assert (found.numbers, found.nan, found.infinite) == (32, 1, 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), min_size=32, max_size=32), st.integers(1, ALL))
def test_the_counts_are_those_of_the_definition(device, values, mask):
    found, _ = stored(device, values, mask=mask)
    active = [value for lane, value in enumerate(values) if mask >> lane & 1]
    assert found.numbers == len(active)
    assert found.infinite == sum(map(math.isinf, active))
    assert found.nan + found.negative_nan == sum(map(math.isnan, active))
    assert bool(found.first_address) == any(not math.isfinite(value) for value in active)


def launch(number, first_ns, **found):
    result = {"numbers": 64, "nan": 0, "negative_nan": 0, "infinite": 0, "first_address": 16, "first_ns": first_ns}
    place = {"module": "net.layers.3", "source": "train.py:7 step"}
    return {"name": f"_Z{len(f'k{number}')}k{number}v", "number": number, **place, "result": {**result, **found}}


def test_the_report_names_the_first_launch_on_the_device_first():
    text = load_tool(REFERENCE).report(
        [launch(1, 500, nan=3), launch(2, 400, infinite=1), launch(3, 0, first_address=0)]
    )
    lines = text.splitlines()
    assert lines[0].startswith("192 numbers stored as float32")
    assert "launch 2: k2: 1 infinite of 64, first at 0x10" in lines[1]
    assert lines[2].strip() == "net.layers.3, train.py:7 step"
    assert "launch 1: k1: 3 NaN of 64" in lines[3]
    assert "launch 3" not in text


def test_the_report_says_that_nothing_was_found():
    assert (
        load_tool(REFERENCE).report([launch(1, 0, first_address=0)])
        == "no NaN and no infinity in 64 numbers stored as float32"
    )


def test_the_report_is_bounded():
    text = load_tool(REFERENCE).report([launch(number, number, nan=1) for number in range(1, 200)])
    assert "and 179 more launches" in text
    assert len(text.splitlines()) < 50


def test_a_format_that_is_none_is_named_with_the_tools_line():
    with pytest.raises(InputError, match=r"nonfinite.py:\d+: tool NonFinite: ValueError: number must be one of"):
        load_tool(REFERENCE, {"number": "float9"})


def test_the_whole_tool_is_shorter_than_what_is_promised():
    lines = sum(len((EXAMPLES / name).read_text().splitlines()) for name in ("nonfinite.py", "nonfinite.cu"))
    assert lines < 300


def test_nvcc_compiles_it_for_every_architecture(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    target = tmp_path / "nonfinite.fatbin"
    library.compile_patch(nvcc, target, code=EXAMPLES / "nonfinite.cu")
    assert target.read_bytes().startswith(b"\x50\xed\x55\xba")  # a fat binary


def test_a_relative_reference_means_the_same_everywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(EXAMPLES)
    reference = absolute("nonfinite.py:NonFinite")
    monkeypatch.chdir(tmp_path)
    assert load_tool(reference).name == "nonfinite"
    assert absolute("package.module:Class") == "package.module:Class"
