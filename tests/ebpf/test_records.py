"""What is exchanged in bytes: BPF records, ring buffers, ELF symbols, process contexts, thread slots, span links."""

import asyncio
import ctypes
import json
import mmap
import os
import struct
import subprocess
import sys
import threading
from bisect import bisect_right
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from pasta_otel.ebpf import layout
from pasta_otel.ebpf.build import SOURCES, compile_object
from pasta_otel.ebpf.elf import NotElfError, function_offsets
from pasta_otel.ebpf.probes import BPF_FOLDER, load_probes
from pasta_otel.ebpf.process_context import context_address, decode, read_context
from pasta_otel.ebpf.return_probes import return_probes_refusal
from pasta_otel.ebpf.ring import HEADER, PAGE, Ring
from pasta_otel.ebpf.spans import HostSpans, host_columns
from pasta_otel.ebpf.syscall import online_cpus, possible_cpus
from pasta_otel.ebpf.wall_clock import WallClock
from pasta_otel.exporters.otlp.encoder import Scope, encode_spans
from pasta_otel.publish import publish_context, withdraw_context
from pasta_otel.publish.process_context import encode
from pasta_otel.publish.slots import NOWHERE, SLOT_SIZE, SlotTable
from tests.ebpf.scenario import HERE
from tests.support import case

SPAN = SpanContext(int("0102030405060708090a0b0c0d0e0f10", 16), int("1112131415161718", 16), False, TraceFlags(1))


class Frozen:
    """Clocks that stand still."""

    def __init__(self, monotonic_ns: int, unix_nano: int) -> None:
        self.now = monotonic_ns, unix_nano

    def monotonic_ns(self) -> int:
        return self.now[0]

    def unix_nano(self) -> int:
        return self.now[1]


@pytest.mark.case("E01")
def test_wall_time_of_events_on_either_clock_and_the_drift_between_two_anchors():
    given_case, expected = case("E01", "clock.json"), case("E01", "expected.json")
    anchor, second = given_case["anchor"], given_case["second_anchor"]
    found = []
    for event in given_case["events"]:  # each with the anchor of its own clock: boot time runs on in suspend
        clock = WallClock(Frozen(anchor[f"{event['clock']}_ns"], anchor["realtime_ns"]))
        found += clock.convert(np.array([event["ns"]])).tolist()
    assert found == expected["epoch_ns"]
    clock = WallClock(Frozen(anchor["monotonic_ns"], anchor["realtime_ns"]))
    clock.add(second["monotonic_ns"], second["realtime_ns"] - second["monotonic_ns"])
    late = clock.convert(np.array([second["monotonic_ns"]]))[0] - second["monotonic_ns"]
    early = clock.convert(np.array([anchor["monotonic_ns"]]))[0] - anchor["monotonic_ns"]
    assert late - early == expected["drift_ns"]


@given(
    corrections=st.lists(st.integers(-500_000, 500_000), min_size=1, max_size=20),
    times=st.lists(st.integers(0, 20_000_000_000), min_size=2, max_size=50),
)
def test_corrections_of_the_clock_never_swap_two_events(corrections, times):
    clock = WallClock(Frozen(1_000_000_000, 1_700_000_000_000_000_000))
    offset = 1_700_000_000_000_000_000 - 1_000_000_000
    converted = []
    ordered = sorted(times)
    for second, correction in enumerate(corrections):
        offset += correction
        clock.add((second + 2) * 1_000_000_000, offset)
        batch = [
            time for time in ordered if second * 1_000_000_000 <= time - 1_000_000_000 < (second + 1) * 1_000_000_000
        ]
        converted += clock.convert(np.array(batch, np.int64)).tolist()
    assert converted == sorted(converted)


def test_a_suspend_moves_what_comes_after_it_and_nothing_before():
    clock = WallClock(Frozen(1_000, 5_000_000_000_000))
    hour = 3_600_000_000_000
    clock.add(2_000_000_000, 5_000_000_000_000 - 1_000 + hour)
    before, after = clock.convert(np.array([1_999_999_990, 2_000_000_010])).tolist()
    assert after - before == hour + 20


def test_python_and_c_agree_on_every_records_size(tmp_path):
    source = tmp_path / "sizes.c"
    header = HERE.parents[1] / "ebpf" / "bpf" / "pasta.bpf.h"
    names = (
        "process",
        "aggregate_key",
        "aggregate",
        "event",
        "critical_event",
        "counters",
        "settings",
        "limit",
        "slot",
    )
    text = header.read_text()
    body = text[text.index("#define SLOT_SIZE") : text.index("#define APIS")]
    prints = "".join(f'printf("%zu\\n", sizeof(struct {name}));' for name in names)
    types = "#include <stdint.h>\n#include <stdio.h>\ntypedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;\n"
    source.write_text(f"{types}#define HISTOGRAM {layout.HISTOGRAM}\n{body}\nint main(void) {{ {prints} return 0; }}")
    subprocess.run(["gcc", "-o", tmp_path / "sizes", source], check=True)
    sizes = [int(line) for line in subprocess.check_output([tmp_path / "sizes"], text=True).split()]
    ours = (
        layout.PROCESS,
        layout.AGGREGATE_KEY,
        layout.AGGREGATE,
        layout.EVENT,
        layout.CRITICAL,
        layout.COUNTERS,
        layout.SETTINGS,
        layout.LIMIT,
    )
    assert sizes == [*(item.size for item in ours), 40]


def test_a_histogram_bucket_holds_what_lies_below_its_bound():
    assert layout.BOUNDS_NS[0] == 32
    assert len(layout.BOUNDS_NS) == layout.HISTOGRAM - 1


def ring_file(tmp_path, records: list[tuple[bytes, int]], size: int, start: int):
    """Write a ring as the kernel lays it out; returns its consumer over a file."""
    data, position = bytearray(size), start
    for body, flags in records:
        for offset, byte in enumerate(struct.pack("<II", len(body) | flags, 0) + body):
            data[(position + offset) % size] = byte
        position += (HEADER + len(body) + 7) & ~7
    path = tmp_path / "ring"
    path.write_bytes(
        struct.pack("<Q", start).ljust(PAGE, b"\0") + struct.pack("<Q", position).ljust(PAGE, b"\0") + bytes(data) * 2
    )
    return os.open(path, os.O_RDWR), position


LOG2 = """
#define __always_inline inline
typedef unsigned long long u64;
typedef unsigned int u32;
#include "log2.bpf.h"
unsigned bucket_of(u64 ns) { return log2_bucket(ns); }
"""


def test_every_duration_falls_into_the_bucket_whose_bounds_hold_it(tmp_path):
    source, library = tmp_path / "log2.c", tmp_path / "log2.so"
    source.write_text(LOG2)
    compile_ = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{BPF_FOLDER}", "-o", library, source]
    subprocess.run(compile_, check=True)
    bucket_of = ctypes.CDLL(str(library)).bucket_of
    ends = [bound + step for bound in layout.BOUNDS_NS for step in (-1, 0, 1)]
    for ns in (*range(4096), *ends, 1 << 37, (1 << 37) - 1, 1 << 63, (1 << 64) - 1):
        assert bucket_of(ctypes.c_uint64(ns)) == bisect_right(layout.BOUNDS_NS, ns), ns


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=100), max_size=20),
    start=st.integers(0, 1 << 40).map(lambda n: n & ~7),
)
def test_a_ring_gives_back_what_was_written_also_around_its_end(tmp_path_factory, bodies, start):
    fd, _ = ring_file(tmp_path_factory.mktemp("ring"), [(body, 0) for body in bodies], 4096, start)
    ring = Ring(fd, 4096)
    try:
        assert list(ring.drain()) == bodies
        assert list(ring.drain()) == []
    finally:
        ring.close()
        os.close(fd)


def test_a_ring_leaves_out_discarded_records_and_stops_at_one_being_written(tmp_path):
    fd, _ = ring_file(
        tmp_path, [(b"a" * 8, 0), (b"b" * 8, 1 << 30), (b"c" * 8, 0), (b"d" * 8, 1 << 31), (b"e" * 8, 0)], 4096, 0
    )
    ring = Ring(fd, 4096)
    assert list(ring.drain()) == [b"a" * 8, b"c" * 8]
    ring.close()
    os.close(fd)


def test_function_offsets_are_those_that_the_library_was_linked_with_also_when_stripped(standin, tmp_path):
    stripped = tmp_path / "libcuda.so.1"
    subprocess.run(["strip", "-o", stripped, standin], check=True)
    names = ["cuLaunchKernel", "cuStreamSynchronize", "notThere"]
    found = function_offsets(str(standin), names)
    assert set(found) == {"cuLaunchKernel", "cuStreamSynchronize"}
    assert function_offsets(str(stripped), names) == found
    listed = subprocess.check_output(["nm", "-D", standin], text=True)
    addresses = {line.split()[2]: int(line.split()[0], 16) for line in listed.splitlines() if line.split()[1] == "T"}
    assert found["cuLaunchKernel"] == addresses["cuLaunchKernel"]  # gcc maps text at its file offset


def test_a_file_that_is_no_elf_object_is_said_to_be_none(tmp_path):
    path = tmp_path / "text"
    path.write_text("not an object" * 10)
    with pytest.raises(NotElfError):
        function_offsets(str(path), ["x"])


@given(
    resource=st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.one_of(st.text(max_size=30), st.integers(-(1 << 63), (1 << 63) - 1)),
        max_size=8,
    ),
    attributes=st.dictionaries(st.text(min_size=1, max_size=20), st.integers(0, (1 << 63) - 1), max_size=4),
)
def test_a_process_context_reads_back_as_it_was_published(resource, attributes):
    found = decode(encode(resource, attributes), 7)
    assert (dict(found.resource), dict(found.attributes)) == (resource, attributes)


@given(payload=st.binary(max_size=200))
def test_any_bytes_of_another_process_are_read_without_harm(payload):
    try:
        found = decode(payload, 1)
    except (ValueError, IndexError):
        return
    found.slots()


def test_attributes_that_do_not_fit_are_left_out_and_ours_stay():
    found = decode(encode({f"key{n}": "x" * 500 for n in range(100)}, {"ours": 5}, limit=4000), 1)
    assert found.attributes == {"ours": 5}
    assert 0 < len(found.resource) < 10


def test_a_context_is_found_under_each_name_that_kernels_give_it():
    for name in ("/memfd:OTEL_CTX (deleted)", "[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]"):
        assert context_address(f"7f00-8f00 r--p 0 0:0 0 {name}\n") == 0x7F00
    assert context_address("7f00-8f00 r--p 0 0:0 0 /tmp/OTEL_CTX\n") is None


def test_threads_whose_ids_collide_get_neighbouring_slots_and_a_fifth_none():
    ids = iter([5, 5 + 8, 5 + 16, 5 + 24, 5 + 32])
    table = SlotTable(8, thread_id=lambda: next(ids), alive=lambda _: True)
    offsets: list[int] = []
    keep = threading.Barrier(6)

    def claim() -> None:
        offsets.append(table.offset())
        keep.wait()

    threads = [threading.Thread(target=claim) for _ in range(5)]
    for thread in threads:
        thread.start()
        while not offsets or len(offsets) < threads.index(thread) + 1:
            pass
    keep.wait()
    for thread in threads:
        thread.join()
    assert offsets == [5 * SLOT_SIZE, 6 * SLOT_SIZE, 7 * SLOT_SIZE, 0, NOWHERE]
    assert table.homeless == 1


def test_a_dead_threads_slot_is_given_away():
    ids = iter([3, 3 + 4096])
    table = SlotTable(thread_id=lambda: next(ids), alive=lambda _: False)
    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(table.offset()))
        thread.start()
        thread.join()
    assert found == [3 * SLOT_SIZE, 3 * SLOT_SIZE]


@pytest.fixture
def published():
    publication = publish_context({"service.name": "me"})
    assert publication is not None
    yield publication
    withdraw_context()


def record_of(publication) -> tuple[bytes, bytes, int, int]:
    """Return trace id, span id, validity and flags of the calling thread's slot."""
    offset = publication.table.offset()
    return struct.unpack_from("<16s8sBB", publication.table.memory, offset + 8)


def current(span: SpanContext):
    return trace.set_span_in_context(NonRecordingSpan(span))


def test_the_slot_follows_attach_and_detach(published):
    token = context_api.attach(current(SPAN))
    assert record_of(published) == (bytes(range(1, 17)), bytes(range(17, 25)), 1, 1)
    context_api.detach(token)
    assert record_of(published)[2] == 0


def test_in_an_event_loop_each_step_has_its_own_tasks_span_and_waiting_has_none(published):
    async def task(number: int) -> list[bytes]:
        span = SpanContext(SPAN.trace_id, number, False, TraceFlags(1))
        token = context_api.attach(current(span))
        seen = []
        for _ in range(3):
            await asyncio.sleep(0)
            seen.append(record_of(published)[1])
        seen.append(await asyncio.to_thread(lambda: record_of(published)[1]))
        context_api.detach(token)
        return seen

    async def main():
        return await asyncio.gather(*(task(number) for number in (7, 8, 9)))

    assert asyncio.run(main()) == [[number.to_bytes(8, "big")] * 4 for number in (7, 8, 9)]
    assert record_of(published)[2] == 0


def test_everything_is_put_back_when_publishing_ends():
    import anyio.to_thread

    runtime = context_api._RUNTIME_CONTEXT
    run_sync = anyio.to_thread.run_sync
    before = (runtime.attach, runtime.detach, asyncio.events.Handle._run, asyncio.BaseEventLoop.run_in_executor)
    publish_context({"service.name": "me"})
    assert asyncio.events.Handle._run is not before[2]
    assert anyio.to_thread.run_sync is not run_sync
    withdraw_context()
    assert anyio.to_thread.run_sync is run_sync
    assert (runtime.attach, runtime.detach, asyncio.events.Handle._run, asyncio.BaseEventLoop.run_in_executor) == before
    assert "attach" not in vars(runtime)


def test_a_published_context_is_found_through_proc_and_gone_after_withdrawal(published, tmp_path):
    from pathlib import Path

    proc = Path("/proc")
    address = context_address((proc / "self" / "maps").read_text())
    found = read_context(proc, os.getpid(), address)
    assert found.resource["service.name"] == "me"
    assert found.slots() == (published.table.address, published.table.slots)
    publish_context({"service.name": "renamed"})
    assert read_context(proc, os.getpid(), address).resource["service.name"] == "renamed"
    withdraw_context()
    assert read_context(proc, os.getpid(), address) is None


def test_publishing_needs_no_privilege(standin):
    """As uid 65534 without any capability and with no_new_privs."""
    code = "from pasta_otel.publish import publish_context; print(publish_context({'service.name': 'x'}) is not None)"
    command = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "--no-new-privs",
        "--bounding-set",
        "-all",
        sys.executable,
        "-c",
        code,
    ]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )
    if "Permission denied" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"uid 65534 cannot run this interpreter: {done.stderr.strip()[-200:]}")
    assert done.stdout.strip() == "True"


def aggregate(**changes) -> layout.Aggregate:
    values = {
        "trace_id": b"t" * 16,
        "span_id": b"s" * 8,
        "tgid": 5,
        "api": 39,
        "epoch": 1,
        "link": "slot",
        "sampled": True,
        "events": 3,
        "sum_ns": 3000,
        "max_ns": 2000,
        "size": 0,
        "first_ns": 100,
        "last_ns": 9000,
        "tid": 6,
        "histogram": (0,) * 32,
    }
    return layout.Aggregate(**{**values, **changes})


def host_spans(limit: int = 200) -> HostSpans:
    apis = {api.number: api for probe in load_probes() for api in probe.apis}
    return HostSpans(apis, lambda _: "svc", limit)


def test_host_spans_are_encoded_with_their_link_and_without_a_parent():
    from pasta_otel.ebpf.observer import Harvest

    maker = host_spans()
    spans = maker.take(Harvest((aggregate(), aggregate(api=65, span_id=b"r" * 8))))
    columns = host_columns(spans, WallClock(Frozen(0, 1_000_000)), iter(range(1, 100)).__next__)
    request = ExportTraceServiceRequest.FromString(encode_spans(columns, {"service.name": "agent"}, Scope("x")))
    first, second = request.resource_spans[0].scope_spans[0].spans
    assert (first.name, second.name) == ("cuStreamSynchronize", "off_cpu.sleeping")
    assert [(link.trace_id, link.span_id) for link in first.links] == [(b"t" * 16, b"s" * 8)]
    assert second.links[0].span_id == b"r" * 8
    assert (first.trace_id, first.parent_span_id) == (b"t" * 16, b"")
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1_000_100, 1_009_000)


def test_links_of_some_rows_only_are_encoded_for_those_rows():
    from dataclasses import replace

    from pasta_otel.ebpf.observer import Harvest

    columns = host_columns(
        host_spans().take(Harvest((aggregate(), aggregate(api=40)))),
        WallClock(Frozen(0, 0)),
        iter(range(1, 9)).__next__,
    )
    traces = np.array(columns.links.trace_id)
    traces[0] = 0
    request = ExportTraceServiceRequest.FromString(
        encode_spans(replace(columns, links=columns.links._replace(trace_id=traces)), {}, Scope("x"))
    )
    assert [len(span.links) for span in request.resource_spans[0].scope_spans[0].spans] == [0, 1]


def test_unsampled_traces_and_surplus_events_make_no_spans_but_are_counted():
    from pasta_otel.ebpf.observer import Harvest

    maker = host_spans(limit=2)
    many = tuple(aggregate(api=number) for number in (17, 18, 19, 39))
    assert len(maker.take(Harvest((*many, aggregate(sampled=False, trace_id=b"u" * 16), aggregate(link="none"))))) == 2
    assert maker.outcomes == {"ok": 2, "capped": 2, "unsampled": 1}


def event(start_ns: int, end_ns: int, **changes) -> layout.Event:
    values = layout.Event(start_ns, end_ns, b"t" * 16, b"s" * 8, 5, 6, 39, "slot", True, 0, 0, 0)
    return values._replace(**changes)


def sum_of(events: list[layout.Event], **changes) -> layout.Aggregate:
    """Return the sum that the kernel keeps of events."""
    durations = [item.end_ns - item.start_ns for item in events]
    buckets = [0] * layout.HISTOGRAM
    for duration in durations:
        buckets[bisect_right(layout.BOUNDS_NS, duration)] += 1
    return aggregate(
        events=len(events), sum_ns=sum(durations), max_ns=max(durations), size=sum(item.size for item in events),
        first_ns=events[0].start_ns, last_ns=max(item.end_ns for item in events), histogram=tuple(buckets), **changes,
    )  # fmt: skip


SLOW_NS = 1_000_000


@given(quick=st.lists(st.integers(0, SLOW_NS - 1), max_size=5), slow=st.lists(st.integers(SLOW_NS, 10**10), max_size=5))
def test_spans_of_slow_events_and_the_sum_of_the_others_tell_every_event_once(quick, slow):
    from pasta_otel.ebpf.observer import Harvest

    events = [event(0, duration, size=duration % 7) for duration in (*quick, *slow)]
    if not events:
        return
    spans = host_spans().take(Harvest((sum_of(events),), tuple(events[len(quick) :])))
    assert sum(span.events for span in spans) == len(events)
    assert sum(span.total_ns for span in spans) == sum(quick) + sum(slow)
    assert sum(span.size for span in spans) == sum(item.size for item in events)
    assert sorted(span.total_ns for span in spans[: len(slow)]) == sorted(slow)
    if quick:
        assert len(spans) == len(slow) + 1
        assert max(quick) <= spans[-1].max_ns <= sum(quick)
        assert len(quick) > 1 or spans[-1].max_ns == quick[0]
        assert spans[-1].max_ns <= 2 * max(*quick, layout.BOUNDS_NS[0])


def test_an_event_that_came_before_its_sum_is_not_told_again_with_it():
    from pasta_otel.ebpf.observer import Harvest

    maker = host_spans()
    before, early = event(0, 2 * SLOW_NS), event(10 * SLOW_NS, 13 * SLOW_NS)
    first = maker.take(Harvest((sum_of([before]),), (before, early)))
    then = maker.take(Harvest((sum_of([early, event(0, 500)]),)))
    assert [(span.events, span.total_ns) for span in (*first, *then)] == [(1, 2 * SLOW_NS), (1, 3 * SLOW_NS), (1, 500)]
    assert maker.take(Harvest((sum_of([event(0, 400)]),)))[0].total_ns == 400  # nothing is kept longer than that


def test_a_slow_event_of_one_process_takes_nothing_from_anothers_sum():
    from pasta_otel.ebpf.observer import Harvest

    other = sum_of([event(0, 100)], tgid=77)
    spans = host_spans().take(Harvest((other,), (event(0, 2 * SLOW_NS),)))
    assert [(span.pid, span.events) for span in spans] == [(5, 1), (77, 1)]


def test_events_that_came_alone_are_not_told_again_in_their_sum():
    from pasta_otel.ebpf.observer import Harvest

    event = layout.Event(100, 900, b"t" * 16, b"s" * 8, 5, 6, 39, "slot", True, 0, 0, 0)
    assert len(host_spans().take(Harvest((aggregate(events=1),), (event,)))) == 1
    assert len(host_spans().take(Harvest((aggregate(events=2),), (event,)))) == 2


@pytest.mark.parametrize(
    ("release", "machine", "safe"),
    [
        ("6.10.5", "x86_64", True),
        ("6.11.0-8", "x86_64", False),
        ("6.13.9", "x86_64", False),
        ("6.14.0", "x86_64", True),
        ("6.12.1", "aarch64", True),
        ("5.15.0-1", "x86_64", True),
    ],
)
def test_return_probes_are_refused_where_they_kill(release, machine, safe):
    assert (return_probes_refusal(release, machine) is None) == safe


def test_cpu_lists_are_read_as_the_kernel_writes_them():
    assert possible_cpus("0-127\n") == 128
    assert online_cpus("0-1,4,6-7\n") == [0, 1, 4, 6, 7]


def test_slots_are_private_memory_that_a_child_cannot_write_into(published):
    token = context_api.attach(current(SPAN))
    child = os.fork()
    if child == 0:
        published.table.memory[:] = bytes(len(published.table.memory))
        os._exit(0)
    os.waitpid(child, 0)
    assert record_of(published)[2] == 1
    context_api.detach(token)
    assert isinstance(published.table.memory, mmap.mmap)
    assert published.table.address == ctypes.addressof(ctypes.c_char.from_buffer(published.table.memory))
    assert json.dumps(published.table.slots)


def test_every_probed_driver_function_is_one_of_the_stand_in_with_all_its_copies(standin):
    names = [symbol for probe in load_probes() if probe.library for api in probe.apis for symbol in api.symbols]
    assert len(names) == len(set(names))
    assert set(function_offsets(str(standin), names)) == set(names)


def test_the_sources_compile_for_arm64_too(tmp_path):
    if not Path("/usr/aarch64-linux-gnu/include/asm").exists() and os.uname().machine != "aarch64":
        pytest.skip("no arm64 headers (Debian: linux-libc-dev-arm64-cross)")
    assert compile_object(SOURCES, tmp_path, "aarch64").stat().st_size > 0


def test_numbers_of_apis_are_unique_and_launches_have_the_first():
    apis = [api for probe in load_probes() for api in probe.apis]
    assert len({api.number for api in apis}) == len(apis)
    assert {api.kind == "launch" for api in apis if api.number < 16} == {True}
    assert {api.kind == "launch" for api in apis if api.number >= 16} == {False}
    assert max(api.number for api in apis) < layout.APIS
