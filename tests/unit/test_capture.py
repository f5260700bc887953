import ctypes
import os

import pytest

from pasta_otel.errors import MissingError
from pasta_otel.gpu.cupti import library
from pasta_otel.testing.fake_cupti import DETACHING, LOADED, run_with


def test_only_what_is_launched_inside_a_window_is_recorded(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
launch(5)
assert capture.open(T3_WINDOW)
launch(7)
capture.close()
launch(5)
rows = np.concatenate(capture.drain())
assert (rows["kind"] == Kind.CONCURRENT_KERNEL).sum() == 7
assert (rows["kind"] == Kind.RUNTIME).sum() == 7
assert capture.names() == ["", "gemm"]
""",
    )


def test_a_window_enables_only_the_calls_that_put_work_on_the_device(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
assert capture.open()
assert [fake.fake_enabled(kind) for kind in (10, 1, 2, 39)] == [1, 1, 1, 1]
assert fake.fake_runtime_call(211) and not fake.fake_runtime_call(17)
launch(4)
capture.close()
assert not any(fake.fake_enabled(kind) for kind in (10, 1, 2, 39))
assert not any(fake.fake_runtime_call(number) for number in range(1, 567))
rows = np.concatenate(capture.drain())
assert (rows["kind"] == Kind.RUNTIME).sum() == 4
""",
    )


def test_calls_that_a_libcupti_does_not_know_yet_are_no_obstacle(fake_cupti):
    run_with(
        fake_cupti,
        "fake.fake_version(28, 208)  # CUDA 12.9, which has no runtime call 505\n"
        + LOADED
        + """
from pasta_otel.gpu.cupti.rows import RUNTIME_LAUNCHES
assert max(RUNTIME_LAUNCHES) > 487
assert capture.open()
assert fake.fake_runtime_call(211) and fake.fake_runtime_call(430)
launch(3)
capture.close()
assert (np.concatenate(capture.drain())["kind"] == Kind.CONCURRENT_KERNEL).sum() == 3
try:
    _cupti.enable_calls(False, tuple(range(65)), True)
except ValueError: pass
else: raise AssertionError
try:
    _cupti.enable_calls(False, (1, "two"), True)
except TypeError: pass
else: raise AssertionError
""",
    )


def test_cupti_before_12_6_records_every_call_of_a_window_and_none_outside(fake_cupti_12_4):
    run_with(
        fake_cupti_12_4,
        LOADED
        + """
from pasta_otel.gpu.mapping import Joiner, Regions
assert _cupti.load(sys.argv[1]) == 22
regions = Regions(_cupti, lambda: 0)
regions.recording = True
for window in range(3):
    launch(5)
    assert capture.open()
    assert fake.fake_enabled(5) and fake.fake_enabled(4)
    regions.enter(1, 7, "layer"); launch(4); regions.leave(7)
    capture.close()
    assert not any(fake.fake_enabled(kind) for kind in range(64))
    joined = Joiner(regions).join(capture.drain())
    assert joined.counts.linked == joined.counts.work == 4, joined.counts
fake.fake_subscriber(b"unknown to 12.4")
assert not capture.open() and capture.holder == "another CUPTI client in this process"
""",
    )


def test_ten_thousand_windows_leak_nothing(fake_cupti):
    out = run_with(
        fake_cupti,
        LOADED
        + """
import resource
def cycle(n):
    for _ in range(n):
        assert capture.open(T3_WINDOW)
        launch(3)
        capture.close()
        capture.drain()
cycle(500)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cycle(10_000)
stats = capture.stats()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, stats["blocks"], stats["buffers_allocated"])
assert stats["records"] == 10_500 * 6 and stats["dropped"] == 0 and stats["buffers_out"] == 0
""",
    )
    grown_kib, blocks, buffers = map(int, out.split())
    assert grown_kib < 2048
    assert blocks <= 2
    assert buffers <= 2


def test_regions_reach_the_rows_also_those_entered_before_the_window(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
_cupti.enter(2**63 + 5)
assert fake.fake_depth() == 0  # outside a window CUPTI is not touched
capture.open(T3_WINDOW)
(unseen,) = launch()  # nothing was entered on this thread since the window opened
_cupti.enter(7); (inside,) = launch(); _cupti.leave(7)
(outer,) = launch()
_cupti.leave(2**63 + 5)
(outside,) = launch()
capture.close()
rows = np.concatenate(capture.drain())
external = rows[rows["kind"] == Kind.EXTERNAL_CORRELATION]
assert external["value"].tolist() == [7, 2**63 + 5] and external["correlation"].tolist() == [inside, outer]
assert external["detail"].tolist() == [5, 5]
assert _cupti.depth() == 0 and fake.fake_depth() == 0
""",
    )


def test_regions_that_ended_unseen_are_left_with_the_one_around_them(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
capture.open(T3_WINDOW)
_cupti.enter(1); _cupti.enter(2); _cupti.enter(3)
_cupti.leave(99)  # never entered here: nothing changes
assert _cupti.depth() == 3 and fake.fake_depth() == 3
_cupti.leave(1)
assert _cupti.depth() == 0 and fake.fake_depth() == 0
_cupti.enter(4); _cupti.replace(5)
fake.fake_top.restype = ctypes.c_uint64
assert (_cupti.depth(), fake.fake_depth(), fake.fake_top()) == (1, 1, 5)
_cupti.leave(5)
for number in range(200): _cupti.enter(number)
assert _cupti.depth() == 200 and fake.fake_depth() == 128
for number in reversed(range(200)): _cupti.leave(number)
assert _cupti.depth() == 0 and fake.fake_depth() == 0
""",
    )


def test_a_region_left_between_windows_is_taken_off_in_the_next(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
fake.fake_top.restype = ctypes.c_uint64
capture.open(T3_WINDOW); _cupti.enter(1); capture.close()
_cupti.leave(1); _cupti.enter(2)
assert fake.fake_top() == 1  # a closed window's ids are not touched
capture.open(T3_WINDOW); _cupti.enter(3)
assert fake.fake_depth() == 2 and fake.fake_top() == 3
""",
    )


def test_each_window_detaches_inside_a_cuda_call_of_the_program(fake_cupti):
    run_with(
        fake_cupti,
        DETACHING
        + """
import threading
stop = threading.Event()
def program():
    while not stop.is_set():
        _cupti.enter(1); launch(); _cupti.leave(1); stop.wait(0.0002)
thread = threading.Thread(target=program); thread.start()
for _ in range(30):
    assert capture.open() and capture.attached
    stop.wait(0.003)
    capture.close()
    assert not capture.attached
stop.set(); thread.join()
stats = capture.stats()
assert fake.fake_finalized() == 30 == stats["detached"] and stats["push_errors"] == 0
rows = np.concatenate(capture.drain())
calls = (rows["kind"] == Kind.RUNTIME).sum()
assert calls > 30 and (rows["kind"] == Kind.CONCURRENT_KERNEL).sum() >= calls - 30
""",
    )


@pytest.mark.parametrize("how", ["fake.fake_next_call(311); launch()", "capture.graphs_in_use = True"])
def test_a_process_that_uses_cuda_graphs_is_never_detached_from(fake_cupti, how):
    run_with(
        fake_cupti,
        DETACHING
        + f"""
import threading
{how.split(";")[0] if "graphs_in_use" in how else ""}
capture.open(); {how if "fake" in how else "launch()"}; capture.close()
assert capture.graphs_in_use and capture.attached
timer = threading.Timer(0.01, launch); timer.start()
assert not capture.detach() and fake.fake_finalized() == 0
assert capture.open() and capture.stats()["graphs"] == {int("fake" in how)}
""",
    )


def test_without_a_cuda_call_it_stays_attached_and_tries_again_later(fake_cupti):
    run_with(
        fake_cupti,
        DETACHING
        + """
import threading, time
assert capture.open(); launch(); capture.close()
assert capture.attached and fake.fake_finalized() == 0
timer = threading.Timer(0.01, lambda: launch()); timer.start()
assert capture.detach() and not capture.attached and fake.fake_finalized() == 1
assert capture.open(); launch(2)
assert sum(map(len, capture.drain())) == 2
""",
    )


def test_another_subscriber_is_named_and_left_alone_until_it_has_gone(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
fake.fake_subscriber(b"nsys")
before = fake.fake_enable_calls()
assert not capture.open() and capture.holder == "nsys" and not capture.is_open
assert fake.fake_enable_calls() == before
fake.fake_subscriber(None)
assert capture.open(T3_WINDOW) and capture.holder is None
launch(); capture.close()
assert sum(map(len, capture.drain())) == 2
assert capture.stats()["stood_back"] == 1
""",
    )


def test_an_open_window_is_shut_for_a_client_that_announces_itself(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
capture.open(T3_WINDOW); launch(2)
capture.hold("torch.profiler")
assert not any(fake.fake_enabled(kind) for kind in range(64))
assert not capture.open() and capture.holder == "torch.profiler"
capture.release("torch.profiler")
assert capture.open(T3_WINDOW); launch(3); capture.close()
rows = np.concatenate(capture.drain())
assert (rows["kind"] == Kind.CONCURRENT_KERNEL).sum() == 5
""",
    )


def test_an_idle_subscription_of_a_known_client_is_no_obstacle(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
fake.fake_subscriber(b"")
capture.hold("torch.profiler")
capture.release("torch.profiler", idle_subscriber=True)
assert capture.open(); launch(); capture.close()
assert fake.fake_finalized() == 0  # detaching would end the other's subscription
""",
    )


def test_buffers_that_another_client_took_are_given_up_not_reused(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
capture.open(T3_WINDOW); launch()
REQUESTED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
taken = []
mine = REQUESTED(lambda *a: None), COMPLETED(lambda c, s, buffer, size, valid: taken.append(buffer))
fake.cuptiActivityRegisterCallbacks(*mine)
fake.cuptiActivityFlushAll(0)
assert len(taken) == 1 and capture.stats()["buffers_out"] == 1
capture.hold("other"); capture.release("other")
assert capture.open(T3_WINDOW); launch(); capture.close()
stats = capture.stats()
assert stats["buffers_lost"] == 1 and stats["buffers_out"] == 0
assert sum(map(len, capture.drain())) == 2
""",
    )


def test_records_beyond_the_buffer_pool_are_counted_as_dropped(fake_cupti):
    run_with(
        fake_cupti,
        """
_cupti.load(sys.argv[1]); capture = Capture(_cupti.Ring(64, 2), buffer_bytes=4096, max_buffers=1, detach=False)
capture.open(T3_WINDOW); launch(1000); capture.close()
stats = capture.stats()
kept = sum(map(len, capture.drain()))
assert kept == 128 == stats["records"] and stats["records"] + stats["ring_full"] == 2000
""",
    )


def test_decoding_on_a_foreign_thread_never_needs_the_interpreter(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
capture.open(T3_WINDOW)
holding = ctypes.PyDLL(sys.argv[1])  # calls without releasing the interpreter lock: a callback that wants it deadlocks
holding.fake_launch_on_thread(20_000)
capture.close()
assert sum(map(len, capture.drain())) == 40_000
assert sorted(capture.names()) == ["", "gemm", "softmax"]
""",
    )


def test_a_walk_that_disagrees_with_cupti_is_found_and_nothing_is_decoded(fake_cupti):
    run_with(
        fake_cupti,
        """
fake.fake_version(130001, 224)
_cupti.load(sys.argv[1]); capture = Capture(buffer_bytes=65536, max_buffers=8, detach=False)
capture.open(T3_WINDOW); launch(5); capture.close()
assert capture.stats()["walk_mismatches"] == 1 and capture.drain() == []
""",
    )


def test_an_unknown_library_version_is_refused_with_the_file_the_number_and_what_is_known(fake_cupti):
    run_with(
        fake_cupti,
        """
from pasta_otel.errors import MissingError
from pasta_otel.gpu.cupti.library import load
fake.fake_version(990000, 300)
try:
    load([sys.argv[1], "/nowhere/libcupti.so.12"])
except MissingError as error:
    text = str(error)
    assert "990000" in text and sys.argv[1] in text and "13.0-13.5" in text and "/nowhere" in text and "PASTA_CUPTI" in text
    assert error.exit_code == 3
else:
    raise SystemExit("accepted")
""",
    )


def test_the_copy_that_the_process_has_loaded_comes_first(fake_cupti):
    ctypes.CDLL(str(fake_cupti))
    found = list(library.candidates({}, []))
    assert found[0] == str(fake_cupti)
    assert found[-1] == "libcupti.so.12"


def test_packages_are_searched_where_pypi_puts_the_library(tmp_path):
    wanted = tmp_path / "nvidia" / "cu13" / "lib" / "libcupti.so.13"
    wanted.parent.mkdir(parents=True)
    wanted.touch()
    assert next(library.candidates({}, [str(tmp_path)], loaded=list)) == str(wanted)
    assert list(library.candidates({"PASTA_CUPTI_LIBRARY": "/x"}, [], loaded=list)) == ["/x"]


def test_without_a_library_the_error_says_how_to_get_one():
    with pytest.raises(MissingError, match=r"no usable libcupti.*nvidia-cuda-cupti"):
        library.load(["/nowhere/libcupti.so.13"])


@pytest.mark.skipif(not os.access("/proc/self/maps", os.R_OK), reason="no /proc")
def test_a_process_without_cupti_maps_none(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 0    /usr/lib/libc.so.6\n7f02-7f03 rw-p 00000000 00:00 0\n")
    assert library.loaded_libraries(maps) == []
