from pathlib import Path

import numpy as np
import pytest

from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti.recording import read_recording
from pasta_otel.gpu.cupti.rows import ROW, views
from pasta_otel.gpu.mapping import END_TOLERANCE_NS, GENERATION_NS, Edge, JoinCounts, Joiner, Region, Regions
from pasta_otel.testing.cupti import BufferBuilder

RECORDING = Path(__file__).parents[1] / "fixtures" / "cupti" / "h200-cuda13.0.cupti.gz"


class Stack:
    """Stands in for the extension's per-thread stack."""

    def __init__(self):
        self.ids = []

    def enter(self, external_id):
        self.ids.append(external_id)

    def leave(self, external_id):
        if external_id in self.ids:
            del self.ids[self.ids.index(external_id) :]

    def replace(self, external_id):
        self.ids = [external_id]


class Now:
    def __init__(self):
        self.ns = 10**18

    def __call__(self):
        return self.ns


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def regions(now):
    found = Regions(Stack(), now)
    found.recording = True
    return found


def rows(builder):
    ring = _cupti.Ring()
    ring.decode(builder.bytes(), builder.api_version, builder.names)
    return views(ring.take())


def test_work_is_joined_over_threads_streams_and_devices_by_id_alone(regions):
    regions.enter(trace_id=1, span_id=100)
    regions.enter(trace_id=1, span_id=101, module="encoder.0")
    regions.enter(trace_id=2, span_id=200)
    builder = BufferBuilder()
    builder.external(101, 1).call(211, 10, 12, 1, thread=1).external(200, 2).call(211, 11, 13, 2, thread=2)
    builder.kernel("b", 50, 60, 2, device=1, context=2, stream=7).kernel("a", 20, 30, 1, device=0, context=1, stream=7)
    builder.external(100, 3).call(41, 40, 41, 3).copy(70, 80, 3, 64)
    joined = Joiner(regions).join(rows(builder))
    owners = [joined.regions[at] for at in joined.region]
    assert owners == [Region(2, 200), Region(1, 101, "encoder.0"), Region(1, 100)]
    assert joined.counts == JoinCounts(work=3, linked=3)
    assert joined.launches == 3


def test_one_graph_launch_owns_all_of_its_gpu_kernels(regions):
    regions.enter_as(900, Region(1, 100, None, {0: "encoder", 1: "head"}))
    builder = BufferBuilder().external(900, 5).call(311, 1, 2, 5)
    for node in range(3):
        builder.kernel(f"k{node}", 10 + node, 11 + node, 5, node=(4 << 32) | node, graph=4)
    joined = Joiner(regions).join(rows(builder))
    assert joined.counts.linked == 3
    assert joined.regions == [Region(1, 100, None, {0: "encoder", 1: "head"})]


def test_work_of_nobody_stays_unlinked_and_ids_of_others_are_not_ours(regions):
    builder = BufferBuilder().call(211, 1, 2, 1).kernel("a", 3, 4, 1)
    builder.external(101, 2, kind=3).call(211, 5, 6, 2).kernel("b", 7, 8, 2)
    regions.enter(1, 101)
    assert Joiner(regions).join(rows(builder)).counts == JoinCounts(work=2, unlinked=2)


def test_work_that_completes_in_a_later_batch_finds_its_launch(regions):
    regions.enter(1, 100)
    joiner = Joiner(regions)
    assert joiner.join(rows(BufferBuilder().external(100, 7).call(211, 1, 2, 7))).counts.work == 0
    assert joiner.join(rows(BufferBuilder().kernel("late", 50, 60, 7))).counts == JoinCounts(work=1, linked=1)


def test_a_correlation_id_joins_only_within_its_attachment(regions):
    regions.enter(1, 100)
    regions.enter(1, 200)

    def batch(attachment, builder):
        (found,) = rows(builder)
        found = found.copy()
        found["attachment"] = attachment
        return found

    joiner = Joiner(regions)
    earlier = batch(1, BufferBuilder().external(100, 7).call(211, 1, 2, 7).external(100, 8).call(211, 3, 4, 8))
    assert joiner.join([earlier]).launches == 2
    late = batch(1, BufferBuilder().kernel("late", 5, 6, 8))
    outside = batch(2, BufferBuilder().call(211, 50, 51, 7, thread=3).kernel("outside", 60, 61, 7))
    inside = batch(2, BufferBuilder().external(200, 8).call(211, 52, 53, 8).kernel("inside", 62, 63, 8))
    joined = joiner.join([late, outside, inside])
    owners = [joined.regions[at].span_id if at >= 0 else None for at in joined.region]
    assert owners == [100, None, 200]
    assert joined.counts == JoinCounts(work=3, linked=2, unlinked=1)
    other = batch(1, BufferBuilder().kernel("of another attachment", 5, 6, 8))
    again = joiner.join([other, outside], [Edge(3, 200, 51)])
    assert [again.regions[at].span_id if at >= 0 else None for at in again.region] == [None, 200]


def test_a_launch_after_its_regions_end_is_stale_and_not_linked(regions, now):
    regions.take_over(500, Region(1, 100))
    regions.end(500)
    late = now.ns + END_TOLERANCE_NS + 1
    builder = BufferBuilder().external(500, 1).call(211, now.ns - 10, now.ns - 5, 1).kernel("in", now.ns, now.ns + 1, 1)
    builder.external(500, 2).call(211, late, late + 1, 2).kernel("after", late + 2, late + 3, 2)
    joined = Joiner(regions).join(rows(builder))
    assert joined.region.tolist() == [0, -1]
    assert joined.counts == JoinCounts(work=2, linked=1, stale=1)


def test_a_region_is_forgotten_after_two_generations_and_then_counts_as_stale(regions, now):
    regions.enter(1, 100)
    for _ in range(2):
        now.ns += GENERATION_NS
        regions.turn()
    assert regions.find(100) is None
    assert regions.forgotten == 1
    builder = BufferBuilder().external(100, 1).call(211, 1, 2, 1).kernel("a", 3, 4, 1)
    assert Joiner(regions).join(rows(builder)).counts.stale == 1


def test_work_that_begins_before_its_launch_call_is_a_clock_violation(regions):
    builder = (
        BufferBuilder().call(211, 100, 110, 1).kernel("a", 93, 120, 1).call(211, 200, 210, 2).kernel("b", 200, 220, 2)
    )
    counts = Joiner(regions).join(rows(builder)).counts
    assert (counts.early, counts.worst_early_ns) == (1, 7)


def test_work_without_timestamps_is_counted_and_goes_no_further(regions):
    joined = Joiner(regions).join(rows(BufferBuilder().kernel("a", 0, 0, 1).kernel("b", 5, 6, 2)))
    assert joined.counts.incomplete == 1
    assert joined.counts.work == len(joined.work) == 1


def test_an_edge_joins_only_its_own_thread_and_only_until_its_time(regions):
    regions.enter(1, 100)
    builder = BufferBuilder()
    for number, (thread, start) in enumerate([(7, 10), (7, 99), (7, 100), (8, 10)], start=1):
        builder.call(211, start, start + 1, number, thread=thread).kernel("k", 200 + number, 300, number)
    builder.kernel("without a call", 200, 300, 77)
    joined = Joiner(regions).join(rows(builder), [Edge(7, 100, 100), Edge(9, 100, 2**64 - 1)])
    assert joined.region.tolist() == [0, 0, -1, -1, -1]


def test_outside_windows_nothing_is_kept_of_a_region_that_was_left(regions):
    regions.recording = False
    for number in range(1000):
        regions.enter_request(1, number)
        regions.enter(1, 5000 + number, "module")
        regions.leave(5000 + number)
        regions.leave(number)
        regions.end(number)
    assert not regions._young
    assert not regions._ends
    regions.enter_request(1, 5)
    regions.enter(1, 6, "running already")
    regions.recording = True
    regions.leave(6)
    regions.leave(5)
    assert regions.find(5) == Region(1, 5)
    assert regions.find(6) is None


def test_a_request_is_known_as_long_as_it_runs(regions, now):
    regions.enter_request(1, 100)
    for _ in range(5):
        now.ns += GENERATION_NS
        regions.turn()
    assert regions.find(100) == Region(1, 100)
    regions.end(100)
    assert regions.find(100) == Region(1, 100)  # what it launched may come yet
    for _ in range(2):
        now.ns += GENERATION_NS
        regions.turn()
    assert regions.find(100) is None
    regions.enter_request(1, 101)
    regions.recording = False
    regions.end(101)
    assert regions.find(101) is None


def test_requests_that_nobody_ends_are_bounded(regions, monkeypatch):
    monkeypatch.setattr("pasta_otel.gpu.mapping.MAX_REGIONS", 10)
    for number in range(1, 30):
        regions.enter_request(1, number)
    assert regions.find(29) is not None
    assert regions.find(5) is None
    assert len(regions._requests) == 10
    assert regions.forgotten == 19


def test_nothing_at_all_is_no_error(regions):
    joined = Joiner(regions).join([np.empty(0, ROW)])
    assert joined.counts == JoinCounts()
    assert Joiner(regions).join([]).counts == JoinCounts()


def test_buffers_recorded_on_an_h200_are_joined(regions):
    ring = _cupti.Ring()
    read_recording(RECORDING).decode_into(ring)
    for number in range(20):
        regions.enter(trace_id=1, span_id=1000 + number)
    regions.enter_as(5000, Region(2, 77, None, {0: "0", 1: "1", 2: "2"}))
    joined = Joiner(regions).join(views(ring.take()))
    assert joined.counts.work == 129 + 40 + 20
    # that window recorded runtime calls only: cuBLAS and cuDNN of CUDA 13 launch by the driver API
    unlinked = {ring.names(0)[row["name"]][:6] for row, at in zip(joined.work, joined.region, strict=True) if at < 0}
    assert unlinked == {"nvjet_", "cudnn_"}
    replays = [
        row for row, at in zip(joined.work, joined.region, strict=True) if at >= 0 and joined.regions[at].span_id == 77
    ]
    assert len(replays) == 9
    assert {int(row["node"]) & 0xFFFFFFFF for row in replays} == {0, 1, 2}
    assert joined.counts.early == 0


def test_a_t2_window_of_an_h200_is_joined_completely_with_backward_and_graph(regions):
    """Recorded by benchmarks.gpu.record: the runtime's and the driver's launch calls; every GPU kernel is joined."""
    ring = _cupti.Ring()
    read_recording(RECORDING.with_name("h200-cuda13.0-t2.cupti.gz")).decode_into(ring)
    for number in range(8):
        regions.enter(1, 1000 + number, "forward")
        regions.enter(1, 2000 + number, "backward")
    regions.enter_as(5000, Region(2, 77, None, {0: "0", 1: "1", 2: "2", 3: "3"}))
    joined = Joiner(regions).join(views(ring.take()))
    assert joined.counts == JoinCounts(work=196, linked=196)
    names = ring.names(0)
    replayed = [row for row, at in zip(joined.work, joined.region, strict=True) if joined.regions[at].span_id == 77]
    assert [int(row["node"]) & 0xFFFFFFFF for row in replayed] == [0, 1, 2, 3]
    assert "layer_norm" in names[replayed[0]["name"]]
    assert ring.counts()["graphs"] == 5
