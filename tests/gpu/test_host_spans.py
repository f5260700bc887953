"""One PyTorch request on a real GPU: its modules, its GPU kernels and what the host did to it, linked and on one clock."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.host_picture import best_trace, draw, kind, record  # noqa: E402 - the repository is no package
from pasta_otel.ebpf.probes import OBJECT_FOLDER  # noqa: E402 - as above

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def spans():
    if shutil.which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], check=False).returncode:
        pytest.skip("no NVIDIA GPU")
    if os.geteuid() != 0:
        pytest.skip("eBPF needs root here")
    if not (OBJECT_FOLDER / f"pasta.{platform.machine()}.bpf.o").exists():
        pytest.skip("the probes are not built: python -m pasta_otel.ebpf.build, and carry ebpf/objects")
    return record()


def test_a_request_shows_modules_gpu_kernels_and_linked_host_events_on_one_clock(spans):
    trace = best_trace(spans)
    assert {kind(span) for span in trace} == {"request", "module", "gpu", "host"}
    request = next(span for span in trace if kind(span) == "request")
    own = {span["span_id"] for span in trace if kind(span) in {"request", "module"}}
    host = [span for span in trace if kind(span) == "host"]
    assert all(len(span["links"]) == 1 and span["links"][0] in own for span in host)
    assert all(request["start"] <= span["start"] <= span["end"] <= request["end"] for span in host)
    names = {span["name"] for span in host}
    assert names & {"cuLaunchKernel", "cuLaunchKernelEx"}
    assert names & {"cuStreamSynchronize", "cuCtxSynchronize"}
    assert any(name.startswith("cuMemcpy") for name in names)
    first_launch = min(span["start"] for span in host if span["name"].startswith("cuLaunch"))
    first_kernel = min(span["start"] for span in trace if kind(span) == "gpu" and "memcpy" not in span["name"].lower())
    assert first_kernel >= first_launch - 50_000  # CUPTI's clock against ours: tens of microseconds
    assert draw(trace).startswith("<svg")


def test_absences_from_the_cpu_are_linked_to_requests(spans):
    requests = {span["span_id"] for span in spans if kind(span) in {"request", "module"}}
    absent = [span for span in spans if span["name"].startswith("off_cpu.")]
    assert absent
    assert {link for span in absent for link in span["links"]} & requests
