"""Two GPUs at once: every GPU kernel has its own device and its own span, also where one program uses both."""

import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_process import facts_of, run, skip_without, start

pytestmark = pytest.mark.gpu

EXPORT = """
from pasta_otel import semconv
from pasta_otel.gpu.classes import KernelClasses
from pasta_otel.gpu.cupti.aggregate import KernelHistograms
from pasta_otel.gpu.cupti.devices import device_uuid
from pasta_otel.gpu.cupti.spans import GpuSpans
uuids = ["GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
         for device in range(torch.cuda.device_count())]
def number(rows, at): return int.from_bytes(rows[at].tobytes(), "big")
def exported(joined, names):
    # device and class counts of the metric, and for every span (owner, device of its hw.id)
    histograms = KernelHistograms(KernelClasses(), device_uuid, time.time_ns)
    histograms.add(joined, names, 1.0)
    points = sorted([p.attributes.get(semconv.MODULE_PATH, ""), uuids.index(p.attributes[semconv.HW_ID]), sum(p.counts)]
                    for p in histograms.points() if p.attributes[semconv.GPU_KERNEL_CLASS] == "elementwise")
    groups, counts = GpuSpans(histograms.codes, device_uuid, lambda _: True, 1 << 40).columns(joined, names, 0)
    spans = Counter()
    for columns in groups:
        for at, site in enumerate(columns.site.tolist()):
            where = dict(columns.sites[site].attributes)[semconv.HW_ID]
            spans[number(columns.parent_span_id, at), uuids.index(where)] += 1
    return points, sorted([*key, count] for key, count in spans.items()), counts.ok
"""


def test_the_same_gpu_kernel_on_two_devices_from_many_threads_has_the_right_device_and_span():
    facts = run(
        EXPORT
        + """
capture, regions = capture_of(), regions_of()
joiner, ready, begin = Joiner(regions), threading.Barrier(9), threading.Event()
def work(owner, device, count):
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    data = torch.ones(1 << 14, device=f"cuda:{device}")
    data.mul_(2); torch.cuda.synchronize(device)
    ready.wait(); begin.wait()
    with torch.cuda.stream(stream):
        regions.enter(owner, owner, f"layer.{owner}")
        for _ in range(count): data.mul_(2)
        regions.leave(owner)
    stream.synchronize()
wanted = [(owner, owner % 2, 200 + 10 * owner) for owner in range(1, 9)]
threads = [threading.Thread(target=work, args=item, daemon=True) for item in wanted]
for thread in threads: thread.start()
ready.wait()
assert while_running(capture.open)
torch.cuda.synchronize()
begin.set()
for thread in threads: thread.join()
torch.cuda.synchronize(0); torch.cuda.synchronize(1)
while_running(capture.close)
joined = joiner.join(capture.drain(), capture.edges())
mine = [(row, at) for row, at in zip(joined.work, joined.region) if at >= 0]
rows = Counter((joined.regions[at].span_id, int(row["device"])) for row, at in mine)
contexts = Counter((int(row["device"]), int(row["context"])) for row, _ in mine)
points, spans, made = exported(joined, capture.names())
facts.update(wanted=wanted, rows=sorted([*key, count] for key, count in rows.items()), contexts=len(contexts),
             names=len({int(row["name"]) for row, _ in mine}), points=points, spans=spans, made=made,
             early=joined.counts.early, stale=joined.counts.stale)
""",
        gpus=2,
    )
    wanted = [list(item) for item in facts["wanted"]]
    assert facts["rows"] == wanted
    assert facts["spans"] == wanted
    by_module = {module: [device, count] for module, device, count in facts["points"] if module}
    assert by_module == {f"layer.{owner}": [device, count] for owner, device, count in wanted}
    assert facts["contexts"] == 2
    assert facts["names"] == 1
    assert facts["early"] == facts["stale"] == 0


def test_one_model_over_two_devices_is_joined_in_forward_and_backward():
    """Autograd has a thread for each device: both belong to the span that the backward pass is called in."""
    facts = run(
        EXPORT
        + """
from opentelemetry import context as context_api, trace
from pasta_otel.gpu.cupti.torch_watch import TorchWatch
capture, regions = capture_of(detach=False), regions_of()
watch = TorchWatch(capture, regions); assert watch.install()
first = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).to("cuda:0")
second = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to("cuda:1")
data = torch.randn(64, 256, device="cuda:0")
def step():
    second(first(data).to("cuda:1")).square().mean().backward()
    torch.cuda.synchronize(0); torch.cuda.synchronize(1)
for _ in range(3): step()
joiner = Joiner(regions)
assert capture.open()
for number in range(20):
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 100 + number, False, trace.TraceFlags(1)))
    token = context_api.attach(trace.set_span_in_context(span))
    regions.enter_request(0xABC, 100 + number)
    step()
    regions.end(100 + number); regions.leave(100 + number)
    context_api.detach(token)
capture.close()
joined = joiner.join(capture.drain(), capture.edges())
per = Counter((joined.regions[at].span_id, int(row["device"])) for row, at in zip(joined.work, joined.region) if at >= 0)
kinds = Counter(int(kind) for kind in joined.work["kind"])
missing = Counter((capture.names()[row["name"]][:60], int(row["device"])) for row in joined.work[joined.region < 0])
facts.update(work=joined.counts.work, linked=joined.counts.linked, stale=joined.counts.stale,
             per=[sorted({count for (_, device), count in per.items() if device == wanted}) for wanted in (0, 1)],
             spans=len({owner for owner, _ in per}), kinds=dict(kinds), missing=missing.most_common(5))
""",
        gpus=2,
    )
    assert facts["linked"] >= 0.999 * facts["work"] > 0
    assert facts["spans"] == 20
    assert [len(counts) for counts in facts["per"]] == [1, 1], "every step has the same work on each device"


RANK = """
import torch.distributed as dist
from opentelemetry import context as context_api, trace
from torch.nn.parallel import DistributedDataParallel
from pasta_otel.gpu.classes import KernelClasses
from pasta_otel.gpu.cupti.torch_watch import TorchWatch
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
capture, regions = capture_of(detach=False), regions_of()
watch = TorchWatch(capture, regions); assert watch.install()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
model = DistributedDataParallel(model, device_ids=[rank])
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(32, 512, device="cuda")
def step():
    model(data).square().mean().backward()
    optimiser.step(); optimiser.zero_grad()
    torch.cuda.synchronize()
for _ in range(5): step()
joiner = Joiner(regions)
dist.barrier(); torch.cuda.synchronize()
assert capture.open()
for number in range(10):
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 100 + number, False, trace.TraceFlags(1)))
    token = context_api.attach(trace.set_span_in_context(span))
    regions.enter_request(0xABC, 100 + number)
    step()
    regions.end(100 + number); regions.leave(100 + number)
    context_api.detach(token)
capture.close()
joined = joiner.join(capture.drain(), capture.edges())
classes = KernelClasses()
collective = [at for row, at in zip(joined.work, joined.region)
              if int(row["kind"]) in (3, 10) and classes(capture.names()[row["name"]]) == "collective"]
missing = Counter(capture.names()[row["name"]][:60] for row in joined.work[joined.region < 0])
facts.update(work=joined.counts.work, linked=joined.counts.linked, collective=len(collective),
             owners=len({joined.regions[at].span_id for at in collective if at >= 0}),
             devices=sorted({int(row["device"]) for row in joined.work}), missing=missing.most_common(5))
dist.destroy_process_group()
"""


def test_a_data_parallel_step_has_its_all_reduce_in_the_span_of_its_own_rank():
    skip_without(gpus=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [start(RANK, environ={**place, "RANK": str(rank)}) for rank in range(2)]
    try:
        facts = [facts_of(process, 150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, fact in enumerate(facts):
        assert fact["linked"] >= 0.999 * fact["work"] > 0
        assert fact["collective"] >= 10
        assert fact["owners"] == 10
        assert fact["devices"] == [rank]
