"""Which sources a machine gets, with the real NVML binding where no driver is."""

from __future__ import annotations

import ctypes
import logging
import stat
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pasta_otel.app.devices import DeviceWatch, find_sources, watch_devices
from pasta_otel.cli.probes import World, examine
from pasta_otel.exporters.metrics import build_meter_provider
from pasta_otel.exporters.prometheus import PrometheusReader
from pasta_otel.gpu.device.amd import AmdSource
from pasta_otel.gpu.device.nvml import NvmlSource
from pasta_otel.gpu.device.smi import SmiSource
from pasta_otel.testing.amdsmi import FakeAmdSmi, full_amd_gpu
from pasta_otel.testing.nvml import FakeNvml, full_gpu


def has_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def devices(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).touch()
    return root


def nobody(pid: int) -> dict[str, str]:
    return {}


def test_a_machine_without_device_files_has_no_source_and_no_metric(tmp_path: Path):
    assert find_sources(nobody, dev_root=tmp_path) == []
    reader = PrometheusReader()
    provider = build_meter_provider(readers=[reader], attributes={}, config=None)
    watch_devices(provider.get_meter("t"), dev_root=str(tmp_path)).close()
    assert b"gpu" not in reader.render()[1]


def test_nvml_goes_before_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = find_sources(nobody, dev_root=devices(tmp_path, "nvidiactl"))
    assert [type(source) for source in found] == [NvmlSource]
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [type(source) for source in find_sources(nobody, dev_root=tmp_path)] == [SmiSource]


def test_devices_that_nothing_can_read_are_logged_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    monkeypatch.setitem(__import__("sys").modules, "amdsmi", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert find_sources(nobody, dev_root=devices(tmp_path, "nvidia0", "kfd")) == []
    assert "pip install 'pasta-otel[gpu]'" in caplog.text
    assert "amd-smi-lib" in caplog.text


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
def test_the_real_binding_without_a_driver_is_a_state_on_the_page(tmp_path: Path):
    reader = PrometheusReader()
    provider = build_meter_provider(readers=[reader], attributes={}, config=None)
    watch = watch_devices(provider.get_meter("t"), dev_root=str(devices(tmp_path, "nvidiactl")))
    page = reader.render()[1].decode()
    up = [s for family in text_string_to_metric_families(page) for s in family.samples if "collector_up" in s.name]
    assert [(s.labels["source"], s.labels["reason"], s.value) for s in up] == [("nvml", "no_driver", 0.0)]
    assert "hw_" not in page
    watch.close()


def test_two_vendors_share_the_instruments():
    reader = PrometheusReader()
    provider = build_meter_provider(readers=[reader], attributes={}, config=None)
    sources = [NvmlSource(FakeNvml(full_gpu("GPU-1"))), AmdSource(FakeAmdSmi(full_amd_gpu()))]
    watch = DeviceWatch(provider.get_meter("t"), sources)
    page = reader.render()[1].decode()
    power = [s for f in text_string_to_metric_families(page) for s in f.samples if s.name == "hw_power_watts"]
    assert {(s.labels["hw_vendor"], s.value) for s in power} == {("nvidia", 250.5), ("amd", 420.0)}
    watch.close()


class Exporter(BaseHTTPRequestHandler):
    """A DCGM exporter that serves the handed page."""

    body = (Path(__file__).parents[1] / "fixtures" / "cases" / "G03" / "dcgm.prom").read_bytes()

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def exporter() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()
        thread.join()


def page_with(dcgm_url: str, root: Path) -> str:
    reader = PrometheusReader()
    provider = build_meter_provider(readers=[reader], attributes={}, config=None)
    watch = watch_devices(provider.get_meter("t"), dcgm_url=dcgm_url, dev_root=str(root))
    page = reader.render()[1].decode()
    watch.close()
    return page


@pytest.mark.case("G03")
def test_a_dcgm_page_stands_in_where_the_machine_shows_no_gpu(tmp_path: Path, exporter: str):
    found = {s.name: s.value for f in text_string_to_metric_families(page_with(exporter, tmp_path)) for s in f.samples}
    assert found["pasta_gpu_blank_values_total"] == 7
    assert found["hw_gpu_utilization_ratio"] == 0.83
    assert found["pasta_gpu_collector_up_ratio"] == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "file:///etc/passwd"])
def test_a_dcgm_page_that_cannot_be_had_is_a_state(tmp_path: Path, url: str):
    page = page_with(url, tmp_path)
    assert 'reason="unreachable"' in page
    assert "hw_" not in page


def test_a_wrong_path_is_a_state_too(tmp_path: Path, exporter: str):
    assert 'reason="unreachable"' in page_with(exporter + "x", tmp_path)


BROKEN = {
    "no pynvml: a library of it": "raise ImportError('libnvidia-ml.so.1: cannot open shared object file')",
    "an error of its own": "raise RuntimeError('old')",
    "another package of that name": "version = 1",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_pynvml_that_cannot_be_used_leaves_the_work_to_nvidia_smi(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "pynvml.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", sys)  # so that it is put back, whatever is imported meanwhile
    del sys.modules["pynvml"]
    (program := tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (dev := tmp_path / "dev").mkdir()
    (dev / "nvidiactl").touch()
    assert [type(source) for source in find_sources(nobody, dev_root=dev)] == [SmiSource]
    (found,) = (one for one in examine(World(library=lambda name: object())) if one.name == "gpu")
    assert found.state == "missing"
    assert "nvidia-ml-py" in found.detail
