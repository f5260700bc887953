"""What one reading of all GPUs costs, by source: needs an NVIDIA GPU.

python -m benchmarks.device [NAME]
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pasta_otel.errors import MissingError
from pasta_otel.gpu.device import nvml_fields
from pasta_otel.gpu.device.model import Snapshot
from pasta_otel.gpu.device.nvml import NvmlSource, nvml_source
from pasta_otel.gpu.device.smi import smi_source

WINDOWS, READINGS = 5, 10
RESULTS = Path(__file__).parent / "results"


def windows(read: Callable[[], Snapshot]) -> list[list[float]]:
    """Return seconds of each reading, by window."""
    read()  # the first one starts the session
    return [[_seconds(read) for _ in range(READINGS)] for _ in range(WINDOWS)]


def _seconds(read: Callable[[], Snapshot]) -> float:
    began = time.perf_counter()
    found = read()
    took = time.perf_counter() - began
    if found.down:
        raise MissingError(f"{found.source}: {found.down}")
    return took


def by_function(source: NvmlSource) -> dict[str, float]:
    """Return the median milliseconds of each group of NVML calls on the first device."""
    nvml = source._nvml
    fields = nvml_fields.Fields(nvml, nvml.nvmlDeviceGetHandleByIndex(0), frozenset())
    found = {}
    for reader in nvml_fields.READERS:
        took = []
        for _ in range(READINGS):
            began = time.perf_counter()
            list(reader(fields))
            took.append((time.perf_counter() - began) * 1e3)
        found[reader.__name__] = round(statistics.median(took), 3)
    return found


def run() -> dict[str, Any]:
    """Measure both NVIDIA sources."""
    nvml, smi = nvml_source(), smi_source()
    snapshot = nvml.read()
    measured = {"nvml": windows(nvml.read), "nvidia-smi": windows(smi.read)}
    medians = {
        name: statistics.median(second for window in found for second in window) for name, found in measured.items()
    }
    return {
        "topic": "device",
        "machine": {
            "python": platform.python_version(),
            "devices": [[read.device.name, dict(read.device.info)] for read in snapshot.devices],
        },
        "readings_per_device": [len(read.readings) for read in snapshot.devices],
        "median_seconds": medians,
        "nvml_median_ms_by_group": by_function(nvml),
        "windows_seconds": measured,
    }


if __name__ == "__main__":
    result = run()
    text = json.dumps(result, indent=1)
    (RESULTS / f"device-{sys.argv[1] if len(sys.argv) > 1 else 'read'}.json").write_text(text + "\n")
    print(text)
