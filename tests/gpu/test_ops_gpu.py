"""Tier 3 on a GPU: ops as spans with the user's function that called them, and their GPU kernels as children."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_process import run

pytestmark = pytest.mark.gpu

PROGRAM = """
from pasta_otel import semconv
from pasta_otel.gpu.cupti.devices import device_uuid
from pasta_otel.gpu.cupti.ops import OpWindow, TaggedRegions
from pasta_otel.gpu.cupti.torch_watch import TorchWatch
from pasta_otel.model import OpSpan
import torch.profiler
class Sink:
    rows = []
    def offer(self, row): self.rows.append(row)
capture, regions = capture_of(), Regions(_cupti, time.time_ns)
watch = TorchWatch(capture, regions); assert watch.install()
tagged, sink = TaggedRegions(regions), Sink()
layer, data = torch.nn.Linear(64, 64).cuda(), torch.randn(16, 64, device="cuda")
stop = threading.Event()
def users_function():
    hidden = layer(data)
    return hidden.relu()
def program():
    number = 0
    while not stop.is_set():
        number += 1
        tagged.enter_request(0xABC, 10 * number)
        tagged.enter(0xABC, 10 * number + 1, "layer")
        users_function()
        tagged.leave(10 * number + 1)
        tagged.leave(10 * number)
        torch.cuda.synchronize()
        stop.wait(0.002)
thread = threading.Thread(target=program, daemon=True); thread.start()
time.sleep(0.5)
window = OpWindow(tagged, sink, device_uuid)
made = window.run(0.5)
held_during = capture.stats()["stood_back"]
"""


def test_ops_have_the_users_lines_and_their_gpu_kernels_as_children():
    facts = run(
        PROGRAM
        + """
stop.set(); thread.join()
rows = sink.rows
assert made == len(rows) > 0
ops = {row.span_id: row for row in rows if semconv.HW_ID not in dict(row.site.attributes)}
work = [row for row in rows if semconv.HW_ID in dict(row.site.attributes)]
linears = [row for row in ops.values() if row.site.name == "aten::linear"]
relus = [row for row in ops.values() if row.site.name == "aten::relu"]
places = {row.site.name: dict(row.site.attributes) for row in (*linears, *relus)}
children, early = Counter(), 0
for row in work:
    attributes, parent = dict(row.site.attributes), ops[row.parent_span_id]
    assert (row.trace_id, parent.trace_id) == (0xABC, 0xABC)
    assert row.end_monotonic_ns > row.start_monotonic_ns
    early += row.start_monotonic_ns < parent.start_monotonic_ns
    children[parent.site.name, attributes[semconv.GPU_KERNEL_CLASS]] += 1
import inspect
source, first = inspect.getsourcelines(users_function)
facts.update(
    linears=len(linears), relus=len(relus), parents=sorted({row.parent_span_id % 10 for row in (*linears, *relus)}),
    files=sorted({str(place.get(semconv.CODE_FILE_PATH)) for place in places.values()}),
    functions=sorted({str(place.get(semconv.CODE_FUNCTION_NAME)) for place in places.values()}),
    lines=sorted({place.get(semconv.CODE_LINE_NUMBER) for place in places.values()}), first=first, count=len(source),
    children=sorted([*key, count] for key, count in children.items()),
    devices=sorted({dict(row.site.attributes)[semconv.HW_ID] == device_uuid(0) for row in work}),
    work=len(work), ops=len(ops), dropped=window.dropped, early=early)
"""
    )
    assert facts["linears"] > 10
    assert facts["relus"] > 10
    assert facts["parents"] == [1], "an op is a child of the module's region, the innermost"
    assert len(facts["files"]) == 1
    assert facts["files"][0].endswith("gpu_program.py")
    assert facts["functions"] == ["users_function"]
    assert all(facts["first"] <= line < facts["first"] + facts["count"] for line in facts["lines"])
    found = {(op, kind): count for op, kind, count in facts["children"]}
    assert found[("aten::linear", "gemm")] >= 0.9 * facts["linears"]
    assert found[("aten::relu", "elementwise")] >= 0.9 * facts["relus"]
    assert facts["devices"] == [True]
    assert facts["early"] == 0


def test_capture_stands_back_for_an_op_window_and_records_again_after_it():
    facts = run(
        PROGRAM
        + """
facts["holder_after"] = capture.holder
assert while_running(capture.open)
time.sleep(0.1)
while_running(capture.close)
facts["ours"] = len(gpu_kernels(gathered(capture)))
facts["second"] = window.run(0.3)
stop.set(); thread.join()
facts.update(first=made, work=sum(semconv.HW_ID in dict(row.site.attributes) for row in sink.rows[made:]))
"""
    )
    assert facts["first"] > 0
    assert facts["holder_after"] is None
    assert facts["ours"] > 0
    assert facts["second"] > 0
    assert facts["work"] > 0
