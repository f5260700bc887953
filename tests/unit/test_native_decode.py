import gc
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel._native import _cupti
from pasta_otel.errors import InputError
from pasta_otel.gpu.cupti.recording import Recording, read_recording, split_buffers, write_recording
from pasta_otel.gpu.cupti.rows import ROW, Kind, views
from pasta_otel.testing.cupti import BufferBuilder

VERSIONS = (18, 20, 21, 22, 24, 26, 28, 130001, 130100, 130201, 130301, 130401, 130500)


def decoded(builder: BufferBuilder, ring: _cupti.Ring | None = None) -> tuple[np.ndarray, list[str]]:
    ring = ring or _cupti.Ring()
    ring.decode(builder.bytes(), builder.api_version, builder.names)
    rows = views(ring.take())
    return (np.concatenate(rows) if rows else np.empty(0, ROW)), ring.names(0)


def one_of_each(version: int) -> BufferBuilder:
    builder = BufferBuilder(version)
    builder.external(77, 5).call(211, 100, 105, 5, thread=9).kernel("gemm", 110, 150, 5, device=1, context=3, stream=21)
    builder.copy(200, 210, 6, 4096, copy_kind=2).memset(220, 225, 7, 64).synchronization(230, 260, 8)
    return builder.overhead(300, 310).graph(400, 500, 9, 12).kernel("node", 401, 402, 9, node=(12 << 32) | 3, graph=12)


def test_the_row_of_numpy_is_the_row_of_c():
    assert ROW.itemsize == _cupti.ROW_BYTES == 64


@pytest.mark.parametrize("version", VERSIONS)
def test_every_record_kind_of_every_known_version_comes_out(version):
    rows, names = decoded(one_of_each(version))
    assert rows["kind"].tolist() == [39, 5, 10, 1, 2, 38, 17, 51, 10]
    kernel = rows[2]
    assert (kernel["start"], kernel["end"], kernel["correlation"]) == (110, 150, 5)
    assert (kernel["device"], kernel["context"], kernel["stream"]) == (1, 3, 21)
    assert names[kernel["name"]] == "gemm"
    assert (rows[0]["value"], rows[0]["correlation"], rows[0]["detail"]) == (77, 5, 5)
    assert (rows[1]["detail"], rows[1]["thread"], rows[1]["start"]) == (211, 9, 100)
    assert (rows[3]["value"], rows[3]["detail"]) == (4096, 2)
    assert (rows[4]["value"], rows[5]["detail"]) == (64, 3)
    assert (rows[7]["graph"], rows[7]["correlation"]) == (12, 9)
    assert (rows[8]["node"], rows[8]["graph"]) == ((12 << 32) | 3, 12)


@pytest.mark.parametrize("version", [0, 17, 19, 25, 29, 130600, 140000])
def test_an_unknown_version_is_refused_by_name(version):
    assert _cupti.layout(version) is None
    with pytest.raises(
        ValueError, match=rf"version {version} has a record layout that is not known; known are CUDA 12"
    ):
        _cupti.Ring().decode(b"", version, {})


def test_a_name_is_interned_once_also_under_two_pointers():
    builder = BufferBuilder()
    builder.kernel("gemm", 1, 2, 1).kernel("softmax", 2, 3, 2).kernel("gemm", 3, 4, 3)
    builder.names = dict.fromkeys(builder.names, b"gemm")
    rows, names = decoded(builder)
    assert set(rows["name"].tolist()) == {1}
    assert names == ["", "gemm"]


def test_many_names_survive_the_growth_of_the_table():
    builder = BufferBuilder()
    wanted = [f"gpu_kernel_{number}" for number in range(2000)]
    for number, name in enumerate(wanted):
        builder.kernel(name, 1, 2, number)
    rows, names = decoded(builder)
    assert [names[at] for at in rows["name"]] == wanted


def test_an_unknown_kind_ends_the_buffer_and_is_counted():
    builder = BufferBuilder().kernel("gemm", 1, 2, 1)
    ring = _cupti.Ring()
    ring.decode(builder.bytes() + b"\x3b" + bytes(99), builder.api_version, builder.names)
    assert len(ring.take()[0]) == 1
    assert ring.counts()["undecodable_bytes"] == 100


def test_a_record_without_timestamps_is_counted():
    ring = _cupti.Ring()
    decoded(BufferBuilder().kernel("gemm", 0, 0, 1), ring)
    assert ring.counts()["incomplete"] == 1


def test_a_full_ring_drops_and_counts_and_works_again_once_views_are_gone():
    builder = BufferBuilder()
    for number in range(100):
        builder.kernel("gemm", 1, 2, number)
    ring = _cupti.Ring(block_rows=8, max_blocks=4)
    ring.decode(builder.bytes(), builder.api_version, builder.names)
    held = views(ring.take())
    assert sum(map(len, held)) == 32
    assert ring.counts()["ring_full"] == 68
    ring.decode(builder.bytes(), builder.api_version, builder.names)
    assert ring.take() == []
    del held
    gc.collect()
    ring.decode(builder.bytes(), builder.api_version, builder.names)
    assert sum(len(block) for block in ring.take()) == 32
    assert ring.counts()["blocks"] == 4


def test_a_view_outlives_its_ring_and_cannot_be_written():
    rows = views_of_a_forgotten_ring()
    gc.collect()
    assert rows["correlation"].tolist() == [4]
    with pytest.raises(ValueError, match="read-only"):
        rows["correlation"][0] = 1


def views_of_a_forgotten_ring() -> np.ndarray:
    ring = _cupti.Ring()
    builder = BufferBuilder().kernel("gemm", 1, 2, 4)
    ring.decode(builder.bytes(), builder.api_version, builder.names)
    (view,) = views(ring.take())
    return view


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=2000), version=st.sampled_from(VERSIONS))
def test_random_bytes_never_crash_and_every_byte_is_accounted_for(data, version):
    ring = _cupti.Ring(block_rows=4, max_blocks=2)
    ring.decode(data, version, {})
    sizes = _cupti.layout(version)
    rows = [row for view in views(ring.take()) for row in view]
    counts = ring.counts()
    if not counts["ring_full"]:
        assert sum(sizes[int(row["kind"])] for row in rows) + counts["undecodable_bytes"] == len(data)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), flips=st.integers(0, 20), cut=st.integers(0, 400), version=st.sampled_from(VERSIONS))
def test_damaged_buffers_never_crash(seed, flips, cut, version):
    builder, rng = one_of_each(version), random.Random(seed)
    data = bytearray(builder.bytes())
    for _ in range(flips):
        data[rng.randrange(len(data))] = rng.randrange(256)
    ring = _cupti.Ring(block_rows=4, max_blocks=8)
    ring.decode(bytes(data[: max(len(data) - cut, 0)]), version, builder.names)
    for view in views(ring.take()):
        assert set(view["kind"].tolist()) <= set(Kind)


def test_a_recording_comes_back_as_it_was(tmp_path):
    builder = one_of_each(130001)
    recording = Recording(builder.api_version, builder.names, (builder.bytes(), builder.bytes()))
    write_recording(tmp_path / "r.cupti.gz", recording)
    back = read_recording(tmp_path / "r.cupti.gz")
    assert back == recording
    ring = _cupti.Ring()
    back.decode_into(ring)
    assert sum(len(block) for block in ring.take()) == 18


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b"nonsense" + b])
def test_a_damaged_recording_is_refused_with_its_file_name(tmp_path, damage):
    builder = one_of_each(130001)
    path = tmp_path / "r.cupti.gz"
    write_recording(path, Recording(builder.api_version, builder.names, (builder.bytes(),)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=r"r\.cupti\.gz"):
        read_recording(path)


def test_the_extensions_own_copies_split_into_buffers():
    assert list(split_buffers(b"\x02" + bytes(7) + b"ab" + b"\x01" + bytes(7) + b"c")) == [b"ab", b"c"]
