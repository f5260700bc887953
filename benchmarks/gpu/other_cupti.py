"""Capture torch of one CUDA version by the CUPTI of another: ``python -m benchmarks.gpu.other_cupti FILE``.

The service takes the copy that the process has loaded, so nobody comes here by default; ``PASTA_CUPTI_LIBRARY`` can
name any.
"""

from __future__ import annotations

import sys
import time

import torch

from benchmarks.gpu.harness import while_running
from benchmarks.gpu.models import WORKLOADS
from pasta_otel._native import _cupti
from pasta_otel.errors import MissingError
from pasta_otel.gpu.cupti import library
from pasta_otel.gpu.cupti.capture import Capture
from pasta_otel.gpu.cupti.start import DETACH_FROM
from pasta_otel.gpu.mapping import JoinCounts, Joiner, Regions

WINDOWS = 5


def main() -> None:
    step = WORKLOADS["gpt2-decode-b1"]()
    for _ in range(10):
        step()
    print(
        f"torch {torch.__version__} of CUDA {torch.version.cuda}; loaded before: {library.loaded_libraries()}",
        flush=True,
    )
    try:
        version = _cupti.load(library.load([sys.argv[1]]))
    except MissingError as error:
        print(f"refused: {error}")
        return
    print(f"loaded CUPTI API version {version}", flush=True)
    capture, regions = Capture(detach=version >= DETACH_FROM), Regions(_cupti, time.time_ns)
    regions.recording = True
    joiner, counts = Joiner(regions), JoinCounts()
    for window in range(WINDOWS):
        why_not = while_running(lambda: _open(capture), step)
        if why_not is not None:
            print(why_not)
            return
        regions.enter(1, 2, "model")
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        regions.leave(2)
        capture.close()
        counts += joiner.join(capture.drain(), capture.edges()).counts
        print(f"window {window}: {counts}", flush=True)
    print(f"names {capture.names()[:6]}; {capture.stats()}; the program goes on: {step()}", flush=True)


def _open(capture: Capture) -> str | None:
    """Open a window; returns why it did not open, or None."""
    try:
        return None if capture.open() else f"not opened: {capture.holder}"
    except OSError as error:
        return f"refused: {error}"


if __name__ == "__main__":
    main()
