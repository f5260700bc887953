import pytest

from pasta_otel.testing.fake_cupti import DETACHING, LOADED, run_with


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
start.LOOK_S, start.cuda_is_used = 0.01, lambda: True
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


@pytest.mark.parametrize("detach", [False, True])
def test_many_threads_and_windows_never_join_work_to_the_wrong_region(fake_cupti, detach):
    """Each GPU kernel lasts as many ns as its region's id says, so that every join can be checked."""
    run_with(
        fake_cupti,
        f"detach = {detach}\n"
        """
import random, threading, time
from pasta_otel.gpu.mapping import JoinCounts, Joiner, Regions
fake.fake_wall_clock(1)
_cupti.load(sys.argv[1]); capture = Capture(buffer_bytes=65536, max_buffers=64, detach=detach)
regions = Regions(_cupti, time.time_ns); regions.recording = True
stop = threading.Event()
def launch_in(number): fake.fake_launch(GEMM, number, 1)
def short_lived(number):
    regions.enter_request(1, number); launch_in(number)
def program(seed):
    rng, number = random.Random(seed), seed * 1_000_000
    while not stop.is_set():
        number += 1
        outer = inner = number
        regions.enter_request(1, outer)
        for _ in range(rng.randrange(4)):
            number += 1
            regions.enter(1, number, "module"); launch_in(number)
            if rng.random() < 0.9: regions.leave(number)
            else: inner = number  # its end is not seen
        launch_in(inner)
        regions.leave(outer)
        if rng.random() < 0.02:
            thread = threading.Thread(target=short_lived, args=(number + 500_000,)); thread.start(); thread.join()
threads = [threading.Thread(target=program, args=(1 + seed,)) for seed in range(4)]
for thread in threads: thread.start()
joiner, counts, wrong, end = Joiner(regions), JoinCounts(), 0, time.monotonic() + 3
rng = random.Random(0)
while time.monotonic() < end:
    assert capture.open(T3_WINDOW); time.sleep(rng.random() * 0.01); capture.close()
    joined = joiner.join(capture.drain(), capture.edges())
    counts += joined.counts
    ids = np.array([region.span_id for region in joined.regions] + [0], np.uint64)[joined.region]
    wrong += int(((joined.region >= 0) & (ids != joined.work["end"] - joined.work["start"])).sum())
    regions.turn()
stop.set()
for thread in threads: thread.join()
assert wrong == 0 and counts.work > 1000 and counts.early == 0, (wrong, counts)
assert counts.linked >= 0.999 * counts.work, counts
assert not detach or capture.stats()["detached"] > 10
""",
    )


def test_launches_of_event_loops_and_worker_threads_belong_to_their_requests(fake_cupti):
    """Two requests at a time on one event loop, each with work in its coroutine and in a worker thread."""
    run_with(
        fake_cupti,
        """
import asyncio, os, time
os.environ.update(PASTA_CUPTI_LIBRARY=sys.argv[1], PASTA_OVERHEAD_BUDGET="1.0")
from opentelemetry.sdk.trace import TracerProvider
from pasta_otel.app import gpu_capture
from pasta_otel.gpu.cupti import start
from pasta_otel.instrumentation import instrument, uninstrument
start.LOOK_S, start.cuda_is_used = 0.01, lambda: True
fake.fake_wall_clock(1)
class Exporter:
    def export(self, data): pass
    def shutdown(self): pass
gpu_capture._otlp_exporter = Exporter
class Sink:
    batches = []
    def offer(self, row): pass
    def offer_columns(self, columns): self.batches.append(columns); return True
provider = TracerProvider()
running = instrument(tracer_provider=provider, sink=Sink(), set_up=False)
tracer = provider.get_tracer("shop")
wanted = {}
def work(kind, count):
    span = trace.get_current_span().get_span_context()
    wanted[span.span_id] = kind
    for _ in range(count): fake.fake_launch(GEMM, kind, 1)  # a GPU kernel lasts as many ns as its request's kind says
from opentelemetry import trace
async def request(kind):
    with tracer.start_as_current_span("request"):
        work(kind, 1)
        await asyncio.sleep(0.001)
        work(kind, 2)
        await asyncio.to_thread(work, kind, 3)
        work(kind, 1)
async def server():
    deadline = time.monotonic() + 60
    while not Sink.batches and time.monotonic() < deadline:
        await asyncio.gather(request(100), request(200))
asyncio.run(server())
import threading
stopper = threading.Thread(target=uninstrument); stopper.start()
while stopper.is_alive(): launch(); time.sleep(0.0005)
right = wrong = 0
for columns in Sink.batches:
    lasted = columns.end_time_unix_nano - columns.start_time_unix_nano
    for parent, kind in zip(columns.parent_span_id, lasted):
        owner = int.from_bytes(parent.tobytes(), "big")
        right += wanted[owner] == kind
        wrong += wanted[owner] != kind
assert right > 20 and wrong == 0, (right, wrong)
""",
    )
