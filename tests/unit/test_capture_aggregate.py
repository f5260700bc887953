import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel import semconv
from pasta_otel._native import _cupti
from pasta_otel.exporters.otlp.encoder import encode_spans
from pasta_otel.gpu.classes import KernelClasses
from pasta_otel.gpu.cupti.aggregate import BOUNDS, KernelHistograms
from pasta_otel.gpu.cupti.recording import read_recording
from pasta_otel.gpu.cupti.rows import views
from pasta_otel.gpu.cupti.spans import GpuSpans
from pasta_otel.gpu.mapping import Joiner, Region, Regions
from pasta_otel.testing.cupti import BufferBuilder

RECORDING = Path(__file__).parents[1] / "fixtures" / "cupti" / "h200-cuda13.0.cupti.gz"
T0 = 10**18


class Stack:
    def enter(self, external_id): ...
    def leave(self, external_id): ...
    def replace(self, external_id): ...


@pytest.fixture
def regions():
    found = Regions(Stack(), lambda: T0)
    found.recording = True
    return found


def joined_of(builder, regions):
    ring = _cupti.Ring()
    ring.decode(builder.bytes(), builder.api_version, builder.names)
    return Joiner(regions).join(views(ring.take())), ring.names(0)


def histograms(limit=2000):
    return KernelHistograms(KernelClasses(), lambda device: f"GPU-{device}", lambda: T0, limit)


def two_modules(regions):
    regions.enter(1, 100, "encoder")
    regions.enter(1, 101, "head")
    builder = BufferBuilder().external(100, 1).call(211, 1, 2, 1).kernel("sgemm", 1000, 3500, 1)
    builder.external(101, 2).call(211, 2, 3, 2).kernel("sgemm", 4000, 4900, 2).kernel(
        "softmax_fw", 5000, 5600, 2, device=1
    )
    return builder.call(41, 6, 7, 3).copy(7000, 17000, 3, 64).memset(20000, 20001, 4, 8)


def test_series_are_by_class_module_and_device_and_scaled(regions):
    target = histograms()
    joined, names = joined_of(two_modules(regions), regions)
    target.add(joined, names, weight=4.0)
    points = {tuple(sorted(point.attributes.items())): point for point in target.points()}
    assert len(points) == 5
    gemm = points[(semconv.GPU_KERNEL_CLASS, "gemm"), (semconv.HW_ID, "GPU-0"), (semconv.MODULE_PATH, "encoder")]
    assert sum(gemm.counts) == 4
    assert gemm.total == pytest.approx(4 * 2.5e-6)
    assert (gemm.minimum, gemm.maximum) == (2.5e-6, 2.5e-6)
    assert gemm.counts[2] == 4  # 2 us < 2.5 us <= 5 us
    assert gemm.exemplars[0][2:] == (1, 100)
    assert {point.attributes[semconv.GPU_KERNEL_CLASS] for point in points.values()} == {
        "gemm",
        "softmax",
        "memcpy",
        "memset",
    }
    copy = next(point for point in points.values() if point.attributes[semconv.GPU_KERNEL_CLASS] == "memcpy")
    assert copy.exemplars == ()
    assert semconv.MODULE_PATH not in copy.attributes


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.sampled_from(["sgemm", "softmax_fw", "mine"]), st.integers(1, 10**9), st.integers(0, 2)),
        min_size=1,
        max_size=60,
    ),
    weight=st.sampled_from([1.0, 3.0, 20.0]),
)
def test_histograms_equal_a_plain_loop(work, weight):
    builder, wanted = BufferBuilder(), {}
    for number, (name, duration, device) in enumerate(work):
        builder.kernel(name, 10, 10 + duration, number, device=device)
        key = ({"sgemm": "gemm", "softmax_fw": "softmax", "mine": "other"}[name], f"GPU-{device}")
        bucket = next((at for at, bound in enumerate(BOUNDS) if duration <= round(bound * 1e9)), len(BOUNDS))
        wanted.setdefault(key, []).append((bucket, duration))
    target = histograms()
    joined, names = joined_of(builder, Regions(Stack(), lambda: T0))
    target.add(joined, names, weight)
    for point in target.points():
        expected = wanted.pop((point.attributes[semconv.GPU_KERNEL_CLASS], point.attributes[semconv.HW_ID]))
        assert point.counts == tuple(
            round(weight * sum(bucket == at for bucket, _ in expected)) for at in range(len(BOUNDS) + 1)
        )
        assert point.total == pytest.approx(weight * sum(duration for _, duration in expected) / 1e9)
        assert point.maximum == max(duration for _, duration in expected) / 1e9
    assert wanted == {}


def test_series_beyond_the_limit_go_into_the_overflow_series(regions):
    target = histograms(limit=2)
    joined, names = joined_of(two_modules(regions), regions)
    target.add(joined, names, 1.0)
    points = target.points()
    assert len(points) == 3
    assert points[-1].attributes == {"otel.metric.overflow": True}
    assert sum(sum(point.counts) for point in points) == 5


def test_a_replayed_graphs_work_has_the_modules_of_its_capture(regions):
    regions.enter_as(900, Region(1, 100, "model", {0: "encoder", 1: "head"}))
    builder = BufferBuilder().external(900, 5).call(311, 1, 2, 5)
    for node in range(3):
        builder.kernel("sgemm", 1000, 2000, 5, node=(4 << 32) | node, graph=4)
    joined, names = joined_of(builder, regions)
    target = histograms()
    target.add(joined, names, 1.0)
    assert {point.attributes[semconv.MODULE_PATH] for point in target.points()} == {"encoder", "head", "model"}
    (columns,), _ = spans(target).columns(joined, names, 0)
    assert columns.attributes[semconv.MODULE_PATH] == ["encoder", "head", "model"]
    assert columns.attributes[semconv.GPU_GRAPH_NODE_ID].tolist() == [0, 1, 2]


def spans(target, limit=1000, sampled=lambda trace: True):
    counter = itertools.count(1)
    return GpuSpans(
        target.codes,
        lambda device: f"GPU-{device}",
        sampled,
        limit,
        lambda size: b"".join(next(counter).to_bytes(8, "big") for _ in range(size // 8)),
    )


def test_spans_are_children_in_the_requests_own_trace(regions):
    target = histograms()
    joined, names = joined_of(two_modules(regions), regions)
    (columns,), counts = spans(target).columns(joined, names, offset_ns=500)
    assert (counts.ok, counts.capped, counts.unsampled) == (3, 0, 0)
    assert [int.from_bytes(row.tobytes(), "big") for row in columns.parent_span_id] == [100, 101, 101]
    assert {int.from_bytes(row.tobytes(), "big") for row in columns.trace_id} == {1}
    assert columns.start_time_unix_nano.tolist() == [1500, 4500, 5500]
    assert (columns.end_time_unix_nano - columns.start_time_unix_nano).tolist() == [2500, 900, 600]
    names_seen = [columns.sites[code].name for code in columns.site]
    assert names_seen == ["sgemm", "sgemm", "softmax_fw"]
    constant = dict(columns.sites[columns.site[2]].attributes)
    assert constant[semconv.GPU_KERNEL_CLASS] == "softmax"
    assert constant[semconv.HW_ID] == "GPU-1"
    assert constant[semconv.LINK_METHOD] == "id"
    assert len({row.tobytes() for row in columns.span_id}) == 3
    assert encode_spans(columns, {}, ("pasta_otel", "0"))


def test_each_trace_has_its_own_limit_over_all_windows(regions):
    target = histograms()
    regions.enter(1, 100)
    regions.enter(2, 200)
    builder = BufferBuilder()
    for number in range(10):
        builder.external(100 if number % 2 else 200, number).call(211, number, number + 1, number)
        builder.kernel("sgemm", 1000 + number, 1010 + number, number)
    joined, names = joined_of(builder, regions)
    maker = spans(target, limit=7)
    (first,), counts = maker.columns(joined, names, 0)
    assert (counts.ok, counts.capped) == (10, 0)
    (second,), counts = maker.columns(joined, names, 0)
    assert (counts.ok, counts.capped) == (4, 6)
    assert sorted(second.start_time_unix_nano.tolist()) == [1000, 1001, 1002, 1003]  # the earliest of each trace
    assert maker.columns(joined, names, 0)[0] == []
    assert len(first) == 10


def test_traces_that_are_not_sampled_have_no_gpu_spans_but_count_in_the_metric(regions):
    target = histograms()
    joined, names = joined_of(two_modules(regions), regions)
    target.add(joined, names, 1.0)
    columns, counts = spans(target, sampled=lambda trace: False).columns(joined, names, 0)
    assert columns == []
    assert counts.unsampled == 3
    assert sum(sum(point.counts) for point in target.points()) == 5


def test_the_h200_recording_becomes_spans_and_points(regions):
    ring = _cupti.Ring()
    read_recording(RECORDING).decode_into(ring)
    for number in range(20):
        regions.enter(1 + number, 1000 + number, f"layer.{number % 2}")
    regions.enter_as(5000, Region(99, 77, "graphed", {0: "0", 1: "1", 2: "2"}))
    joined = Joiner(regions).join(views(ring.take()))
    target = histograms()
    target.add(joined, ring.names(0), 1.0)
    total = sum(sum(point.counts) for point in target.points())
    assert total == joined.counts.work == 189
    spent = sum(point.total for point in target.points())
    assert spent == pytest.approx(float(np.sum(joined.work["end"] - joined.work["start"])) / 1e9)
    groups, counts = spans(target).columns(joined, ring.names(0), 0)
    assert counts.ok == joined.counts.linked == sum(map(len, groups))
    assert len(groups) == 3
    for columns in groups:
        assert encode_spans(columns, {}, ("pasta_otel", "0"))
