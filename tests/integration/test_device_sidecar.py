"""A sidecar on a machine with a GPU: its page has the device metrics, and promtool accepts it."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import urllib.request
from pathlib import Path

import pytest

from pasta_otel.app import sidecar as module
from pasta_otel.app.devices import DeviceWatch
from pasta_otel.app.options import SidecarOptions
from pasta_otel.app.sidecar import Sidecar
from pasta_otel.errors import MissingError
from pasta_otel.gpu.device.nvml import NvmlSource
from pasta_otel.gpu.device.smi import SmiSource
from pasta_otel.testing.nvml import FakeNvml, full_gpu
from pasta_otel.testing.prometheus import tool

FAKE_SMI = Path(__file__).parents[1] / "fixtures" / "cases" / "G05" / "fake_nvidia_smi.sh"


def page(url: str) -> str:
    with urllib.request.urlopen(url + "/metrics", timeout=20) as answer:
        return answer.read().decode()


async def scrape(monkeypatch: pytest.MonkeyPatch, source: object, times: int) -> list[str]:
    monkeypatch.setattr(module, "watch_devices", lambda meter, **_: DeviceWatch(meter, [source]))
    options = SidecarOptions(otlp_http_port=0, otlp_grpc_port=0, api_port=0, host_metrics=False)
    sidecar = Sidecar(options, environ={})
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(sidecar.run(stop, lambda event: ready.done() or ready.set_result(event)))
    pages = []
    try:
        url = (await asyncio.wait_for(ready, 20))["api"]
        for _ in range(times):
            pages.append(await asyncio.to_thread(page, url))
            await asyncio.sleep(0.6)  # a new scrape asks the devices again
    finally:
        stop.set()
        await task
    return pages


async def test_the_page_tells_the_state_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    (text,) = await scrape(monkeypatch, NvmlSource(FakeNvml(full_gpu("GPU-1"))), 1)
    assert 'hw_id="GPU-1"' in text
    assert any(line.startswith("hw_gpu_utilization_ratio{") and line.endswith(" 0.97") for line in text.splitlines())


@pytest.mark.case("G05")
async def test_a_hung_nvidia_smi_does_not_hang_the_page_and_leaves_no_old_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    environ = {"PATH": os.environ["PATH"], "STATE": str(tmp_path / "state")}
    source = SmiSource(["/bin/sh", str(FAKE_SMI)], limit_s=0.5, environ=environ)
    first, second = await scrape(monkeypatch, source, 2)
    assert "hw_gpu_utilization_ratio{" in first
    assert "hw_gpu_utilization_ratio{" not in second
    assert 'reason="timeout"' in second


@pytest.mark.case("P06")
async def test_promtool_finds_nothing_wrong_with_our_page(monkeypatch: pytest.MonkeyPatch):
    try:
        promtool = tool("promtool")
    except MissingError as error:
        pytest.skip(str(error))
    (text,) = await scrape(monkeypatch, NvmlSource(FakeNvml(full_gpu("GPU-1"))), 1)
    check = functools.partial(subprocess.run, input=text, capture_output=True, text=True, timeout=60, check=False)
    checked = await asyncio.to_thread(check, [promtool, "check", "metrics"])
    assert checked.returncode in {0, 3}, checked.stdout + checked.stderr  # 3: lint warnings only
