"""Versions of CUPTI other than torch's, on hardware, in programs without torch: CUDA's driver API and its runtime.

``PASTA_TEST_CUPTI`` names a folder with files ``VERSION/libcupti.so.12`` or ``.13`` from the PyPI packages
nvidia-cuda-cupti-cu12 and nvidia-cuda-cupti, and, for calls of the runtime API, ``libcudart.so.12`` from
nvidia-cuda-runtime-cu12.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_process import run, skip_without

pytestmark = pytest.mark.gpu
FOLDER = Path(os.environ.get("PASTA_TEST_CUPTI", "there-is-no-such-folder"))
LIBRARIES = sorted(FOLDER.glob("*/libcupti.so.1[23]"))

PROGRAM = """
import ctypes, json, sys, threading, time
from collections import Counter
import numpy as np
from pasta_otel._native import _cupti
from pasta_otel.gpu.cupti import library
from pasta_otel.gpu.cupti.capture import Capture, T2_WINDOW, T3_WINDOW
from pasta_otel.gpu.cupti.rows import API_CALLS, ROW, Kind, is_kind
from pasta_otel.gpu.cupti.start import DETACH_FROM
from pasta_otel.gpu.mapping import Joiner, Regions

ADD_ONE = b'''
.version 7.8
.target sm_80
.address_size 64
.visible .entry add_one(.param .u64 data)
{
  .reg .b64 %rd<4>;
  .reg .b32 %r<5>;
  .reg .f32 %f<3>;
  ld.param.u64 %rd1, [data];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  mul.wide.u32 %rd3, %r4, 4;
  add.s64 %rd3, %rd2, %rd3;
  ld.global.f32 %f1, [%rd3];
  add.f32 %f2, %f1, 0f3F800000;
  st.global.f32 [%rd3], %f2;
  ret;
}
'''
COUNT = 1 << 16
SLACK_NS = 50_000  # CUPTI's clock against ours
EDGE_NS = 10_000  # the same for API calls
cuda = ctypes.CDLL("libcuda.so.1")
pointer, number, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
def driver(name, *types):
    function = getattr(cuda, name); function.argtypes = types
    def call(*arguments):
        code = function(*arguments)
        assert code == 0, (name, code)
    return call
driver("cuInit", number)(0)
context, module, kernel, memory, other = (pointer() for _ in range(5))
driver("cuDevicePrimaryCtxRetain", pointer, ctypes.c_int)(ctypes.byref(context), 0)
driver("cuCtxSetCurrent", pointer)(context)
driver("cuModuleLoadData", pointer, ctypes.c_char_p)(ctypes.byref(module), ADD_ONE)
driver("cuModuleGetFunction", pointer, pointer, ctypes.c_char_p)(ctypes.byref(kernel), module, b"add_one")
for place in (memory, other): driver("cuMemAlloc_v2", pointer, size)(ctypes.byref(place), 4 * COUNT)
value = ctypes.c_uint64(memory.value)
arguments = (pointer * 1)(ctypes.addressof(value))
launch_kernel = driver("cuLaunchKernel", pointer, *[number] * 7, pointer, pointer, pointer)
wait = driver("cuCtxSynchronize")
def launch(): launch_kernel(kernel, COUNT // 256, 1, 1, 256, 1, 1, 0, None, arguments, None)
def while_running(action):
    result = []
    thread = threading.Thread(target=lambda: result.append(action()), daemon=True); thread.start()
    while thread.is_alive(): launch()
    return result[0] if result else None
if RUNTIME:
    cudart = ctypes.CDLL(RUNTIME)
    cudart.cudaMemsetAsync.argtypes = (pointer, ctypes.c_int, size, pointer)
    cudart.cudaMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
    assert cudart.cudaSetDevice(0) == 0
    def clear(): assert cudart.cudaMemsetAsync(memory, 0, 4 * COUNT, None) == 0
    def copy(): assert cudart.cudaMemcpyAsync(other, memory, 4 * COUNT, 3, None) == 0
else:
    clear_driver = driver("cuMemsetD8Async", pointer, ctypes.c_ubyte, size, pointer)
    copy_driver = driver("cuMemcpyDtoDAsync_v2", pointer, pointer, size, pointer)
    def clear(): clear_driver(memory, 0, 4 * COUNT, None)
    def copy(): copy_driver(other, memory, 4 * COUNT, None)
for action in (launch, clear, copy): action()
wait()
facts = {}
"""

WINDOWS = """
version = _cupti.load(LIBRARY)
facts["version"] = version
capture = Capture(_cupti.Ring(8192, 64), detach=version >= DETACH_FROM)
regions = Regions(_cupti, time.time_ns); regions.recording = True
unlinked = 0
joiner, per, seen, sizes, problems = Joiner(regions), Counter(), Counter(), set(), Counter()
times, ids, wrong = {}, [], []
def enter(region, module): regions.enter(1, region, module); times[region] = [time.time_ns(), None]
def leave(region): times[region][1] = time.time_ns(); regions.leave(region)
# The correlation ids of a window, and the work in it that was given to a region which did not launch it: times against
# the region's, ids of the launch in this window.
def seen_in_window(rows, joined):
    calls = {int(row["correlation"]): row for row in rows[is_kind(rows, API_CALLS)]}
    external = rows[rows["kind"] == Kind.EXTERNAL_CORRELATION]
    ids.append([sorted({int(number) for number in rows["attachment"]}), min(calls), max(calls), len(external)])
    for row, at in zip(joined.work, joined.region):
        call = calls.get(int(row["correlation"]))
        region = joined.regions[at].span_id if at >= 0 else 0
        entered, left = times.get(region, (0, 0))
        if not region or (call is not None and entered - EDGE_NS <= call["start"] <= left + EDGE_NS): continue
        same = external[external["correlation"] == row["correlation"]]["value"].tolist()
        call_ns = None if call is None else [int(call["start"]) - entered, int(call["end"]) - left]
        wrong.append(dict(window=len(ids) - 1, region=region, correlation=int(row["correlation"]), external=same,
                          work_ns=[int(row["start"]) - entered, int(row["end"]) - left], call_ns=call_ns))
def opened(what):
    try:
        return capture.open(what)
    except OSError as error:
        facts["refused"] = str(error)
for window in range(6):
    if not while_running(lambda: opened(T3_WINDOW if window % 2 else T2_WINDOW)):
        facts.setdefault("refused", capture.holder or "the window did not open")
        break
    before = time.time_ns()
    enter(100 + window, "kernels")
    for _ in range(40): launch()
    leave(100 + window)
    enter(200 + window, "copies")
    for _ in range(10): clear(); copy()
    wait()
    leave(200 + window)
    after = time.time_ns()
    while_running(capture.close)
    rows = capture.drain()
    everything = np.concatenate(rows) if rows else np.empty(0, ROW)
    seen.update(Kind(int(kind)).name for kind in everything["kind"])
    joined = joiner.join(rows, capture.edges())
    unlinked += joined.counts.unlinked
    problems.update(early=joined.counts.early, incomplete=joined.counts.incomplete, stale=joined.counts.stale)
    seen_in_window(everything, joined)
    names = capture.names()
    for row, at in zip(joined.work, joined.region):
        if at < 0: continue
        per[joined.regions[at].span_id, names[row["name"]] or Kind(int(row["kind"])).name] += 1
        inside = before - SLACK_NS <= int(row["start"]) < int(row["end"]) <= after + SLACK_NS
        problems["outside its window"] += not inside
        problems["wrong device"] += int(row["device"]) != 0
        if row["kind"] != Kind.CONCURRENT_KERNEL: sizes.add(int(row["value"]))
wait()
values = (ctypes.c_float * COUNT)()
driver("cuMemcpyDtoH_v2", pointer, pointer, size)(values, memory, 4 * COUNT)
facts.update(per=sorted([*key, count] for key, count in per.items()), seen=dict(seen), sizes=sorted(sizes),
             problems={name: count for name, count in problems.items() if count}, stats=capture.stats(),
             ids=ids, wrong=wrong[:10], unlinked=unlinked,
             correct=len(set(values)) == 1 and values[0] > 0, attached=capture.attached)
"""


def program(path: Path) -> str:
    runtime = FOLDER / "libcudart.so.12" if path.name.endswith("12") else None
    found = str(runtime) if runtime is not None and runtime.is_file() else ""
    return f"LIBRARY, RUNTIME = {str(path)!r}, {found!r}\n" + PROGRAM


@pytest.fixture(params=[str(path) for path in LIBRARIES] or ["none"], ids=lambda path: Path(path).parent.name)
def cupti(request):
    if request.param == "none":
        pytest.skip("PASTA_TEST_CUPTI names no folder with other versions of libcupti")
    skip_without(gpus=1)
    return Path(request.param)


def test_another_cupti_records_every_piece_of_gpu_work_with_its_region_or_says_why_not(cupti):
    facts = run(WINDOWS, preamble=program(cupti))
    assert facts["correct"], "the program's own results"
    if "refused" in facts:
        pytest.xfail(f"CUPTI {facts['version']} on this driver: {facts['refused']}")
    assert facts["wrong"] == [], "work in a region that did not launch it"
    wanted = [[100 + window, "add_one", 40] for window in range(6)]
    wanted += [[200 + window, name, 10] for window in range(6) for name in ("MEMCPY", "MEMSET")]
    assert facts["per"] == sorted(wanted)
    assert facts["sizes"] == [4 << 16]
    assert facts["problems"] == {}
    assert {"SYNCHRONIZATION", "EXTERNAL_CORRELATION", "DRIVER"} <= set(facts["seen"])
    stats = facts["stats"]
    assert stats["walk_mismatches"] == stats["dropped"] == stats["undecodable_bytes"] == stats["push_errors"] == 0
    assert facts["attached"] is (facts["version"] < 24)


def test_another_cupti_tells_of_a_second_subscriber(cupti):
    facts = run(
        """
version = _cupti.load(LIBRARY)
facts["version"] = version
lib = ctypes.CDLL(LIBRARY)
handle = pointer()
callback = ctypes.CFUNCTYPE(None, pointer, number, number, pointer)(lambda *_: None)
facts["subscribed"] = lib.cuptiSubscribe(ctypes.byref(handle), callback, None)
capture = Capture(_cupti.Ring(8192, 64), detach=version >= DETACH_FROM)
facts["opened"], facts["holder"] = capture.open(), capture.holder
facts["unsubscribed"] = lib.cuptiUnsubscribe(handle)
facts["later"], facts["then"] = while_running(capture.open), capture.holder
""",
        preamble=program(cupti),
    )
    if facts["subscribed"] != 0:
        pytest.xfail(f"CUPTI {facts['version']} on this driver: cuptiSubscribe gives {facts['subscribed']}")
    assert facts["opened"] is False
    assert facts["holder"]
    assert facts["unsubscribed"] == 0
    assert facts["later"] is True
    assert facts["then"] is None
