import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pasta_otel.errors import MissingError
from pasta_otel.gpu.cupti import library

SOURCE = Path(__file__).parents[1] / "fixtures" / "native" / "fake_cupti.c"


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in CUPTI")
    path = tmp_path_factory.mktemp("cupti") / "libcupti.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, SOURCE, "-lpthread"], check=True)
    return path


def run_with(fake_cupti, body: str) -> str:
    """Run a body in its own process: a process loads one CUPTI for its life."""
    script = textwrap.dedent(
        """
        import ctypes, sys
        import numpy as np
        from pasta_otel._native import _cupti
        from pasta_otel.gpu.cupti.capture import T3_WINDOW, Capture, WindowKinds
        from pasta_otel.gpu.cupti.rows import Kind
        fake = ctypes.CDLL(sys.argv[1])
        fake.fake_launch.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64]
        GEMM = ctypes.create_string_buffer(b"gemm")
        launch = lambda n=1: [fake.fake_launch(GEMM, 100, 10) for _ in range(n)]
        """
    )
    script += textwrap.dedent(body)
    command = [sys.executable, "-c", script, str(fake_cupti)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = "_cupti.load(sys.argv[1]); capture = Capture(buffer_bytes=65536, max_buffers=8, detach=False)\n"
DETACHING = "_cupti.load(sys.argv[1]); capture = Capture(buffer_bytes=65536, max_buffers=8)\n"


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


def test_the_service_runs_windows_under_its_governor_and_hands_on_spans_and_points(fake_cupti):
    run_with(
        fake_cupti,
        DETACHING
        + """
import threading, time
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from pasta_otel import semconv
from pasta_otel.gpu.cupti.service import GpuCapture
from pasta_otel.gpu.governor import Governor
from pasta_otel.gpu.mapping import Regions
class Sink:
    taken = []
    def offer_columns(self, columns):
        self.taken.append(columns)
        return True
reader = InMemoryMetricReader()
provider = MeterProvider([reader])
regions = Regions(_cupti, time.time_ns)
governor = Governor(1.0, time.monotonic_ns, window_ns=20_000_000, headroom=1.0, min_period_ns=0)
service = GpuCapture(capture, regions, governor, device_id=lambda d: f"GPU-{d}", sink=Sink())
service.register(provider.get_meter("test"))
service.start()
deadline = time.monotonic() + 60
number = 0
while service.windows["ok"] < 5 and time.monotonic() < deadline:
    number += 1
    regions.enter(7, number, "model.layer")
    launch()
    regions.leave(number)
    time.sleep(0.0005)
# the program goes on while the service stops: it detaches inside one of its calls
stopper = threading.Thread(target=service.stop); stopper.start()
while stopper.is_alive():
    launch(); time.sleep(0.0005)
assert service.windows["ok"] >= 5 and service.windows["failed"] == 0
assert not capture.is_open and not capture.attached
assert service.counts.linked == service.spans["ok"] + service.spans["capped"] > 0
assert service.counts.unlinked <= service.windows["ok"] + 20
columns = Sink.taken[0]
assert columns.trace_id[0].tolist() == [0] * 15 + [7]
assert 1 <= int.from_bytes(columns.parent_span_id[0].tobytes(), "big") <= number
(labels,) = {tuple(sorted(p.attributes.items())) for p in service.points() if semconv.MODULE_PATH in p.attributes}
assert dict(labels) == {"gpu.kernel.class": "gemm", "hw.id": "GPU-0", "pasta.torch.module.path": "model.layer"}
metrics = {m.name: m for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics}
assert 0 < metrics["pasta.gpu.capture.duty"].data.data_points[0].value <= 1
assert metrics["pasta.gpu.capture.budget"].data.data_points[0].value == 1.0
work = {p.attributes["link"]: p.value for p in metrics["pasta.gpu.work"].data.data_points}
assert work["id"] == service.counts.linked
assert set(metrics) <= set(semconv.METRICS)
""",
    )


def test_the_service_reports_a_holder_and_goes_on_when_it_has_gone(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
import time
from pasta_otel.gpu.cupti.service import GpuCapture
from pasta_otel.gpu.governor import Governor
from pasta_otel.gpu.mapping import Regions
service = GpuCapture(capture, Regions(_cupti, time.time_ns), Governor(0.5, time.monotonic_ns), device_id=str)
fake.fake_subscriber(b"nsys")
assert service.window(1_000_000) is None
assert service.windows["held"] == 1 and service._held()[0].attributes == {"holder": "nsys"}
fake.fake_subscriber(None)
from pasta_otel.gpu.governor import Calibration
Calibration.MIN_SAMPLES = 2
now = time.time_ns()
for duration in (100, 102): service.request_ended("order", now, now + duration)
assert service.governor.calibration.slowdown() is None
service._window_times = (now, None)
for duration in (130, 132): service.request_ended("order", now, now + duration)
service.request_ended("order", now - 1, now + 10_000)  # partly inside: says nothing
mean, error = service.governor.calibration.slowdown()
assert abs(mean - 0.297) < 0.001 and 0 < error < 0.02
report = service.window(1_000_000)
assert report.cost.recorded_ns >= 1_000_000 and report.weight > 0
assert service._held()[0].value == 0
""",
    )


def test_the_tier_decides_whether_and_how_deep_windows_are(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
import time
from pasta_otel.errors import StateError
from pasta_otel.gpu.cupti import service as module
from pasta_otel.gpu.cupti.service import GpuCapture
from pasta_otel.gpu.governor import Governor
from pasta_otel.gpu.mapping import Regions
module.T3_WINDOW_NS = 1_000_000
tier, asked = [1], []
def ops(seconds):
    asked.append(seconds)
    raise StateError("torch.profiler is in use")
governor = Governor(1.0, time.monotonic_ns, window_ns=1_000_000, min_period_ns=0, headroom=1.0)
service = GpuCapture(capture, Regions(_cupti, time.time_ns), governor, device_id=str, tier=lambda: tier[0], ops=ops)
for _ in range(3): assert service._turn() == module.RETRY_S
assert service.windows["ok"] == 0
tier[0] = 3
spent = governor._spent_ns
for _ in range(100): service._turn()
assert service._deep_windows == module.MAX_T3_WINDOWS  # bounded by count; after that the budget's own windows
assert len(asked) == 6 and asked[0] == module.OPS_WINDOW_S
tier[0] = 2
service._turn()
assert service._deep_windows == 0
tier[0] = 3; service._turn(); assert service._deep_windows == 1
tier[0] = 2; service.deepen(60); service._turn(); assert service._deep_windows == 1
""",
    )


def test_a_fork_inside_a_window_leaves_the_child_without_capture(fake_cupti):
    run_with(
        fake_cupti,
        """
import os, time
from pasta_otel.gpu.cupti import start
from pasta_otel.gpu.cupti.start import CaptureOptions, GpuCaptureStarter
start.LOOK_S = 0.01
starter = GpuCaptureStarter(CaptureOptions(library=sys.argv[1]), uses_cuda=lambda: True)
starter.start()
deadline = time.monotonic() + 30
while starter.service is None and time.monotonic() < deadline: time.sleep(0.01)
capture = starter.service.capture
starter.regions.recording = True
assert capture.open()
child = os.fork()
if child == 0:
    starter.regions.enter(1, 2)
    starter.regions.enter_request(1, 3)
    os._exit(0 if fake.fake_depth() == 0 and starter.regions.recording is False else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
starter.regions.enter(1, 4)
assert fake.fake_depth() == 1
""",
    )


def test_an_instrumented_program_gets_its_gpu_kernels_as_children_of_its_module_spans(fake_cupti):
    run_with(
        fake_cupti,
        """
import os, time
os.environ.update(PASTA_CUPTI_LIBRARY=sys.argv[1], PASTA_OVERHEAD_BUDGET="1.0")
import torch
from opentelemetry.sdk.trace import TracerProvider
from pasta_otel import semconv
from pasta_otel.app import gpu_capture
from pasta_otel.gpu.cupti import start
from pasta_otel.instrumentation import instrument, uninstrument
start.LOOK_S, start.cuda_is_loaded = 0.01, lambda: True
class Exporter:
    sent = []
    def export(self, data): self.sent.append(data)
    def shutdown(self): pass
gpu_capture._otlp_exporter = Exporter
class Sink:
    rows, batches = [], []
    def offer(self, row): self.rows.append(row)
    def offer_columns(self, columns): self.batches.append(columns); return True
class Layer(torch.nn.Module):
    def forward(self, x):
        launch(2)
        return x
model = torch.nn.Sequential(Layer(), Layer())
provider = TracerProvider()
running = instrument(tracer_provider=provider, sink=Sink(), models={"ranker": model}, set_up=False)
tracer, deadline = provider.get_tracer("shop"), time.monotonic() + 60
while not Sink.batches and time.monotonic() < deadline:
    with tracer.start_as_current_span("request"):
        launch(1)
        model(torch.ones(1))
    time.sleep(0.002)
import threading
stopper = threading.Thread(target=uninstrument); stopper.start()
while stopper.is_alive(): launch(); time.sleep(0.0005)
modules = {row.span_id: row for row in Sink.rows}
children = {}
for columns in Sink.batches:
    for trace_id, parent in zip(columns.trace_id, columns.parent_span_id):
        row = modules.get(int.from_bytes(parent.tobytes(), "big"))
        if row is not None:
            assert row.trace_id == int.from_bytes(trace_id.tobytes(), "big")
            children[row.site.name] = children.get(row.site.name, 0) + 1
assert set(children) == {"ranker.0", "ranker.1"} and min(children.values()) > 10
points = [p for data in Exporter.sent for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics
          for p in m.data.data_points]
assert {p.attributes.get(semconv.MODULE_PATH) for p in points} >= {"ranker.0", "ranker.1"}
assert all(p.exemplars for p in points if semconv.MODULE_PATH in p.attributes)
""",
    )


def test_launches_before_a_threads_first_region_of_the_window_are_joined_too(fake_cupti):
    run_with(
        fake_cupti,
        LOADED
        + """
import threading, time
from pasta_otel.gpu.mapping import Joiner, Regions
regions = Regions(_cupti, time.time_ns)
regions.recording = True
go, done, ended = threading.Event(), threading.Event(), threading.Event()
def quiet(number):  # inside one region all the time, and launches without entering another
    regions.enter_request(1, number)
    go.wait(); launch(4); done.set(); ended.wait()
    regions.leave(number)
def gone():
    regions.enter_request(1, 999)
thread = threading.Thread(target=gone); thread.start(); thread.join()  # its end must not be remembered
thread = threading.Thread(target=quiet, args=(50,)); thread.start()
time.sleep(0.05)
regions.enter_request(1, 60)
regions.enter(1, 61)
fake.fake_wall_clock(1)
capture.open(T3_WINDOW)
launch(3)  # in 61
regions.leave(61)
launch(2)  # in 60
regions.enter(1, 62); launch(1); regions.leave(62)
regions.leave(60)
launch(5)  # in nothing
go.set(); done.wait()
capture.close(); ended.set(); thread.join()
edges = capture.edges()
assert sorted(edge.external_id for edge in edges) == [50, 61], edges
joined = Joiner(regions).join(capture.drain(), edges)
found = {}
for at in joined.region: found[joined.regions[at].span_id if at >= 0 else None] = found.get(joined.regions[at].span_id if at >= 0 else None, 0) + 1
assert found == {50: 4, 61: 3, 60: 2, 62: 1, None: 5}, found
assert capture.open() and capture.edges() == []
""",
    )
